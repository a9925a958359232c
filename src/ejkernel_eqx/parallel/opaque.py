"""A kernel that the compiler cannot see into, over any number of leading axes: one launch, folded under `vmap`, split over devices."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from ..dispatch import replaceable
from .layout import Axes
from .mesh import explicit_mesh, over_explicit_mesh
from .partition import partitioned, Split
from .shapes import output_shapes

Arrays = dict[str, Array]
Function = Callable[[Arrays], Arrays]


def opaque(
    function: Function,
    axes: Mapping[str, tuple[str, ...]],
    out_axes: Mapping[str, tuple[str, ...]],
    *,
    split: Split,
    shared: frozenset[str] = frozenset(),
    summed: bool = False,
    sliced: bool = True,
) -> Function:
    """`function` takes and gives arrays by name, each with exactly one leading axis, the same for all; the result takes any number
    of them (none too) and folds every `jax.vmap` into them.

    `axes` and `out_axes` name the axes behind the leading ones, `out_axes` for every output that there may be. Equal names are equal
    axes. Names `H<n>` are heads, n of them: they are split over devices together, where every output has them and all counts divide.
    `split` says on which meshes it is split over the devices; `summed` and `sliced` as `parallel.partitioned` has them.

    Inputs named in `shared` may come without leading axes, the same for all; `function` gets them so, or with the leading axis where
    `jax.vmap` maps them.
    """

    def folded(arrays: Arrays) -> Arrays:
        return _fold(function, arrays, axes, shared)

    def over_devices(arrays: Arrays) -> Arrays:
        return _partitioned(folded, arrays, axes, out_axes, split, summed, sliced)

    return _batched(folded if split is Split.NOWHERE else over_devices, axes, shared)


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
        replaced: list[Callable[[], None]] = []

        @custom_vmap
        def one(arrays: Arrays) -> Arrays:
            with replaceable() as take_back:
                replaced.append(take_back)
                return function(arrays)

        @one.def_vmap
        def rule(size: int, in_batched: list[Any], arrays: Arrays) -> tuple[Arrays, Any]:
            # The unmapped call was traced, but is never launched.
            for take_back in replaced:
                take_back()
            (mapped,) = in_batched
            first = next(name for name in arrays if name not in shared)
            lead = arrays[first].shape[mapped[first] : arrays[first].ndim - len(axes[first])]
            wide = {name: widen(name, x, mapped[name], size, lead) for name, x in arrays.items()}
            result = call(wide)
            return result, dict.fromkeys(result, True)

        return one(arrays)

    return call


def given_of(arrays: Any) -> Arrays:
    """The arrays that a NamedTuple of arrays has, by name."""
    return {name: x for name, x in arrays._asdict().items() if x is not None}


def over_mesh(function: Function, arrays: Arrays, axes: Mapping[str, tuple[str, ...]]) -> Arrays:
    """`function(arrays)` of operations that the compiler sees into; `axes` names the axes behind the leading ones of every array and of
    every output, by which outputs are split on a mesh whose shardings are part of the types."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(arrays)
    heads = _heads(axes)
    return over_explicit_mesh(
        mesh, function, arrays, _labels(axes, arrays, heads), lambda outs: _labels(axes, outs, heads), heads
    )


def _partitioned(
    function: Function,
    arrays: Arrays,
    axes: Mapping[str, tuple[str, ...]],
    out_axes: Mapping[str, tuple[str, ...]],
    meshes: Split,
    summed: bool,
    sliced: bool,
) -> Arrays:
    outs = output_shapes(function, arrays)
    heads = _heads({n: axes[n] for n in arrays} | {f"out {n}": out_axes[n] for n in outs})
    return partitioned(
        function,
        (arrays,),
        (_labels(axes, arrays, heads),),
        outs,
        _labels(out_axes, outs, heads),
        split=_is_split,
        group=heads,
        meshes=meshes,
        summed=summed,
        sliced=sliced,
    )


def _heads(axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names of heads, the most of them first. One head serves any split of the others: it is none of the axes to split."""
    found = sorted(
        {n for letters in axes.values() for n in letters if _is_heads(n)}, key=lambda n: -int(n[1:])
    )
    return tuple(name for name in found if name != "H1" or len(found) == 1)


def _labels(
    axes: Mapping[str, tuple[str, ...]], arrays: Mapping[str, Any], heads: tuple[str, ...]
) -> dict[str, Axes]:
    def label(letters: tuple[str, ...], x: Any) -> Axes:
        lead = (f"b{i}" for i in range(len(x.shape) - len(letters)))
        return Axes((*lead, *(n if n in heads or not _is_heads(n) else None for n in letters)))

    return {name: label(axes[name], x) for name, x in arrays.items()}


def _is_split(name: str) -> bool:
    return name.startswith("b") or _is_heads(name)


def _is_heads(name: str) -> bool:
    return name[0] == "H" and name[1:].isdigit()
