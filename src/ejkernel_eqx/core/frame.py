"""Properties shared by all operands of a call over tokens: sizes, packing, and initial and final states."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._values import check_slots
from ..sequences.rows import Packing, read_packing
from .along import Along, along_of
from .arguments import accumulator, array, fitting


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """The sizes shared by all operands of a call, and the packing of its tokens. For a step `length` is `None` and
    `lead` ends with the rows."""

    lead: tuple[int, ...]
    length: int | None
    dtype: Any
    packing: Packing
    letters: str
    """Letters of the main operand's axes after the leading ones."""
    state_indices: Any = None
    along: Along | None = None
    """Set if the tokens are split over devices, and these are one device's."""

    @property
    def over_tokens(self) -> tuple[int, ...]:
        """The sizes of the axes before the heads."""
        return self.lead if self.length is None else (*self.lead, self.length)

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no tokens or no rows, so that there is nothing to launch."""
        return 0 in self.over_tokens

    def take(self, x: Array) -> Array:
        return self.packing.take(x)

    def mask(self, x: Array) -> Array:
        return self.packing.mask(x)

    def repeated(self, count: int) -> "Frame":
        """The frame of a call that has `count` tokens in the place of each."""
        assert self.length is not None
        packing = self.packing.repeated(count)
        along = None if self.along is None else dataclasses.replace(self.along, packing=packing)
        return dataclasses.replace(self, length=packing.length, packing=packing, along=along)

    def operand(self, name: str, x: Any, sizes: tuple[int | None, ...], letters: str) -> Array:
        """An operand over tokens: checked, with zero padding, in the kernels' order. `letters` are those after the token axis."""
        letters = letters if self.length is None else f"T {letters}"
        return self.take(fitting(name, x, (*self.over_tokens, *sizes), letters))

    def main(self, name: str, x: Any, sizes: tuple[int | None, ...], letters: str) -> Array:
        """An operand of products, all of which have one dtype."""
        x = self.operand(name, x, sizes, letters)
        if x.dtype != self.dtype:
            raise ValueError(
                f"{name}: expected the dtype of the first operand, {self.dtype}, received {x.dtype}; cast them to the same dtype."
            )
        return x

    def qkv(self, q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
        dim = q.shape[-1]
        return (
            self.main("q", q, (None, dim), "H D"),
            self.main("k", k, (None, dim), "H D"),
            self.main("v", v, (None, None), "H V"),
        )

    def shared(self, x: Array) -> Array:
        """A parameter shared by all tokens, for every leading axis."""
        return jnp.broadcast_to(x, (*self.lead, *x.shape))

    def state_dtype(self, name: str | None) -> str:
        """The dtype of initial and final states, as requested by the user."""
        return name or jnp.dtype(accumulator(self.dtype)).name

    def states(self, given: Any, sizes: tuple[int, ...], letters: str, dtype: Any = None) -> "States":
        """The states of a sequence call, with these `sizes` and, if given, this dtype. With `state_indices`, `given` is a pool of states."""
        count, shape = self.packing.num_sequences, (*self.lead, *sizes)
        if count is not None:
            shape = (count, *sizes)  # there are no leading axes
        pool = slots = None
        if self.state_indices is not None:
            pool, slots = self._pool("initial_state", given, sizes, letters)
            # Past the end if there is none: read as zeros, and not written.
            slots = jnp.where(slots < 0, pool.shape[0], slots)
            given = pool.at[slots].get(mode="fill", fill_value=0)
        if given is not None:
            # `N` counts the packed sequences, unless it is the size of a state.
            number = "" if count is None else "S " if "N" in letters.split() else "N "
            given = fitting("initial_state", given, shape, f"{number}{letters}")
            given = self.packing.states(given if dtype is None else given.astype(dtype))
        return States(given, shape, self.packing, pool, slots)

    def row_states(self, state: Any, sizes: tuple[int, ...], letters: str) -> tuple[Array, Array | None]:
        """The state of every row of a step, or a pool shared by one axis of rows, with the slot of each."""
        if self.state_indices is None:
            return fitting("state", state, (*self.lead, *sizes), letters), None
        return self._pool("state", state, sizes, letters)

    def _pool(self, name: str, states: Any, sizes: tuple[int, ...], letters: str) -> tuple[Array, Array]:
        """A pool of states `[slots, *sizes]`, in which each row or packed sequence has one slot, or -1 for none."""
        indices = self._slots()
        if states is None:
            raise ValueError(
                f"{name}: expected a pool [slots, {letters.replace(' ', ', ')}] with state_indices, received None; use zeros for an empty pool."
            )
        pool = fitting(name, states, (None, *sizes), f"slots {letters}")
        return pool, check_slots("state_indices", indices, self.state_indices, pool.shape[0])

    def _slots(self) -> Array:
        """The slot of each row, or of each packed sequence, int32 `[B]` or `[N]`."""
        count, what = self.packing.num_sequences, "packed sequence"
        if count is None:
            if len(self.lead) != 1:
                raise ValueError(
                    f"state_indices: expected operands with one axis of rows, [B, {self.letters}], received leading axes {self.lead}; "
                    "use jax.vmap for more."
                )
            count, what = self.lead[0], "row"
        indices = jnp.asarray(self.state_indices)
        if indices.shape != (count,) or not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError(
                f"state_indices: expected {count} integers, received {indices.dtype} of shape {indices.shape}; pass one integer per {what}."
            )
        return indices.astype(jnp.int32)

    def as_rows(self, arrays: Any) -> Any:
        """Arrays of a step in which each row with its own state is its own batch, because leading axes may be sharded."""
        if self.state_indices is not None:
            return arrays
        return jax.tree.map(lambda x: jnp.expand_dims(x, len(self.lead)), arrays)

    def from_rows(self, arrays: Any) -> Any:
        if self.state_indices is not None:
            return arrays
        return jax.tree.map(lambda x: jnp.squeeze(x, len(self.lead)), arrays)


def frame_of(
    main: Any,
    names: str,
    letters: str,
    cu_seqlens: Any,
    segment_ids: Any,
    reverse: bool,
    state_indices: Any = None,
    sequence_axis: str | None = None,
) -> Frame:
    """The frame of a sequence call with main operand `[..., T, *letters]`."""
    letters = f"T {letters}"
    main = array(names, main, letters)
    at = main.ndim - len(letters.split())
    lead, length = main.shape[:at], main.shape[at]
    packing = read_packing(cu_seqlens, segment_ids, lead, length, reverse)
    along = along_of(sequence_axis, packing)
    return Frame(lead, length, main.dtype, packing, letters, state_indices, along)


def step_frame_of(main: Any, names: str, letters: str, state_indices: Any = None) -> Frame:
    """The frame of a step with main operand `[..., *letters]`."""
    main = array(names, main, letters)
    lead = main.shape[: main.ndim - len(letters.split())]
    return Frame(lead, None, main.dtype, Packing(lead, 1, False), letters, state_indices)


class States(NamedTuple):
    """The states of a sequence call."""

    entering: Array | None
    """Initial states in the kernels' order; `None` for zeros."""
    shape: tuple[int, ...]
    packing: Packing
    pool: Array | None
    slots: Array | None

    def unchanged(self, dtype: Any) -> Array:
        """The final states of a call without tokens."""
        return jnp.zeros(self.shape, dtype) if self.entering is None else self.entering

    def leaving(self, states: Array) -> Array:
        """The caller's result for final states in the kernels' order; the whole pool if there is one."""
        states = self.packing.states(states)
        if self.pool is None:
            return states
        return self.pool.at[self.slots].set(states.astype(self.pool.dtype), mode="drop")
