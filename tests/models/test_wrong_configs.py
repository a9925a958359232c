"""Configurations that are damaged or made to do harm: every entry that is read is checked, and the error names it."""

import json
import math
import pathlib
import re

import jax
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from ejkernel_eqx import nn, weights
from ejkernel_eqx._entries import FIELDS
from tests.models.cases import CONFIGS, drawn, model_type

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())
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
                assert re.search(rf"^config: {name}: expected .*, received .*; correct", message), (
                    name,
                    message,
                )


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_every_entry_of_a_model_is_checked(kind):
    check_all_entries(ejx.models.decoder_config, CONFIGS[kind] | {"model_type": model_type(kind)})


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


LLAMA = CONFIGS["llama"] | {"model_type": "llama"}
DEEPSEEK = CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 10**5},
            "num_hidden_layers: expected an integer from 1 to 1024, received 100000; correct the config.json.",
        ),
        (
            "llama",
            {"num_hidden_layers": 10**4000},
            "num_hidden_layers: .* received an integer of more than 40 digits",
        ),
        ("llama", {"hidden_size": None}, "an entry 'hidden_size' for model_type 'llama', received none"),
        (
            "llama",
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings: expected true or false, received 'false'",
        ),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps: expected a number from 0 to 1, received nan"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps: expected a number from 0 to 1, received null"),
        (
            "llama",
            {"hidden_size": 64, "num_attention_heads": 5},
            "num_key_value_heads: expected a divisor of num_att",
        ),
        (
            "qwen2",
            {"hidden_size": 64, "num_attention_heads": 5, "num_key_value_heads": 5},
            "num_attention_heads: expected a divisor of the 64 features, as there is no head_dim, received 5",
        ),
        ("llama", {"hidden_size": 36, "head_dim": 9}, "rotary_dim: expected an even number"),
        (
            "qwen3",
            {"layer_types": ["full_attention"]},
            "layer_types: expected a type for each of the 3 layers",
        ),
        ("llama", {"text_config": [1]}, r"text_config: expected an object .*received \[1\]"),
        ("llama", {"text_config": {"model_type": ["llama"]}}, r"text_config\.model_type: expected text"),
        ("llama", {"eos_token_id": [1, "2"]}, r"eos_token_id: .* received \[1, '2'\]"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number from 1e-30"),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok: expected at most the 4 experts, received 9",
        ),
        ("deepseek_v3", {"n_group": 4}, "n_group: expected a divisor of the 6 experts, received 4"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group: expected at most n_group=3, received 5"),
        ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor: .* received null"),
        ("mamba", {"expand": 1e-9}, "expand: expected a factor by which the 32 features become 1 to"),
        ("mamba2", {"time_step_limit": [0.0]}, r"time_step_limit: expected a list of 2, .* received \[0.0\]"),
        ("mamba2", {"n_groups": 3}, "n_groups: expected a divisor of num_heads=8, received 3"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval: expected an integer from 1"),
        ("minimax", {"mlp_alpha_factor": "1"}, "mlp_alpha_factor: expected a number from"),
        (
            "phi3",
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings: expected an integer from 2",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1.0}},
            r"rope_parameters\.rope_theta: expected a number from 1.001",
        ),
    ],
)
def test_wrong_entries_are_named(kind, change, message):
    with pytest.raises(ejx.CheckpointError, match=message):
        ejx.models.decoder_config(CONFIGS[kind] | {"model_type": model_type(kind)} | change)


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
        (
            "config.json",
            json.dumps(LLAMA | {"hidden_act": LONG}),
            r"config\.json': config: hidden_act: .*'xxx.*\.\.\.'",
        ),
        (
            "config.json",
            json.dumps(LLAMA | {"torch_dtype": "fp7"}),
            r"config\.json': config: dtype: expected one of",
        ),
        (
            "config.json",
            json.dumps(LLAMA | {"dtype": ["float32"]}),
            r"config\.json': config: dtype: expected text",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": "2"}',
            r"generation_config\.json': config: eos_token_id: expected",
        ),
        ("config.json", " " * 2**24 + "{}", "expected a file of at most 16,777,216 bytes"),
    ],
)
def test_files_are_named(tmp_path, name, content, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(content)
    with pytest.raises(ejx.CheckpointError, match=message) as error:
        ejx.models.from_pretrained(tmp_path)
    assert len(str(error.value)) < 800


def test_nulls_and_what_is_not_read_do_no_harm():
    plain = ejx.models.decoder_config(LLAMA)
    given = {"sliding_window": None, "rope_scaling": None, "text_config": None, "eos_token_id": [2]}
    # Of other models, and of no model.
    other = {"expand": "x", "attn": NESTED, "linear_attn_config": 3, "strange": math.nan, 3: LONG}
    assert ejx.models.decoder_config(LLAMA | given | other) == plain


@pytest.mark.parametrize(
    ("change", "without", "message"),
    [
        (
            {"num_hidden_layers": 1024},
            None,
            "weights of 1024 layers .* received those of 3; layer 3 has none",
        ),
        (
            {"vocab_size": 2**24, "hidden_size": 2**20},
            "model.embed_tokens.weight",
            "it has no 'model.embed_tokens.we",
        ),
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
