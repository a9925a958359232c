"""Every layer over tokens at a small size."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ejkernel_eqx import nn
from tests.nn import recurrent_layers
from tests.nn.recurrent_layers import EMBED

_HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "rope": nn.RotaryEmbedding(EMBED // 4)}
_LATENT = {"num_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "q_lora_rank": 8}
_SPARSE = {"block_size": 2, "num_blocks": 2, "sliding_window": 2}
_SPARSE |= {"compression_size": 2, "compression_stride": 1}
ATTENTION: dict[str, Callable[..., Any]] = {
    "attention": functools.partial(nn.MultiHeadAttention, EMBED, **_HEADS, qk_norm=True, sinks=True),
    "latent attention": functools.partial(nn.MultiHeadLatentAttention, EMBED, **_LATENT),
    "native sparse attention": functools.partial(nn.NativeSparseAttention, EMBED, **_HEADS, **_SPARSE),
}
LAYERS: dict[str, Callable[..., Any]] = {
    **ATTENTION,
    "lstm": functools.partial(nn.LSTM, EMBED, EMBED, num_layers=2),
    "gru": functools.partial(nn.GRU, EMBED, EMBED),
    **{name: case.build for name, case in recurrent_layers.LAYERS.items()},
}


def build(name: str, **options: Any) -> Any:
    """One layer; of the recurrent ones with weights in which nothing is left at one or zero."""
    if name in recurrent_layers.LAYERS:
        return recurrent_layers.build(name, **options)
    return LAYERS[name](**options, key=jax.random.key(0))


def stacked(name: str, number: int) -> Any:
    return eqx.filter_vmap(lambda key: LAYERS[name](key=key))(jax.random.split(jax.random.key(0), number))
