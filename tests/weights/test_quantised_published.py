"""Quantised models give what `transformers` makes of the same files, on a CPU; live, where it is installed."""

import functools
import importlib
import importlib.util
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.models.cases import tokens
from tests.weights import quantised as forms
from tests.weights.test_quantised import (
    arrays_of,
    Case,
    CASES,
    compressed,
    FLOAT,
    FP8,
    GROUP,
    made,
    NVFP4,
    written,
)

pytestmark = [
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None for name in ("torch", "transformers", "compressed_tensors")
        ),
        reason="compares with transformers, which the extra of that name installs, and compressed-tensors",
    ),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
PART = functools.partial
WIDE = {"scale_dtype": np.float32}  # else they round the floats to the dtype of the scales
SCALAR = PART(forms.fp8, block=(0, 0))
LIVE = {
    "fp8 DeepSeek": CASES["fp8 DeepSeek"],
    "fp8 blocks": Case("llama", FP8 | {"weight_block_size": [16, 16]}, PART(forms.fp8, block=(16, 16))),
    "fp8 one scale": Case("llama", FP8 | {"weight_block_size": None}, SCALAR),
    "mxfp4": CASES["mxfp4"],
    "int4": Case("qwen3", compressed("pack-quantized", **GROUP), PART(forms.packed, **WIDE)),
    "int4 zero points": Case(
        "llama",
        compressed("pack-quantized", symmetric=False, **GROUP),
        PART(forms.packed, symmetric=False, **WIDE),
    ),
    "int4 channels": Case(
        "llama",
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        PART(forms.packed, group=0, **WIDE),
    ),
    "int8": CASES["int8"],
    "int8 zero points": CASES["int8 zero points"],
    "float8": Case(
        "llama",
        compressed("float-quantized", strategy="channel", **FLOAT),
        PART(forms.compressed_float8, **WIDE),
    ),
    "float8 tensor": Case(
        "llama",
        compressed("float-quantized", strategy="tensor", **FLOAT),
        PART(forms.compressed_float8, block=(0, 0), **WIDE),
    ),
    "float8 blocks": Case(
        "llama",
        compressed("float-quantized", strategy="block", block_structure=[16, 16], **FLOAT),
        PART(forms.compressed_float8, block=(16, 16), **WIDE),
    ),
}


def theirs_of(folder: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    options = {
        "fp8": transformers.FineGrainedFP8Config,
        "mxfp4": transformers.Mxfp4Config,
        "compressed-tensors": transformers.CompressedTensorsConfig,
    }
    method = transformers.AutoConfig.from_pretrained(folder).quantization_config["quant_method"]
    options = {"dtype": torch.float32, "quantization_config": options[method](dequantize=True)}
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, attn_implementation="eager", **options).eval()


@pytest.mark.parametrize("name", list(LIVE))
def test_logits(name, tmp_path):
    torch: Any = importlib.import_module("torch")
    theirs = theirs_of(written(made(LIVE[name]), tmp_path))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens()).long(), use_cache=False).logits.numpy()
    ours = ejx.models.from_pretrained(tmp_path, dtype="float32", dequantise=True)
    logits = np.asarray(eqx.filter_jit(ours)(jnp.asarray(tokens())))
    assert np.max(np.abs(logits - expected)) / np.max(np.abs(expected)) < 1e-5


def test_weights_in_nvfp4(tmp_path):
    """They multiply in bfloat16, so that each weight is rounded twice."""
    case = Case("llama", compressed("nvfp4-pack-quantized", **NVFP4), forms.nvfp4)
    theirs = theirs_of(written(made(case), tmp_path)).state_dict()
    ours: Any = ejx.models.from_pretrained(tmp_path, dtype="float32", dequantise=True)
    for index in range(3):
        expected = theirs[f"model.layers.{index}.mlp.down_proj.weight"].numpy()
        assert np.any(expected)
        np.testing.assert_allclose(ours.layer(index).mlp.down_proj.weight, expected, rtol=2**-7)


def test_the_order_of_awq():
    """As the converter of compressed-tensors unpacks it, which is not the code of this test."""
    torch: Any = importlib.import_module("torch")
    convert: Any = importlib.import_module("compressed_tensors.entrypoints.convert.converters.autoawq")
    _, published, floats = arrays_of("awq")
    name = "model.layers.0.self_attn.q_proj"
    parts = [torch.from_numpy(published[f"{name}.{end}"].copy()) for end in ("qweight", "qzeros")]
    numbers = convert.AutoAWQConverter.reverse_awq_order(*convert.AutoAWQConverter.unpack_awq(*parts, 4), 4)
    codes, zeros = (x.numpy().astype(np.int64) & 15 for x in numbers)
    scales = published[f"{name}.scales"].astype(np.float32)
    weight = (codes - zeros.repeat(16, 0)) * scales.repeat(16, 0)
    np.testing.assert_array_equal(weight.T, floats[f"{name}.weight"])
