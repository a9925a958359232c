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
    """A product of two matrices, to which `down` and `up` belong, beside a projection."""

    down: Array  # [R, in]
    up: Array  # [out, R]

    def __init__(self, parts: Parts, features: int, rank: int, out: int):
        self.down, self.up = parts.linear(features, rank).weight, parts.linear(rank, out).weight

    def _published(self, weights: Any) -> "LowRank":
        return fill_fields(self, weights, {"down": "0.weight", "up": "1.weight"})


class Adapted(Module):
    """A projection with a low-rank product added to it."""

    base: Any
    down: Array  # [R, in]
    up: Array  # [out, R]

    def over_rows(self, name: str, x: Array, features: int) -> Array:
        y = project(name, self.base, x, features)
        return y + laid_out_as(y, product(product(x, self.down), self.up))


class BlockAdapters(Module):
    """What a layer has of its own of the block that it shares: low-rank products beside projections, and a projection behind the block."""

    q_proj: LowRank | None
    k_proj: LowRank | None
    v_proj: LowRank | None
    gate_up_proj: LowRank  # the rows of the gate first
    linear: eqx.nn.Linear  # [E, E]

    def __init__(self, embed_dim: int, config: SharedBlockConfig, dtype: Any, key: Array):
        parts, rank, sizes = Parts(key, 9, dtype, None), config.adapter_rank, dict(config.options)
        self.linear = parts.linear(embed_dim, embed_dim)
        self.gate_up_proj = LowRank(parts, embed_dim, rank, 2 * config.mlp.hidden_dim)

        def beside(heads: str) -> LowRank | None:
            width = sizes[heads] * sizes["head_dim"]
            return LowRank(parts, 2 * embed_dim, rank, width) if config.attention_adapters else None

        self.q_proj, self.k_proj, self.v_proj = map(beside, ("num_heads", "num_kv_heads", "num_kv_heads"))

    def __call__(
        self, block: SharedBlock, x: Array, start: Array, cache: Any, rows: dict[str, Any]
    ) -> tuple[Array, Any]:
        """What the block gives for tokens and their embeddings `[..., T, E]`, and the new cache of its attention."""
        h = normed(block.input_layernorm, jnp.concatenate([x, start], axis=-1))
        attention, mlp, both = block.self_attn, block.feed_forward, self.gate_up_proj
        beside = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        attention = replaced(
            attention,
            {
                name: Adapted(getattr(attention, name), low.down, low.up)
                for name, low in beside.items()
                if low is not None
            },
        )
        gate, up = jnp.split(both.up, 2)
        new = {"gate_proj": Adapted(mlp.gate_proj, both.down, gate)}
        mlp = replaced(mlp, new | {"up_proj": Adapted(mlp.up_proj, both.down, up)})
        h, cache = (attention(h, **rows), None) if cache is None else attention(h, cache, **rows)
        h = mlp(normed(block.pre_ff_layernorm, h.astype(x.dtype)))
        return project("linear", self.linear, h, x.shape[-1]), cache
