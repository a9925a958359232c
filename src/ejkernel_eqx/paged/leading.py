"""Calls over any number of leading axes, for platforms that JAX maps itself."""

from collections.abc import Callable

import jax
from jax import Array

from .core import axes_of
from .spec import PagedArrays, PagedSpec, SHARED

Row = Callable[[PagedArrays, PagedSpec], dict[str, Array]]


def over_leading_axes(row: Row, arrays: PagedArrays, spec: PagedSpec) -> dict[str, Array]:
    """`row`, which takes arrays without leading axes, over all of them; what is shared stays shared."""
    ranks = {name: len(axes) for name, axes in axes_of(arrays, spec).items()}
    given = arrays.given
    alone = {name for name in SHARED.intersection(given) if given[name].ndim == ranks[name]}

    def call(given: dict[str, Array]) -> dict[str, Array]:
        return row(PagedArrays.of(given), spec)

    for _ in range(arrays.q.ndim - ranks["q"]):
        call = jax.vmap(call, in_axes=({name: None if name in alone else 0 for name in given},))
    return call(given)
