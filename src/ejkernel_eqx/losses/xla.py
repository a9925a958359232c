"""The losses in plain XLA: a loop over chunks of tokens, whose logits are never held together."""

import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.arguments import accumulator
from ..dispatch import DeviceFacts, Problem
from ..launch.fields import check_fields, whole
from . import passes
from .chunks import logits_of, over_chunks, product
from .divergence import divergence_of, teacher_log_probs
from .spec import LossArrays, LossSpec, TOKENS
from .statistics import (
    curved,
    devices,
    merged,
    part_of,
    place_of,
    results_of,
    Slope,
    slope_of,
    summed,
    Tokens,
    tokens_of,
)

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


def _over_chunks(
    arrays: LossArrays, spec: LossSpec, config: XlaConfig, cotangents: Named
) -> tuple[Named, Named]:
    """What `results_of` says of all tokens; with `cotangents [B, M, N]` of some of it, also the gradients of x, weight and bias."""
    shared = arrays._replace(weight=arrays.weight.astype(arrays.x.dtype), token_weights=None)
    by_token = {name: x for name in TOKENS if (x := getattr(shared, name)) is not None}

    def chunk(tokens: Named) -> tuple[Named, Named, Named]:
        own = {name: tokens.pop(name) for name in by_token}
        return _chunk(shared._replace(**own), spec, tokens)

    learned = {"weight": arrays.weight, "bias": arrays.bias} if cotangents else {}
    learned = {name: x for name, x in learned.items() if x is not None}
    results, of_tokens, sums = over_chunks(chunk, by_token | cotangents, config.chunk_size, learned)
    return results, of_tokens | sums


forward = functools.partial(passes.forward, _over_chunks)
backward = functools.partial(passes.backward, _over_chunks)


def _chunk(arrays: LossArrays, spec: LossSpec, cotangents: Named) -> tuple[Named, Named, Named]:
    """The same for tokens along one axis, with all logits at once; the weight is in the dtype of x."""
    x, labels, weight, bias = arrays[:4]
    dtype = accumulator(x.dtype)
    # JAX moves what depends on no array out of a loop, and would keep numbers of the shape of the logits: so 0 is made of the labels.
    nothing = labels[0] * 0
    zero = nothing.astype(dtype)
    real = labels >= 0
    # Padding may hold NaN, and 0 NaN is NaN.
    x = jnp.where(real[:, None], x, zero.astype(x.dtype))
    logits, curve = curved(logits_of(x, weight, bias, dtype), spec.logits_soft_cap, spec.temperature)
    if spec.divergence is not None:
        losses, slope = divergence_of(jax.nn.log_softmax(logits), teacher_log_probs(arrays, spec), spec)
        results = {"losses": jnp.where(real, losses, 0)}
        slope = slope * cotangents["losses"][:, None] if cotangents else slope
    else:
        words = len(weight) * devices(spec)
        numbers = nothing + lax.broadcasted_iota(jnp.int32, (1, len(weight)), 1)
        hit = place_of(spec, labels, len(weight))[:, None] == numbers
        tokens = tokens_of(merged(part_of(logits, hit, spec), spec), words)
        results = results_of(tokens, real, spec)
        results["losses"] = jnp.where(labels < words, results["losses"], jnp.nan)
        slope = _slope(logits, hit, tokens, slope_of(cotangents, spec, words)) if cotangents else logits
    if not cotangents:
        return results, {}, {}
    slope = jnp.where(real[:, None], slope if curve is None else slope * curve, zero)
    narrow = slope.astype(x.dtype)
    dx = summed(product(narrow, weight, ((1,), (0,)), dtype), spec).astype(x.dtype)
    sums = {"weight": product(narrow, x, ((0,), (0,)), dtype)}
    return results, {"x": dx}, sums | ({} if bias is None else {"bias": jnp.sum(slope, 0)})


def _slope(logits: Array, hit: Array, tokens: Tokens, slope: Slope) -> Array:
    """The gradient of the logits `[N, V]`."""
    log_p = jnp.maximum(logits - tokens.lse[:, None], jnp.finfo(logits.dtype).min)
    factor = slope.of_p if slope.of_p_lse is None else slope.of_p + slope.of_p_lse * tokens.lse
    factor = factor[:, None]
    if slope.of_p_log_p is not None:
        assert tokens.entropy is not None
        factor = factor + slope.of_p_log_p[:, None] * (log_p + tokens.entropy[:, None])
    total = jnp.exp(log_p) * factor + jnp.where(hit, slope.of_label[:, None], jnp.zeros_like(logits))
    return total if slope.of_all is None else total + slope.of_all[:, None]
