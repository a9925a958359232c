"""Choices read from a traced program are those of the kernels that it launches, whatever JAX has made of the call."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx._kernel import choices_of
from tests.attention.test_sharding import opaque
from tests.meshes import mesh_of, place, ROWS

ROW = (16, 2, 16)


def square(attend: Any, x: Any) -> Any:
    return jnp.sum(attend(x, x, x) ** 2)


def over_layers(attend: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda x, _: (x + attend(x, x, x), None))
    return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0] ** 2)


def in_shard_map(loss: Any) -> Any:
    mesh = mesh_of("automatic")
    local = lambda x: jax.lax.psum(loss(x), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=P(ROWS), out_specs=P(), axis_names={"dp", "tp"})


# What is done to a loss of x [B, T, H, D], and the rows of a launch for B = 8.
WAYS = {
    "plain": (lambda loss: loss, 8),
    "grad of vmap": (lambda loss: jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x.reshape(2, 4, *ROW)))), 8),
    "vmap of grad of jit": (
        lambda loss: lambda x: jax.vmap(jax.grad(jax.jit(loss)))(x.reshape(2, 4, *ROW)),
        8,
    ),
    "mapped one by one": (lambda loss: lambda x: jax.lax.map(loss, x.reshape(2, 4, *ROW)), 4),
    "a branch": (lambda loss: lambda x: jax.lax.cond(x.sum() > 0, loss, lambda x: 0.0, x), 8),
    "grad of shard_map": (lambda loss: jax.grad(in_shard_map(loss)), 4),
}


@pytest.mark.parametrize("body", [square, over_layers])
@pytest.mark.parametrize("way", WAYS)
def test_a_program_names_the_choices_of_its_launches(way, body):
    pytest.importorskip("triton")
    transform, rows = WAYS[way]
    module = ejx.FlashAttention(causal=True, platform="triton-interpret")
    x = jax.ShapeDtypeStruct((8, *ROW), jnp.float32)
    found = list(choices_of(transform(functools.partial(body, module)), ejx.inputs(x)))
    assert {choice.problem.dim("B") for choice in found} == {rows}
    assert {choice.platform.value for choice in found} == {"triton-interpret"}
    expected = module.plan.select(found[0].problem)
    assert all(choice == expected for choice in found)


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_a_kernel_that_is_partitioned(kind):
    """Explicit shardings say what each device launches while the call is traced; the compiler's say so afterwards: the whole call is named."""
    module, mesh = opaque(causal=True), mesh_of(kind)
    x = place(mesh, jnp.ones((8, *ROW)), P(ROWS))
    for function in (functools.partial(square, module), jax.grad(functools.partial(square, module))):
        found = list(choices_of(function, ejx.inputs(x)))
        assert {choice.problem.dim("B") for choice in found} == {4 if kind == "explicit" else 8}


def test_two_calls_are_two_choices_in_order():
    module = ejx.FlashAttention(causal=True)
    small, large = (jax.ShapeDtypeStruct((2, n, 2, 16), jnp.float32) for n in (8, 40))
    function = lambda small, large: (square(module, small), square(module, large), square(module, small))
    found = [choice.problem.dim("T") for choice in choices_of(function, ejx.inputs(small, large))]
    assert list(dict.fromkeys(found)) == [8, 40] and found[-1] == 8
