"""The cross entropy in plain XLA: a loop over chunks of tokens, whose logits are never held together.

A reduced loss has one cotangent. So its gradients, but for that factor, are computed with the loss, from the same logits, and kept for the
backward. Otherwise the backward computes the logits again.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.arguments import accumulator
from ..dispatch import DeviceFacts, Problem
from ..launch.fields import check_fields, whole
from .spec import LossArrays, LossSpec

Named = dict[str, Array]
_LOGITS = 2**27
"""Logits of a chunk, by default: half a gigabyte of them."""


@dataclasses.dataclass(frozen=True)
class XlaConfig:
    """At most `chunk_size` tokens have logits at a time."""

    chunk_size: Annotated[int, whole(1, 2**30)]

    __post_init__ = check_fields


config_type = XlaConfig


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    """Why this platform cannot serve the problem: never, it supports all."""
    return None


def default_config(problem: Problem, device: DeviceFacts) -> XlaConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first."""
    most = max(1, _LOGITS // (problem.dim("V") * problem.dim("B")))
    size = 1 << (most.bit_length() - 1)
    tokens = 1 << (problem.dim("N") - 1).bit_length()
    sizes = (min(tokens, max(1, s)) for s in (size, size // 2, 2 * size, size // 4))
    return [XlaConfig(s) for s in dict.fromkeys(sizes)]


def forward(arrays: LossArrays, spec: LossSpec, config: XlaConfig, *, save: bool = True) -> Named:
    """`out`, and what the backward needs of a reduced loss of one row."""
    weights, total = _weights_of(arrays), None
    if not save or not _is_kept(arrays, spec):
        losses = _over_chunks(arrays, spec, config, None).losses
    else:
        losses, *gradients = _over_chunks(arrays, spec, config, weights)
        total = jnp.sum(weights, -1)
    if spec.reduction == "none":
        return {"out": weights * losses}
    out = jnp.sum(weights * losses, -1)
    if spec.reduction == "mean":
        out = out * _inverse(jnp.sum(weights, -1))
    if total is None:
        return {"out": out}
    saved = dict(zip(("dx", "dweight", "dbias"), gradients))
    one = lambda name, x: x if name == "dx" else x[None]  # of the only row
    return {"out": out, "losses": losses, "total": total} | {
        name: one(name, x) for name, x in saved.items() if x is not None
    }


def backward(
    arrays: LossArrays, spec: LossSpec, config: XlaConfig, saved: Named, cotangents: Named
) -> Named:
    """The gradients of all float arrays; those of weight and bias are summed over all rows."""
    weights, cotangent = _weights_of(arrays), cotangents["out"].astype(accumulator(arrays.x.dtype))
    each = cotangent if spec.reduction == "none" else cotangent[..., None]
    if spec.reduction == "mean":
        each = each * _inverse(jnp.sum(weights, -1, keepdims=True))
    if "dx" in saved:
        losses, (row,) = saved["losses"], each
        grads = {"x": saved["dx"] * each[..., None], "weight": saved["dweight"][0] * row}
        grads |= {"bias": saved["dbias"][0] * row} if arrays.bias is not None else {}
    else:
        losses, dx, dweight, dbias = _over_chunks(arrays, spec, config, weights * each)
        grads = {"x": dx, "weight": dweight} | ({} if dbias is None else {"bias": dbias})
    if arrays.token_weights is not None:
        # A mean loses its share of each weight, as the sum of all weights grows.
        mean = 0.0
        if spec.reduction == "mean":
            mean = jnp.sum(weights * losses, -1, keepdims=True) * _inverse(
                jnp.sum(weights, -1, keepdims=True)
            )
        grads["token_weights"] = jnp.where(arrays.labels >= 0, each * (losses - mean), 0)
    return grads


def _is_kept(arrays: LossArrays, spec: LossSpec) -> bool:
    """Whether the gradients are those of one cotangent."""
    return spec.reduction != "none" and arrays.x.shape[0] == 1


def _weights_of(arrays: LossArrays) -> Array:
    """The weight of each token `[B, N]`, 0 for those that are ignored."""
    wide = accumulator(arrays.x.dtype)
    real = arrays.labels >= 0
    return real.astype(wide) if arrays.token_weights is None else jnp.where(real, arrays.token_weights, 0).astype(wide)


def _inverse(total: Array) -> Array:
    """1 over the sum of weights; 0 if there are none."""
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))


class _Found(NamedTuple):
    """The losses `[B, N]` of tokens before they are weighted, and the gradients of a sum of them."""

    losses: Array
    dx: Array | None = None  # [B, N, E], in the dtype of x
    dweight: Array | None = None  # [V, E], wide
    dbias: Array | None = None  # [V], wide


def _over_chunks(arrays: LossArrays, spec: LossSpec, config: XlaConfig, factors: Array | None) -> _Found:
    """The losses of all tokens; with `factors [B, N]` also the gradients of the sum of losses times factors."""
    rows, count = arrays.labels.shape
    chunks = -(-count // config.chunk_size)
    weight = arrays.weight.astype(arrays.x.dtype)

    def chunk_of(index_of: tuple[Array, ...]) -> _Found:
        x, labels, *rest = index_of
        part = arrays._replace(x=x, labels=labels, weight=weight)
        return _chunk(part, spec, rest[0] if rest else None)

    whole = tuple(x for x in (arrays.x, arrays.labels, factors) if x is not None)
    if chunks <= 1:
        return chunk_of(whole)

    def split(x: Array, fill: Any) -> Array:
        """Chunk i has the tokens i, i + chunks, ..., so that each holds some of every device's if the tokens are split over devices."""
        pad = [(0, 0), (0, -count % chunks)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(rows, -1, chunks, *x.shape[2:]), 2, 0)

    def merge(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(rows, -1, *x.shape[3:])[:, :count]

    def body(sums: tuple[Array | None, ...], own: tuple[Array, ...]) -> Any:
        found = chunk_of(own)
        sums = jax.tree.map(jnp.add, sums, (found.dweight, found.dbias))
        return sums, (found.losses, found.dx)

    wide = accumulator(arrays.x.dtype)
    zeros = lambda x: None if factors is None or x is None else jnp.zeros_like(x, wide)
    parts = tuple(split(x, fill) for x, fill in zip(whole, (0, -1, 0)))
    sums, (losses, dx) = lax.scan(body, (zeros(arrays.weight), zeros(arrays.bias)), parts)
    return _Found(merge(losses), None if dx is None else merge(dx), *sums)


def _chunk(arrays: LossArrays, spec: LossSpec, factors: Array | None) -> _Found:
    """As `_over_chunks`, with all logits at once; the weight is in the dtype of x."""
    x, labels, weight = arrays.x, arrays.labels, arrays.weight
    wide, size = accumulator(x.dtype), arrays.weight.shape[0]
    # Padding may hold NaN, and 0 NaN is NaN.
    real = labels >= 0
    x = jnp.where(real[..., None], x, 0)
    logits = _product(x, weight, ((2,), (1,)), wide)
    logits = logits if arrays.bias is None else logits + arrays.bias.astype(wide)
    if (cap := spec.logits_soft_cap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, -1)
    # A comparison rather than a gather: it is part of the pass over the logits, also where the vocabulary is split over devices.
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]
    smooth = spec.label_smoothing
    losses = lse - (1 - smooth) * jnp.sum(jnp.where(hit, logits, 0), -1)
    if smooth:
        losses -= smooth * jnp.mean(logits, -1)
    if spec.z_loss:
        losses += spec.z_loss * lse**2
    losses = jnp.where(real, jnp.where(labels < size, losses, jnp.nan), 0)
    if factors is None:
        return _Found(losses)
    slope = jnp.exp(logits - lse[..., None])
    if spec.z_loss:
        slope *= (1 + 2 * spec.z_loss * lse)[..., None]
    slope -= jnp.where(hit, 1 - smooth, 0) + smooth / size
    if cap is not None:
        slope *= 1 - (logits / cap) ** 2
    slope = jnp.where(real[..., None], slope * factors[..., None], 0)
    narrow = slope.astype(x.dtype)
    dx = _product(narrow, weight, ((2,), (0,)), wide).astype(x.dtype)
    dweight = _product(narrow, x, ((0, 1), (0, 1)), wide)
    return _Found(losses, dx, dweight, None if arrays.bias is None else jnp.sum(slope, (0, 1)))


def _product(a: Array, b: Array, axes: Any, dtype: Any) -> Array:
    precision = None if a.dtype.itemsize < 4 else lax.Precision.HIGHEST
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=dtype)
