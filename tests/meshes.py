"""Meshes as users have them, for tests that run the same call with and without one."""

import collections
import contextlib
import re
from typing import Any, Literal

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.tolerances import assert_close

ROWS, HEADS = "dp", "tp"
KINDS = ("explicit", "explicit without context", "automatic")
"""`jax.make_mesh` is explicit by default, and arrays carry it in their types whether a context names it or not."""
LAYOUTS = {"data": (ROWS,), "tensor": (HEADS,), "both": (ROWS, HEADS)}
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)

# Explicit meshes without a context, split both ways, say most; the slow part has every kind and every layout.
_SLOW = [("explicit", "data"), ("explicit", "tensor"), ("automatic", "both")]
everywhere = pytest.mark.parametrize(
    "kind, layout",
    [("explicit without context", "both"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _SLOW)],
)


def mesh_of(kind: str, shape: tuple[int, int] = (2, 2)) -> Any:
    axis_type = AxisType.Auto if kind == "automatic" else AxisType.Explicit
    return jax.make_mesh(shape, (ROWS, HEADS), axis_types=(axis_type,) * 2)


def context(kind: str, mesh: Any) -> Any:
    return jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext()


def spec(layout: str, *axes: str | None) -> P:
    """Of the axes named, those that the layout splits."""
    return P(*(axis if axis in LAYOUTS[layout] else None for axis in axes))


def place(mesh: Any, tree: Any, specs: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), NamedSharding(mesh, s)), tree, specs)


def collectives(compiled: Any) -> collections.Counter:
    return collections.Counter(COLLECTIVE.findall(compiled.as_text() or ""))


def agree(actual: Any, expected: Any, kind: Literal["forward", "gradient"] = "forward") -> None:
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
    for (path, x), (_, y) in zip(got, want, strict=True):
        assert_close(np.asarray(x), np.asarray(y), kind=kind, name=jax.tree_util.keystr(path))


def lies(x: Any, mesh: Any, spec: P) -> bool:
    """Whether an array is laid out as the spec says."""
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
