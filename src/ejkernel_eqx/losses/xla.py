"""The cross entropy in plain XLA: a loop over chunks of tokens, whose logits are never held together.

A reduced loss has one cotangent. So its gradients, but for that factor, are computed with the loss, from the same logits, and kept for the
backward. Otherwise the backward computes the logits again.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.arguments import accumulator, wide
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
    """Nothing: this platform supports every problem."""
    return None


def default_config(problem: Problem, device: DeviceFacts) -> XlaConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first."""
    most = max(1, _LOGITS // (problem.dim("V")))
    size = 1 << (most.bit_length() - 1)
    tokens = problem.dim("B") * problem.dim("M") * problem.dim("N")
    tokens = 1 << (tokens - 1).bit_length()
    sizes = (min(tokens, max(1, s)) for s in (size, size // 2, 2 * size, size // 4))
    return [XlaConfig(s) for s in dict.fromkeys(sizes)]


def forward(arrays: LossArrays, spec: LossSpec, config: XlaConfig, *, save: bool = True) -> Named:
    """`out`, and what the backward needs of a reduced loss of one row of the call."""
    weights = _weights_of(arrays)
    result = _over_chunks(arrays, spec, config, weights if save and _is_kept(arrays, spec) else None)
    out = weights * result.losses
    if spec.reduction != "none":
        out = jnp.sum(out, (1, 2))
    if spec.reduction == "mean":
        out = out * _inverse(weights)
    if result.dx is None:
        return {"out": out}
    of_row = {"dweight": result.dweight, "dbias": result.dbias}
    saved = {name: x[None] for name, x in of_row.items() if x is not None}
    return {"out": out, "losses": result.losses, "dx": result.dx, **saved}


def backward(arrays: LossArrays, spec: LossSpec, config: XlaConfig, saved: Named, cotangents: Named) -> Named:
    """The gradients of all float arrays; those of weight and bias are summed over all rows."""
    weights, factor = _weights_of(arrays), cotangents["out"].astype(accumulator(arrays.x.dtype))
    if spec.reduction == "mean":
        factor = factor * _inverse(weights)
    each = factor if spec.reduction == "none" else factor[:, None, None]
    if "dx" in saved:
        grads = {"x": wide(saved["dx"]) * each[..., None], "weight": saved["dweight"][0] * factor[0]}
        grads |= {} if arrays.bias is None else {"bias": saved["dbias"][0] * factor[0]}
        losses = saved["losses"]
    else:
        losses, *result = _over_chunks(arrays, spec, config, weights * each)
        grads = {name: x for name, x in zip(("x", "weight", "bias"), result) if x is not None}
    if arrays.token_weights is not None:
        slope = losses
        if spec.reduction == "mean":  # a larger weight also adds to the sum that all are divided by
            mean = jnp.sum(weights * losses, (1, 2)) * _inverse(weights)
            slope = losses - mean[:, None, None]
        grads["token_weights"] = jnp.where(arrays.labels >= 0, each * slope, 0)
    return grads


def _is_kept(arrays: LossArrays, spec: LossSpec) -> bool:
    """Returns whether the gradients are those of one cotangent."""
    return spec.reduction != "none" and arrays.x.shape[0] == 1


def _weights_of(arrays: LossArrays) -> Array:
    """The weight of each token `[B, M, N]`, 0 for those that are ignored."""
    real, weights, dtype = arrays.labels >= 0, arrays.token_weights, accumulator(arrays.x.dtype)
    return real.astype(dtype) if weights is None else jnp.where(real, weights.astype(dtype), 0)


def _inverse(weights: Array) -> Array:
    """1 over the sum of all weights `[B]`; 0 if that is 0."""
    total = jnp.sum(weights, (1, 2))
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))


class _Losses(NamedTuple):
    """The losses `[B, M, N]` of tokens before they are weighted, and the gradients of a sum of them."""

    losses: Array
    dx: Array | None = None  # [B, M, N, E], in the dtype of x
    dweight: Array | None = None  # [V, E], wide
    dbias: Array | None = None  # [V], wide


def _over_chunks(arrays: LossArrays, spec: LossSpec, config: XlaConfig, factors: Array | None) -> _Losses:
    """The losses of all tokens; with `factors [B, M, N]` also the gradients of the sum of losses times factors."""
    lead = arrays.labels.shape
    tokens = tuple(x.reshape(-1, *x.shape[3:]) for x in (arrays.x, arrays.labels, factors) if x is not None)
    count = tokens[0].shape[0]
    chunks = -(-count // config.chunk_size)
    shared = arrays._replace(weight=arrays.weight.astype(arrays.x.dtype))
    chunk = lambda x, labels, factors=None: _chunk(shared._replace(x=x, labels=labels), spec, factors)
    if chunks <= 1:
        losses, dx, dweight, dbias = chunk(*tokens)
    else:
        # Chunk i has the tokens i, i + chunks, ..., so that each has some of every device's if the tokens are split over devices.
        def split(x: Array, fill: int) -> Array:
            x = jnp.pad(x, [(0, -count % chunks)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
            return jnp.moveaxis(x.reshape(-1, chunks, *x.shape[1:]), 1, 0)

        def body(sums: Any, inputs: Any) -> Any:
            result = chunk(*inputs)
            return jax.tree.map(jnp.add, sums, (result.dweight, result.dbias)), (result.losses, result.dx)

        dtype = accumulator(arrays.x.dtype)
        zeros = lambda x: None if factors is None or x is None else jnp.zeros(x.shape, dtype)
        parts = tuple(split(x, fill) for x, fill in zip(tokens, (0, -1, 0)))
        sums, result = lax.scan(body, (zeros(arrays.weight), zeros(arrays.bias)), parts)
        whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])[:count]
        (dweight, dbias), (losses, dx) = sums, jax.tree.map(whole, result)
    losses, dx = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), (losses, dx))
    return _Losses(losses, dx, dweight, dbias)


