"""The states at the starts of chunks: a scan, whose derivative is a scan of the same form over the changes of the states.

The products of changed keys and decays read no changed state, so the derivative computes them for all chunks at once. Its scan keeps no
residuals of its own: a gradient keeps the states and the written values once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from .xla_chunks import back, front


class Writes(NamedTuple):
    """The effect of chunks on the state, `[B, M, ...]` or, in a scan, `[B, HS, ...]`.

    `new = kept * state + added + put^T written`, where `written = own - gained @ state`. A term that is `None` is absent, a factor that is
    `None` is 1.
    """

    added: Array | None = None  # [.., D, V]
    own: Array | None = None  # [.., C, V]
    gained: Array | None = None  # [.., C, D]
    put: Array | None = None  # [.., C, D]
    kept: Array | None = None  # [.., D or 1, V or 1]


def times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def advance(precision: Any, state: Array | None, x: Writes) -> tuple[Any, Any]:
    """The state after one chunk and the values written in it; without a state, those of a first chunk."""
    kept = None if state is None else times(state, x.kept)
    written = _total(x.own, _lost(precision, x.gained, state))
    return _total(kept, x.added, _put(precision, x.put, written)), written


def _total(*terms: Array | None) -> Any:
    """The sum of those terms that are present."""
    present = [x for x in terms if x is not None]
    return functools.reduce(jnp.add, present) if present else None


def _lost(precision: Any, gained: Array | None, state: Array | None) -> Array | None:
    if gained is None or state is None:
        return None
    return -jnp.einsum("...rd,...dv->...rv", gained, state, precision=precision)


def _put(precision: Any, put: Array | None, written: Array | None) -> Array | None:
    if put is None or written is None:
        return None
    return jnp.einsum("...sd,...sv->...dv", put, written, precision=precision)


def over_chunks(
    chunk: Callable[[Any, Any], tuple[Any, Any]],
    xs: Any,
    first: Array,
    fresh: Array | None,
    entering: Array | None,
) -> tuple[Array, Any, Array]:
    """Scans `chunk(state, x) -> (new, others)`. Returns the states before the chunks, `others`, and the final state.

    With `fresh`, chunks where it is true start from `entering` or from zero; the third result is then the states after all chunks.
    """

    def body(state: Array, x: Any) -> tuple[Array, Any]:
        x, fresh, entering = x
        if fresh is not None:
            # A chunk that begins a sequence continues its own initial state, not the chunk before.
            state = jnp.where(fresh, 0 if entering is None else entering, state)
        new, others = chunk(state, x)
        return new, (state, others, None if fresh is None else new)

    final, (states, others, after) = lax.scan(body, first, (xs, fresh, entering))
    return states, others, final if after is None else after


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def over_writes(
    precision: Any, xs: Writes, first: Array, fresh: Array | None, entering: Array | None
) -> tuple[Array, Array | None, Array]:
    """`over_chunks` of `advance`, with the states and the written values as `[B, M, ...]`."""
    return _over_fronts(precision, _fronts(xs, first), first, fresh, entering)


def _fronts(xs: Any, first: Array) -> Any:
    return jax.tree.map(lambda x: front(x, first.shape[1]), xs)


def _over_fronts(precision: Any, xs: Writes, first: Array, *entry: Array | None) -> tuple[Array, Any, Array]:
    states, written, after = over_chunks(functools.partial(advance, precision), xs, first, *entry)
    return back(states), None if written is None else back(written), after


def _jvp(precision: Any, primals: Any, tangents: Any) -> Any:
    xs, first, fresh, _ = primals
    zero = lambda x: x is None or isinstance(x, SymbolicZero)
    changes, change, _, entering = jax.tree.map(lambda x: None if zero(x) else x, tangents, is_leaf=zero)
    states, written, _ = results = over_writes(precision, *primals)
    # The results are linear in `added`, `own` and the states that enter, so their changes follow from those of these three.
    moved = xs._replace(
        added=_total(changes.added, _put(precision, changes.put, written)),
        own=_total(changes.own, _lost(precision, changes.gained, states)),
    )
    moved = _fronts(moved, first)
    if changes.kept is not None:
        # Chunks first, as this product keeps no second copy of the states then.
        kept, states = _fronts((changes.kept, states), first)
        moved = moved._replace(added=_total(moved.added, kept * states))
    change = jnp.zeros_like(first) if change is None else change
    return results, _over_fronts(precision, moved, change, fresh, entering)


over_writes.defjvp(_jvp, symbolic_zeros=True)
