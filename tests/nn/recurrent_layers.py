"""The recurrent layers at small sizes, with the formulas of the published ones, for the tests of all of them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx import nn
from tests.arrays import array
from tests.nn import published_recurrent as published

EMBED = 24
INDEX = 2  # of the lightning layer


class Case(NamedTuple):
    build: Callable[..., nn.RecurrentLayer]
    formulas: Callable[..., tuple[np.ndarray, np.ndarray]]
    """`(w, x) -> (y, state)`."""
    renamed: dict[str, str]
    """Parameters that have another name here."""


def _case(layer, options, formulas, known, renamed=()):
    build = functools.partial(layer, EMBED, **options)
    return Case(build, functools.partial(formulas, **known), dict(renamed))


_MAMBA2_KNOWN = {"head_dim": 12, "groups": 2, "size": 6}
_MAMBA2_OPTIONS = {"head_dim": 12, "num_groups": 2, "state_size": 6}
_MAMBA3_KNOWN = {"head_dim": 12, "groups": 2, "size": 8, "angles": 2}
_MAMBA3_OPTIONS = {"head_dim": 12, "num_groups": 2, "state_size": 8}
_SWISH = {"g_norm.weight": "g_norm_swish_gate.weight"}

_RANKS = {"decay_low_rank_dim": 3, "a_low_rank_dim": 5, "v_low_rank_dim": 7, "gate_low_rank_dim": 4}
_PARTS = (("down.weight", "lora.0.weight"), ("up.weight", "lora.2.weight"), ("up.bias", "lora.2.bias"))
_LOW_RANK = {f"{name}_lora.{ours}": f"{name}_lora.{theirs}" for name in "wavg" for ours, theirs in _PARTS}


LAYERS = {
    "mamba": _case(nn.Mamba1Mixer, {"state_size": 4}, published.mamba, {}),
    "mamba2": _case(nn.Mamba2Mixer, _MAMBA2_OPTIONS, published.mamba2, _MAMBA2_KNOWN),
    "mamba3": _case(nn.Mamba3Mixer, _MAMBA3_OPTIONS, published.mamba3, _MAMBA3_KNOWN),
    "gla": _case(
        nn.GatedLinearAttention, {"num_heads": 4}, published.gla, {"heads": 4, "kv_heads": 4}, _SWISH
    ),
    "lightning": _case(
        nn.LightningAttention,
        {"num_heads": 4, "layer_index": INDEX, "num_layers": 5},
        published.minimax,
        {"heads": 4, "layer": INDEX, "layers": 5},
    ),
    "kimi": _case(nn.KimiDeltaAttention, {"num_heads": 2, "head_dim": 8}, published.kimi, {"heads": 2}),
    "qwen3-next": _case(
        nn.GatedDeltaNet,
        {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 8, "v_head_dim": 6},
        published.qwen3_next,
        {"k_heads": 2, "v_heads": 4, "head_dim": 8, "v_head_dim": 6},
    ),
    "rwkv6": _case(
        nn.RWKV6TimeMix,
        {"num_heads": 2, "expand_k": 0.5, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5},
        published.rwkv6,
        {"heads": 2, "eps": 64e-5},
        _LOW_RANK,
    ),
    "rwkv7": _case(
        nn.RWKV7TimeMix,
        {"head_dim": 12, "v_head_dim": 6, "value_residual": False, "norm_eps": 1e-4, **_RANKS},
        published.rwkv7,
        {"heads": 2, "eps": 1e-4},
        _LOW_RANK,
    ),
    "rwkv7 channels": _case(nn.RWKV7ChannelMix, {"inner_dim": 40}, published.rwkv7_channels, {}),
    "lfm2": _case(nn.GatedShortConvolution, {}, published.short_convolution, {}),
}
RESIDUAL = functools.partial(nn.RWKV7TimeMix, EMBED, head_dim=12, v_head_dim=6, norm_eps=1e-4, **_RANKS)
"""A layer of RWKV-7 after the first, which takes its values."""
VARIANTS = {
    "falcon-mamba, biases": _case(
        nn.Mamba1Mixer,
        {"state_size": 4, "inner_norms": True, "use_bias": True, "inner_dim": 40, "dt_rank": 3},
        published.mamba,
        {"norm_eps": 1e-6},
    ),
    "jamba, a norm with weights": _case(
        nn.Mamba1Mixer,
        {"state_size": 4, "inner_norms": "weighted", "inner_norm_eps": 1e-5},
        published.mamba,
        {"norm_eps": 1e-5},
    ),
    "falcon-h1, factors": _case(
        nn.Mamba2Mixer,
        _MAMBA2_OPTIONS | {"multipliers": (0.9, 0.7, 1.2, 1.1, 0.8)},
        published.mamba2,
        _MAMBA2_KNOWN | {"factors": (0.9, 0.7, 1.2, 1.1, 0.8)},
    ),
    "lfm2, biases, wide": _case(
        nn.GatedShortConvolution, {"conv_width": 5, "use_bias": True}, published.short_convolution, {}
    ),
    "mamba2, norm first, over all groups, limited": _case(
        nn.Mamba2Mixer,
        _MAMBA2_OPTIONS | {"norm_before_gate": True, "norm_group_size": 48, "dt_limit": (0.02, 0.5)},
        published.mamba2,
        _MAMBA2_KNOWN | {"norm_first": True, "per_group": False, "limit": (0.02, 0.5)},
    ),
    "mamba2, no norm, no conv bias": _case(
        nn.Mamba2Mixer,
        _MAMBA2_OPTIONS | {"use_norm": False, "use_conv_bias": False},
        published.mamba2,
        _MAMBA2_KNOWN,
    ),
    "mamba3, two ranks": _case(
        nn.Mamba3Mixer,
        _MAMBA3_OPTIONS | {"mimo_rank": 2},
        published.mamba3,
        _MAMBA3_KNOWN | {"ranks": 2},
    ),
    "mamba3, three ranks, a norm, all rotated": _case(
        nn.Mamba3Mixer,
        {
            "head_dim": 12,
            "state_size": 8,
            "mimo_rank": 3,
            "use_norm": True,
            "rope_fraction": 1.0,
            "min_rate": 0.5,
        },
        published.mamba3,
        _MAMBA3_KNOWN | {"groups": 1, "angles": 4, "ranks": 3, "floor": 0.5},
    ),
    "gla, few kv heads, convolutions, no gate": _case(
        nn.GatedLinearAttention,
        {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "conv_width": 3, "use_conv_bias": True}
        | {"output_gate": False, "gate_min": -0.04},
        published.gla,
        {"heads": 4, "kv_heads": 2, "gate_min": -0.04},
    ),
    "qwen3-next, three writes": _case(
        nn.GatedDeltaNet,
        {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 8, "v_head_dim": 6, "num_householder": 3}
        | {"allow_neg_eigval": True},
        published.qwen3_next,
        {"k_heads": 2, "v_heads": 4, "head_dim": 8, "v_head_dim": 6, "writes": 3, "doubled": True},
    ),
    "kimi, many value heads, bounded, doubled": _case(
        nn.KimiDeltaAttention,
        {"num_heads": 2, "head_dim": 8, "num_v_heads": 4, "v_head_dim": 6, "use_gate_bias": True}
        | {"lower_bound": -5.0, "allow_neg_eigval": True},
        published.kimi,
        {"heads": 2, "v_heads": 4, "lower_bound": -5.0, "doubled": True},
    ),
}


def _is_parameter(leaf) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def parameters(layer) -> dict[str, Any]:
    """The layer's parameters by the names that its fields have."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(layer, _is_parameter))
    plain = lambda part: str(getattr(part, "name", getattr(part, "idx", part)))
    return {".".join(map(plain, path)): leaf for path, leaf in leaves}


