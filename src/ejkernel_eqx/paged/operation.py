"""From checked arguments to results: the implementation shared by every operation of this family."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._kernel import Kernel, Plan
from ..core.arguments import accumulator
from ..core.plans import plan_of as plan_of
from ..dispatch import PlatformLike
from .arguments import Cache, PagedOptions, resolve, Scoring, Tokens, write_slots
from .cache.pages import holding, write_arrays
from .cache.write import write
from .core import attend, writer
from .spec import PagedArrays, PagedSpec


class PagedOperation(Kernel):
    """Base class of the operations, with the options that all of them share."""

    options: PagedOptions = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `sliding_window`: an int $w$: the last $w$ keys, including the query's own; a pair `(left, right)`: `left` keys before its own (`None`:
            all). `right` has no effect, because no key follows the query's own.
        - `logits_soft_cap`: the bound $c$ of the tanh soft cap, from 1e-30 to 1e30.
        - `softmax_scale`: default `D**-0.5`; required with a `PagedLatentCache`.
        - `platform`: use this platform or raise; `None` chooses by device and call.
        - `config`: use this kernel configuration, which implies its platform.
        - `tune_for`: [`ejkernel_eqx.inputs`][] of a call, such as `inputs(q, cache, query_start_loc=..., max_query_len=...)`, arrays or
            `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.

        Raises `ValueError` for invalid options.
        """
        self.options = PagedOptions.read(sliding_window, logits_soft_cap, softmax_scale)
        self.plan = plan_of(type(self), self, platform, config, tune_for)

    def _run(
        self, q: Array, cache: Cache, tokens: Tokens, scoring: Scoring, return_lse: bool
    ) -> Array | tuple[Array, Array]:
        """`out`, or `(out, lse)`."""
        arrays, spec = resolve(q, cache, self.options, tokens, scoring, return_lse=return_lse)
        return finish(self.plan, arrays, spec)


def append(
    plan: Plan, arrays: PagedArrays, spec: PagedSpec, cache: Cache, new: tuple[Any, Any]
) -> tuple[PagedArrays, Cache]:
    """The call and the cache after writing the keys and values (or latents and rotary keys) of the new tokens. The platform that will read
    the pages also writes them."""
    writes = write_arrays(cache, new, write_slots(arrays))
    written = (write if _is_empty(arrays) else writer(plan, plan.operation, arrays, spec))(writes)
    return arrays._replace(**written), holding(cache, written)


def finish(
    plan: Plan, arrays: PagedArrays, spec: PagedSpec, squeeze: int | None = None
) -> Array | tuple[Array, Array]:
    """The results of the resolved call; `squeeze` is the axis of `out` that the operation has added."""
    if _is_empty(arrays):
        results = _empty(arrays)
    else:
        results = attend(plan, plan.operation, arrays, spec)
    out = results["out"] if squeeze is None else jnp.squeeze(results["out"], squeeze)
    if not spec.return_lse:
        return out
    lse = results["lse"]
    return out, lse if squeeze is None else jnp.squeeze(lse, squeeze + 1)


def _is_empty(arrays: PagedArrays) -> bool:
    return 0 in (arrays.q.size, arrays.kv_len.size)


def _empty(arrays: PagedArrays) -> dict[str, Array]:
    """Whether there are no tokens, or none that belong to a sequence."""
    values = arrays.k if arrays.v is None else arrays.v
    shape = arrays.q.shape[:-1]
    lse = jnp.full(shape, -jnp.inf, accumulator(arrays.q.dtype))
    return {"out": jnp.zeros((*shape, values.shape[-1]), arrays.q.dtype), "lse": lse}
