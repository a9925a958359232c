"""Files of quantised models that do not fit together, or ask for what is not read, are refused by name, before their weights are read."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.quantised import QuantizedWeight
from tests.weights.test_quantised import arrays_of, folder_of

LAYER = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def refused(folder, words, **options: Any) -> None:
    with pytest.raises(ejx.CheckpointError) as raised:
        ejx.models.from_pretrained(folder, **options)
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert len(message) < 700


ENTRIES = [
    ("awq", {"quant_method": "bitsandbytes"}, "quant_method: expected 'fp8' or 'mxfp4' or"),
    ("awq", {"quant_method": None}, "quant_method: expected 'fp8'"),
    ("awq", {"quant_method": 3}, "quant_method: expected text"),
    ("awq", {"rotation": "hadamard"}, "quantization_config.rotation: expected no entry of this name"),
    ("mxfp4", {"block_size": 16}, "quantization_config.block_size: expected no entry"),
    ("awq", {"bits": 3}, "quantization_config.bits: expected 4, received 3"),
    ("awq", {"bits": "4"}, "quantization_config.bits: expected an integer"),
    ("awq", {"version": "gemv"}, "version: expected 'gemm', received 'gemv'"),
    ("awq", {"zero_point": False}, "zero_point: expected true, received false"),
    ("awq", {"group_size": 0}, "group_size: expected"),
    ("awq", {"group_size": 20}, "inputs in groups of 20 (group_size), received 48 inputs"),
    ("awq", {"modules_to_not_convert": ["q_proj"]}, "q_proj.weight': expected floats"),
    ("awq", {"modules_to_not_convert": "q_proj"}, "modules_to_not_convert: expected a list"),
    ("mxfp4", {"modules_to_not_convert": ["model.layers.*.mlp"]}, "down_proj': expected floats"),
    ("fp8 blocks", {"fmt": "e3m4"}, "fmt: expected 'e4m3' or"),
    ("fp8 blocks", {"fmt": "e5m2"}, "down_proj.weight': expected F8_E5M2, received F8_E4M3"),
    ("fp8 blocks", {"weight_block_size": [16]}, "weight_block_size: expected a list of 2"),
    (
        "fp8 blocks",
        {"weight_block_size": [8, 16]},
        "weight_scale_inv': expected shape (4, 3), received (2, 3)",
    ),
    ("fp8 blocks", {"ignored_layers": [LAYER]}, "q_proj.weight': expected floats"),
    ("gptq", {"bits": 3}, "bits: expected 4 or 8, received 3"),
    ("gptq", {"bits": None}, "bits: expected 4 or 8, received null"),
    ("gptq", {"group_size": None}, "group_size: expected -1 or"),
    ("gptq", {"group_size": 20}, "groups of 20"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: expected 'gptq' or 'gptq_v2'"),
    ("gptq", {"pack_dtype": "int64"}, "pack_dtype: expected 'int32'"),
    ("gptq", {"sym": True}, "qzeros': expected zero points 8, as sym is true"),
    (
        "gptq",
        {"dynamic": {"+:.*q_proj": {"bits": 8}}},
        "dynamic: expected rules that exclude modules",
    ),
    ("gptq", {"dynamic": {"-:.*gate": {}, "q_proj": {"bits": 8}}}, "dynamic: expected rules that exclude"),
    ("gptq", {"dynamic": True}, "dynamic: expected"),
    ("int4", {"format": "marlin-24"}, "format: expected 'pack-quantized' or"),
    ("int4", {"format": "float-quantized"}, "weights.type: expected 'float', received 'int'"),
    ("int4", {"quantization_status": "frozen"}, "quantization_status: expected 'compressed'"),
    ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: expected null"),
    ("int4", {"transform_config": {"config_groups": {}}}, "transform_config: expected null"),
    ("int4", {"ignore": ["re:.*q_proj"]}, "q_proj.weight': expected floats"),
    ("int4", {"ignore": [LAYER]}, "q_proj.weight': expected floats"),
    (
        "int4",
        {"ignore": ["re:(a+)+$"]},
        "expected a regular expression of at most 4 repetitions and none of a group",
    ),
    ("int4", {"ignore": ["re:.*.*.*.*.*b"]}, "expected a regular expression of at most 4 repetitions"),
    ("int4", {"ignore": ["re:("]}, "expected a regular expression"),
    ("int4", {"config_groups": {}}, "weight_scale': expected a target of config_groups"),
    ("int4", {"config_groups": [1]}, "config_groups: expected an object"),
    ("awq", {"fuse_max_seq_len": 5, "act": {}}, "quantization_config.act: expected no entry"),
]


@pytest.mark.parametrize(("name", "entries", "message"), ENTRIES)
def test_entries(name, entries, message, tmp_path):
    refused(folder_of(name, tmp_path, **entries), [message])


GROUPS = [
    ("int4", {"num_bits": 3}, "num_bits: expected 4 or 8, received 3"),
    ("int4", {"strategy": "channel"}, "strategy: expected a group_size for groups"),
    ("int4", {"strategy": "token"}, "strategy: expected 'tensor' or"),
    ("int4", {"group_size": 20}, "groups of 20"),
    ("int4", {"dynamic": True}, "dynamic: expected false"),
    ("int4", {"smoothing": 1}, "weights.smoothing: expected no entry"),
    ("int4", {"symmetric": False}, "weight_zero_point': expected it beside the other arrays"),
    ("nvfp4", {"symmetric": False}, "symmetric: expected true for floats"),
    ("float8 blocks", {"block_structure": None}, "strategy: expected a group_size"),
    ("float8 channels", {"num_bits": 4}, "num_bits: expected 8"),
]


@pytest.mark.parametrize(("name", "change", "message"), GROUPS)
def test_entries_of_groups(name, change, message, tmp_path):
    groups = arrays_of(name)[0]["quantization_config"]["config_groups"]
    group = groups["group_0"] | {"weights": groups["group_0"]["weights"] | change}
    refused(folder_of(name, tmp_path, config_groups={"group_0": group}), [message])


ARRAYS: list[tuple[str, str, Any, str]] = [
    ("fp8 blocks", f"{LAYER}.weight_scale_inv", None, "q_proj.weight': expected scales beside it"),
    ("fp8 blocks", f"{LAYER}.weight", None, "q_proj.weight': expected it beside the other arrays"),
    ("fp8 blocks", f"{LAYER}.weight", np.zeros((48, 32), np.int8), "expected F8_E4M3, received I8"),
    (
        "fp8 blocks",
        f"{LAYER}.weight_scale_inv",
        np.zeros((3, 2), np.int32),
        "expected F32 or BF16 or F16 or F8_E8M0",
    ),
    (
        "fp8 blocks",
        f"{LAYER}.weight_scale_inv",
        np.zeros((2, 3), np.float32),
        "expected shape (3, 2), received (2, 3)",
    ),
    ("fp8 blocks", f"{LAYER}.weight", np.zeros((3, 4, 4), ml_dtypes.float8_e4m3fn), "expected a matrix"),
    ("mxfp4", f"{EXPERTS}_scales", None, "gate_up_proj_scales': expected it beside"),
    ("mxfp4", f"{EXPERTS}_blocks", np.zeros((4, 128, 1, 8), np.uint8), "expected shape (experts, outputs"),
    ("mxfp4", f"{EXPERTS}_blocks", np.zeros((4, 128, 1, 16), np.int8), "expected U8, received I8"),
    (
        "mxfp4",
        f"{EXPERTS}_scales",
        np.zeros((4, 64, 1), np.uint8),
        "expected shape (4, 128, 1), received (4, 64, 1)",
    ),
    ("awq", f"{LAYER}.scales", None, "q_proj.scales': expected it beside the other arrays"),
    ("awq", f"{LAYER}.qzeros", None, "q_proj.qzeros': expected it beside"),
    ("awq", f"{LAYER}.qzeros", np.zeros((2, 5), np.int32), "expected shape (2, 6), received (2, 5)"),
    ("awq", f"{LAYER}.qweight", np.zeros((32, 6), np.int64), "expected I32, received I64"),
    ("awq", f"{LAYER}.qweight", np.zeros((0, 6), np.int32), "expected no axis of 0"),
    (
        "gptq",
        f"{LAYER}.g_idx",
        np.full(32, 2, np.int32),
        "g_idx': expected groups from 0 to 1, received 2 to 2",
    ),
    (
        "gptq",
        f"{LAYER}.g_idx",
        np.full(32, -1, np.int32),
        "g_idx': expected groups from 0 to 1, received -1 to -1",
    ),
    ("gptq", f"{LAYER}.g_idx", np.zeros(31, np.int32), "g_idx': expected shape (32,), received (31,)"),
    ("gptq", f"{LAYER}.g_idx", np.zeros(32, np.float32), "g_idx': expected I32 or I64, received F32"),
    (
        "gptq",
        f"{LAYER}.qweight",
        np.zeros((4, 33), np.int32),
        "expected a multiple of 8 outputs, received 33",
    ),
    (
        "gptq",
        f"{LAYER}.qzeros",
        np.full((2, 4), -1, np.int32),
        "expected zero points less one up to 14, received 15",
    ),
    ("int4", f"{LAYER}.weight_shape", None, "weight_shape': expected it beside"),
    (
        "int4",
        f"{LAYER}.weight_shape",
        np.array([48, 2**40]),
        "weight_shape': expected 48 outputs and the inputs of 4 words",
    ),
    ("int4", f"{LAYER}.weight_shape", np.array([-48, 32]), "received [-48, 32]"),
    ("int4", f"{LAYER}.weight_packed", None, "weight_packed': expected it beside"),
    (
        "int4 actorder",
        f"{LAYER}.weight_g_idx",
        np.full(32, 7, np.int32),
        "expected groups from 0 to 1, received 7 to 7",
    ),
    ("nvfp4", f"{LAYER}.weight_global_scale", None, "weight_global_scale': expected it beside"),
    ("nvfp4", f"{LAYER}.weight_scale", np.zeros((32, 2), np.float32), "expected F8_E4M3, received F32"),
]


@pytest.mark.parametrize(("name", "array", "value", "message"), ARRAYS)
def test_arrays(name, array, value, message, tmp_path):
    assert array in arrays_of(name)[1]
    refused(folder_of(name, tmp_path, {array: value}), [message, array.rpartition(".")[0]], dequantise=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gptq desc_act", "groups out of order (desc_act"),
        ("gptq 8 bits with zero points", "zero points and 8 bits"),
        ("int4 actorder", "groups out of order"),
        ("int8 zero points", "zero points and 8 bits"),
    ],
)
def test_weights_that_only_floats_hold(name, reason, tmp_path):
    refused(folder_of(name, tmp_path), [reason, "Pass dequantise=True"])
    refused(tmp_path, [reason, "gate_proj"], dequantise=("*.down_proj.weight",))


@pytest.mark.parametrize("value", [3, "*.weight", [1], None])
def test_what_is_to_be_floats(value, tmp_path, unchecked):
    with pytest.raises(ValueError, match="dequantise: expected True, False or a sequence of patterns"):
        ejx.models.from_pretrained(folder_of("awq", tmp_path), dequantise=value)


def test_layers_of_several_formats(tmp_path):
    """One layer of the stack is in floats, as an ignore list has it."""
    floats = arrays_of("awq")[2]
    name = "model.layers.1.mlp.down_proj"
    change: dict[str, Any] = {f"{name}{end}": None for end in (".qweight", ".qzeros", ".scales")}
    folder = folder_of("awq", tmp_path, change | {f"{name}.weight": floats[f"{name}.weight"]})
    refused(folder, ["down_proj", "expected weights of one format", "received", "floats", "dequantise"])
    model: Any = ejx.models.from_pretrained(folder, dequantise=("*.down_proj.weight",))
    assert isinstance(model.layer(1).mlp.gate_proj.weight, QuantizedWeight)
    np.testing.assert_array_equal(model.layer(1).mlp.down_proj.weight, floats[f"{name}.weight"])
    np.testing.assert_array_equal(
        model.layer(0).mlp.down_proj.weight, floats["model.layers.0.mlp.down_proj.weight"]
    )


def test_experts_of_several_formats(tmp_path):
    _, _, floats = arrays_of("awq experts")
    name = next(name for name in floats if re.search(r"layers\.0\..*experts\.2\.w1", name))
    parts = {name.replace(".weight", end): None for end in (".qweight", ".qzeros", ".scales")}
    folder = folder_of("awq experts", tmp_path, parts | {name: floats[name]})
    refused(folder, ["experts.*.w1.weight", "expected weights of one format"])


def test_projections_that_share_a_block(tmp_path):
    """Phi-3 publishes queries, keys and values in one matrix, here with blocks of 128 rows over several of them."""
    published = arrays_of("fp8 bfloat16 scales")[1]
    scales = {name: np.ones((1, 1), np.float32) for name in published if name.endswith("weight_scale_inv")}
    folder = folder_of("fp8 bfloat16 scales", tmp_path, scales, weight_block_size=[128, 128])
    refused(folder, ["holds several projections in one", "whole blocks of 128 rows", "dequantise"])
    ejx.models.from_pretrained(folder, dequantise=("*qkv_proj*", "*gate_up_proj*"))
