"""Lets the compiler split an opaque kernel over a mesh along axes it names, with no collective on its operands."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Axes:
    """The name of every axis of one array; `None` for an axis that is never split. Equal names are equal axes."""

    letters: tuple[str | None, ...]


def inside_manual_mesh() -> bool:
    """Whether the code being traced already runs per device (`shard_map`)."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _refuse_partly_manual() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    left = [name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"shard_map: expected all axes of the mesh to be manual around a kernel that the compiler cannot split, received {left} left to the "
            "compiler, which would gather every operand; name them in axis_names too, or use platform='xla'."
        )


def no_mesh() -> Any:
    """A context in which shardings are nobody's business, as inside the body of a kernel."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def output_shapes(function: Callable[..., Any], *args: Any) -> Any:
    """The shapes of the outputs of a function whose body knows no mesh."""
    with no_mesh():
        return jax.eval_shape(function, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))


def partitioned(
    function: Callable[..., Any],
    args: Any,
    axes: Any,
    outs: Any,
    out_axes: Any,
    *,
    split: Callable[[str], bool],
    group: tuple[str, ...],
) -> Any:
    """`function(*args)`, split over the devices along every axis for which `split(name)` holds.

    An axis is only split where every output has it (a sum over it would need a collective) and every size divides. `group`
    names axes of which each is a multiple of the next and is split with it: query heads, key heads.
    """
    if inside_manual_mesh():
        _refuse_partly_manual()
        return function(*args)
    flat, treedef = jax.tree.flatten(args)
    flat_axes = [a.letters for a in jax.tree.leaves(axes)]
    flat_outs, out_treedef = jax.tree.flatten(outs)
    flat_out_axes = [a.letters for a in jax.tree.leaves(out_axes)]
    call = _Call(function, treedef, flat_axes, flat_out_axes, split, group)
    shapes, out_shapes = [x.shape for x in flat], [x.shape for x in flat_outs]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        results = call.over_explicit_mesh(mesh, flat, shapes, out_shapes)
    else:
        results = call.bind(shapes)(*flat)
    return jax.tree.unflatten(out_treedef, results)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    function: Callable[..., Any]
    treedef: Any
    axes: list[tuple[str | None, ...]]
    out_axes: list[tuple[str | None, ...]]
    split: Callable[[str], bool]
    group: tuple[str, ...]

    def bind(self, shapes: list[tuple[int, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
        rule, whole = self._rule(shapes)
        call = custom_partitioning(self._local)
        call.def_partition(partition=self._partition, sharding_rule=rule, need_replication_factors=whole)
        return call

    def _local(self, *flat: jax.Array) -> tuple[jax.Array, ...]:
        with no_mesh():
            return tuple(jax.tree.leaves(self.function(*jax.tree.unflatten(self.treedef, flat))))

    def _splittable(self, name: str | None) -> bool:
        """Whether an axis may be split at all; names are those of `_canonical`."""
        if name is None or not (self.split(name) or name in self.group):
            return False
        return all(name in map(self._canonical, axes) for axes in self.out_axes)

    def _canonical(self, name: Any) -> Any:
        """The name under which an axis is split: the many of the group go with the fewest that are there."""
        if name not in self.group:
            return name
        return next((few for few in reversed(self.group) if any(few in axes for axes in self.axes)), name)

    def _rule(self, shapes: list[tuple[int, ...]]) -> tuple[str, tuple[str, ...]]:
        """The sharding rule, and its factors that must not be split, in order of appearance."""
        fresh = (f"u{i}" for i in itertools.count())
        size = {
            n: s
            for axes, shape in zip(self.axes, shapes, strict=True)
            for n, s in zip(axes, shape, strict=True)
            if n
        }
        # Of one factor, the compiler would split the few over a part of a mesh axis that is too large for them, which
        # no `PartitionSpec` can say. As two, each comes as it is, and `_specs` decides.
        apart = len({size[name] for name in self.group if name in size}) > 1
        order: dict[str, bool] = {}

        def factor(name: str | None) -> str:
            if name is None:
                spelled, free = next(fresh), False
            else:
                canonical = self._canonical(name)
                spelled, free = name if apart else canonical, self._splittable(canonical)
            order[spelled] = free
            return spelled

        sides = [
            ", ".join(" ".join(map(factor, axes)) for axes in side) for side in (self.axes, self.out_axes)
        ]
        return " -> ".join(sides), tuple(name for name, free in order.items() if not free)

    def over_explicit_mesh(
        self, mesh: Any, flat: list[jax.Array], shapes: list[Any], out_shapes: list[Any]
    ) -> tuple[jax.Array, ...]:
        """Where shardings are part of the types they are known now, and `shard_map` says the same without the compiler."""
        known = [tuple(jax.typeof(x).sharding.spec) for x in flat]
        specs = self._specs(mesh.shape, known, [*shapes, *out_shapes])
        ins, outs = specs[: len(flat)], specs[len(flat) :]
        flat = [
            x if _trimmed(have) == _trimmed(want) else jax.sharding.reshard(x, want)
            for x, have, want in zip(flat, known, ins, strict=True)
        ]
        return jax.shard_map(
            self._local_manual, mesh=mesh, in_specs=tuple(ins), out_specs=tuple(outs), check_vma=False
        )(*flat)

    def _local_manual(self, *flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(self.function(*jax.tree.unflatten(self.treedef, flat))))

    def _partition(self, mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        shapes = [*(a.shape for a in arg_shapes), *(r.shape for r in jax.tree.leaves(result_shapes))]
        specs = self._specs(mesh.shape, [tuple(a.sharding.spec) for a in arg_shapes], shapes)
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        count = len(self.axes)
        return mesh, self._local, tuple(shardings[count:]), tuple(shardings[:count])

    def _specs(
        self, mesh_shape: Any, known: list[tuple[Any, ...]], shapes: list[tuple[int, ...]]
    ) -> list[PartitionSpec]:
        """How every argument and output is split, given how the arguments come: the first argument that splits an axis decides."""
        every = [*self.axes, *self.out_axes]
        assigned: dict[str | None, Any] = {}
        for axes, spec in zip(self.axes, known, strict=True):
            for name, entry in zip(map(self._canonical, axes), spec, strict=False):
                taken = {axis for e in assigned.values() for axis in _mesh_axes(e)}
                if (
                    entry
                    and name not in assigned
                    and self._splittable(name)
                    and not _mesh_axes(entry) & taken
                ):
                    assigned[name] = entry
        for name in list(assigned):
            parts = math.prod(mesh_shape[axis] for axis in _mesh_axes(assigned[name]))
            sizes = (
                s
                for axes, shape in zip(every, shapes, strict=True)
                for n, s in zip(axes, shape, strict=True)
                if self._canonical(n) == name
            )
            if any(size % parts for size in sizes):
                del assigned[name]
        return [PartitionSpec(*(assigned.get(self._canonical(name)) for name in axes)) for axes in every]


def match_sharding(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` with the sharding that the type of `like` says, on a mesh where types say it; `x` itself elsewhere."""
    if inside_manual_mesh() or not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    wanted = jax.typeof(like).sharding.spec
    return x if _trimmed(jax.typeof(x).sharding.spec) == _trimmed(wanted) else jax.sharding.reshard(x, wanted)


def _trimmed(spec: Any) -> tuple[Any, ...]:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def _mesh_axes(entry: Any) -> set[str]:
    return set(entry) if isinstance(entry, tuple) else {entry}
