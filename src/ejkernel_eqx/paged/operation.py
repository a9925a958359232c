"""The base class of the operations over pages, with the body that they share."""

from typing import Any

import equinox as eqx
from jax import Array

from .._kernel import Kernel, Plan
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import PagedOptions, resolve, Scoring, Tokens, write_slots
from .cache.pages import holding, write_arrays
from .cache.write import write
from .core import is_empty, writer
from .signature import Cache
from .windows import finish_within


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

    def _over_pages(
        self, q: Array, cache: Cache, tokens: Tokens, scoring: Scoring, window: Any = None, new: Any = None
    ) -> Any:
        """The body of every operation over pages, on queries and tokens that have been checked: `out`, with `return_lse` also `lse`, and the cache if
        `new` keys and values (or latents and rotary keys) are written to it first. The platform that will read the pages also writes them."""
        arrays, spec = resolve(q, cache, self.options, tokens, scoring)
        if new is not None:
            if arrays.gates is not None:
                raise ValueError(
                    "cache: expected one without gates with append=True, received gates; write them with cache.append(..., log_forget=)."
                )
            writes = write_arrays(cache, new, write_slots(arrays))
            written = (write if is_empty(arrays) else writer(self.plan, arrays, spec))(writes)
            arrays, cache = arrays._replace(**written), holding(cache, written)
        results = finish_within(self.plan, arrays, spec, window)
        if new is None:
            return results
        return (*results, cache) if scoring.return_lse else (results, cache)
