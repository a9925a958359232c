"""Defines how a call is split over a mesh, by the names of its axes: which arrays are split where, and what is summed over devices."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Shape = tuple[int, ...]
Assigned = Mapping[str, Any]
"""Axis names (axes of a group under the group's first name) and the mesh axes that each is split over."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The name of every axis of one array; `None` for an axis that is never split. Equal names denote the same axis. `ones`: the names of its axes
    of size one, which may be broadcast; only mesh axes of one device split them."""

    letters: tuple[str | None, ...]
    ones: tuple[str | None, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The axes of all arguments and outputs, and which of them may be split.

    `group`: axes of which each is a multiple of the next, such that element `r` of the longest goes with element `r // (R / n)` of one of
    length `n`. They are split together. One that is shorter than the mesh axis stays whole: if `sliced`, each device slices out the element
    that it needs, else the group is not split. `summed`: an output that lacks a split axis is the sum over it; otherwise an axis is split
    only if every output has it. `pinned`: axes that are always split, each over one mesh axis, whose parts the body itself combines, if
    `combined` also in outputs that are otherwise sums. `ones`, `out_ones`: see `Axes`.
    """

    axes: tuple[tuple[str | None, ...], ...]
    out_axes: tuple[tuple[str | None, ...], ...]
    split: Callable[[str], bool]
    group: tuple[str, ...]
    summed: bool = False
    sliced: bool = True
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    combined: bool = False
    ones: tuple[tuple[str | None, ...], ...] = ()
    out_ones: tuple[tuple[str | None, ...], ...] = ()

    def _canonical(self, name: Any) -> Any:
        """The name under which an axis is split; the axes of the group share one."""
        return self.group[0] if name in self.group else name

    def _splittable(self, name: str | None) -> bool:
        if name in self.pinned:
            return True
        if name is None or not (name in self.group or self.split(name)):
            return False
        name = self._canonical(name)
        return self.summed or all(name in map(self._canonical, axes) for axes in self.out_axes)

    def rule(self, shapes: Sequence[Shape]) -> tuple[str, tuple[str, ...]]:
        """The sharding rule for the compiler, and its factors that must not be split, in order of appearance."""
        fresh = (f"u{i}" for i in itertools.count())
        # With heads of several counts as one factor, the compiler would split the few over part of a mesh axis that is too large for them,
        # which no `PartitionSpec` can express. As separate factors each keeps its sharding, and `assign` decides.
        apart = len({size for name, size in self._named(self.axes, shapes) if name in self.group}) > 1
        order: dict[str, bool] = {}

        def factor(name: str | None) -> str:
            spelled = next(fresh) if name is None else name if apart else self._canonical(name)
            order[spelled] = self._splittable(name)
            return spelled

        sides = [
            ", ".join(" ".join(map(factor, axes)) for axes in side) for side in (self.axes, self.out_axes)
        ]
        return " -> ".join(sides), tuple(name for name, free in order.items() if not free)

    def assign(
        self, mesh: Mapping[str, int], known: Sequence[Sequence[Any]], shapes: Sequence[Shape]
    ) -> dict[str, Any]:
        """Returns what is split over which mesh axes, given the shardings of the arguments; the first that splits an axis decides. `shapes` are those
        of the arguments followed by those of the outputs."""
        assigned: dict[str, Any] = {}
        for name, size in self._named(self.axes, shapes):
            if name in self.pinned:
                assigned[name] = self.pinned[name]
                check_split(assigned[name], size, mesh, name=name)
        # Pinned axes come first: no argument may take their mesh axes.
        taken = set(assigned.values())
        for axes, spec in zip(self.axes, known, strict=True):
            for name, entry in zip(axes, spec, strict=False):
                canonical = self._canonical(name)
                if entry and canonical not in assigned and self._splittable(name):
                    if not mesh_axes(entry) & taken:
                        assigned[canonical] = entry
                        taken |= mesh_axes(entry)
        return {
            name: entry
            for name, entry in assigned.items()
            if self._divides(name, _parts(mesh, entry), shapes)
        }

    def can_pin(self, mesh: Mapping[str, int], shapes: Sequence[Shape]) -> bool:
        """Returns whether a mesh has the axes that pinned ones are split over, and they divide."""
        return all(
            name not in self.pinned or size % mesh.get(self.pinned[name], size + 1) == 0
            for name, size in self._named(self.axes, shapes)
        )

    def _divides(self, name: str, parts: int, shapes: Sequence[Shape]) -> bool:
        def sizes(every: Any, shapes: Any) -> set[int]:
            return {size for other, size in self._named(every, shapes) if self._canonical(other) == name}

        given, made = sizes(self.axes, shapes), sizes(self.out_axes, shapes[len(self.axes) :])
        # Axes of these sizes can only stay whole, with each device taking what it needs of them.
        few = {size for size in given if size % parts}
        if few and (not self.sliced or name not in self.group or max(given) % parts):
            return False
        return all(parts % size == 0 for size in few) and all(
            size % parts == 0 or (self.summed and size in few) for size in made
        )

    def specs(
        self,
        mesh: Mapping[str, int],
        assigned: Assigned,
        shapes: Sequence[Shape],
        out_shapes: Sequence[Shape],
    ) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """The partition specs of every argument and output."""

        def entry(name: str | None, size: int) -> Any:
            entry = assigned.get(self._canonical(name))
            return entry if entry and size % _parts(mesh, entry) == 0 else None

        def of(every: Any, shapes: Any) -> list[PartitionSpec]:
            return [
                PartitionSpec(*map(entry, axes, shape)) for axes, shape in zip(every, shapes, strict=True)
            ]

        return of(self.axes, shapes), of(self.out_axes, out_shapes)

    def seen_specs(
        self,
        mesh: Mapping[str, int],
        known: Sequence[Sequence[Any]],
        shapes: Sequence[Shape],
        out_shapes: Sequence[Shape],
    ) -> list[PartitionSpec]:
        """The partition specs of the outputs of an operation that the compiler sees into, which keeps every axis split that its arguments
        share, whether a kernel can split it or not."""
        seen = dataclasses.replace(self, split=lambda name: True, summed=True)
        assigned = seen.assign(mesh, known, [*shapes, *out_shapes])
        specs = seen.specs(mesh, assigned, shapes, out_shapes)[1]
        single: dict[str, Any] = {}
        for names, spec in zip(self.ones, known, strict=False):
            single |= {name: entry for name, entry in zip(names, spec, strict=False) if name and entry}

        def with_single(spec: PartitionSpec, names: tuple[str | None, ...]) -> PartitionSpec:
            entries, taken = list(spec), {axis for entry in spec for axis in mesh_axes(entry)}
            for i, name in enumerate(names):
                if name in single and entries[i] is None and not mesh_axes(single[name]) & taken:
                    entries[i] = single[name]
            return PartitionSpec(*entries)

        return list(map(with_single, specs, self.out_ones or [()] * len(specs)))

    def divide(
        self,
        function: Callable[..., tuple[jax.Array, ...]],
        mesh: Mapping[str, int],
        known: Sequence[Sequence[Any]],
        shapes: Sequence[Shape],
        out_shapes: Sequence[Shape],
    ) -> tuple[Callable[..., tuple[jax.Array, ...]], list[PartitionSpec], list[PartitionSpec]]:
        """The function that each device runs, and the specs of arguments and outputs, given the shardings of the arguments."""
        assigned = self.assign(mesh, known, [*shapes, *out_shapes])
        body = self._per_device(function, mesh, assigned, shapes, out_shapes)
        return body, *self.specs(mesh, assigned, shapes, out_shapes)

    def _per_device(
        self,
        function: Callable[..., tuple[jax.Array, ...]],
        mesh: Mapping[str, int],
        assigned: Assigned,
        shapes: Sequence[Shape],
        out_shapes: Sequence[Shape],
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """The function of one device's arrays: slices the heads that it needs out of whole arrays, and sums outputs over devices."""
        entry = assigned.get(self.group[0]) if self.group else None
        parts = _parts(mesh, entry) if entry else 1

        def few(axes: tuple[str | None, ...], shape: Shape) -> int | None:
            """The axis of the group that stays whole although the group is split."""
            return next((i for i, name in enumerate(axes) if name in self.group and shape[i] % parts), None)

        def take(x: jax.Array, axes: tuple[str | None, ...], shape: Shape) -> jax.Array:
            axis = few(axes, shape)
            if axis is None:
                return x
            return jax.lax.dynamic_slice_in_dim(x, _device(entry, mesh) * shape[axis] // parts, 1, axis)

        def total(x: jax.Array, axes: tuple[str | None, ...], shape: Shape) -> jax.Array:
            own = {self._canonical(name) for name in axes} | (self.pinned.keys() if self.combined else set())
            mine = {axis for name in own & assigned.keys() for axis in _ordered(assigned[name])}
            over = [axis for name, e in assigned.items() if name not in own for axis in _ordered(e)]
            # A mesh axis counts once, and none that splits this output is summed over.
            over = [axis for axis in dict.fromkeys(over) if axis not in mine]
            axis = few(axes, shape)
            # The sum over devices is rounded once, at the end.
            wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
            if axis is not None:
                over += _ordered(entry)
                start = _device(entry, mesh) * shape[axis] // parts
                # Each device fills in its own heads, and the sum over devices joins them.
                whole = jnp.zeros((*x.shape[:axis], shape[axis], *x.shape[axis + 1 :]), wide.dtype)
                wide = jax.lax.dynamic_update_slice_in_dim(whole, wide, start, axis)
            return jax.lax.psum(wide, tuple(over)).astype(x.dtype) if over else x

        def body(*flat: jax.Array) -> tuple[jax.Array, ...]:
            results = function(*map(take, flat, self.axes, shapes))
            # Otherwise a result has every split axis, or devices have already combined it over a pinned one.
            return tuple(map(total, results, self.out_axes, out_shapes)) if self.summed else tuple(results)

        return body

    @staticmethod
    def _named(every: Any, shapes: Any) -> Iterator[tuple[str, int]]:
        for axes, shape in zip(every, shapes, strict=False):
            yield from ((name, size) for name, size in zip(axes, shape, strict=True) if name)


def layout_of(axes: Sequence[Axes], out_axes: Sequence[Axes], **options: Any) -> Layout:
    """A layout of these arguments and outputs; `options` are the other fields."""
    return Layout(
        tuple(a.letters for a in axes),
        tuple(a.letters for a in out_axes),
        ones=tuple(a.ones for a in axes),
        out_ones=tuple(a.ones for a in out_axes),
        **options,
    )


def heads_among(axes: Any) -> tuple[str, ...]:
    """The names of heads, largest count first. A single head serves any split of the others, so it is not an axis to split."""
    found = sorted({n for letters in axes for n in letters if n and _is_heads(n)}, key=lambda n: -int(n[1:]))
    return tuple(name for name in found if name != "H1" or len(found) == 1)


def is_whole(letter: str, size: int, heads: tuple[str, ...]) -> bool:
    """Returns whether an axis has its full size: it is not broadcast, nor a slice of heads."""
    return size == int(letter[1:]) and letter in heads if _is_heads(letter) else size != 1


def is_split(name: str) -> bool:
    """Returns whether an axis is one that devices split: a leading one, or heads."""
    return name.startswith("b") or _is_heads(name)


def _is_heads(name: str) -> bool:
    return name[0] == "H" and name[1:].isdigit()


_REMEDIES = {
    "V": ("vocab_axis", "weight", "words", "give the padding a bias of -inf"),
    None: ("axis_name", "q, k, v", "tokens", "hide the padding by kv_lengths or by negative segment_ids"),
}
"""Of what a pinned axis splits, by its name: the option that names the mesh axis, the arrays, what is split, how to pad it."""


def check_split(
    axis: str, size: int, mesh: Mapping[str, int], chunks: int = 1, name: str | None = None
) -> None:
    """Raises `ValueError` if a mesh cannot split so many tokens over its axis, in so many chunks for each device, or what else `name` is."""
    option, arrays, what, hiding = _REMEDIES.get(name, _REMEDIES[None])
    if axis not in mesh:
        raise ValueError(
            f"{option}: expected an axis of the mesh, which has {', '.join(map(repr, mesh)) or 'none'}, received {axis!r}; name the one that "
            f"splits the {what}."
        )
    parts = mesh[axis] * chunks
    if size % parts:
        whole = -(-size // parts) * parts
        raise ValueError(
            f"{arrays}: expected {what} in {parts} equal parts over the {mesh[axis]} devices of axis {axis!r}, received {size}; pad them to {whole} "
            f"and {hiding}."
        )


def _device(entry: Any, mesh: Mapping[str, int]) -> jax.Array:
    """The index of this device along the mesh axes of an entry, the first being most significant."""
    number = jnp.int32(0)
    for axis in _ordered(entry):
        number = number * mesh[axis] + jax.lax.axis_index(axis)
    return number


def _parts(mesh: Mapping[str, int], entry: Any) -> int:
    return math.prod(mesh[axis] for axis in _ordered(entry))


def _ordered(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def mesh_axes(entry: Any) -> set[str]:
    return set(_ordered(entry))
