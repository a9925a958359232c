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
from .._take import take_along
from ..core import Named
from ..core.arguments import accumulator
from ..core.platforms import supports_all
from ..launch.fields import Checked, whole
from ..parallel import match_varying
from ..sequences.packing import ended
from ..sequences.tokens import masked
from .formulas import advance
from .spec import CellArrays, CellSpec, PADDING, STARTS

_KEPT = "ejkernel_eqx.cells.states"


@dataclasses.dataclass(frozen=True)
class XlaConfig(Checked):
    """The body of the loops processes `unroll` tokens."""

    unroll: Annotated[int, whole(1, 64)] = 1


config_type = XlaConfig
unsupported = supports_all


def default_config(problem: Any, device: Any) -> XlaConfig:
    return XlaConfig()


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first."""
    return [XlaConfig(count) for count in (1, 2, 4, 8)]


States = tuple[Array, ...]
"""The hidden state and, of an LSTM, the cell state."""


class _Floats(NamedTuple):
    """The arrays that are differentiated. Time is the first axis; `*` are the leading ones."""

    x: Array  # [T, *, G]
    weight: Array  # [G, H], in the dtype of x
    bias: Array | None  # [H]
    first: States  # [*, H], wide
    entering: States | None  # [T, *, H], wide: the states of tokens that start; None for zeros


class _Masks(NamedTuple):
    starts: Array | None = None  # bool [T, *]
    padding: Array | None = None  # bool [T, *]


class _Static(NamedTuple):
    spec: CellSpec
    unroll: int
    kept: Any
    """The dtype of the states of every token."""


def apply(arrays: CellArrays, spec: CellSpec, config: XlaConfig) -> Named:
    """`out [*, T, H]` in the dtype of `x` and the final states in the spec's."""
    floats, masks = _loop_inputs(arrays, spec)
    kept = arrays.x.dtype if arrays.offsets is None else floats.first[0].dtype
    run = functools.partial(_run, _Static(spec, config.unroll, kept))
    policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
    every, last = jax.checkpoint(run, policy=policy)(floats, masks)
    out = every[0] if masks.padding is None else masked(every[0], ~masks.padding)
    results = {"out": jnp.moveaxis(out, 0, -2).astype(arrays.x.dtype)}
    initial = arrays.hidden, arrays.cell
    for name, states, end, first in zip(("final_hidden", "final_cell"), every, last, initial):
        results[name] = _final(states, end, first, arrays.offsets).astype(spec.state_dtype)
    return results


def _loop_inputs(arrays: CellArrays, spec: CellSpec) -> tuple[_Floats, _Masks]:
    x, wide = arrays.x, accumulator(arrays.x.dtype)
    first = lambda a: jnp.moveaxis(a, x.ndim - 2, 0)
    none = jnp.zeros((*x.shape[:-2], arrays.weight.shape[-1]), wide)
    initial = (arrays.hidden, arrays.cell)[: 2 if spec.cell == "lstm" else 1]
    states, masks, entering = tuple(none if a is None else a.astype(wide) for a in initial), _Masks(), None
    if arrays.offsets is not None:
        begins, padding, number = _bounds(arrays.offsets, x.shape[-2])
        masks = _Masks(first(begins), first(padding))
        if arrays.hidden is not None:
            entering = tuple(first(take_along(a, number[..., None], -2)) for a in states)
        states = (none,) * len(initial)
    if arrays.marks is not None:
        marks = first(arrays.marks)
        masks = _Masks(marks == STARTS, marks == PADDING)
    bias = None if arrays.bias is None else arrays.bias.astype(wide)
    return _Floats(first(x), arrays.weight.astype(x.dtype), bias, states, entering), masks


def _bounds(offsets: Array, length: int) -> tuple[Array, Array, Array]:
    """Facts of every token `[*, T]`: whether its sequence begins there, whether it is in none, and the number of its sequence."""
    tokens = like(jnp.arange(length, dtype=jnp.int32), offsets)
    number = jnp.minimum(ended(offsets[..., 1:], length), offsets.shape[-1] - 2)
    begins = tokens == take_along(offsets, number, -1)
    padding = (tokens < offsets[..., :1]) | (tokens >= offsets[..., -1:])
    return begins & ~padding, padding, number


