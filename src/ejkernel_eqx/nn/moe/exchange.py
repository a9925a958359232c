"""Rows to the devices that have their experts, and back, each row for itself.

Of `D` devices each has rows in the order of the devices that they are for. How many go where is known only when the program runs; sizes of arrays
are not. With `m` rows on each device, any device may get all `D m` of them. So rows are moved in rounds, with room for `2 m` rows in each: one
is enough unless a device gets more than twice its share. `D / 2` are always enough. Rounds without rows are skipped.

The rows that a device gets lie side by side, whoever sent them (`ragged_all_to_all`, on GPUs and TPUs): only rows are moved, no padding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...parallel import match_varying

_ROOM = 2  # times the rows of a device


class _Move(NamedTuple):
    """The last arguments of `lax.ragged_all_to_all`."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


class Ragged:
    """Rows `[m, ...]` on their way to other devices and back, in rounds."""

    def __init__(self, counts: Array, axes: tuple[str, ...], rows: int, everywhere: tuple[str, ...]):
        """`counts [D]`: how many of this device's rows are for each; they are split over the mesh axes `axes`. `everywhere`: all axes of the mesh
        over which anything differs."""
        devices = counts.shape[0]
        self.axes, self.rows = axes, rows
        self.room = max(1, min(_ROOM * rows, devices * rows))
        self.rounds = -(-devices * rows // self.room)
        self.all = lax.all_gather(counts, axes)  # [from, to]
        total = jnp.max(jnp.sum(self.all, axis=0))
        self.most = lax.pmax(match_varying_over(total, everywhere), everywhere)
        self.me = lax.axis_index(axes)

    def is_needed(self, number: Any) -> Array:
        """Returns whether any device still has rows to send in a round; the same on all devices."""
        return self.most > number * self.room

    def there(self, x: Array, number: Any, empty: int = 0) -> Array:
        """Returns what this device gets in a round of everyone's `x [m, ...]`; `empty` where it gets nothing."""
        there, back = self._moves(number)
        return _moved(x, there, back, self.room, self.axes, empty)

    def back(self, x: Array, number: Any) -> Array:
        """Returns what became of this device's own rows, `[m, ...]`, where it lay on other devices, given what it got and computed; 0 for rows of
        other rounds."""
        there, back = self._moves(number)
        return _moved(x, back, there, self.rows, self.axes, 0)

    def _moves(self, number: Any) -> tuple[_Move, _Move]:
        counts, first = self.all, number * self.room
        arrives = (
            jnp.cumsum(counts, axis=0) - counts
        )  # where the rows of each would lie if there were room for all
        begin = jnp.clip(first - arrives, 0, counts)
        sizes = jnp.clip(first + self.room - arrives, 0, counts) - begin
        lies = jnp.clip(arrives + begin - first, 0, self.room)  # of each pair, at the receiver
        from_ = jnp.cumsum(counts, axis=1) - counts + begin  # and at the sender
        row, column = (lambda x: x[self.me]), (lambda x: x[:, self.me])
        there = _Move(row(from_), row(sizes), row(lies), column(sizes))
        back = _Move(column(lies), column(sizes), column(from_), row(sizes))
        return there, back


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _moved(x: Array, move: _Move, reverse: _Move, length: int, axes: tuple[str, ...], empty: int) -> Array:
    """`lax.ragged_all_to_all` into an array of this length. Its gradient is the move back; JAX's would also mask a gradient of the array that is
    written into, which is a constant here."""
    out = match_varying(jnp.full((length, *x.shape[1:]), empty, x.dtype), (x, *move))
    return lax.ragged_all_to_all(x, out, *move, axis_name=axes)


def _moved_forward(
    x: Array, move: _Move, reverse: _Move, length: int, axes: tuple[str, ...], empty: int
) -> Any:
    return _moved(x, move, reverse, length, axes, empty), (move, reverse, x.shape[0])


def _moved_backward(length: int, axes: tuple[str, ...], empty: int, saved: Any, cotangent: Array) -> Any:
    move, reverse, rows = saved
    return _moved(cotangent, reverse, move, rows, axes, 0), None, None


_moved.defvjp(_moved_forward, _moved_backward)


def match_varying_over(x: Array, axes: tuple[str, ...]) -> Array:
    """`x`, typed as varying over these axes of the mesh."""
    varying = jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x
