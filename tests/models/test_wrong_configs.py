"""Configurations that are damaged or made to do harm: every entry that is read is checked, and the error names it."""

import json
import math
import re

import jax
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from ejkernel_eqx import nn, weights
from ejkernel_eqx._entries import FIELDS
from tests.models.cases import drawn, GOLDEN

NESTED: list = []
for _ in range(10_000):
    NESTED = [NESTED]
LONG = "x" * 5000
# One value for each way to be wrong; those that fit an entry are left to the meaning of the entry.
WRONG = [10**30, -1, "3", "false", math.nan, [1, "2"], NESTED, {"a": 1}, LONG, True, 10**5000, [LONG], 2.5]
LAYERS = {
    "gla": (weights.gated_linear_attention_options, {"hidden_size": 64, "num_heads": 4}),
    "kimi_linear": (
        weights.kimi_delta_attention_options,
        {"hidden_size": 64, "linear_attn_config": {"num_heads": 2, "kda_layers": [1, 2]}},
    ),
    "gpt2": (weights.attention_options, {"n_embd": 64, "n_head": 4, "n_layer": 2}),
    "gpt_neox": (weights.attention_options, {"hidden_size": 64, "num_attention_heads": 4}),
    "qwen3_5_text": (weights.gated_delta_net_options, {"hidden_size": 64}),
}