def _chunk(arrays: LossArrays, spec: LossSpec, factors: Array | None) -> _Losses:
    """Does what `_over_chunks` does for tokens along one axis, with all logits at once; the weight is in the dtype of x."""
    x, labels, weight = arrays.x, arrays.labels, arrays.weight
    dtype, size = accumulator(x.dtype), arrays.weight.shape[0]
    # JAX moves what depends on no array out of a loop, and would keep numbers of the shape of the logits: so 0 is made of the labels.
    nothing = labels[0] * 0
    zero = nothing.astype(dtype)
    words = nothing + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    real = labels >= 0
    # Padding may hold NaN, and 0 NaN is NaN.
    x = jnp.where(real[:, None], x, zero.astype(x.dtype))
    logits = _product(x, weight, ((1,), (1,)), dtype)
    logits = logits if arrays.bias is None else logits + arrays.bias.astype(dtype)[None]
    if (cap := spec.logits_soft_cap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, -1)
    # A comparison rather than a gather: it is part of the pass over the logits, also where the vocabulary is split over devices.
    hit = labels[:, None] == words
    smooth = spec.label_smoothing
    losses = lse - (1 - smooth) * jnp.sum(jnp.where(hit, logits, zero), -1)
    if smooth:
        losses -= smooth * jnp.mean(logits, -1)
    if spec.z_loss:
        losses += spec.z_loss * lse**2
    losses = jnp.where(real, jnp.where(labels < size, losses, jnp.nan), 0)
    if factors is None:
        return _Losses(losses)
    slope = jnp.exp(logits - lse[:, None])
    if spec.z_loss:
        slope *= (1 + 2 * spec.z_loss * lse)[:, None]
    slope -= jnp.where(hit, zero + (1 - smooth), zero)
    if smooth:
        slope -= smooth / size
    if cap is not None:
        slope *= 1 - (logits / cap) ** 2
    slope = jnp.where(real[:, None], slope * factors[:, None], zero)
    narrow = slope.astype(x.dtype)
    dx = _product(narrow, weight, ((1,), (0,)), dtype).astype(x.dtype)
    dweight = _product(narrow, x, ((0,), (0,)), dtype)
    return _Losses(losses, dx, dweight, None if arrays.bias is None else jnp.sum(slope, 0))


def _product(a: Array, b: Array, axes: Any, dtype: Any) -> Array:
    precision = None if a.dtype.itemsize < 4 else lax.Precision.HIGHEST
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=dtype)
