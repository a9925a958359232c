"""Explicit meshes, whose shardings are part of array types, such as those of `jax.make_mesh`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from .layout import layout_of
from .shapes import inside_manual_mesh, output_shapes


def explicit_mesh(tree: Any) -> Any:
    """The mesh in the types of the arrays, with or without `jax.set_mesh` around them; else that of the context; `None` if the compiler
    handles shardings or the code already runs per device."""
    if inside_manual_mesh():
        return None
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
        if mesh is not None and mesh.explicit_axes:
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.explicit_axes else None


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


def spec_of(x: Any) -> tuple[Any, ...]:
    """The sharding in the type of an array, one entry per axis."""
    spec = tuple(getattr(getattr(jax.typeof(x), "sharding", None), "spec", ()))
    return (*spec, *(None,) * (jax.typeof(x).ndim - len(spec)))


def resharded(x: Array, mesh: Any, spec: PartitionSpec) -> Array:
    """`x` split according to `spec`; `x` itself if its type already says so."""
    padded = (*spec, *(None,) * (x.ndim - len(spec)))
    if spec_of(x) == padded and jax.typeof(x).sharding.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def gathered(x: Array, axis: int) -> Array:
    """`x` with all of an axis on every device, if the type of `x` says that a mesh splits it."""
    spec, axis = spec_of(x), axis % x.ndim
    if not spec[axis]:
        return x
    return resharded(x, jax.typeof(x).sharding.mesh, PartitionSpec(*spec[:axis], None, *spec[axis + 1 :]))


def match_sharding(x: Array, like: Array) -> Array:
    """`x` with the sharding in the type of `like` on an explicit mesh; `x` itself elsewhere."""
    mesh = explicit_mesh(like)
    return x if mesh is None else resharded(x, mesh, PartitionSpec(*spec_of(like)))