class Watched(dict):
    """Notes what is asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, name):
        self.asked.add(name)
        return super().__contains__(name)


def check_all_entries(read, config):
    watched = Watched(config)
    read(watched)
    assert len(watched.asked) > 5
    for name in sorted(watched.asked):
        for value in WRONG:
            message = ""
            try:
                read(config | {name: value})
            except ValueError as error:
                message = str(error)
                assert len(message) < 800, name
            if not FIELDS[name].fits(value):
                assert re.search(rf"^config: {name}: expected .*, received .*; correct", message), name


# Together they read what all kinds do.
READ = ("llama", "phi3", "gemma3_text", "gpt_oss", "mamba", "mamba2", "qwen3_next", "qwen2_moe", "minimax")
HYBRIDS = ("bamba", "falcon_h1", "jamba", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "zamba2")


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [*READ, *HYBRIDS, "deepseek_v2 with groups", "deepseek_v3"])
def test_every_entry_of_a_model_is_checked(kind):
    check_all_entries(ejx.models.decoder_config, GOLDEN[kind]["config"])


@pytest.mark.parametrize("kind", LAYERS)
def test_every_entry_of_a_layer_is_checked(kind):
    read, config = LAYERS[kind]
    check_all_entries(read, config | {"model_type": kind})


@pytest.mark.parametrize("inner", ["rope_type", "factor", "beta_fast", "mscale", "truncate"])
def test_every_entry_of_a_scaling_is_checked(inner):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for value in WRONG:
        if not FIELDS[inner].fits(value):
            with pytest.raises(ejx.CheckpointError, match=rf"config: rope_scaling\.{inner}: expected"):
                nn.RotaryEmbedding.from_config({"head_dim": 16, "rope_scaling": scaling | {inner: value}})


LLAMA = GOLDEN["llama"]["config"]
DEEPSEEK = GOLDEN["deepseek_v3"]["config"]
TEXT = {"text_config": GOLDEN["gemma"]["config"]}
QUANTISED = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"model_type": "t5"}, "model_type: expected one of .*llama.*received 't5'"),
        ("llama", {"hidden_size": None}, "an entry 'hidden_size' for model_type 'llama', received none"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps: expected a number from 0 to 1, received null"),
        ("llama", {"hidden_size": 64, "num_attention_heads": 5}, "num_key_value_heads: expected a divisor"),
        (
            "qwen2",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "num_attention_heads: expected a div",
        ),
        ("llama", {"hidden_size": 36, "head_dim": 9}, "rotary_dim: expected an even number"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1.0}},
            r"rope_parameters\.rope_theta: expected a number",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types: expected a type for each of the 3"),
        ("llama", {"text_config": {"model_type": ["llama"]}}, r"text_config\.model_type: expected text"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most the 4 experts"),
        ("deepseek_v3", {"n_group": 4}, "n_group: expected a divisor of the 6 experts, received 4"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group: expected at most n_group=3, received 5"),
        (
            "mamba",
            {"expand": 1e-9, "intermediate_size": None},
            "expand: expected a factor by which the 32 features become 1 to",
        ),
        ("mamba2", {"n_groups": 3}, "n_groups: expected a divisor of num_heads=8, received 3"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act: expected one of .*xielu"),
        ("mixtral", {"hidden_act": "xielu"}, "hidden_act: expected one of .*xielu"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation: expected the same as hidden_act"),
        ("gpt_oss with experts", {"swiglu_limit": 5.0}, "swiglu_limit"),
        # A quantised model is refused for what its floats would be.
        ("gpt_oss", {"swiglu_limit": 5.0} | QUANTISED, "swiglu_limit"),
        # What stands beside a text_config.
        ("gemma", {"model_type": "paligemma"} | TEXT, "both directions"),
    ],
)
def test_wrong_entries_are_named(kind, change, message):
    with pytest.raises(ValueError, match=message):
        ejx.models.decoder_config(GOLDEN[kind]["config"] | change)


@pytest.mark.parametrize(
    ("change", "first", "message"),
    [
        ({}, 0, "as first_k_dense_replace is 1; layer 1 is the first that has experts"),
        ({"first_k_dense_replace": 3}, 2, "as first_k_dense_replace is 3; no layer has experts"),
        ({"moe_layer_freq": 2}, 1, "as moe_layer_freq is 2; layer 2 is the first"),
        ({"n_routed_experts": 0}, 2, "as it has no experts"),
    ],
)
def test_which_entry_gives_a_layer_a_plain_mlp(change, first, message):
    with pytest.raises(ValueError, match=message):
        nn.MixtureOfExperts.from_config(DEEPSEEK | change, layer_index=first, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[" * 10**5, "is not readable as JSON"),
        ("config.json", "9" * 10**4, "is not readable as JSON"),
        ("config.json", LLAMA | {"hidden_act": LONG}, r"config\.json': config: hidden_act: .*'xxx.*\.\.\.'"),
        (
            "config.json",
            LLAMA | {"torch_dtype": "fp7", "dtype": None},
            r"config\.json': config: dtype: expected one of",
        ),
        ("config.json", LLAMA | {"dtype": ["float32"]}, r"config\.json': config: dtype: expected text"),
        ("generation_config.json", {"eos_token_id": "2"}, r"generation_config\.json': config: eos_token_id"),
        ("config.json", " " * 2**24 + "{}", "expected a file of at most 16,777,216 bytes"),
    ],
)
def test_files_are_named(tmp_path, name, content, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ejx.CheckpointError, match=message) as error:
        ejx.models.from_pretrained(tmp_path)
    assert len(str(error.value)) < 800


def test_nulls_and_what_is_not_read_do_no_harm():
    plain = ejx.models.decoder_config(LLAMA)
    given = {"sliding_window": None, "rope_scaling": None, "text_config": None, "eos_token_id": [2]}
    # Of other models, and of no model.
    other = {"expand": "x", "attn": NESTED, "linear_attn_config": 3, "strange": math.nan, 3: LONG}
    assert ejx.models.decoder_config(LLAMA | given | other) == plain


EMBEDDING = "model.embed_tokens.weight"
HUGE = {"vocab_size": 2**24, "hidden_size": 2**20}


@pytest.mark.parametrize(
    ("change", "without", "message"),
    [
        (
            {"num_hidden_layers": 1024},
            None,
            "weights of 1024 layers .* received those of 3; layer 3 has none",
        ),
        (HUGE, EMBEDDING, "it has no 'model.embed_tokens.we"),
        ({"intermediate_size": 2**20, "head_dim": 2**20}, None, r"expected shape \(4194304, 32\), received"),
    ],
)
def test_no_array_is_made_of_a_size_that_the_files_do_not_have(tmp_path, change, without, message):
    """The arrays of these configurations are larger than any memory."""
    arrays = drawn(GOLDEN["llama"]["shapes"])
    save_file({name: x for name, x in arrays.items() if name != without}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN["llama"]["config"] | change))
    with pytest.raises(ejx.CheckpointError, match=message):
        ejx.models.from_pretrained(tmp_path)
