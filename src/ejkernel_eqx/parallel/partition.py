"""Lets the compiler split an opaque kernel over a mesh along named axes, without collectives on its operands."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import eval_jaxpr
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .layout import Layout, layout_of
from .mesh import explicit_mesh, inside_manual_mesh, no_mesh, output_shapes, resharded, spec_of, Split


def refuse_partly_manual() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    left = [name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"shard_map: expected all axes of the mesh to be manual around this kernel, received {left} left to the compiler. It cannot split "
            "the kernel and would gather every operand; add the axes to axis_names, or use platform='xla'."
        )


def refuse_automatic() -> None:
    """A kernel that the compiler cannot split refuses a mesh in the context whose shardings the compiler determines. Without one, they are not
    known while tracing, and JAX raises an error of its own when such a program is lowered for several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    left = [name for name in mesh.auto_axes if mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"mesh: expected explicit axes around a Pallas kernel on TPU, received the automatic axes {left}. The compiler cannot split such a "
            "kernel; make the mesh with axis_types=AxisType.Explicit, call the layer inside jax.shard_map, or use platform='xla'."
        )


def over_explicit_mesh(
    mesh: Any,
    function: Callable[[Any], Any],
    args: Any,
    axes: Any,
    out_axes: Callable[[Any], Any],
    group: tuple[str, ...],
) -> Any:
    """`function(args)` for operations that the compiler sees into and splits as on an automatic mesh. Outputs are split like the arguments
    that share the names of their axes. `axes` has an `Axes` for every array; `out_axes(shapes)` returns the same for the outputs."""
    flat, treedef = jax.tree.flatten(args)
    flat_outs, out_treedef = jax.tree.flatten(outs := output_shapes(function, args))
    every, out_every = jax.tree.leaves(axes), jax.tree.leaves(out_axes(outs))
    layout = layout_of(every, out_every, split=lambda name: True, group=group)
    shapes, out_shapes = [x.shape for x in flat], [x.shape for x in flat_outs]
    specs = layout.seen_specs(mesh.shape, [spec_of(x) for x in flat], shapes, out_shapes)

    def automatic(*flat: Array) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(function(jax.tree.unflatten(treedef, flat))))

    flat = [resharded(x, mesh, PartitionSpec(*spec_of(x))) for x in flat]
    out_sharding = tuple(NamedSharding(mesh, spec) for spec in specs)
    call: Any = jax.sharding.auto_axes(automatic, axes=mesh.explicit_axes, out_sharding=out_sharding)
    return jax.tree.unflatten(out_treedef, call(*flat))


def partitioned(
    function: Callable[..., Any],
    args: Any,
    axes: Any,
    outs: Any,
    out_axes: Any,
    *,
    meshes: Split = Split.EVERYWHERE,
    **options: Any,
) -> Any:
    """`function(*args)`, split over devices on these `meshes` along every axis for which `split(name)` holds and whose size divides.

    `options`: `split`, `group` (query heads and key heads), `summed` (gradients), `sliced`, `pinned` and `combined`, as in `Layout`.
    """
    if inside_manual_mesh():
        refuse_partly_manual()
        return function(*args)
    flat, treedef = jax.tree.flatten(args)
    flat_outs, out_treedef = jax.tree.flatten(outs)
    layout = layout_of(jax.tree.leaves(axes), jax.tree.leaves(out_axes), **options)
    shapes = [x.shape for x in flat], [x.shape for x in flat_outs]

    def call(*flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(treedef, flat))))

    mesh = explicit_mesh(args)
    if mesh is None and meshes is Split.EXPLICIT_OR_REFUSED:
        refuse_automatic()
    if mesh is None and meshes is not Split.EVERYWHERE:
        return function(*args)
    if mesh is None:
        results = by_the_compiler(layout, call, shapes, flat)
    else:
        results = by_types(layout, call, shapes, mesh, flat)
    return jax.tree.unflatten(out_treedef, results)


Call = Callable[..., tuple[jax.Array, ...]]
Shapes = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


