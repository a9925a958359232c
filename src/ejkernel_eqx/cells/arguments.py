"""Checks what a user passes to a recurrent cell and resolves it to `CellArrays`."""

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._broadcast import like
from .._values import check_between
from ..core import Named
from ..core.arguments import array, fitting, wide
from ..core.frame import Frame, frame_of, States
from ..sequences.packing import read_ids
from ..sequences.rows import Packing, read_packing
from .spec import CellArrays, CellSpec, CHOICES, CONTINUES, GATES, PADDING, STARTS


def check_options(cell: Any, activation: Any, gate_activation: Any) -> None:
    for (name, choices), value in zip(CHOICES.items(), (cell, activation, gate_activation)):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, received {value!r}.")


Parameters = namedtuple("Parameters", "weight_hh bias_hh weight_ih bias_ih", defaults=(None,) * 3)
"""The weights and biases of a call, as the user passes them."""
Tokens = namedtuple("Tokens", "lengths resets cu_seqlens segment_ids state_indices", defaults=(None,) * 5)
"""The arguments of a call that describe its tokens."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A resolved call, and the conversion of its results to the caller's layout."""

    arrays: CellArrays
    frame: Frame
    states: tuple[States, ...]
    """The hidden state, and of an LSTM the cell state."""

    def unchanged(self, spec: CellSpec) -> Named:
        """The results of a call without tokens."""
        features = self.arrays.weight.shape[-1]
        out = jnp.zeros((*self.arrays.x.shape[:-1], features), self.arrays.x.dtype)
        finals = (states.unchanged(spec.state_dtype) for states in self.states)
        return {"out": out} | dict(zip(("final_hidden", "final_cell"), finals))

    def finish(self, results: Named) -> tuple[Array, Any]:
        named = zip(self.states, ("final_hidden", "final_cell"))
        left = tuple(states.leaving(results[name]) for states, name in named)
        return self.frame.packing.give(results["out"]), left if len(left) == 2 else left[0]


def resolve(
    spec: CellSpec, inputs: Any, parameters: Parameters, initial_state: Any, tokens: Tokens, *, reverse: bool
) -> Call:
    ids, starts = _segments(inputs, tokens)
    frame = frame_of(inputs, "inputs", "I", tokens.cu_seqlens, ids, reverse, tokens.state_indices)
    weight = _weight(spec, parameters)
    x = frame.operand("inputs", inputs, (None,), "I")
    x, bias = _projected(spec, x, parameters, weight.shape[0])
    states = _states(spec, frame, initial_state, weight.shape[-1])
    hidden, cell = (*(s.entering for s in states), None)[:2]
    marks = _marks(frame.packing, None if reverse else starts)
    arrays = CellArrays(x, weight, bias, hidden, cell, marks, frame.packing.offsets)
    return Call(arrays, frame, states)


def _weight(spec: CellSpec, parameters: Parameters) -> Array:
    """The recurrent weight."""
    weight, count = array("weight_hh", parameters.weight_hh, "G H"), GATES[spec.cell]
    if weight.ndim != 2 or weight.shape[0] != count * weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"weight_hh: expected [{count} * H, H] for a cell {spec.cell!r}, received shape {weight.shape}; the layout is PyTorch's."
        )
    return weight


def _projected(spec: CellSpec, x: Array, parameters: Parameters, gates: int) -> tuple[Array, Array | None]:
    """The projected inputs with all biases, except the one of a GRU's n inside the product with r, which is returned beside them."""
    if parameters.weight_ih is None:
        if x.shape[-1] != gates:
            raise ValueError(
                f"inputs: expected projected inputs [..., T, {gates}], received shape {x.shape}; pass weight_ih to project them here."
            )
    else:
        weight = fitting("weight_ih", parameters.weight_ih, (gates, x.shape[-1]), "G I").astype(x.dtype)
        precision = lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else None
        x = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=precision)
    outer, inner, both = [], None, 2 * gates // 3
    if parameters.bias_ih is not None:
        outer.append(wide(fitting("bias_ih", parameters.bias_ih, (gates,), "G")))
    if parameters.bias_hh is not None:
        bias = fitting("bias_hh", parameters.bias_hh, (gates,), "G")
        if spec.cell == "gru":
            bias, inner = bias.at[both:].set(0), bias[both:]
        outer.append(wide(bias))
    if outer:
        # In float32, so that the gradients of the biases are summed over tokens in it.
        x = (wide(x) + like(functools.reduce(jnp.add, outer), x)).astype(x.dtype)
    return x, inner


