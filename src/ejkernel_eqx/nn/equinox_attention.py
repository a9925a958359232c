"""Conversion of the attention layer of Equinox."""

from typing import Any

import equinox as eqx


def options_of(attention: Any) -> dict[str, Any]:
    """The arguments of a `MultiHeadAttention` with the sizes and biases of `attention`."""
    if not isinstance(attention, eqx.nn.MultiheadAttention):
        raise ValueError(
            f"attention: expected an equinox.nn.MultiheadAttention, received {type(attention).__name__}; build other layers from their "
            "sizes."
        )
    return {
        "embed_dim": attention.query_size,
        "num_heads": attention.num_heads,
        "kv_embed_dim": attention.key_size,
        "v_embed_dim": attention.value_size,
        "output_size": attention.output_size,
        "head_dim": attention.qk_size,
        "v_head_dim": attention.vo_size,
        "use_qkv_bias": (attention.use_query_bias, attention.use_key_bias, attention.use_value_bias),
        "use_output_bias": attention.use_output_bias,
        "dropout_rate": attention.dropout.p,
        "causal": False,
    }
