"""Lets the compiler split an opaque kernel over a mesh along named axes, without collectives on its operands."""

import enum
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from ..dispatch import DeviceFacts, Platform
from .layout import Layout
from .mesh import explicit_mesh, resharded, spec_of
from .shapes import inside_manual_mesh, no_mesh


def _refuse_partly_manual() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    left = [name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"shard_map: expected all axes of the mesh to be manual around a kernel that the compiler cannot split, received {left} left to the "
            "compiler, which would gather every operand; add them to axis_names, or use platform='xla'."
        )


class Split(enum.Enum):
    """The meshes on which a call is split over devices."""

    NOWHERE = enum.auto()
    EXPLICIT = enum.auto()
    EVERYWHERE = enum.auto()


def how_split(platform: Platform, device: DeviceFacts) -> Split:
    """Nothing is needed for one device. An interpreted kernel runs on the host through a callback that `custom_partitioning` loses, so it is
    split on explicit meshes only."""
    if device.count == 1:
        return Split.NOWHERE
    return Split.EXPLICIT if platform is Platform.TRITON_INTERPRET else Split.EVERYWHERE


def partitioned(
    function: Callable[..., Any],
    args: Any,
    axes: Any,
    outs: Any,
    out_axes: Any,
    *,
    split: Callable[[str], bool],
    group: tuple[str, ...],
    meshes: Split = Split.EVERYWHERE,
    summed: bool = False,
    sliced: bool = True,
) -> Any:
    """`function(*args)`, split over devices on these `meshes` along every axis for which `split(name)` holds and whose size divides.

    `group` names axes of which each is a multiple of the next and split with it, such as query heads and key heads. With fewer key heads than
    devices, each device slices out the one that it reads, if `sliced`. An output that lacks a split axis keeps it whole or, if outputs are
    `summed` (gradients), is summed over the devices.
    """
    if inside_manual_mesh():
        _refuse_partly_manual()
        return function(*args)
    flat, treedef = jax.tree.flatten(args)
    flat_outs, out_treedef = jax.tree.flatten(outs)
    layout = Layout(
        tuple(a.letters for a in jax.tree.leaves(axes)),
        tuple(a.letters for a in jax.tree.leaves(out_axes)),
        split,
        group,
        summed,
        sliced,
    )

    shapes = [x.shape for x in flat], [x.shape for x in flat_outs]

    def call(*flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(treedef, flat))))

    mesh = explicit_mesh(args)
    if mesh is None and meshes is Split.EXPLICIT:
        return function(*args)
    if mesh is None:
        results = _by_the_compiler(layout, call, shapes)(*flat)
    else:
        results = _by_types(layout, call, shapes, mesh, flat)
    return jax.tree.unflatten(out_treedef, results)


Call = Callable[..., tuple[jax.Array, ...]]
Shapes = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


def _by_the_compiler(layout: Layout, function: Call, shapes: Shapes) -> Call:
    """For automatic meshes: shardings are known when the program is partitioned, not while it is traced."""

    def local(*flat: jax.Array) -> tuple[jax.Array, ...]:
        with no_mesh():
            return function(*flat)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        known = [tuple(a.sharding.spec) for a in arg_shapes]
        body, ins, outs = layout.divide(local, mesh.shape, known, *shapes)
        named = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, body, named(outs), named(ins)

    rule, whole = layout.rule(shapes[0])
    call = custom_partitioning(local)
    call.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole)
    return call


def _by_types(
    layout: Layout, function: Call, shapes: Shapes, mesh: Any, flat: list[jax.Array]
) -> tuple[jax.Array, ...]:
    """For explicit meshes: shardings are known while tracing, and `shard_map` applies them without the compiler."""
    body, ins, outs = layout.divide(function, mesh.shape, [spec_of(x) for x in flat], *shapes)
    flat = [resharded(x, mesh, spec) for x, spec in zip(flat, ins, strict=True)]
    call = jax.shard_map(body, mesh=mesh, in_specs=tuple(ins), out_specs=tuple(outs), check_vma=False)
    return call(*flat)
