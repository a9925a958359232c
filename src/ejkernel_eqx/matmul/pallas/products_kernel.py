"""The kernel of the result, and of the gradient of the left side: a tile of rows by a tile of one group's columns a step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..epilogue import finished
from ..spec import GroupedSpec
from .tile import dot, inside, rounded
from .visits import REAL

INPUTS = ("x", "y", "w", "u", "row_scale", "other_row_scale", "scale", "up_scale", "bias", "up_bias")
OUTPUTS = ("out", "gate", "up_z")
SCRATCH = ("total", "other")
CHUNK = 512
"""Of the contracted axis at once. A longer block is a loop, as the compiler writes out every product of a tile."""
_PART = 256


@dataclasses.dataclass(frozen=True)
class Form:
    """The static half of a launch: which references it has, in the order above, and what is computed.

    - `spec`: what follows the products of `w` and, where given, of `u`. With `y` the result is the sum of `x w` and `y u`.
    - `operand`: the dtype that tiles are multiplied in.
    - `inner`: the length of the contracted axis, of which a step has `block_k`, the last one perhaps less.
    """

    names: tuple[str, ...]
    spec: GroupedSpec
    operand: str
    block_m: int
    block_k: int
    inner: int

    @property
    def steps(self) -> int:
        return -(-self.inner // self.block_k)

    @property
    def loops(self) -> int:
        """The chunks of a block before its last one."""
        return max(0, -(-self.block_k // CHUNK) - 1)


def chunks_together(operand: str) -> int:
    """The chunks of one turn of the loop. The units that multiply stand still where a turn begins and ends; products of float32 are so many
    instructions that this does not matter."""
    return 1 if operand == "float32" else 2


def kernel(form: Form, tile: Any, matrix: Any, begin: Any, end: Any, kind: Any, *refs: Any) -> None:
    """`out = act(z)`, or `act(gate) (up + shift)`, or the sum of two products; 0 past the last group."""
    ref = dict(zip(form.names, refs, strict=True))
    visit, step = pl.program_id(1), pl.program_id(2)
    first = tile[visit] * form.block_m
    store = functools.partial(_store, first, begin[visit], end[visit])
    is_real, is_last = kind[visit] & REAL != 0, step == form.steps - 1
    totals = [ref[name] for name in SCRATCH if name in ref]

    def turn(masked: bool) -> None:
        def add(place: Any) -> None:
            for total, z in zip(totals, _products(form, ref, place, CHUNK, masked), strict=True):
                total[...] += z

        if totals:

            @pl.when(step == 0)
            def _() -> None:
                for total in totals:
                    total[...] = jnp.zeros_like(total)

        each = chunks_together(form.operand)
        turns = form.loops // each

        def several(place: Any, carry: None) -> None:
            for chunk in range(each):
                add(place * each + chunk)

        if turns:
            lax.fori_loop(0, turns, several, None)
        for chunk in range(turns * each, form.loops):
            add(chunk)
        rest = _products(form, ref, form.loops, form.block_k - form.loops * CHUNK, masked)
        if form.steps == 1:
            sums = [total[...] + z for total, z in zip(totals, rest, strict=True)] if totals else rest
            _finish(form, ref, store, *sums)
            return
        for total, z in zip(totals, rest, strict=True):
            total[...] += z
        pl.when(is_last)(lambda: _finish(form, ref, store, *(total[...] for total in totals)))

    if form.inner % form.block_k == 0:
        pl.when(is_real)(lambda: turn(False))
    else:
        pl.when(is_real & ~is_last)(lambda: turn(False))
        pl.when(is_real & is_last)(lambda: turn(True))

    @pl.when(~is_real & is_last)
    def _() -> None:
        for name in OUTPUTS:
            if name in ref:
                store(ref[name], jnp.zeros(ref[name].shape, jnp.float32))


def _products(form: Form, ref: dict[str, Any], chunk: Any, size: int, masked: bool) -> list[Array]:
    """Over `size` of the contracted axis, from a chunk on: `x w` and, with a gate, `x u`; with `y` the sum of both products. `masked`: only some of
    it exists."""
    start = chunk * CHUNK
    left = form.inner % form.block_k - start if masked else None
    part = pl.ds(start if isinstance(start, int) else pl.multiple_of(start, CHUNK), size)
    operand = functools.partial(inside, length=left, dtype=form.operand)

    def side(name: str, scale: str) -> Array:
        """A left side, with the scales of the rows of its right side."""
        x = ref[name][:, part]
        if scale in ref:
            x = x.astype(jnp.float32) * ref[scale][:, part]
        return operand(x, axis=1)

    def matrix(name: str) -> Array:
        w = ref[name]
        return operand(w[:, part], axis=1) if form.spec.transpose_rhs else operand(w[part, :], axis=0)

    x = side("x", "row_scale")
    z = _product(form, x, matrix("w"))
    if "u" not in ref:
        return [z]
    if "y" not in ref:
        return [z, _product(form, x, matrix("u"))]
    return [z + _product(form, side("y", "other_row_scale"), matrix("u"))]


def _product(form: Form, x: Array, w: Array) -> Array:
    """`x w` or, transposed, `x w^T`. In bfloat16 the compiler orders the former better as a sum of two products, unless there are several."""
    alone = "u" not in form.names and not form.spec.transpose_rhs
    if not alone or form.operand == "float32" or x.shape[1] != CHUNK:
        return dot(x, w, form.spec.transpose_rhs)
    return dot(x[:, :_PART], w[:_PART], False) + dot(x[:, _PART:], w[_PART:], False)


def _finish(
    form: Form, ref: dict[str, Any], store: Callable[[Any, Array], None], z: Array, other: Array | None = None
) -> None:
    z = _scaled(ref, z, "scale", "bias")
    other = None if other is None else _scaled(ref, other, "up_scale", "up_bias")
    for name, x in (("gate", z), ("up_z", other)):
        if name in ref:
            assert x is not None
            store(ref[name], rounded(x, ref[name].dtype, form.spec.limit))
    store(ref["out"], finished(z, other, form.spec))


def _scaled(ref: dict[str, Any], z: Array, scale: str, bias: str) -> Array:
    z = z * ref[scale][...] if scale in ref else z
    return z + ref[bias][...] if bias in ref else z


def _store(first: Any, begin: Any, end: Any, ref: Any, x: Array) -> None:
    """Writes the rows of the visiting group; those of others stay as they are."""
    row = first + jnp.arange(ref.shape[0], dtype=jnp.int32)[:, None]
    mine = jnp.broadcast_to((row >= begin) & (row < end), ref.shape)
    ref[...] = jnp.where(mine, x.astype(jnp.float32), ref[...].astype(jnp.float32)).astype(ref.dtype)
