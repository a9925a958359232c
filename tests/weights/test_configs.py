"""Layers from published configurations, as they stand on the models' pages: older and newer ones."""

import equinox as eqx
import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn, weights

KEY = jax.random.key(0)


def config_of(model_type, width, heads, kv_heads, layers, **more):
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": model_type, "num_hidden_layers": layers} | sizes | more


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
LLAMA_3_1 = config_of("llama", 4096, 32, 8, 32, rope_theta=500000.0, rope_scaling=_LLAMA3)
MISTRAL = config_of("mistral", 4096, 32, 8, 32, sliding_window=4096, rope_theta=10000.0)
QWEN3 = config_of("qwen3", 1024, 16, 8, 28, head_dim=128, rms_norm_eps=1e-6, rope_theta=1000000)
QWEN3 |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}
GEMMA_2 = config_of("gemma2", 3584, 16, 8, 42, head_dim=256, sliding_window=4096, rope_theta=10000.0)
GEMMA_2 |= {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
# Published inside the configuration of a model of images and text, with little more than what differs from the defaults.
_GEMMA_3 = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
_GEMMA_3 |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA_3 = {"model_type": "gemma3", "text_config": _GEMMA_3}
GPT_OSS = config_of("gpt_oss", 2880, 64, 8, 24, head_dim=64, rope_theta=150000, rope_scaling=_YARN)
GPT_OSS |= {"attention_bias": True, "sliding_window": 128}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
NEOX = config_of("gpt_neox", 6144, 64, 64, 44, rotary_pct=0.25, rotary_emb_base=10000)
QWEN3_NEXT = config_of("qwen3_next", 2048, 16, 2, 48, head_dim=256, rms_norm_eps=1e-6, rope_theta=10000000)
QWEN3_NEXT |= {"full_attention_interval": 4, "partial_rotary_factor": 0.25}
MINIMAX = config_of("minimax", 6144, 64, 8, 80, head_dim=128, rope_theta=10000000)
MINIMAX |= {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10}
_KDA = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32}
_KDA |= {"kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4}
KIMI = config_of("kimi_linear", 2304, 32, 32, 27, rms_norm_eps=1e-5, linear_attn_config=_KDA)
DELTA_PRODUCT = {"model_type": "gated_deltaproduct", "expand_v": 1.5, "num_householder": 2}
DELTA_PRODUCT |= {"use_forget_gate": True, "attn": {"layers": [0]}}
GLA = {"model_type": "gla", "num_heads": 4, "norm_eps": 1e-5}
RWKV7 = {
    "model_type": "rwkv7",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "head_dim": 64,
    "hidden_ratio": 4.0,
}
RWKV7 |= {"decay_low_rank_dim": 64, "a_low_rank_dim": 64, "v_low_rank_dim": 32, "gate_low_rank_dim": 128}
RWKV7 |= {"value_dim": [768] * 11 + [1536], "hidden_act": "sqrelu", "attn": None}
RWKV6 = {"model_type": "rwkv6", "hidden_size": 768, "num_heads": 12, "expand_k": 1.0, "norm_eps": 64e-5}


def rope(*args, **options):
    return nn.RotaryEmbedding(*args, **options)


def attention(config, layer_index=0):
    return eqx.filter_eval_shape(
        lambda: nn.MultiHeadAttention.from_config(config, layer_index=layer_index, platform="xla", key=KEY)
    )


def heads(number, kv_heads=None, head_dim=None, **options):
    return {"num_heads": number, "num_kv_heads": kv_heads, "head_dim": head_dim} | options


_LLAMA3_ROPE = rope(128, theta=500000.0, scaling=nn.Llama3Scaling(8.0, 1.0, 4.0, 8192))
_YARN_ROPE = rope(64, theta=150000.0, scaling=nn.YarnScaling(32.0, 4096, truncate=False))
_OF_GEMMA_2 = heads(16, 8, 256, logits_soft_cap=50.0, softmax_scale=1 / 16, rope=rope(256))
_OF_GEMMA_3 = heads(8, 4, 256, qk_norm=True, softmax_scale=1 / 16)
_BIASES = {"use_qkv_bias": True, "use_output_bias": True}
ATTENTION = {
    "llama3.1": (LLAMA_3_1, 0, 4096, heads(32, 8, rope=_LLAMA3_ROPE)),
    "mistral": (MISTRAL, 3, 4096, heads(32, 8, sliding_window=4096, rope=rope(128))),
    "qwen3": (QWEN3, 0, 1024, heads(16, 8, 128, qk_norm=True, rope=rope(128, theta=1000000.0))),
    "gemma2_window": (GEMMA_2, 2, 3584, _OF_GEMMA_2 | {"sliding_window": 4096}),
    "gemma2": (GEMMA_2, 1, 3584, _OF_GEMMA_2),
    "gemma3_window": (GEMMA_3, 4, 2560, _OF_GEMMA_3 | {"sliding_window": 1024, "rope": rope(256)}),
    "gemma3": (GEMMA_3, 5, 2560, _OF_GEMMA_3 | {"rope": rope(256, theta=1e6, scaling=nn.LinearScaling(8.0))}),
    "gpt_oss": (GPT_OSS, 1, 2880, heads(64, 8, 64, sinks=True, **_BIASES, rope=_YARN_ROPE)),
    "neox": (NEOX, 0, 6144, heads(64, **_BIASES, rope=rope(96, rotary_dim=24))),
    "qwen3_next": (
        *(QWEN3_NEXT, 3, 2048),
        heads(16, 2, 256, qk_norm=True, output_gate=True, rope=rope(256, theta=1e7, rotary_dim=64)),
    ),
    "minimax": (MINIMAX, 7, 6144, heads(64, 8, 128, rope=rope(128, theta=1e7))),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    config, layer_index, width, options = ATTENTION[name]
    made = attention(config, layer_index)
    expected = eqx.filter_eval_shape(lambda: nn.MultiHeadAttention(width, **options, platform="xla", key=KEY))
    assert eqx.tree_equal(made, expected)  # static fields, the window and the scale say, included


@pytest.mark.parametrize(
    "layer, config, layer_index, options",
    [
        (nn.GatedLinearAttention, GLA, 0, {"embed_dim": 2048, "num_heads": 4}),
        (
            *(nn.LightningAttention, MINIMAX, 6),
            {"embed_dim": 6144, "num_heads": 64, "head_dim": 128, "layer_index": 6, "num_layers": 80},
        ),
        (nn.KimiDeltaAttention, KIMI, 4, {"embed_dim": 2304, "num_heads": 32, "head_dim": 128}),
        (nn.RWKV7TimeMix, RWKV7, 0, {"embed_dim": 768, "value_residual": False}),
        (nn.RWKV7TimeMix, RWKV7, 11, {"embed_dim": 768, "v_head_dim": 128}),
        (nn.RWKV7ChannelMix, RWKV7 | {"intermediate_size": 100}, 3, {"embed_dim": 768, "inner_dim": 100}),
        (
            nn.RWKV7ChannelMix,
            {"model_type": "rwkv7", "hidden_size": 80},
            3,
            {"embed_dim": 80, "inner_dim": 320},
        ),
        (nn.RWKV6TimeMix, RWKV6, 0, {"embed_dim": 768, "num_heads": 12}),
        (
            *(nn.GatedDeltaNet, DELTA_PRODUCT, 1),
            {"embed_dim": 2048, "num_k_heads": 6, "head_dim": 256, "v_head_dim": 384, "num_householder": 2},
        ),
        (
            *(nn.GatedDeltaNet, QWEN3_NEXT, 0),
            {"embed_dim": 2048, "num_k_heads": 16, "num_v_heads": 32, "head_dim": 128},
        ),
    ],
)
def test_recurrent(layer, config, layer_index, options):
    """Others are built from the configurations that `transformers` gave with their results."""
    made = eqx.filter_eval_shape(
        lambda: layer.from_config(config, layer_index=layer_index, platform="xla", key=KEY)
    )
    assert eqx.tree_equal(made, eqx.filter_eval_shape(lambda: layer(**options, platform="xla", key=KEY)))


def test_another_activation_of_rwkv7_is_refused():
    with pytest.raises(ValueError, match=r"expected hidden_act to be 'sqrelu' .*, received 'silu'"):
        nn.RWKV7ChannelMix.from_config(RWKV7 | {"hidden_act": "silu"}, layer_index=0, key=KEY)


def test_windows_by_layer():
    windows = [weights.attention_options(GPT_OSS, i)["sliding_window"] for i in range(4)]
    assert windows == [128, None, 128, None]
    qwen = {**QWEN3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert [weights.attention_options(qwen, i)["sliding_window"] for i in range(4)] == [None, None, 64, 64]
    bare = {"model_type": "gpt_oss", "hidden_size": 32, "num_attention_heads": 8, "head_dim": 8}
    assert [weights.attention_options(bare, i)["sliding_window"] for i in range(2)] == [128, None]


_FULL = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
_SLIDING = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
NESTED = {"full_attention": _FULL, "sliding_attention": _SLIDING}


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
    with pytest.raises(ValueError, match=r"layer_type: .* full_attention, .*received 'sliding_attention'"):
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


LLAMA = {"model_type": "llama", "num_attention_heads": 4}
REFUSED = {
    "model": (lambda: attention({"model_type": "mamba"}), r"one of .*qwen3_next, .*received 'mamba'"),
    "nothing": (lambda: attention({}), "received null"),
    "list": (lambda: attention([("model_type", "llama")]), "the dictionary of a config.json, received list"),
    "no size": (lambda: attention(LLAMA), "an entry 'hidden_size' or 'n_embd' for model_type 'llama'"),
    "layer": (lambda: attention(LLAMA_3_1, 32), "a layer of the 32 that the model has, received 32"),
    "below 0": (lambda: attention(LLAMA_3_1, -1), "layer_index: expected a whole number from 0 on"),
    "recurrent": (lambda: attention(QWEN3_NEXT, 0), "for MultiHeadAttention, .*'linear_attention'"),
    "type": (lambda: attention(LLAMA_3_1 | {"layer_types": ["chunked_attention"]}), "'chunked_attention'"),
    "both ways": (lambda: attention(GEMMA_2 | {"use_bidirectional_attention": True}), "to be False"),
    "attention": (lambda: weights.gated_delta_net_options(QWEN3_NEXT, 3), "received 3.*'full_attention'"),
    "no forget gate": (
        lambda: weights.gated_delta_net_options(DELTA_PRODUCT | {"use_forget_gate": False}, 1),
        "use_forget_gate.*received False",
    ),
    "softmax among products": (lambda: weights.gated_delta_net_options(DELTA_PRODUCT, 0), "'attention'"),
    "kimi": (lambda: weights.kimi_delta_attention_options(KIMI, 3), "3, which is of type 'full_attention'"),
    "activation": (
        lambda: weights.lightning_attention_options(MINIMAX | {"hidden_act": "gelu"}, 0),
        "hidden_act to be 'silu' or 'swish'",
    ),
    "feature map": (
        lambda: weights.gated_linear_attention_options(GLA | {"feature_map": "relu"}),
        "feature_map.*received 'relu'",
    ),
    "hybrid": (
        lambda: weights.gated_linear_attention_options(GLA | {"attn": {"layers": [1]}}, 1),
        "of type 'attention'",
    ),
    "class": (lambda: Unpublished.from_config({}, key=KEY), "received Unpublished"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name, unchecked):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_filled_by_another_model_is_refused():
    """Qwen3's norms and GPT-OSS' sinks, which a layer of Llama's configuration has no place for."""
    small = {**QWEN3, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    given = {f"{name}_proj.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    given |= {"q_norm.weight": np.zeros(4, np.float32), "k_norm.weight": np.zeros(4, np.float32)}
    ejx.load_published(attention(small), given)
    with pytest.raises(ejx.CheckpointError, match=r"nothing takes its 'q_norm\.weight', 'k_norm\.weight'"):
        ejx.load_published(attention({**small, "model_type": "llama"}), given)
