"""The cells token by token, as in their equations: the oracle of every test, in float64 for float64 inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core import Named
from ..core.arguments import accumulator
from ..sequences.tokens import masked
from .formulas import advance
from .spec import CellArrays, CellSpec, CONTINUES, PADDING, SHARED, STARTS


def run(arrays: CellArrays, spec: CellSpec) -> Named:
    """`out [*, T, H]` and the final states, in float32 (float64 for float64 operands)."""
    call = _packed if arrays.offsets is not None else _row
    for _ in range(arrays.x.ndim - 2):
        axes: dict[str, Any] = {
            name: None if x is None or name in SHARED else 0 for name, x in arrays._asdict().items()
        }
        call = jax.vmap(call, in_axes=(CellArrays(**axes), None))
    return call(arrays, spec)


def _row(arrays: CellArrays, spec: CellSpec) -> Named:
    """One row without leading axes."""
    wide, features = accumulator(arrays.x.dtype), arrays.weight.shape[-1]
    x, weight = arrays.x.astype(wide), arrays.weight.astype(wide)
    zeros = jnp.zeros(features, wide)
    marks = jnp.full(x.shape[0], CONTINUES, jnp.int32) if arrays.marks is None else arrays.marks
    bias = zeros if arrays.bias is None else arrays.bias.astype(wide)
    # Only the last gate of a GRU has a bias inside its product.
    bias = jnp.concatenate([jnp.zeros(weight.shape[0] - features, wide), bias])
    state = tuple(zeros if a is None else a.astype(wide) for a in (arrays.hidden, arrays.cell))

    def token(state: Any, at: tuple[Array, Array]) -> tuple[Any, Array]:
        x, mark = at
        before = tuple(jnp.where(mark == STARTS, zeros, a) for a in state)
        recurrent = jnp.dot(weight, before[0], precision=lax.Precision.HIGHEST) + bias
        after = advance(spec, x, recurrent, *before)
        state = tuple(jnp.where(mark == PADDING, a, b) for a, b in zip(state, after))
        return state, state[0]

    (hidden, cell), out = lax.scan(token, state, (x, marks))
    results = {"out": masked(out, marks != PADDING), "final_hidden": hidden}
    return results | ({"final_cell": cell} if spec.cell == "lstm" else {})


def _packed(arrays: CellArrays, spec: CellSpec) -> Named:
    """One row of packed sequences, each treated as a row in which all other tokens are padding."""
    offsets = arrays.offsets
    assert offsets is not None
    tokens = jnp.arange(arrays.x.shape[0], dtype=jnp.int32)

    def one(n: Array, hidden: Array | None, cell: Array | None) -> Named:
        mine = (tokens >= offsets[n]) & (tokens < offsets[n + 1])
        x, marks = masked(arrays.x, mine), jnp.where(mine, CONTINUES, PADDING)
        return _row(arrays._replace(x=x, marks=marks, hidden=hidden, cell=cell, offsets=None), spec)

    results = jax.vmap(one)(jnp.arange(offsets.shape[0] - 1), arrays.hidden, arrays.cell)
    # Every token is real in at most one sequence, so the sum selects its output.
    return results | {"out": results["out"].sum(0)}
