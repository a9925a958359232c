"""Layers from published configurations, as they stand on the models' pages: older and newer ones."""

import equinox as eqx
import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn, weights

KEY = jax.random.key(0)
LLAMA_3_1 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
GEMMA_2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 42,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "rope_theta": 10000.0,
}
# Published inside the configuration of a model of images and text, with little more than what differs from the defaults.
GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 24,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
}
MINIMAX = {
    "model_type": "minimax",
    "hidden_size": 6144,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
    "rope_theta": 10000000,
}
KIMI = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}


def rope(*args, **options):
    return nn.RotaryEmbedding(*args, **options)


def attention(config, layer_index=0):
    return eqx.filter_eval_shape(
        lambda: nn.MultiHeadAttention.from_config(config, layer_index=layer_index, platform="xla", key=KEY)
    )


@pytest.mark.parametrize(
    "config, layer_index, width, options",
    [
        (
            LLAMA_3_1,
            0,
            4096,
            {
                "num_heads": 32,
                "num_kv_heads": 8,
                "rope": rope(128, theta=500000.0, scaling=nn.Llama3Scaling(8.0, 1.0, 4.0, 8192)),
            },
        ),
        (MISTRAL, 3, 4096, {"num_heads": 32, "num_kv_heads": 8, "sliding_window": 4096, "rope": rope(128)}),
        (
            QWEN3,
            0,
            1024,
            {
                "num_heads": 16,
                "num_kv_heads": 8,
                "head_dim": 128,
                "qk_norm": True,
                "rope": rope(128, theta=1000000.0),
            },
        ),
        (
            GEMMA_2,
            2,
            3584,
            {
                "num_heads": 16,
                "num_kv_heads": 8,
                "head_dim": 256,
                "logits_soft_cap": 50.0,
                "softmax_scale": 1 / 16,
                "sliding_window": 4096,
                "rope": rope(256),
            },
        ),
        (
            GEMMA_2,
            1,
            3584,
            {
                "num_heads": 16,
                "num_kv_heads": 8,
                "head_dim": 256,
                "logits_soft_cap": 50.0,
                "softmax_scale": 1 / 16,
                "rope": rope(256),
            },
        ),
        (
            GEMMA_3,
            4,
            2560,
            {
                "num_heads": 8,
                "num_kv_heads": 4,
                "head_dim": 256,
                "qk_norm": True,
                "softmax_scale": 1 / 16,
                "sliding_window": 1024,
                "rope": rope(256),
            },
        ),
        (
            GEMMA_3,
            5,
            2560,
            {
                "num_heads": 8,
                "num_kv_heads": 4,
                "head_dim": 256,
                "qk_norm": True,
                "softmax_scale": 1 / 16,
                "rope": rope(256, theta=1e6, scaling=nn.LinearScaling(8.0)),
            },
        ),
        (
            GPT_OSS,
            1,
            2880,
            {
                "num_heads": 64,
                "num_kv_heads": 8,
                "head_dim": 64,
                "sinks": True,
                "use_qkv_bias": True,
                "use_output_bias": True,
                "rope": rope(64, theta=150000.0, scaling=nn.YarnScaling(32.0, 4096, truncate=False)),
            },
        ),
        (
            NEOX,
            0,
            6144,
            {"num_heads": 64, "use_qkv_bias": True, "use_output_bias": True, "rope": rope(96, rotary_dim=24)},
        ),
        (
            QWEN3_NEXT,
            3,
            2048,
            {
                "num_heads": 16,
                "num_kv_heads": 2,
                "head_dim": 256,
                "qk_norm": True,
                "output_gate": True,
                "rope": rope(256, theta=1e7, rotary_dim=64),
            },
        ),
        (
            MINIMAX,
            7,
            6144,
            {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "rope": rope(128, theta=1e7)},
        ),
    ],
    ids=[
        "llama3.1",
        "mistral",
        "qwen3",
        "gemma2_window",
        "gemma2",
        "gemma3_window",
        "gemma3",
        "gpt_oss",
        "neox",
        "qwen3_next",
        "minimax",
    ],
)
def test_attention(config, layer_index, width, options):
    made = attention(config, layer_index)
    expected = eqx.filter_eval_shape(lambda: nn.MultiHeadAttention(width, **options, platform="xla", key=KEY))
    assert eqx.tree_equal(made, expected)  # static fields, the window and the scale say, included


@pytest.mark.parametrize(
    "layer, config, layer_index, options",
    [
        (
            nn.Mamba1Mixer,
            {
                "model_type": "mamba",
                "hidden_size": 768,
                "num_hidden_layers": 24,
                "time_step_rank": 48,
                "layer_norm_epsilon": 1e-5,
            },
            0,
            {"embed_dim": 768},
        ),
        (
            nn.Mamba1Mixer,
            {
                "model_type": "falcon_mamba",
                "hidden_size": 4096,
                "expand": 16,
                "intermediate_size": 8192,
                "time_step_rank": 256,
            },
            0,
            {"embed_dim": 4096, "inner_norms": True},
        ),
        (
            nn.Mamba2Mixer,
            {
                "model_type": "mamba2",
                "hidden_size": 768,
                "num_heads": 24,
                "head_dim": 64,
                "n_groups": 1,
                "time_step_limit": [0.0, float("inf")],
            },
            0,
            {"embed_dim": 768},
        ),
        (
            nn.GatedLinearAttention,
            {"model_type": "gla", "num_heads": 4, "norm_eps": 1e-5},
            0,
            {"embed_dim": 2048, "num_heads": 4},
        ),
        (
            nn.LightningAttention,
            MINIMAX,
            6,
            {"embed_dim": 6144, "num_heads": 64, "head_dim": 128, "layer_index": 6, "num_layers": 80},
        ),
        (nn.KimiDeltaAttention, KIMI, 4, {"embed_dim": 2304, "num_heads": 32, "head_dim": 128}),
        (
            nn.GatedDeltaNet,
            QWEN3_NEXT,
            0,
            {"embed_dim": 2048, "num_k_heads": 16, "num_v_heads": 32, "head_dim": 128},
        ),
    ],
)
def test_recurrent(layer, config, layer_index, options):
    made = eqx.filter_eval_shape(
        lambda: layer.from_config(config, layer_index=layer_index, platform="xla", key=KEY)
    )
    assert eqx.tree_equal(made, eqx.filter_eval_shape(lambda: layer(**options, platform="xla", key=KEY)))


