"""What is known of meshes while a call is traced: the mesh around it, the shardings in the types of explicit meshes (such as those of
`jax.make_mesh`), the mesh axes that values vary over inside `shard_map`, and how a platform is split over devices."""

import enum
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..dispatch import Backend, DeviceFacts, Platform, replaceable


def inside_manual_mesh() -> bool:
    """Returns whether the code being traced already runs per device (`shard_map`)."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def no_mesh() -> Any:
    """A context without a mesh, as inside the body of a kernel."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def output_shapes(function: Callable[..., Any], *args: Any) -> Any:
    """The shapes of a function's outputs, outside any mesh. Choices recorded by it are withdrawn, since nothing is launched."""
    with no_mesh(), replaceable() as take_back:
        shapes = jax.eval_shape(
            function, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        )
    take_back()
    return shapes


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


def match_varying(tree: Any, like: Any) -> Any:
    """The same values, marked as varying over every axis that any array of `like` varies over."""
    wanted = frozenset[str]().union(*map(_varying, jax.tree.leaves(like)))

    def mark(leaf: Any) -> Any:
        missing = wanted - _varying(leaf)
        return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(mark, tree) if wanted else tree


def _varying(leaf: Any) -> frozenset[str]:
    manual = getattr(jax.typeof(leaf), "manual_axis_type", None)
    return frozenset(manual.varying) if manual is not None else frozenset()


class Split(enum.Enum):
    """The meshes on which a call is split over devices."""

    NOWHERE = enum.auto()
    EXPLICIT = enum.auto()
    """Those whose shardings are part of the types; on others it runs whole."""
    EXPLICIT_OR_REFUSED = enum.auto()
    """As `EXPLICIT`, but others are an error."""
    EVERYWHERE = enum.auto()


def how_split(platform: Platform, device: DeviceFacts) -> Split:
    """Nothing is needed for one device. On TPU the compiler does not call `custom_partitioning` (jax-ml/jax#38196)."""
    if device.count == 1:
        return Split.NOWHERE
    if platform is Platform.PALLAS and device.backend is Backend.TPU:
        return Split.EXPLICIT_OR_REFUSED
    # An interpreted kernel runs on the host through a callback that `custom_partitioning` loses.
    is_interpreted = platform in (Platform.TRITON_INTERPRET, Platform.PALLAS_INTERPRET)
    return Split.EXPLICIT if is_interpreted else Split.EVERYWHERE
