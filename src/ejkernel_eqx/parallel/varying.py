"""Types of values inside `shard_map`: which mesh axes a value varies over."""

from typing import Any

import jax


def varying_axes(tree: Any) -> frozenset[str]:
    """The union of the mesh axes that the arrays of a tree vary over; empty outside `shard_map(check_vma=True)`."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        axes |= _varying(leaf)
    return axes


def match_varying(tree: Any, like: Any) -> Any:
    """The same values, marked as varying over every axis that any array of `like` varies over."""
    wanted = varying_axes(like)

    def mark(leaf: Any) -> Any:
        missing = wanted - _varying(leaf)
        return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(mark, tree) if wanted else tree


def _varying(leaf: Any) -> frozenset[str]:
    manual = getattr(jax.typeof(leaf), "manual_axis_type", None)
    return frozenset(manual.varying) if manual is not None else frozenset()
