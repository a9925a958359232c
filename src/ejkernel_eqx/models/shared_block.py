"""Blocks of attention and an MLP that several layers share."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._signatures import Module
from ..nn import MultiHeadAttention
from ..nn.few_rows import laid_out_as, Norm, normed
from ..nn.parts import Parts
from ..nn.projection import product, project
from ..weights.fill import fill_fields, replaced
from .config import DecoderConfig, SharedBlockConfig
from .mlp import MLP, norm_of


class SharedBlock(Module):
    r"""A block that several layers share (Zamba2, Glorioso et al. 2024, arXiv:2411.15242), without residuals:
    $\mathrm{MLP}(\mathrm{norm}(\mathrm{attention}(\mathrm{norm}([x, x_0]))))$, where $x_0$ is the embedding of the tokens. Parameters have their
    published names."""

    input_layernorm: Norm  # [2 * E]
    self_attn: MultiHeadAttention  # from 2 * E features to E
    pre_ff_layernorm: Norm  # [E]
    feed_forward: MLP

    def __init__(self, config: DecoderConfig, *, dtype: Any, key: Array, **options: Any):
        block, width, parts = config.shared_blocks, config.embed_dim, Parts(key, 2, dtype, None)
        assert block is not None
        norm = lambda features: norm_of(config.norm_type, features, config.norm_eps, dtype)
        self.input_layernorm, self.pre_ff_layernorm = norm(2 * width), norm(width)
        attention: dict[str, Any] = dict(block.options) | options | {"output_size": width}
        self.self_attn = MultiHeadAttention(2 * width, **attention, dtype=dtype, key=parts.key())
        platform = options.get("platform")
        self.feed_forward = MLP(width, block.mlp, platform=platform, dtype=dtype, key=parts.key())


class LowRank(Module):
    """A product of two matrices beside a projection."""

    down: Array  # [R, in]
    up: Array  # [out, R]

    def _published(self, weights: Any) -> "LowRank":
        return fill_fields(self, weights, {"down": "0.weight", "up": "1.weight"})


class Adapted(Module):
    """A projection with a low-rank product added to it."""

    base: Any
    beside: LowRank

    def over_rows(self, name: str, x: Array, features: int) -> Array:
        y = project(name, self.base, x, features)
        return y + laid_out_as(y, product(product(x, self.beside.down), self.beside.up))


class BlockAdapters(Module):
    """What a layer has of its own of the block that it shares: low-rank products beside projections, and a projection behind the block."""

    beside: dict[
        str, LowRank
    ]  # by the names of the projections; of "gate_up_proj", the rows of the gate are first
    linear: eqx.nn.Linear  # [E, E]

    def __init__(self, embed_dim: int, config: SharedBlockConfig, dtype: Any, key: Array):
        parts, rank, options = Parts(key, 9, dtype, None), config.adapter_rank, dict(config.options)
        self.linear = parts.linear(embed_dim, embed_dim)
        sizes = {"gate_up_proj": (embed_dim, 2 * config.mlp.hidden_dim)}
        if config.attention_adapters:
            heads = {"q_proj": "num_heads", "k_proj": "num_kv_heads", "v_proj": "num_kv_heads"}
            sizes |= {name: (2 * embed_dim, options[n] * options["head_dim"]) for name, n in heads.items()}
        weight = lambda *features: parts.linear(*features).weight
        self.beside = {name: LowRank(weight(i, rank), weight(rank, o)) for name, (i, o) in sizes.items()}

    def __call__(
        self, block: SharedBlock, x: Array, start: Array, cache: Any, rows: dict[str, Any]
    ) -> tuple[Array, Any]:
        """What the block gives for tokens and their embeddings `[..., T, E]`, and the new cache of its attention."""
        both = self.beside["gate_up_proj"]
        gate, up = (LowRank(both.down, part) for part in jnp.split(both.up, 2))
        adapted = lambda layer, beside: replaced(
            layer, {name: Adapted(getattr(layer, name), low) for name, low in beside.items()}
        )
        mlp = adapted(block.feed_forward, {"gate_proj": gate, "up_proj": up})
        of_heads = {name: low for name, low in self.beside.items() if low is not both}
        attention = adapted(block.self_attn, of_heads)
        h = normed(block.input_layernorm, jnp.concatenate([x, start], axis=-1))
        h, cache = (attention(h, **rows), None) if cache is None else attention(h, cache, **rows)
        h = mlp(normed(block.pre_ff_layernorm, h.astype(x.dtype)))
        return project("linear", self.linear, h, x.shape[-1]), cache
