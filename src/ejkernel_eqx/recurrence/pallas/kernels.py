"""The kernels of both directions: chunks one after the other, with the state, or its gradient, in vector memory between them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from .chunk import Chunk, Form, through_chunk

OPERANDS = ("q", "k", "v", "g", "beta")
FRESH, ENDS = 1, 2
"""Flags of a chunk: a sequence starts with it; one ends with it."""


@dataclasses.dataclass(frozen=True)
class Launched:
    """The static half of a launch: the names of its references in order, heads of a step, query heads of each, chunks of a row, and whether every
    row has its own entries in the tables of chunks."""

    names: tuple[str, ...]
    form: Form
    heads: int
    queries: int
    chunks: int
    packed: bool

    def entry(self, row: Any, chunk: Any) -> Any:
        """The entry of a chunk in the tables."""
        return row * self.chunks + chunk if self.packed else chunk


def forward_kernel(call: Launched, sequence: Any, flags: Any, *refs: Any) -> None:
    """Outputs, states at the starts of chunks if they are kept, and final states."""
    ref = dict(zip(call.names, refs, strict=True))
    flag = flags[call.entry(pl.program_id(0), pl.program_id(2))]
    state = ref["state"]

    @pl.when(flag & FRESH != 0)
    def _() -> None:
        state[...] = ref["initial"][...].astype(jnp.float32) if "initial" in ref else jnp.zeros_like(state)

    for head in range(call.heads):
        if "states" in ref:
            ref["states"][head] = state[head].astype(ref["states"].dtype)
        out, new = through_chunk(call.form, _chunk(call, ref, head, state[head]), _starts(ref))
        _put(call, ref["out"], head, out)
        state[head] = new
        ref["final"][head] = new.astype(ref["final"].dtype)


def backward_kernel(call: Launched, sequence: Any, flags: Any, *refs: Any) -> None:
    """Gradients of all operands and of the initial states, from the last chunk to the first."""
    ref = dict(zip(call.names, refs, strict=True))
    flag = flags[call.entry(pl.program_id(0), call.chunks - 1 - pl.program_id(2))]
    dstate = ref["dstate"]

    @pl.when(flag & ENDS != 0)
    def _() -> None:
        dstate[...] = ref["dfinal"][...].astype(jnp.float32)

    for head in range(call.heads):
        state = ref["states"][head].astype(jnp.float32)
        through = lambda x: through_chunk(call.form, x, _starts(ref))
        _results, pull = jax.vjp(through, _chunk(call, ref, head, state))
        (grads,) = pull((_queries(call, ref["dout"], head), dstate[head]))
        _put(call, ref["dq"], head, grads.q)
        for name in OPERANDS[1:]:
            if name in ref:
                x = getattr(grads, name)
                ref[f"d{name}"][head] = x.astype(ref[f"d{name}"].dtype)
        dstate[head] = grads.state
        if "dinitial" in ref:
            ref["dinitial"][head] = grads.state


def _chunk(call: Launched, ref: dict[str, Any], head: int, state: Array) -> Chunk:
    others = {name: ref[name][head].astype(jnp.float32) for name in OPERANDS[1:] if name in ref}
    return Chunk(q=_queries(call, ref["q"], head), state=state, **others)


def _queries(call: Launched, ref: Any, head: int) -> Array:
    """`[G C, ...]`: the query heads of a state head, one after the other."""
    heads = range(head * call.queries, (head + 1) * call.queries)
    each = [ref[n].astype(jnp.float32) for n in heads]
    return jnp.concatenate(each) if len(each) > 1 else each[0]


def _put(call: Launched, ref: Any, head: int, x: Array) -> None:
    """Writes what `_queries` reads."""
    size = x.shape[0] // call.queries
    for n in range(call.queries):
        ref[head * call.queries + n] = x[n * size : (n + 1) * size].astype(ref.dtype)


def _starts(ref: dict[str, Any]) -> Array | None:
    return ref["starts"][...] if "starts" in ref else None
