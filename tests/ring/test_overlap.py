"""Hops can run beside kernels: in the program of every step they need nothing that the step computes. Whether they do is seen on GPUs
(`tests/gpu/test_ring_gpu.py`, `benchmarks/ring.py --profile`): a CPU's compiler neither has hops in two halves nor compiles for a GPU."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr, Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.ring.calls import AXIS, mesh_of

PASSED_ON = {"optimization_barrier", "broadcast_in_dim", "pvary", "pcast", "convert_element_type"}
"""What is in the way of a hop that computes nothing."""


def inside(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """A program and all programs in it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from inside(inner)


def needs(jaxpr: Jaxpr, equation: Any) -> set[str]:
    """The primitives of what an equation's operands are computed by in its step, which begins with a barrier."""
    makers = {out: e for e in jaxpr.eqns for out in e.outvars}
    found, waiting = set(), list(equation.invars)
    while waiting:
        variable = waiting.pop()
        maker = None if isinstance(variable, Literal) else makers.get(variable)
        if maker is not None and maker is not equation:
            found.add(maker.primitive.name)
            waiting += () if maker.primitive.name == "optimization_barrier" else maker.invars
    return found


@pytest.mark.parametrize("order", [pytest.param("contiguous", marks=pytest.mark.slow), "zigzag"])
def test_no_hop_waits_for_the_kernels_of_its_step(order):
    mesh = mesh_of("explicit", 4)
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, AXIS)))
    ring = ejx.RingAttention(AXIS, causal=True, order=order, method="ring", platform="xla")
    program = jax.make_jaxpr(jax.grad(lambda *qkv: jnp.sum(ring(*qkv) ** 2), (0, 1, 2)))(x, x, x)
    every = [(jaxpr, equation) for jaxpr in inside(program.jaxpr) for equation in jaxpr.eqns]
    hops = [one for one in every if one[1].primitive.name == "ppermute"]
    waiting = [found for jaxpr, equation in hops if (found := needs(jaxpr, equation) - PASSED_ON)]
    # Keys, values and their gradients in loops and single steps; only the gradients' way home, after the last step, waits for it.
    assert len(hops) >= 12 and len(waiting) == 2, waiting