def by_the_compiler(
    layout: Layout, function: Call, shapes: Shapes, flat: list[jax.Array], exchanging: Call | None = None
) -> tuple[jax.Array, ...]:
    """For automatic meshes: shardings are known when the program is partitioned, not while it is traced. `exchanging`: what each device runs
    instead, as inside `shard_map`, on meshes that can split the pinned axes."""

    # Without the mesh of a context, which is none of one device's.
    local = _under(no_mesh, function)
    whole = jax.make_jaxpr(local)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat))
    # Constant arrays, such as the lists of tiles that XLA runs over, must be arguments, though each device's program has its own.
    constants = [jnp.asarray(x) for x in whole.consts]
    layout = dataclasses.replace(layout, axes=(*layout.axes, *((None,) * x.ndim for x in constants)))
    shapes = [*shapes[0], *(x.shape for x in constants)], shapes[1]

    def undivided(*given: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(eval_jaxpr(whole.jaxpr, given[len(flat) :], *given[: len(flat)]))

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        known = [whole_axes(mesh, a) for a in arg_shapes]
        here, run = layout, local
        if exchanging is not None:
            here = layout if layout.can_pin(mesh.shape, shapes[0]) else dataclasses.replace(layout, pinned={})
            run = _under(functools.partial(_all_manual, mesh), exchanging if here.pinned else function)
        body, ins, outs = here.divide(lambda *given: run(*given[: len(flat)]), mesh.shape, known, *shapes)
        named = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, _under(no_mesh, body), named(outs), named(ins)

    rule, together = layout.rule(shapes[0])
    call = custom_partitioning(undivided)
    call.def_partition(
        partition=partition, sharding_rule=rule, need_replication_factors=together, decode_shardings=False
    )
    return tuple(call(*flat, *constants))


def whole_axes(mesh: Any, x: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each axis of an array, outermost first. The compiler may split two heads over a part of a mesh axis of four devices:
    no `PartitionSpec` says that, and JAX raises an error where it looks for one. Such axes are left out, and the heads stay whole."""
    # On an array with as many elements as devices in each direction, every tile begins at a place of its own.
    indices = x.sharding.devices_indices_map((mesh.size,) * x.ndim)
    starts = np.array([[own.start or 0 for own in indices[device]] for device in mesh.devices.flat], int)
    starts = starts.reshape(*mesh.devices.shape, x.ndim)

    def along(place: int, axis: int) -> list[int]:
        """Where the tiles of the devices along a mesh axis begin."""
        return np.moveaxis(starts[..., axis], place, 0).reshape(mesh.devices.shape[place], -1)[:, 0].tolist()

    def entry(axis: int) -> tuple[str, ...]:
        lines = {name: along(place, axis) for place, name in enumerate(mesh.axis_names)}
        steps = {name: line[1] - line[0] for name, line in lines.items() if len(set(line)) == len(line) > 1}
        return tuple(sorted(steps, key=lambda name: -steps[name]))

    return tuple(map(entry, range(x.ndim)))


def _under(context: Callable[[], Any], function: Call) -> Call:
    """The function, computed inside a context."""

    def call(*flat: jax.Array) -> tuple[jax.Array, ...]:
        with context():
            return function(*flat)

    return call


def _all_manual(mesh: Any) -> Any:
    """The context of one device's function, as inside `shard_map`: the axes of the mesh are manual, and nothing in it is split again."""
    manual = (AxisType.Manual,) * len(mesh.shape)
    sizes, names = tuple(mesh.shape.values()), tuple(mesh.shape)
    return jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names, axis_types=manual))


def by_types(
    layout: Layout,
    function: Call,
    shapes: Shapes,
    mesh: Any,
    flat: list[jax.Array],
    differentiated: bool = False,
) -> tuple[jax.Array, ...]:
    """For explicit meshes: shardings are known while tracing, and `shard_map` applies them without the compiler. `differentiated`: by JAX, which
    must know over which devices values vary, or it would sum gradients over devices that have the same. The results have the types of an
    operation that the compiler sees into: mesh axes that the kernel cannot split, or that have one device, stay in them."""
    known = [spec_of(x) for x in flat]
    body, ins, outs = layout.divide(function, mesh.shape, known, *shapes)
    seen = layout.seen_specs(mesh.shape, known, *shapes)
    # Arguments move to the shardings that the kernel can be split over.
    flat = [resharded(x, mesh, spec) for x, spec in zip(flat, ins, strict=True)]
    call = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(ins), out_specs=tuple(outs), check_vma=differentiated
    )
    return tuple(resharded(x, mesh, spec) for x, spec in zip(call(*flat), seen, strict=True))