def _states(spec: CellSpec, frame: Frame, initial: Any, features: int) -> tuple[States, ...]:
    if spec.cell != "lstm":
        if isinstance(initial, tuple | list):
            raise ValueError(
                f"initial_state: expected one array [..., H] for a cell {spec.cell!r}, received {type(initial).__name__}; only an LSTM has a cell "
                "state."
            )
        return (frame.states(initial, (features,), "H", spec.state_dtype),)
    if initial is None:
        initial = (None, None)
    elif not isinstance(initial, tuple | list) or len(initial) != 2 or any(x is None for x in initial):
        raise ValueError(
            f"initial_state: expected (hidden, cell) for an LSTM, received {type(initial).__name__}; use zeros for one that is not known."
        )
    return tuple(frame.states(x, (features,), "H", spec.state_dtype) for x in initial)


def _segments(inputs: Any, tokens: Tokens) -> tuple[Any, Array | None]:
    """Segment ids that also contain lengths and resets, and where resets are; both in the caller's order."""
    if tokens.lengths is None and tokens.resets is None:
        return tokens.segment_ids, None
    if tokens.cu_seqlens is not None:
        name = "lengths" if tokens.lengths is not None else "resets"
        raise ValueError(
            f"{name}: expected None with cu_seqlens, received both; give each sequence its own offsets."
        )
    over = array("inputs", inputs, "T I").shape[:-1]
    ids = jnp.zeros(over, jnp.int32)
    if tokens.segment_ids is not None:
        read_packing(None, tokens.segment_ids, over[:-1], over[-1], False)  # checks the shape
        ids = jnp.broadcast_to(like(read_ids(tokens.segment_ids), ids), over)
    time = jnp.arange(over[-1], dtype=jnp.int32)
    if tokens.lengths is not None:
        lengths = _read_lengths(tokens.lengths, over)
        ids = jnp.where(like(time, ids) < lengths[..., None], ids, -1)
    if tokens.resets is None:
        return ids, None
    resets = _read_resets(tokens.resets, over) & (ids >= 0)
    packing = read_packing(None, ids, over[:-1], over[-1], False)
    assert packing.starts is not None
    begins = (packing.starts == like(time, ids)) | resets
    return jnp.where(ids >= 0, jnp.cumsum(begins, ids.ndim - 1, dtype=jnp.int32), -1), resets


def _read_lengths(value: Any, over: tuple[int, ...]) -> Array:
    lengths = jnp.asarray(value)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape not in (over[:-1], ()):
        raise ValueError(
            f"lengths: expected integers of shape {over[:-1]}, one per row, received {lengths.dtype} of shape {lengths.shape}."
        )
    lengths = check_between(
        "lengths", lengths.astype(jnp.int32), value, 0, over[-1], "a row has at most T tokens"
    )
    return jnp.broadcast_to(lengths, over[:-1])


def _read_resets(value: Any, over: tuple[int, ...]) -> Array:
    resets = jnp.asarray(value) if isinstance(value, Array | np.ndarray | list | tuple) else value
    if getattr(resets, "dtype", None) != jnp.bool_ or resets.shape != over:
        dtype = getattr(resets, "dtype", type(value).__name__)
        raise ValueError(
            f"resets: expected booleans of shape {over}, one per token, received {dtype} of shape {getattr(resets, 'shape', ())}; "
            "compare numbers, as in resets != 0, and broadcast them."
        )
    return resets


def _marks(packing: Packing, resets: Array | None) -> Array | None:
    """`resets` only adds the first token of a row, where a segment that begins takes the initial state."""
    if packing.real is None or packing.offsets is not None:
        return None
    assert packing.starts is not None
    starts = packing.starts == like(jnp.arange(packing.length, dtype=jnp.int32), packing.starts)
    starts = starts if resets is None else starts | resets
    return jnp.where(packing.real, jnp.where(starts, STARTS, CONTINUES), PADDING).astype(jnp.int32)
