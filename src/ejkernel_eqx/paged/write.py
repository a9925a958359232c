"""Writing new tokens into pages, on XLA: one scatter, in place where the pages are donated.

On a CPU, XLA widens bfloat16 and float8 to scatter and so copies the pages of these dtypes each time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from .quantise import quantise
from .spec import PAGES, WriteArrays

Writer = Callable[[WriteArrays], dict[str, Array]]


def write(arrays: WriteArrays) -> dict[str, Array]:
    """The pages and scales with the new tokens in them.

    Pages with leading axes are written each with its own tokens and slots, which then have these axes too; other axes in front of
    the tokens are more tokens. Scales a head may come without the leading axes.
    """
    names = [name for name in PAGES if name in arrays.new]
    lead = arrays.pages[names[0]].ndim - 4
    if lead == 0:
        return _write(arrays)
    axes = WriteArrays(
        {name: 0 if name in PAGES or x.ndim > lead else None for name, x in arrays.pages.items()},  # pyright: ignore
        dict.fromkeys(arrays.new, 0),  # pyright: ignore
        0,  # pyright: ignore
    )
    return jax.vmap(write, in_axes=(axes,))(arrays)


def _write(arrays: WriteArrays) -> dict[str, Array]:
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
            written[f"{name}_scale"] = _put(scale, own, slots)
        written[name] = _put(pages, new, slots)
    return written


def _put(pages: Array, new: Array, slots: Array) -> Array:
    """`pages [P, p, ...]` with `new [T, ...]` at `slots [T]`."""
    room = pages.shape[0] * pages.shape[1]
    # A negative index would count from the end. Past the end nothing is written, and no two indices are the same.
    nowhere = room + jnp.arange(slots.shape[0], dtype=jnp.int32)
    slots = jnp.where((slots >= 0) & (slots < room), slots, nowhere)
    flat = pages.reshape(room, *pages.shape[2:])
    return flat.at[slots].set(new, mode="drop", unique_indices=True).reshape(pages.shape)