def test_windows_by_layer():
    windows = [weights.attention_options(GPT_OSS, i)["sliding_window"] for i in range(4)]
    assert windows == [128, None, 128, None]
    qwen = {**QWEN3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert [weights.attention_options(qwen, i)["sliding_window"] for i in range(4)] == [None, None, 64, 64]
    bare = {"model_type": "gpt_oss", "hidden_size": 32, "num_attention_heads": 8, "head_dim": 8}
    assert [weights.attention_options(bare, i)["sliding_window"] for i in range(2)] == [128, None]


NESTED = {
    "full_attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "qwen3", "gemma2", "mistral"])
def test_rotations_nested_by_layer_type(kind):
    """As newer files have them, whatever the model: each layer has that of its type."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "layer_types": types, "rope_parameters": NESTED}
    ropes = [weights.attention_options(config, i)["rope"] for i in range(3)]
    window = rope(16, theta=1e4, rotary_dim=8)
    assert ropes == [window, rope(16, theta=1e6, scaling=nn.YarnScaling(4.0, 16)), window]
    without = {**config, "rope_parameters": {"full_attention": NESTED["full_attention"]}}
    with pytest.raises(
        ValueError, match=r"layer_type: expected one of full_attention, .*received 'sliding_attention'"
    ):
        weights.attention_options(without, 0)


def test_options_take_precedence():
    small = {**LLAMA_3_1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    layer = nn.MultiHeadAttention.from_config(small, key=KEY, dtype="bfloat16", sliding_window=7, rope=None)
    assert layer.q_proj.weight.dtype == np.dtype("bfloat16")
    assert layer.attention.window == ejx.FlashAttention(causal=True, sliding_window=7).window
    assert layer.rope is None


def test_which_models_offset_their_norms():
    assert weights.unit_offset_norms(GEMMA_3) and weights.unit_offset_norms(QWEN3_NEXT)
    assert not weights.unit_offset_norms(QWEN3) and not weights.unit_offset_norms(NEOX)


class Unpublished(nn.RecurrentLayer):
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: attention({"model_type": "mamba"}), r"one of gemma, .*qwen3_next, received 'mamba'"),
        (lambda: attention({}), "received null"),
        (
            lambda: attention([("model_type", "llama")]),
            "config: expected the dictionary of a config.json, received list",
        ),
        (
            lambda: attention({"model_type": "llama", "num_attention_heads": 4}),
            "an entry 'hidden_size' or 'n_embd' for model_type 'llama'",
        ),
        (lambda: attention(LLAMA_3_1, 32), "a layer of the 32 that the model has, received 32"),
        (lambda: attention(LLAMA_3_1, -1), "layer_index: expected a whole number from 0 on, received -1"),
        (
            lambda: attention(QWEN3_NEXT, 0),
            "'full_attention' or 'sliding_attention' for MultiHeadAttention, received 0.*'linear_attention'",
        ),
        (lambda: attention({**LLAMA_3_1, "layer_types": ["chunked_attention"]}), "'chunked_attention'"),
        (
            lambda: attention({**GEMMA_2, "use_bidirectional_attention": True}),
            "use_bidirectional_attention to be False",
        ),
        (
            lambda: weights.gated_delta_net_options(QWEN3_NEXT, 3),
            "'linear_attention' for GatedDeltaNet, received 3.*'full_attention'",
        ),
        (
            lambda: weights.kimi_delta_attention_options(KIMI, 3),
            "received 3, which is of type 'full_attention'",
        ),
        (
            lambda: weights.lightning_attention_options({**MINIMAX, "hidden_act": "gelu"}, 0),
            "hidden_act to be 'silu' or 'swish'",
        ),
        (
            lambda: weights.gated_linear_attention_options({"model_type": "gla", "feature_map": "relu"}),
            "feature_map.*received 'relu'",
        ),
        (
            lambda: weights.gated_linear_attention_options({"model_type": "gla", "attn": {"layers": [1]}}, 1),
            "of type 'attention'",
        ),
        (lambda: Unpublished.from_config({}, key=KEY), "received Unpublished"),
    ],
)
def test_what_is_not_known_is_refused(make, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_filled_by_another_model_is_refused():
    """Qwen3's norms and GPT-OSS' sinks, which a layer of Llama's configuration has no place for."""
    small = {**QWEN3, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    given = {
        f"{name}_proj.weight": np.zeros(shape, np.float32)
        for name, shape in zip("qkvo", [(8, 8), (4, 8), (4, 8), (8, 8)])
    }
    given |= {"q_norm.weight": np.zeros(4, np.float32), "k_norm.weight": np.zeros(4, np.float32)}
    ejx.load_published(attention(small), given)
    with pytest.raises(ejx.CheckpointError, match=r"nothing takes its 'q_norm\.weight', 'k_norm\.weight'"):
        ejx.load_published(attention({**small, "model_type": "llama"}), given)
