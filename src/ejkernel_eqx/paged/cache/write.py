"""Writes new tokens into pages on XLA with a single scatter, in place if the pages are donated.

On a CPU, XLA widens bfloat16 and float8 for the scatter, so pages of these dtypes are copied each time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._jitted import compiled_once
from ...core import Named
from ...parallel import Axes, explicit_mesh, over_explicit_mesh
from ..spec import PAGES, WriteArrays
from .quantise import quantise

Writer = Callable[[WriteArrays], Named]


def write(arrays: WriteArrays) -> Named:
    """The pages and scales with the new tokens written.

    With leading axes on the pages, tokens and slots have these axes too, and each entry is written with its own. Other axes in front of
    the tokens count as more tokens. Scales per head may omit the leading axes.
    """
    return compiled_once(_over_mesh)(arrays)


def _over_mesh(arrays: WriteArrays) -> Named:
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return _over_leading_axes(arrays)
    lead = _leading(arrays)

    def label(x: Any, heads: int | None, rows: int) -> Axes:
        """The leading axes, and the axis `heads` of the heads."""
        names: list[str | None] = [f"b{i}" for i in range(rows)] + [None] * (len(x.shape) - rows)
        if heads is not None:
            names[heads] = "H"
        return Axes(tuple(names))

    def pages(given: Any) -> dict[str, Axes]:
        rows = lambda name, x: lead if name in PAGES or x.ndim > lead + 1 else x.ndim - 1
        return {name: label(x, -2 if name in PAGES else -1, rows(name, x)) for name, x in given.items()}

    new = {name: label(x, -2, lead) for name, x in arrays.new.items()}
    axes = WriteArrays(pages(arrays.pages), new, label(arrays.slots, None, lead))  # pyright: ignore
    return over_explicit_mesh(mesh, _over_leading_axes, arrays, axes, pages, ())


def _leading(arrays: WriteArrays) -> int:
    return next(arrays.pages[name].ndim - 4 for name in PAGES if name in arrays.new)


def _over_leading_axes(arrays: WriteArrays) -> Named:
    lead = _leading(arrays)
    if lead == 0:
        return _write(arrays)
    # Scales per head may lack the leading axes; then all entries share them.
    pages: Any = {name: 0 if name in PAGES or x.ndim > lead else None for name, x in arrays.pages.items()}
    new: Any = dict.fromkeys(arrays.new, 0)
    slots: Any = 0
    return jax.vmap(_over_leading_axes, in_axes=(WriteArrays(pages, new, slots),))(arrays)


def _write(arrays: WriteArrays) -> Named:
    written = dict(arrays.pages)
    slots = arrays.slots.reshape(-1)
    for name, new in arrays.new.items():
        pages, scale = arrays.pages[name], arrays.pages.get(f"{name}_scale")
        new = new.reshape(-1, *new.shape[-2:])  # [T, K, D]
        if scale is None:
            new = new.astype(pages.dtype)
        elif scale.ndim == 1:
            new, _ = quantise(new, pages.dtype, scale)
        else:
            new, own = quantise(new, pages.dtype)
            written[f"{name}_scale"] = put(scale, own, slots)
        written[name] = put(pages, new, slots)
    return written


def at_slots(pages: Array, slots: Array) -> Array:
    """What `pages [P, p, ...]` have at `slots [T]`; 0 for slots of no page."""
    room = pages.shape[0] * pages.shape[1]
    at = jnp.where(slots >= 0, slots, room)
    return (
        pages.reshape(room, *pages.shape[2:])
        .at[at]
        .get(mode="fill", fill_value=0, wrap_negative_indices=False)
    )


def put(pages: Array, new: Array, slots: Array) -> Array:
    """`pages [P, p, ...]` with `new [T, ...]` at `slots [T]`."""
    room = pages.shape[0] * pages.shape[1]
    # Negative indices would count from the end. Indices past the end are not written, and all indices are distinct.
    nowhere = room + jnp.arange(slots.shape[0], dtype=jnp.int32)
    slots = jnp.where((slots >= 0) & (slots < room), slots, nowhere)
    flat = pages.reshape(room, *pages.shape[2:])
    flat = flat.at[slots].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return flat.reshape(pages.shape)
