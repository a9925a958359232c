"""From checked arguments to results: what every operation of this family does behind its signature."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..recurrence.operation import plan_of as plan_of
from .arguments import Cache, PagedOptions, resolve, Scoring, Tokens, write_slots
from .cache.pages import holding, write_arrays
from .cache.write import write
from .core import attend, writer
from .spec import PagedArrays, PagedSpec


def run(
    plan: Plan,
    options: PagedOptions,
    q: Array,
    cache: Cache,
    tokens: Tokens,
    scoring: Scoring,
    return_lse: bool,
) -> Any:
    """`out`, or `(out, lse)`."""
    arrays, spec = resolve(q, cache, options, tokens, scoring, return_lse=return_lse)
    return finish(plan, arrays, spec)


def append(
    plan: Plan, arrays: PagedArrays, spec: PagedSpec, cache: Cache, new: tuple[Any, Any]
) -> tuple[PagedArrays, Cache]:
    """The call and the cache with the new tokens' keys and values (or latents and rotary keys) in their pages, written by the platform that
    will read them."""
    writes = write_arrays(cache, new, write_slots(arrays))
    written = (write if _is_empty(arrays) else writer(plan, plan.operation, arrays, spec))(writes)
    return arrays._replace(**written), holding(cache, written)


def finish(plan: Plan, arrays: PagedArrays, spec: PagedSpec, squeeze: int | None = None) -> Any:
    """The results of the resolved call; `squeeze` is the axis of `out`, one that the operation has added."""
    if _is_empty(arrays):
        results = _empty(arrays, spec)
    else:
        results = attend(plan, plan.operation, arrays, spec)
    out = results["out"] if squeeze is None else jnp.squeeze(results["out"], squeeze)
    if not spec.return_lse:
        return out
    lse = results["lse"]
    return out, lse if squeeze is None else jnp.squeeze(lse, squeeze + 1)


def _is_empty(arrays: PagedArrays) -> bool:
    return 0 in (arrays.q.size, arrays.kv_len.size)


def _empty(arrays: PagedArrays, spec: PagedSpec) -> dict[str, Array]:
    """No token, or none of a sequence."""
    values = arrays.k if arrays.v is None else arrays.v
    wide = jnp.float64 if arrays.q.dtype == jnp.float64 else jnp.float32
    shape = arrays.q.shape[:-1]
    results = {"out": jnp.zeros((*shape, values.shape[-1]), arrays.q.dtype)}
    return results | {"lse": jnp.full(shape, -jnp.inf, wide)} if spec.return_lse else results
