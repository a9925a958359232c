"""Published quantised models give what the float model of the same numbers gives, kept as they are and as floats."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ejkernel_eqx as ejx
from ejkernel_eqx.quantised import dequantise, QuantizedWeight
from tests.models.cases import drawn, GOLDEN, tokens
from tests.weights import quantised as forms

LINEAR = r".*(_proj|_proj_qkv|_proj_z|_proj_qkvz|w1|w2|w3|kv_a_proj_with_mqa)\.weight"
EXPERTS = r".*experts\.(gate_up|down)_proj"


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    entries: dict[str, Any]
    form: Any
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    only_floats: bool = False


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
    }


PART = functools.partial
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
APART = {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "in_proj_ba"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
GPTQ |= {"checkpoint_format": "gptq", "lm_head": False, "true_sequential": True, "damp_percent": 0.1}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
BYTES: dict[str, Any] = GROUP | {"num_bits": 8}
FLOAT = {"num_bits": 8, "type": "float"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CASES = {
    "fp8 blocks": Case("qwen3", FP8 | {"weight_block_size": [16, 16]}, PART(forms.fp8, block=(16, 16))),
    "fp8 DeepSeek": Case("deepseek_v3", FP8 | {"weight_block_size": [128, 128]}, forms.fp8),
    "fp8 bfloat16 scales": Case(
        "phi3",
        FP8 | {"weight_block_size": [16, 16]},
        PART(forms.fp8, block=(16, 16), scale_dtype=ml_dtypes.bfloat16),
    ),
    "fp8 Qwen3.5": Case(
        "qwen3_5_text", FP8 | {"weight_block_size": [8, 16]} | APART, PART(forms.fp8, block=(8, 16))
    ),
    "awq Qwen3.5": Case("qwen3_5_text", AWQ | APART, forms.awq),
    "fp8 Qwen3-Next": Case(
        "qwen3_next", FP8 | {"weight_block_size": [16, 16]} | APART, PART(forms.fp8, block=(16, 16))
    ),
    "fp8 one scale": Case("llama", FP8, PART(forms.fp8, block=(0, 0), end=".weight_scale")),
    "fp8 rows": Case("llama", FP8, PART(forms.fp8, block=(1, 0), end=".weight_scale")),
    "mxfp4": Case("gpt_oss with experts", MXFP4, forms.mxfp4, {"intermediate_size": 64}),
    "awq": Case("qwen3", AWQ, forms.awq),
    "awq fused": Case("phi3", AWQ | {"group_size": -1}, lambda x: forms.awq(x, x.shape[1])),
    "awq experts": Case("mixtral", AWQ, forms.awq),
    "gptq": Case("llama", GPTQ, forms.gptq),
    "gptq symmetric": Case("qwen2", GPTQ | {"sym": True}, PART(forms.gptq, symmetric=True)),
    "gptq v2": Case("llama", GPTQ | {"checkpoint_format": "gptq_v2"}, PART(forms.gptq, version=2)),
    "gptq 8 bits": Case("llama", GPTQ | {"bits": 8, "sym": True}, PART(forms.gptq, bits=8, symmetric=True)),
    "gptq 8 bits with zero points": Case("llama", GPTQ | {"bits": 8}, PART(forms.gptq, bits=8), {}, True),
    "gptq desc_act": Case("llama", GPTQ | {"desc_act": True}, PART(forms.gptq, shuffle=True), {}, True),
    "int4": Case("qwen3", compressed("pack-quantized", symmetric=True, **GROUP), forms.packed),
    "int4 zero points": Case(
        "qwen3_moe",
        compressed("pack-quantized", symmetric=False, **GROUP),
        PART(forms.packed, symmetric=False),
        {"moe_intermediate_size": 32},
    ),
    "int4 channels": Case(
        "llama", compressed("pack-quantized", num_bits=4, strategy="channel"), PART(forms.packed, group=0)
    ),
    "int4 actorder": Case(
        "llama",
        compressed("pack-quantized", symmetric=False, actorder="group", **GROUP),
        PART(forms.packed, symmetric=False, shuffle=True),
        {},
        True,
    ),
    "int8 packed": Case("llama", compressed("pack-quantized", **BYTES), PART(forms.packed, bits=8)),
    "int8": Case("qwen3", compressed("int-quantized", num_bits=8, strategy="channel"), forms.int8),
    "int8 zero points": Case(
        "llama",
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        PART(forms.int8, symmetric=False),
        {},
        True,
    ),
    "float8 channels": Case(
        "llama", compressed("float-quantized", strategy="channel", **FLOAT), forms.compressed_float8
    ),
    "float8 tensor": Case(
        "llama",
        compressed("float-quantized", strategy="tensor", **FLOAT),
        PART(forms.compressed_float8, block=(0, 0)),
    ),
    "float8 blocks": Case(
        "llama",
        compressed("float-quantized", strategy="block", block_structure=[16, 16], **FLOAT),
        PART(forms.compressed_float8, block=(16, 16)),
    ),
    "nvfp4": Case("llama", compressed("nvfp4-pack-quantized", **NVFP4), forms.nvfp4),
}


@functools.cache
def arrays_of(name: str) -> tuple[dict, dict, dict]:
    return made(CASES[name])


def made(case: Case) -> tuple[dict, dict, dict]:
    """The configuration, the published arrays, and those of the float model."""
    old = GOLDEN[case.kind]["config"]
    config, shapes = old | case.config, GOLDEN[case.kind]["shapes"]
    # Another width of the experts.
    wider = {n * old[key]: n * new for key, new in case.config.items() for n in (1, 2)}
    shape = lambda name: [wider.get(n, n) if "experts" in name else n for n in shapes[name]]
    weights = drawn({name: shape(name) for name in shapes})
    weights = weights if case.form is forms.mxfp4 else forms.one_by_one(weights, case.kind)
    pattern = re.compile(EXPERTS if case.form is forms.mxfp4 else LINEAR)
    published, floats = forms.quantised(weights, lambda name: bool(pattern.fullmatch(name)), case.form)
    return config | {"quantization_config": case.entries}, published, floats


def folder_of(name: str, folder: pathlib.Path, change: Any = None, **entries: Any) -> pathlib.Path:
    return written(arrays_of(name), folder, change, **entries)


def written(
    model: tuple[dict, dict, dict], folder: pathlib.Path, change: Any = None, **entries: Any
) -> pathlib.Path:
    """A folder of the published model, with arrays that are exchanged or left out, and with other entries."""
    config, published, _ = model
    config = config | {"quantization_config": config["quantization_config"] | entries}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = published | (change or {})
    forms.write(folder / "model.safetensors", {name: x for name, x in arrays.items() if x is not None})
    return folder


def float_model(name: str, folder: pathlib.Path) -> Any:
    config, _, floats = arrays_of(name)
    folder = folder / "floats"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    forms.write(folder / "model.safetensors", floats)
    return ejx.models.from_pretrained(folder, dtype="float32")


def is_quantised(x: Any) -> bool:
    return isinstance(x, QuantizedWeight)


# By default mixtures of experts of both kinds of files are kept, and others become floats: blocks, zero points, an order of rows, two scales.
QUICK = ("mxfp4", "awq experts")
FLOATS = ("fp8 DeepSeek", "awq", "gptq desc_act", "int4 actorder", "nvfp4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FLOATS else pytest.mark.slow) for name in CASES]
)
def test_floats_are_those_that_the_form_means(name, tmp_path):
    """Bit by bit, but for the factor of NVFP4, which is rounded once."""
    model = ejx.models.from_pretrained(folder_of(name, tmp_path), dtype="float32", dequantise=True)
    for found, expected in zip(jax.tree.leaves(model), jax.tree.leaves(float_model(name, tmp_path))):
        if eqx.is_array(found) and name == "nvfp4":
            np.testing.assert_allclose(found, expected, rtol=2e-7)
        elif eqx.is_array(found):
            np.testing.assert_array_equal(found, expected)


def test_projections_that_are_published_apart_stay_quantised_in_one(tmp_path):
    """Rows of a head without blocks of their own are refused."""
    mixer = ejx.models.from_pretrained(folder_of("fp8 Qwen3.5", tmp_path), dtype="float32").layer(0).mixer
    assert is_quantised(mixer.in_proj_qkvz.weight) and not is_quantised(mixer.in_proj_ba.weight)
    case = dataclasses.replace(CASES["fp8 Qwen3.5"], form=PART(forms.fp8, block=(16, 16)))
    folder = written(made(case), tmp_path, weight_block_size=[16, 16])
    with pytest.raises(ejx.CheckpointError, match=r"in_proj_qkv.*scales of their own.*dequantise=True"):
        ejx.models.from_pretrained(folder)


KEPT = [name for name, case in CASES.items() if not case.only_floats]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KEPT]
)
def test_kept_weights(name, tmp_path):
    """The numbers bit by bit, and the logits."""
    kept = ejx.models.from_pretrained(folder_of(name, tmp_path), dtype="float32")
    floats = float_model(name, tmp_path)
    weights = jax.tree.leaves(kept, is_leaf=is_quantised)
    assert sum(map(is_quantised, weights)) >= 2
    for found, expected in zip(weights, jax.tree.leaves(floats)):
        if is_quantised(found):
            assert found.dtype == jnp.float32
            tolerance = 2e-7 if name == "nvfp4" else 0
            np.testing.assert_allclose(dequantise(found), expected, rtol=tolerance)
        elif eqx.is_array(found):
            np.testing.assert_array_equal(found, expected)
    ids = jnp.asarray(tokens())
    logits, expected = (np.asarray(eqx.filter_jit(model)(ids)) for model in (kept, floats))
    assert np.max(np.abs(logits - expected)) / np.max(np.abs(expected)) < 1e-5


@pytest.mark.parametrize(
    "name, part, inner",
    [
        ("awq experts", "mlp", "mlp"),
        pytest.param("awq", "mlp", "mlp", marks=pytest.mark.slow),
        pytest.param("fp8 rows", "self_attn", "mixer", marks=pytest.mark.slow),
    ],
)
def test_a_single_layer(name, part, inner, tmp_path):
    """`load_published` reads a folder, and a file in it, by the `config.json` beside them."""
    folder = folder_of(name, tmp_path)
    model: Any = ejx.models.from_pretrained(folder, dtype="float32")
    floats, kept = (getattr(one.layer(1), inner) for one in (float_model(name, tmp_path), model))
    load = functools.partial(ejx.load_published, floats, prefix=f"model.layers.1.{part}")
    for path in (folder, folder / "model.safetensors"):
        assert eqx.tree_equal(load(path), kept)
    assert sum(map(is_quantised, jax.tree.leaves(load(folder), is_leaf=is_quantised))) >= 3
    assert eqx.tree_equal(load(folder, dequantise=True), floats)
    (folder / "config.json").unlink()
    with pytest.raises(ejx.CheckpointError):  # its arrays are then read as they are named
        load(folder)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq experts"])
def test_weights_over_devices(name, tmp_path):
    """Codes and scales are split as the floats would be; an axis of scales that devices do not divide is whole."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def sharding(path: str, leaf: Any) -> Any:
        spec = {"down_proj": PartitionSpec(*[None] * (leaf.ndim - 1), "x")}
        spec |= {"gate_proj": PartitionSpec(*[None] * (leaf.ndim - 2), "x", None)}
        return next((NamedSharding(mesh, value) for part, value in spec.items() if part in path), None)

    folder = folder_of(name, tmp_path)
    whole = ejx.models.from_pretrained(folder)
    split = ejx.models.from_pretrained(folder, sharding=sharding)
    assert eqx.tree_equal(
        jax.tree.map(np.asarray, eqx.filter(whole, eqx.is_array)),
        jax.tree.map(np.asarray, eqx.filter(split, eqx.is_array)),
    )
    mlp: Any = split.stacks[0][0].mlp
    mlp = (
        mlp.experts
        if name == "awq experts"
        else jax.tree.map(lambda linear: linear.weight, mlp, is_leaf=lambda x: type(x) is eqx.nn.Linear)
    )
    for part, axis in (("gate_proj", -2), ("down_proj", -1)):
        weight = getattr(mlp, part)
        codes = weight.codes.addressable_shards[0].data.shape
        assert codes[axis] == weight.codes.shape[axis] // 2, part
        size = weight.scales.shape[axis]
        expected = size // 2 if size % 2 == 0 else size
        assert weight.scales.addressable_shards[0].data.shape[axis] == expected
