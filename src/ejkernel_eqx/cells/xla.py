"""The cells in plain XLA: one loop over time in either direction, and everything else as products over all tokens at once.

The loop has its own derivative rule, a loop over the tangents of the states, which JAX transposes. So forward mode and second derivatives
work, and the loop of the backward carries no gradient of the weight: that is one product over all tokens. For the backward only the states
of every token are kept; the gates are recomputed.
"""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from .._broadcast import like
from ..core.arguments import accumulator
from ..launch.fields import check_fields, whole
from ..parallel import match_varying
from ..sequences.packing import ended
from ..sequences.tokens import masked
from .formulas import advance
from .spec import CellArrays, CellSpec, PADDING, STARTS

Named = dict[str, Array]
_KEPT = "ejkernel_eqx.cells.states"


@dataclasses.dataclass(frozen=True)
class XlaConfig:
    """The body of the loops processes `unroll` tokens."""

    unroll: Annotated[int, whole(1, 64)] = 1

    __post_init__ = check_fields


config_type = XlaConfig


def unsupported(problem: Any, device: Any) -> str | None:
    """The reason why this platform cannot serve the problem: never, it supports all."""
    return None


def default_config(problem: Any, device: Any) -> XlaConfig:
    return XlaConfig()


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first."""
    return [XlaConfig(count) for count in (1, 2, 4, 8)]


class _Floats(NamedTuple):
    """The arrays that are differentiated. Time is the first axis; `*` are the leading ones."""

    x: Array  # [T, *, G]
    weight: Array  # [G, H], in the dtype of x
    bias: Array | None  # [H]
    hidden: Array  # [*, H], wide
    cell: Array | None  # [*, H], wide; of an LSTM
    entering_hidden: Array | None  # [T, *, H], wide: the states of tokens that start; None for zeros
    entering_cell: Array | None


class _Masks(NamedTuple):
    starts: Array | None = None  # bool [T, *]
    padding: Array | None = None  # bool [T, *]


class _Static(NamedTuple):
    spec: CellSpec
    unroll: int
    kept: Any
    """The dtype of the states of every token."""


class _States(NamedTuple):
    """The states after every token `[T, *, H]`, and the last ones `[*, H]`. There are cells only in an LSTM."""

    hidden: Array
    cell: Array | None
    last_hidden: Array
    last_cell: Array | None


def apply(arrays: CellArrays, spec: CellSpec, config: XlaConfig) -> Named:
    """`out [*, T, H]` in the dtype of `x` and the final states in the spec's."""
    floats, masks = _loop_inputs(arrays, spec)
    static = _Static(spec, config.unroll, arrays.x.dtype if arrays.offsets is None else floats.hidden.dtype)
    run = functools.partial(_run, static)
    policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
    states = jax.checkpoint(run, policy=policy)(floats, masks)
    out = states.hidden if masks.padding is None else masked(states.hidden, ~masks.padding)
    results = {
        "out": jnp.moveaxis(out, 0, -2).astype(arrays.x.dtype),
        "final_hidden": _final(states.hidden, states.last_hidden, arrays.hidden, arrays.offsets),
    }
    if states.cell is not None and states.last_cell is not None:
        results["final_cell"] = _final(states.cell, states.last_cell, arrays.cell, arrays.offsets)
    dtype = jnp.dtype(spec.state_dtype)
    return {name: x if name == "out" else x.astype(dtype) for name, x in results.items()}


def _loop_inputs(arrays: CellArrays, spec: CellSpec) -> tuple[_Floats, _Masks]:
    x, wide = arrays.x, accumulator(arrays.x.dtype)
    features, is_lstm = arrays.weight.shape[-1], spec.cell == "lstm"
    first = lambda a: jnp.moveaxis(a, x.ndim - 2, 0)
    none = jnp.zeros((*x.shape[:-2], features), wide)
    hidden, cell, masks, entering = none, none, _Masks(), (None, None)
    if arrays.offsets is not None:
        begins, padding, number = _bounds(arrays.offsets, x.shape[-2])
        masks = _Masks(first(begins), first(padding))
        if arrays.hidden is not None:
            take = lambda a: first(jnp.take_along_axis(a.astype(wide), number[..., None], -2))
            entering = take(arrays.hidden), None if arrays.cell is None else take(arrays.cell)
    else:
        hidden = none if arrays.hidden is None else arrays.hidden.astype(wide)
        cell = none if arrays.cell is None else arrays.cell.astype(wide)
    if arrays.marks is not None:
        marks = first(arrays.marks)
        masks = _Masks(marks == STARTS, marks == PADDING)
    weight = arrays.weight.astype(x.dtype)
    bias = None if arrays.bias is None else arrays.bias.astype(wide)
    return _Floats(first(x), weight, bias, hidden, cell if is_lstm else None, *entering), masks


def _bounds(offsets: Array, length: int) -> tuple[Array, Array, Array]:
    """Facts of every token `[*, T]`: whether its sequence begins there, whether it is in none, and the number of its sequence."""
    tokens = like(jnp.arange(length, dtype=jnp.int32), offsets)
    number = jnp.minimum(ended(offsets[..., 1:], length), offsets.shape[-1] - 2)
    begins = tokens == jnp.take_along_axis(offsets, number, -1)
    padding = (tokens < offsets[..., :1]) | (tokens >= offsets[..., -1:])
    return begins & ~padding, padding, number


