"""The expert that every token goes to."""

from typing import Any

import equinox as eqx
from jax import Array

from ..._signatures import Module
from ..activations import gated, ungated
from ..initial import keys_of, linear
from ..projection import project


class SharedExpert(Module):
    r"""An MLP, $W_{down}(f(W_{gate} x) \odot W_{up} x)$ or without a gate $W_{down}\,f(W_{up} x)$."""

    gate_proj: eqx.nn.Linear | None  # [F, E]
    up_proj: eqx.nn.Linear  # [F, E]
    down_proj: eqx.nn.Linear  # [E, F]
    hidden_dim: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(
        self, embed_dim: int, hidden_dim: int, *, activation: str, has_gate: bool, dtype: Any, key: Array
    ):
        keys = keys_of(key, 3)
        self.gate_proj = linear(keys[0], embed_dim, hidden_dim, False, dtype) if has_gate else None
        self.up_proj = linear(keys[1], embed_dim, hidden_dim, False, dtype)
        self.down_proj = linear(keys[2], hidden_dim, embed_dim, False, dtype)
        self.hidden_dim, self.activation = hidden_dim, activation

    def __call__(self, x: Array) -> Array:
        up = project("up_proj", self.up_proj, x, self.hidden_dim)
        if self.gate_proj is None:
            return project("down_proj", self.down_proj, ungated(self.activation, up), x.shape[-1])
        gate = project("gate_proj", self.gate_proj, x, self.hidden_dim)
        return project("down_proj", self.down_proj, gated(self.activation, gate, up), x.shape[-1])