def _final(states: Array, last: Array, initial: Array | None, offsets: Array | None) -> Array:
    """The state after the last token of every sequence; the initial one of an empty sequence."""
    if offsets is None:
        return last
    begin, end = offsets[..., :-1], offsets[..., 1:]
    rows = jnp.moveaxis(states, 0, -2)
    ends = take_along(rows, jnp.maximum(end - 1, 0)[..., None], -2)
    old = jnp.zeros_like(ends) if initial is None else initial.astype(ends.dtype)
    return jnp.where((end > begin)[..., None], ends, old)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(static: _Static, floats: _Floats, masks: _Masks) -> tuple[States, States]:
    """The states after every token `[T, *, H]`, and the last ones `[*, H]`."""

    def token(state: States, at: Any) -> tuple[States, States]:
        x, starts, padding, entering = at
        before = _started(state, starts, entering)
        recurrent = _recurrent(before[0], floats.weight, floats.bias)
        state = _kept(padding, state, advance(static.spec, x, recurrent, before[0], before[-1]))
        return state, tuple(a.astype(static.kept) for a in state)

    first = match_varying(floats.first, (floats, masks))
    last, every = lax.scan(token, first, (floats.x, *masks, floats.entering), unroll=static.unroll)
    return every, last


@_run.defjvp
def _run_jvp(static: _Static, primals: Any, tangents: Any) -> Any:
    """The derivative of every token is linear in the tangents of the states before it; what does not depend on those is computed at once."""
    (floats, masks), (dfloats, _) = primals, tangents
    every, last = _run(static, floats, masks)
    every = tuple(checkpoint_name(a, _KEPT) for a in every)
    narrow = lambda states: jax.tree.map(lambda a: a.astype(static.kept), states)
    before = [jnp.concatenate([a[None], b[:-1]]) for a, b in zip(narrow(floats.first), every)]
    before = _started(tuple(before), masks.starts, narrow(floats.entering))
    dtype = floats.x.dtype
    product = _recurrent(before[0], floats.weight, floats.bias).astype(dtype)
    dproduct = _product(before[0], dfloats.weight, dtype)
    if floats.bias is not None:
        # In float32, so that the gradient of the bias is summed over tokens in it.
        dproduct = dproduct.astype(accumulator(dtype))
        dproduct = (dproduct + _last_gate(dfloats.bias, dproduct)).astype(dtype)

    def token(state: States, at: Any) -> tuple[States, States]:
        x, product, before, dx, dproduct, starts, padding, dentering = at
        dbefore = _started(state, starts, dentering)
        dproduct = dproduct + _product(dbefore[0], floats.weight, dtype)
        primal, tangent = (x, product, before[0], before[-1]), (dx, dproduct, dbefore[0], dbefore[-1])
        new = jax.jvp(functools.partial(advance, static.spec), primal, tangent)[1]
        state = _kept(padding, state, new)
        return state, tuple(a.astype(static.kept) for a in state)

    wide = tuple(a.astype(floats.first[0].dtype) for a in before)
    # Rematerialised, so that the gates of all tokens are not stored in the wider dtype.
    along = floats.x, product, wide, dfloats.x, dproduct, *masks, dfloats.entering
    first = match_varying(dfloats.first, (floats, masks))
    dlast, devery = lax.scan(jax.checkpoint(token), first, along, unroll=static.unroll)
    return (every, last), (devery, dlast)


def _started(states: States, starts: Array | None, entering: States | None) -> States:
    """The states before a token: where it starts, those that enter, or zeros."""
    if starts is None:
        return states
    new = [jnp.zeros((), a.dtype) for a in states] if entering is None else entering
    return tuple(jnp.where(starts[..., None], a, b) for a, b in zip(new, states))


def _kept(padding: Array | None, old: States, new: States) -> States:
    """The states after a token: at padding those before it."""
    return tuple(b if padding is None else jnp.where(padding[..., None], a, b) for a, b in zip(old, new))


def _recurrent(hidden: Array, weight: Array, bias: Array | None) -> Array:
    """The products of hidden states `[..., H]` with the weight, with the bias of a GRU's last gate: `[..., G]`, wide."""
    product = _product(hidden, weight, accumulator(weight.dtype))
    return product if bias is None else product + _last_gate(bias, product)


def _last_gate(bias: Array, product: Array) -> Array:
    before = jnp.zeros(product.shape[-1] - bias.shape[-1], product.dtype)
    return like(jnp.concatenate([before, bias.astype(product.dtype)]), product)


def _product(hidden: Array, weight: Array, dtype: Any) -> Array:
    """A product of operands in the dtype of the weight, for which there are tensor cores."""
    precision = lax.Precision.HIGHEST if weight.dtype.itemsize >= 4 else None
    axes = (((hidden.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        hidden.astype(weight.dtype), weight, axes, precision=precision, preferred_element_type=dtype
    )