def build(name: str, dtype=jnp.float32, seed: int = 0, platform=None) -> nn.RecurrentLayer:
    """The layer, with weights in which nothing is left at one or zero; made here, since JAX compiles a program for each shape."""
    random = np.random.default_rng(seed)

    def weight(path, leaf):
        if not _is_parameter(leaf):
            return jnp.asarray(INDEX, leaf.dtype)
        field = path[-1].name
        if field == "A_log":
            value = np.log(random.uniform(1, 4, leaf.shape))
        else:
            small = field in ("dt_bias", "bias") or len(leaf.shape) == 1
            value = (0.2 if small else leaf.shape[-1] ** -0.5) * random.standard_normal(leaf.shape)
            value = value + 1 if len(leaf.shape) == 1 and not field.endswith("bias") else value
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        return array(value, dtype if leaf.dtype == jnp.float16 else wide)

    make = RESIDUAL if name == "rwkv7 residual" else (LAYERS | VARIANTS)[name].build
    # In float16 the parameters that stay wide can be told from those that do not.
    like = eqx.filter_eval_shape(lambda: make(key=jax.random.key(0), dtype=jnp.float16, platform=platform))
    arrays, rest = eqx.partition(like, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree_util.tree_map_with_path(weight, arrays), rest)


def inputs(rows: int, tokens: int, dtype=jnp.float32) -> jax.Array:
    random = np.random.default_rng(1)
    return array(random.standard_normal((rows, tokens, EMBED)), dtype)


@eqx.filter_jit
def call(layer, x, state=None, **arrays):
    return layer(x, state, **arrays)
