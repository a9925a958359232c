"""Defines what is known of a call before it runs: its context and the shapes of its outputs."""

from collections.abc import Callable
from typing import Any

import jax

from ..dispatch import replaceable


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
