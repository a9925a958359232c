"""`Pattern`: the part of a mask that is known while tracing, as a function of head, query and key."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from .bounds.evaluate import traced_once
from .dense import heads_needed
from .functions import depends_on_head, evaluate, PairFunction


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Query `i` of head `h` sees only keys `j` for which `function(h, i + offset, j)` holds; with `heads` heads in all if it depends on them,
    else `heads` is 0."""

    function: PairFunction
    offset: int
    heads: int = 0

    @classmethod
    def make(cls, function: PairFunction, offset: int, heads: int | None) -> "Pattern":
        return cls(
            function, offset, heads_needed(heads) if depends_on_head(traced_once(function).jaxpr) else 0
        )

    def seen(self, heads: Array | None, queries: Array, keys: Array) -> Array:
        """Booleans `[n or 1, T, S]` of heads `[n]` (`None` if the pattern is the same for all), of queries `[T]` counted from 0, and of keys."""
        heads = jnp.zeros(1, jnp.int32) if heads is None else heads
        return evaluate(self.function, heads, queries + self.offset, keys)
