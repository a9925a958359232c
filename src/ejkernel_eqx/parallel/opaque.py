"""A kernel that the compiler cannot see into, over any number of leading axes: one launch, folded under `vmap`, split over devices."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from ..dispatch import on_selection, Selection, withdraw
from . import partition

Arrays = dict[str, Array]
Function = Callable[[Arrays], Arrays]


def opaque(
    function: Function,
    axes: Mapping[str, tuple[str, ...]],
    out_axes: Mapping[str, tuple[str, ...]],
    *,
    split: bool,
    shared: frozenset[str] = frozenset(),
) -> Function:
    """`function` takes and gives arrays by name, each with exactly one leading axis, the same for all; the result takes any number
    of them (none too) and folds every `jax.vmap` into them.

    `axes` and `out_axes` name the axes behind the leading ones, `out_axes` for every output that there may be. Equal names are equal
    axes. Names `H<n>` are heads, n of them: they are split over devices together, where every output has them and all counts divide.
    With `split` the call says how it may be split over a mesh.

    Inputs named in `shared` may come without leading axes, the same for all; `function` gets them so, or with the leading axis where
    `jax.vmap` maps them.
    """

    def folded(arrays: Arrays) -> Arrays:
        return _fold(function, arrays, axes, shared)

    def over_devices(arrays: Arrays) -> Arrays:
        return _partitioned(folded, arrays, axes, out_axes)

    return _batched(over_devices if split else folded, axes, shared)


def _fold(
    function: Function, arrays: Arrays, axes: Mapping[str, tuple[str, ...]], shared: frozenset[str]
) -> Arrays:
    alone = {name for name in shared & arrays.keys() if arrays[name].ndim == len(axes[name])}
    leads = {name: x.shape[: x.ndim - len(axes[name])] for name, x in arrays.items() if name not in alone}
    lead = next(iter(leads.values()))
    assert all(other == lead for other in leads.values()), f"leading axes differ: {leads}"
    count = math.prod(lead)
    flat = {
        name: x if name in alone else x.reshape((count, *x.shape[len(lead) :])) for name, x in arrays.items()
    }
    return {name: x.reshape((*lead, *x.shape[1:])) for name, x in function(flat).items()}


def _batched(function: Function, axes: Mapping[str, tuple[str, ...]], shared: frozenset[str]) -> Function:
    def widen(name: str, x: Array, is_mapped: bool, size: int, lead: tuple[int, ...]) -> Array:
        alone = name in shared and x.ndim - is_mapped == len(axes[name])
        if alone and is_mapped and lead:
            rest = x.shape[1:]
            return jnp.broadcast_to(x.reshape((size, *(1,) * len(lead), *rest)), (size, *lead, *rest))
        return x if alone or is_mapped else jnp.broadcast_to(x, (size, *x.shape))

    def call(arrays: Arrays) -> Arrays:
        chosen: list[Selection] = []

        @custom_vmap
        def one(arrays: Arrays) -> Arrays:
            with on_selection(chosen.append):
                return function(arrays)

        @one.def_vmap
        def rule(size: int, in_batched: list[Any], arrays: Arrays) -> tuple[Arrays, Any]:
            # The unmapped call was traced, but is never launched.
            for selection in chosen:
                withdraw(selection)
            (mapped,) = in_batched
            first = next(name for name in arrays if name not in shared)
            lead = arrays[first].shape[mapped[first] : arrays[first].ndim - len(axes[first])]
            wide = {name: widen(name, x, mapped[name], size, lead) for name, x in arrays.items()}
            result = call(wide)
            return result, dict.fromkeys(result, True)

        return one(arrays)

    return call


def _partitioned(
    function: Function,
    arrays: Arrays,
    axes: Mapping[str, tuple[str, ...]],
    out_axes: Mapping[str, tuple[str, ...]],
) -> Arrays:
    asked: list[Selection] = []
    with on_selection(asked.append):
        outs = partition.output_shapes(function, arrays)
    for selection in asked:
        withdraw(selection)
    names = {n for x in (*(axes[name] for name in arrays), *(out_axes[name] for name in outs)) for n in x}
    heads = sorted((n for n in names if _is_heads(n)), key=lambda n: -int(n[1:]))
    # One head serves any split of the others: it is none of the axes to split.
    shared = "H1" if len(heads) > 1 else None

    def label(x: Any, letters: tuple[str, ...]) -> partition.Axes:
        lead = (f"b{i}" for i in range(len(x.shape) - len(letters)))
        return partition.Axes((*lead, *(None if letter == shared else letter for letter in letters)))

    return partition.partitioned(
        function,
        (arrays,),
        ({name: label(x, axes[name]) for name, x in arrays.items()},),
        outs,
        {name: label(x, out_axes[name]) for name, x in outs.items()},
        split=lambda name: name.startswith("b") or _is_heads(name),
        group=tuple(name for name in heads if name != shared),
    )


def _is_heads(name: str) -> bool:
    return name[0] == "H" and name[1:].isdigit()
