"""The kernel of the gradients of right sides: a tile of one group's sum over the tiles that it has rows in."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .tile import contracted, operand
from .visits import FIRST, LAST


@dataclasses.dataclass(frozen=True)
class RightForm:
    """The static half of a launch: the dtype that tiles are multiplied in, and whether matrices are `[W, K]`."""

    operand: str
    transposed: bool
    block_m: int


def kernel(
    form: RightForm,
    tile: Any,
    matrix: Any,
    begin: Any,
    end: Any,
    kind: Any,
    x: Any,
    dz: Any,
    out: Any,
    total: Any,
) -> None:
    """`out = x^T dz` over the rows of a group, or its transpose. Rows of others may be NaN."""
    visit = pl.program_id(2)
    first, start, stop, flags = tile[visit] * form.block_m, begin[visit], end[visit], kind[visit]
    is_whole = (start <= first) & (stop >= first + form.block_m)

    @pl.when(flags & FIRST != 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def add(take: Any) -> None:
        left, right = (dz, x) if form.transposed else (x, dz)
        total[...] += contracted(take(left), take(right), 0, 0)

    def mine(ref: Any) -> Any:
        row = first + jnp.arange(ref.shape[0], dtype=jnp.int32)[:, None]
        is_mine = jnp.broadcast_to((row >= start) & (row < stop), ref.shape)
        return jnp.where(is_mine, ref[...].astype(jnp.float32), 0.0).astype(form.operand)

    pl.when(is_whole)(functools.partial(add, lambda ref: operand(ref[...], form.operand)))
    pl.when(~is_whole & (stop > start))(functools.partial(add, mine))

    @pl.when(flags & LAST != 0)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)
