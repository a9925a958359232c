"""Calls over any number of leading axes, for platforms that JAX maps itself."""

from collections.abc import Callable

import jax
from jax import Array

from .spec import axes_of, PagedArrays, PagedSpec, SHARED

Row = Callable[[PagedArrays, PagedSpec], dict[str, Array]]


def over_leading_axes(row: Row, arrays: PagedArrays, spec: PagedSpec) -> dict[str, Array]:
    """`row`, which takes arrays without leading axes, over all of them; what is shared stays shared."""
    alone = unmapped(arrays, spec)

    def call(given: dict[str, Array]) -> dict[str, Array]:
        return row(PagedArrays.of(given), spec)

    for _ in range(arrays.q.ndim - len(axes_of(arrays, spec)["q"])):
        call = jax.vmap(call, in_axes=({name: None if name in alone else 0 for name in arrays.given},))
    return call(arrays.given)


def unmapped(arrays: PagedArrays, spec: PagedSpec) -> frozenset[str]:
    """What comes without leading axes, the same for all of them."""
    axes, given = axes_of(arrays, spec), arrays.given
    return frozenset(name for name in SHARED.intersection(given) if given[name].ndim == len(axes[name]))
