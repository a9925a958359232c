"""Checks what a user passes to a recurrence and resolves it to `RecurrenceArrays` or `StepArrays`.

Every error names the argument, what was expected, what came, and what to do, before anything is computed.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._values import check_slots
from .packing import Packing, read_packing
from .spec import CONSTANT, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays, StepSpec

_DTYPES = ("bfloat16", "float16", "float32", "float64")
STATE_DTYPES = ("float32", "bfloat16", "float64")


def check_scale(scale: float | None) -> float | None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number or None, received {scale}; None means D**-0.5.")
    return None if scale is None else float(scale)


def check_state_dtype(dtype: Any) -> str | None:
    """The name of a state dtype; `None` stays: float32, or float64 for float64 operands."""
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in STATE_DTYPES:
        raise ValueError(f"state_dtype: expected one of {', '.join(STATE_DTYPES)}, received {name}.")
    return name


def array(name: str, x: Any, letters: str, rank: int | None = None) -> Array:
    """`x` as a floating-point array of at least this rank, by default that of `letters` (`"T H D"`)."""
    rank = len(letters.split()) if rank is None else rank
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected an array [..., {letters}], received {type(x).__name__}.")
    if x.ndim < rank:
        raise ValueError(
            f"{name}: expected rank {rank} or more, [..., {letters}], received shape {x.shape}; add the missing axes."
        )
    if str(x.dtype) not in _DTYPES:
        raise ValueError(f"{name}: expected dtype {', '.join(_DTYPES)}, received {x.dtype}; cast it first.")
    return jnp.asarray(x)


def fitting(name: str, x: Any, shape: tuple[int | None, ...], letters: str) -> Array:
    """`x` as an array of exactly this shape; `None` for a free size."""
    x = array(name, x, letters, rank=0)
    if x.ndim != len(shape) or any(w is not None and w != s for s, w in zip(x.shape, shape, strict=True)):
        expected = ", ".join(
            letter if w is None else str(w) for w, letter in zip(shape, _names(letters, shape), strict=True)
        )
        layout = f"[..., {letters}]" if len(shape) > len(letters.split()) else f"[{letters}]"
        raise ValueError(f"{name}: expected shape [{expected}], received {x.shape}; the layout is {layout}.")
    return x


def _names(letters: str, shape: tuple[int | None, ...]) -> list[str]:
    own = letters.split()
    return ["."] * (len(shape) - len(own)) + own


def accumulator(dtype: Any) -> Any:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """The sizes that all operands of one call share, and how its tokens are packed. For a step `length` is `None` and
    `lead` ends with the rows."""

    lead: tuple[int, ...]
    length: int | None
    dtype: Any
    packing: Packing

    @property
    def over_tokens(self) -> tuple[int, ...]:
        """The axes of an operand before its heads."""
        return self.lead if self.length is None else (*self.lead, self.length)

    @property
    def letters(self) -> str:
        return "" if self.length is None else "T "

    def take(self, x: Array) -> Array:
        return x if self.length is None else self.packing.take(x)

    def mask(self, x: Array) -> Array:
        return x if self.length is None else self.packing.mask(x)

    def operand(self, name: str, x: Any, sizes: tuple[int | None, ...], letters: str) -> Array:
        """An operand over tokens: checked, its padding zero, in the kernels' order. `letters` are those behind the tokens."""
        return self.take(fitting(name, x, (*self.over_tokens, *sizes), self.letters + letters))

    def main(self, name: str, x: Any, sizes: tuple[int | None, ...], letters: str) -> Array:
        """An operand that takes part in products, all of one dtype."""
        x = self.operand(name, x, sizes, letters)
        if x.dtype != self.dtype:
            raise ValueError(
                f"{name}: expected the dtype of the first operand, {self.dtype}, received {x.dtype}; cast them to the same."
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
        """A parameter that all tokens share, for every leading axis."""
        return jnp.broadcast_to(x, (*self.lead, *x.shape))


def frame_of(main: Any, names: str, letters: str, cu_seqlens: Any, segment_ids: Any, reverse: bool) -> Frame:
    """The frame of a sequence call, from its main operand `[..., T, *letters]`."""
    main = array(names, main, f"T {letters}")
    at = main.ndim - 1 - len(letters.split())
    lead, length = main.shape[:at], main.shape[at]
    packing = read_packing(cu_seqlens, segment_ids, lead, length, reverse)
    return Frame(lead, length, main.dtype, packing)


def step_frame_of(main: Any, names: str, letters: str) -> Frame:
    """The frame of a step, from its main operand `[..., *letters]`."""
    main = array(names, main, letters)
    lead = main.shape[: main.ndim - len(letters.split())]
    return Frame(lead, None, main.dtype, Packing(lead, 1, False))


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """A call as the mathematics sees it. All arrays were checked one by one and taken: their padding is zero."""

    q: Array
    k: Array
    v: Array
    scale: float | None
    """`None`: `D**-0.5`."""
    g: Array | None = None
    beta: Array | None = None
    skip: Array | None = None
    decay: str = NONE
    delta: bool = False
    transposed: bool = False
    """The caller's states are `[V, D]`."""

    def state_sizes(self) -> tuple[tuple[int, ...], str]:
        sizes = (self.q.shape[-1], self.v.shape[-1])
        return (sizes[::-1], "H P N") if self.transposed else (sizes, "H D V")


def build(
    frame: Frame, operands: Operands, initial_state: Any, state_dtype: str | None
) -> tuple[RecurrenceArrays, RecurrenceSpec]:
    """The resolved call."""
    q, k, v, g, decay = operands.q, operands.k, operands.v, operands.g, operands.decay
    packing = frame.packing
    if decay == CONSTANT and packing.starts is not None:
        # One number a head knows no padding; one a token does.
        assert g is not None
        decay = SCALAR
        g = packing.mask(jnp.broadcast_to(g[..., None, :], (*frame.over_tokens, g.shape[-1])))
    spec = RecurrenceSpec(
        scale=_scale(operands),
        decay=decay,
        delta=operands.delta,
        state_dtype=state_dtype or jnp.dtype(accumulator(frame.dtype)).name,
    )
    arrays = RecurrenceArrays(q, k, v, g, operands.beta, operands.skip, None, packing.starts, packing.offsets)
    heads = check_heads(operands)
    if initial_state is not None:
        sizes, letters = operands.state_sizes()
        count = packing.num_sequences
        shape = (*frame.lead, *(() if count is None else (count,)), heads, *sizes)
        letters = letters if count is None else f"N {letters}"
        state = fitting("initial_state", initial_state, shape, letters).astype(spec.state_dtype)
        state = jnp.swapaxes(state, -1, -2) if operands.transposed else state
        arrays = arrays._replace(initial_state=packing.states(state))
    return arrays, spec


def _scale(operands: Operands) -> float:
    return float(operands.q.shape[-1] ** -0.5) if operands.scale is None else operands.scale


def check_heads(operands: Operands) -> int:
    """The state's heads: every head count divides the largest; those of the state divide the state's."""
    counts = {"q": operands.q.shape[-2], "k": operands.k.shape[-2], "v": operands.v.shape[-2]}
    if operands.g is not None:
        counts["g"] = operands.g.shape[-1 if operands.decay in (CONSTANT, SCALAR) else -2]
    if operands.beta is not None:
        counts["beta"] = operands.beta.shape[-1]
    state = max(n for name, n in counts.items() if name != "q")
    largest = max(state, counts["q"])
    for name, n in reversed(counts.items()):
        whole = largest if name == "q" else state
        if n == 0 or whole % n or (name == "q" and largest % state):
            raise ValueError(
                f"{name}: expected a head count that divides the largest, received {n} among {counts}; the layout is [..., T, H, D]."
            )
    return state


def build_step(
    frame: Frame, operands: Operands, state: Any, state_indices: Any
) -> tuple[StepArrays, StepSpec]:
    """The resolved step. Without `state_indices` every row has its own state; with them, one axis of rows shares a pool."""
    # One number a head is given as one a row here.
    decay = SCALAR if operands.decay == CONSTANT else operands.decay
    spec = StepSpec(_scale(operands), decay, operands.delta, operands.transposed)
    heads = check_heads(operands)
    sizes, letters = operands.state_sizes()
    own = state_indices is None
    indices = None if own else read_slots(frame, state_indices)
    shape, letters = (frame.lead, letters) if own else ((None,), f"slots {letters}")
    state = fitting("state", state, (*shape, heads, *sizes), letters)
    indices = (
        None if indices is None else check_slots("state_indices", indices, state_indices, state.shape[0])
    )
    arrays = StepArrays(operands.q, operands.k, operands.v, state, operands.g, operands.beta)
    if own:
        # One row a batch of its own: leading axes may be sharded.
        arrays = jax.tree.map(lambda x: jnp.expand_dims(x, len(frame.lead)), arrays)
        return arrays._replace(skip=operands.skip), spec
    # The parameters are the same for all rows.
    skip = None if operands.skip is None else operands.skip[0]
    return arrays._replace(skip=skip, indices=indices), spec


def read_slots(frame: Frame, state_indices: Any, letters: str = "H D") -> Array:
    """The slot of each row, or of each packed sequence, int32 `[B]` or `[N]`; `letters` are those of an operand behind its rows."""
    count, what = frame.packing.num_sequences, "packed sequence"
    if count is None:
        if len(frame.lead) != 1:
            raise ValueError(
                f"state_indices: expected operands with one axis of rows, [B, {frame.letters}{letters}], received leading axes {frame.lead}; "
                "jax.vmap over more."
            )
        count, what = frame.lead[0], "row"
    indices = jnp.asarray(state_indices)
    if indices.shape != (count,) or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"state_indices: expected {count} integers, received {indices.dtype} of shape {indices.shape}; one slot a {what}."
        )
    return indices.astype(jnp.int32)


class Pool(NamedTuple):
    """States in slots, of which each row or packed sequence of a call has one, or none: -1."""

    states: Array  # [slots, *sizes]
    indices: Array  # int32 [N]

    @property
    def _slots(self) -> Array:
        """Past the end where there is none: read as zeros, and not written."""
        return jnp.where(self.indices < 0, self.states.shape[0], self.indices)

    def read(self) -> Array:
        return self.states.at[self._slots].get(mode="fill", fill_value=0)

    def written(self, states: Array) -> Array:
        """The whole pool, with these new states."""
        return self.states.at[self._slots].set(states.astype(self.states.dtype), mode="drop")


def read_pool(
    frame: Frame, states: Any, state_indices: Any, sizes: tuple[int, ...], letters: str, operand: str = "H D"
) -> Pool:
    """The pool that a call with `state_indices` is given as its initial state."""
    indices = read_slots(frame, state_indices, operand)
    if states is None:
        raise ValueError(
            f"initial_state: expected a pool [slots, {letters.replace(' ', ', ')}] with state_indices, received None; zeros make an empty one."
        )
    pool = fitting("initial_state", states, (None, *sizes), f"slots {letters}")
    return Pool(pool, check_slots("state_indices", indices, state_indices, pool.shape[0]))
