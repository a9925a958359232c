"""A kernel that the compiler cannot see into, over any number of leading axes: one launch, folded under `vmap`, split over devices."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from ..dispatch import replaceable
from .layout import Axes
from .leading import Arrays, Leading, merged, widened
from .mesh import explicit_mesh, over_explicit_mesh
from .partition import partitioned, refuse_partly_manual, Split
from .shapes import inside_manual_mesh, output_shapes

Function = Callable[[Arrays], Arrays]


def opaque(
    function: Callable[..., Arrays],
    leading: Leading,
    *,
    split: Split,
    whole: frozenset[str] = frozenset(),
    summed: bool = False,
    sliced: bool = True,
    pinned: Mapping[str, str] | None = None,
    seen: bool = False,
) -> Function:
    """Extends `function(arrays, runs)`, which takes and returns arrays by name with exactly one leading axis (except as specified in
    `leading`), to any number of leading axes, including none, and folds every `jax.vmap` into them.

    Equal names denote the same axis. Names `H<n>` are n heads; they are split over devices together if every output has them and all
    counts divide. `split` determines the meshes on which it is split over devices; `summed`, `sliced` and `pinned` are as in
    `parallel.partitioned`. `seen`: the compiler sees into the function after all, so it may run where only some axes of a mesh are manual.
    The `whole` broadcast arrays are materialised when `jax.vmap` maps others, because a gradient is needed for every example.
    """

    folded = functools.partial(merged, function, leading=leading)

    def over_devices(arrays: Arrays) -> Arrays:
        if inside_manual_mesh():
            if not seen:
                refuse_partly_manual()
            return folded(arrays)
        outs = output_shapes(folded, arrays)
        heads = heads_among([leading.axes[name] for name in (*arrays, *outs)])
        return partitioned(
            folded,
            (arrays,),
            (_labels(leading, arrays, heads, leading.lead(arrays), pinned or {}),),
            outs,
            _labels(leading, outs, heads, leading.lead(arrays), pinned or {}),
            split=_is_split,
            group=heads,
            meshes=split,
            summed=summed,
            sliced=sliced,
            pinned=pinned,
        )

    return _batched(folded if split is Split.NOWHERE else over_devices, folded, leading, whole)


def _batched(function: Function, folded: Function, leading: Leading, whole: frozenset[str]) -> Function:
    def call(arrays: Arrays) -> Arrays:
        replaced: list[Callable[[], None]] = []

        @custom_vmap
        def one(arrays: Arrays) -> Arrays:
            with replaceable() as take_back:
                replaced.append(take_back)
                return function(arrays)

        @one.def_vmap
        def rule(size: int, in_batched: list[Any], arrays: Arrays) -> tuple[Arrays, Any]:
            # The unmapped call was traced but is never launched.
            for take_back in replaced:
                take_back()
            (is_mapped,) = in_batched
            wide = widened(arrays, is_mapped, size, leading, whole)
            if leading.one_by_one and not _maps_all(folded, leading, wide, is_mapped):
                result = _one_by_one(call, arrays, is_mapped)
            else:
                result = call(wide)
            return result, dict.fromkeys(result, True)

        return one(arrays)

    return call


def _maps_all(folded: Function, leading: Leading, wide: Arrays, is_mapped: Mapping[str, bool]) -> bool:
    """Returns whether no shared array is mapped, and every result has the leading axes."""
    if any(is_mapped[name] for name in leading.shared & wide.keys()):
        return False
    outs = output_shapes(folded, wide) if leading.like and leading.shared & wide.keys() else {}
    return not any(leading.is_alone(name, x) for name, x in outs.items())


def _one_by_one(call: Function, arrays: Arrays, is_mapped: Mapping[str, bool]) -> Arrays:
    fixed = {name: x for name, x in arrays.items() if not is_mapped[name]}
    over = {name: x for name, x in arrays.items() if is_mapped[name]}
    in_order = lambda mapped: {name: mapped[name] if is_mapped[name] else fixed[name] for name in arrays}
    return jax.lax.map(lambda mapped: call(in_order(mapped)), over)


def given_of(arrays: Any) -> dict[str, Any]:
    """The arrays present in a NamedTuple of arrays, by name."""
    return {name: x for name, x in arrays._asdict().items() if x is not None}


def over_mesh(function: Function, arrays: Arrays, leading: Leading) -> Arrays:
    """`function(arrays)` for operations that the compiler sees into; on an explicit mesh, outputs are split by the axes named in
    `leading`."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(arrays)
    heads, lead = heads_among(leading.axes.values()), leading.lead(arrays)
    labels = lambda arrays: _labels(leading, arrays, heads, lead)
    return over_explicit_mesh(mesh, function, arrays, labels(arrays), labels, heads)


def heads_among(axes: Any) -> tuple[str, ...]:
    """The names of heads, largest count first. A single head serves any split of the others, so it is not an axis to split."""
    found = sorted({n for letters in axes for n in letters if n and _is_heads(n)}, key=lambda n: -int(n[1:]))
    return tuple(name for name in found if name != "H1" or len(found) == 1)


def _labels(
    leading: Leading,
    arrays: Mapping[str, Any],
    heads: tuple[str, ...],
    lead: tuple[int, ...],
    pinned: Mapping[str, str] | None = None,
) -> dict[str, Axes]:
    """The name of every axis; `None` if it is broadcast."""

    def label(name: str, x: Any) -> Axes:
        own, letters = leading.shape(name, x), leading.axes[name]
        first = (f"b{i}" if size == lead[i] else None for i, size in enumerate(own))
        rest = zip(letters, x.shape[len(own) :], strict=True)
        # A pinned axis of size one is an axis like any other, unless arrays may broadcast it.
        always = () if leading.like.get(name, name) in leading.broadcast else pinned or ()
        names = (*first, *(n if n in always or _is_whole(n, size, heads) else None for n, size in rest))
        every = (*(f"b{i}" for i in range(len(own))), *letters)
        return Axes(names, tuple(n if size == 1 else None for n, size in zip(every, x.shape, strict=True)))

    return {name: label(name, x) for name, x in arrays.items()}


def _is_whole(letter: str, size: int, heads: tuple[str, ...]) -> bool:
    return size == int(letter[1:]) and letter in heads if _is_heads(letter) else size != 1


def _is_split(name: str) -> bool:
    return name.startswith("b") or _is_heads(name)


def _is_heads(name: str) -> bool:
    return name[0] == "H" and name[1:].isdigit()
