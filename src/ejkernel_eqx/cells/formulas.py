"""The formulas of the cells, elementwise in the hidden features; the reference and XLA share them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from .spec import CellSpec

FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "hard_tanh": jax.nn.hard_tanh,
    "silu": jax.nn.silu,
    "identity": lambda x: x,
    "hard_sigmoid": jax.nn.hard_sigmoid,
}


def advance(spec: CellSpec, x: Array, recurrent: Array, hidden: Array, cell: Array) -> tuple[Array, Array]:
    """The next hidden and cell state `[..., H]` from the projected inputs `x` and the products `recurrent` of the hidden state `[..., G]`, which
    for a GRU contain the bias of n. Cells without a cell state return the one they were given."""
    wide = accumulator(x.dtype)
    x, recurrent, hidden, cell = (a.astype(wide) for a in (x, recurrent, hidden, cell))
    act, gate = FUNCTIONS[spec.activation], FUNCTIONS[spec.gate_activation]
    if spec.cell == "rnn":
        return act(x + recurrent), cell
    if spec.cell == "gru":
        (xr, xz, xn), (ur, uz, un) = jnp.split(x, 3, -1), jnp.split(recurrent, 3, -1)
        r, z = gate(xr + ur), gate(xz + uz)
        # The reset gate multiplies the product together with its bias, as in PyTorch.
        n = act(xn + r * un)
        return n + z * (hidden - n), cell
    i, f, g, o = jnp.split(x + recurrent, 4, -1)
    cell = gate(f) * cell + gate(i) * act(g)
    return gate(o) * act(cell), cell