def _final(states: Array, last: Array, initial: Array | None, offsets: Array | None) -> Array:
    """The state after the last token of every sequence; the initial one of an empty sequence."""
    if offsets is None:
        return last
    begin, end = offsets[..., :-1], offsets[..., 1:]
    rows = jnp.moveaxis(states, 0, -2)
    ends = jnp.take_along_axis(rows, jnp.maximum(end - 1, 0)[..., None], -2)
    old = jnp.zeros_like(ends) if initial is None else initial.astype(ends.dtype)
    return jnp.where((end > begin)[..., None], ends, old)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(static: _Static, floats: _Floats, masks: _Masks) -> _States:
    spec, zero = static.spec, jnp.zeros((), floats.hidden.dtype)
    starts, padding = masks
    first = floats.hidden, floats.cell

    def token(state: Any, at: Any) -> tuple[Any, Any]:
        x, starts, padding, entering = at
        hidden, cell = (_started(a, starts, b, zero) for a, b in zip(state, entering))
        assert hidden is not None
        recurrent = _recurrent(hidden, floats.weight, floats.bias)
        new = advance(spec, x, recurrent, hidden, hidden if cell is None else cell)
        state = tuple(_kept(padding, a, b) for a, b in zip(state, new))
        return state, tuple(None if a is None else a.astype(static.kept) for a in state)

    along = floats.x, starts, padding, (floats.entering_hidden, floats.entering_cell)
    first = match_varying(first, (floats, masks))
    last, states = lax.scan(token, first, along, unroll=static.unroll)
    return _States(*states, *last)


@_run.defjvp
def _run_jvp(static: _Static, primals: Any, tangents: Any) -> tuple[_States, _States]:
    """The derivative of every token is linear in the tangents of the states before it; what does not depend on those is computed at once."""
    (floats, masks), (dfloats, _) = primals, tangents
    states = _run(static, floats, masks)
    hidden, cell = (None if a is None else checkpoint_name(a, _KEPT) for a in states[:2])
    assert hidden is not None
    entering, dentering = ((f.entering_hidden, f.entering_cell) for f in (floats, dfloats))
    before = _before(hidden, floats.hidden, entering[0], masks.starts)
    before_cell = None if cell is None else _before(cell, floats.cell, entering[1], masks.starts)
    dtype = floats.x.dtype
    product = _recurrent(before, floats.weight, floats.bias).astype(dtype)
    dproduct = _product(before, dfloats.weight, dtype)
    if floats.bias is not None:
        # In float32, so that the gradient of the bias is summed over tokens in it.
        dproduct = dproduct.astype(accumulator(dtype))
        dproduct = (dproduct + _last_gate(dfloats.bias, dproduct)).astype(dtype)

    def token(state: Any, at: Any) -> tuple[Any, Any]:
        x, product, before, before_cell, dx, dproduct, starts, padding, dentering = at
        dbefore, dcell = (
            _started(a, starts, b, jnp.zeros((), floats.hidden.dtype)) for a, b in zip(state, dentering)
        )
        dproduct = dproduct + _product(dbefore, floats.weight, dtype)
        is_lstm = before_cell is not None
        primal = x, product, before, before_cell if is_lstm else before
        tangent = dx, dproduct, dbefore, dcell if is_lstm else dbefore
        new = jax.jvp(functools.partial(advance, static.spec), primal, tangent)[1]
        state = tuple(_kept(padding, a, b) for a, b in zip(state, new))
        return state, tuple(None if a is None else a.astype(static.kept) for a in state)

    wide = lambda a: None if a is None else a.astype(floats.hidden.dtype)
    # Rematerialised, so that the gates of all tokens are not stored in the wider dtype.
    along = floats.x, product, wide(before), wide(before_cell), dfloats.x, dproduct, *masks, dentering
    first = match_varying((dfloats.hidden, dfloats.cell), (floats, masks))
    dlast, dstates = lax.scan(jax.checkpoint(token), first, along, unroll=static.unroll)
    return states._replace(hidden=hidden, cell=cell), _States(*dstates, *dlast)


def _started(state: Array | None, starts: Array | None, entering: Array | None, zero: Array) -> Array | None:
    """The state before a token: another one where it starts."""
    if state is None or starts is None:
        return state
    return jnp.where(starts[..., None], zero if entering is None else entering, state)


def _kept(padding: Array | None, old: Array | None, new: Array) -> Array | None:
    if old is None or padding is None:
        return None if old is None else new
    return jnp.where(padding[..., None], old, new)


def _before(states: Array, first: Array | None, entering: Array | None, starts: Array | None) -> Array:
    """The state before every token, `[T, *, H]`."""
    assert first is not None
    before = jnp.concatenate([first[None].astype(states.dtype), states[:-1]])
    entering = None if entering is None else entering.astype(states.dtype)
    result = _started(before, starts, entering, jnp.zeros((), states.dtype))
    assert result is not None
    return result


def _recurrent(hidden: Array, weight: Array, bias: Array | None) -> Array:
    """The products of hidden states `[..., H]` with the weight, with the bias of a GRU's last gate: `[..., G]`, wide."""
    product = _product(hidden, weight, accumulator(weight.dtype))
    return product if bias is None else product + _last_gate(bias, product)


def _last_gate(bias: Array, product: Array) -> Array:
    before = jnp.zeros(product.shape[-1] - bias.shape[-1], product.dtype)
    return like(jnp.concatenate([before, bias.astype(product.dtype)]), product)


def _product(hidden: Array | None, weight: Array, dtype: Any) -> Array:
    """A product of operands in the dtype of the weight, for which there are tensor cores."""
    assert hidden is not None
    precision = lax.Precision.HIGHEST if weight.dtype.itemsize >= 4 else None
    axes = (((hidden.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        hidden.astype(weight.dtype), weight, axes, precision=precision, preferred_element_type=dtype
    )
