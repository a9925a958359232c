"""Kinds of fault that users of other libraries have reported, in every family that could have them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.conftest import launches as launches
from tests.attention.dense import normal
from tests.operations import made, OPERATIONS, T
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

PLATFORMS = ["xla", "triton-interpret"]
PACKED = [name for name in OPERATIONS if name not in ("one query", "norm")]


@pytest.mark.parametrize("name", PACKED)
def test_two_packings_are_an_error(name):
    """Neither of them is ignored in silence, nor are offsets beside leading axes."""
    op, args = made(name)
    with pytest.raises(ValueError, match=r"segment_ids: expected (None with|at most one of)"):
        op(*args, cu_seqlens=np.array([0, 4, T]), segment_ids=np.zeros(T, int))
    own = len(OPERATIONS[name][1])
    with pytest.raises(ValueError, match=r"cu_seqlens: expected .* leading axes \(2,\)"):
        op(*[jnp.stack([x, x]) for x in args[:own]], *args[own:], cu_seqlens=np.array([0, 4, T]))


PACKINGS = (
    ("segment_ids", np.array([[0, 0, 0, 0, 1, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 2, 2, 2]])),
    ("cu_seqlens", np.array([[0, 4, 7], [0, 1, 9]])),
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name in PACKED if name != "sparse"])
def test_gradients_in_a_branch_of_a_loop(name):
    """Arrays that say what belongs together are arguments of the derivative, which keeps nothing of the trace around it."""
    op, args = made(name)
    packing, givens = PACKINGS[name == "pooling" or PACKED.index(name) % 2]

    def gradients(args, given):
        loss = lambda args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(op(*args, **{packing: given})))
        return jax.grad(loss)(args)

    @quick
    def looped(args, givens, used):
        def body(total, step):
            given, is_used = step
            nothing = lambda args, _: jax.tree.map(jnp.zeros_like, args)
            new = jax.lax.cond(is_used, gradients, nothing, args, given)
            return jax.tree.map(jnp.add, total, new), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, args), (givens, used))[0]

    found = looped(args, jnp.asarray(givens), jnp.array([True, True]))
    one, other = (quick(gradients)(args, jnp.asarray(given)) for given in givens)
    for n, (x, a, b) in enumerate(zip(found, one, other, strict=True)):
        assert_close(x, a + b, kind="gradient", name=f"argument {n}")


@pytest.mark.few(3)
@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", [name for name in PACKED if name not in ("sparse", "attention", "pooling")])
def test_cotangents_of_padding(name, platform, packing):
    """Padding takes no part, whatever its cotangents hold; attention has its own test."""
    op, args = made(name, platform)
    given = jnp.array([-1, 0, 0, 0, -1, 1, 1, 1, -1] if packing == "segment_ids" else [1, 4, 7])
    real = given >= 0 if packing == "segment_ids" else (jnp.arange(T) >= 1) & (jnp.arange(T) < 7)

    @quick
    def gradients(hidden):
        out, pull = jax.vjp(lambda *args: op(*args, **{packing: given})[0], *args)
        return pull(jnp.where(real.reshape(T, *[1] * (out.ndim - 1)), jnp.cos(out + 1), hidden))

    for found, wanted in zip(gradients(jnp.nan), gradients(0.0), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.isfinite(found).all() and np.asarray(found).any()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_values_with_and_without_gradients(name, platform):
    """A forward pass that keeps what its gradient needs takes the same options."""
    op, args = made(name, platform)
    call = lambda *args: op(*args)
    alone, beside = quick(call)(*args), quick(lambda *args: jax.vjp(call, *args)[0])(*args)
    jax.tree.map(np.testing.assert_array_equal, alone, beside)


# What `jax.checkpoint` is to keep for the forward kernels not to run again.
KEPT = {
    "sparse": ("native_sparse_out", "native_sparse_saved"),
    "delta": ("recurrence_out", "recurrence_state", "recurrence_saved"),
    "linear": ("recurrence_out", "recurrence_state", "recurrence_saved"),
    "scan": ("selective_scan_out", "selective_scan_state", "selective_scan_saved"),
    "cells": ("recurrent_out", "recurrent_hidden", "recurrent_cell", "recurrent_saved"),
    "experts": ("grouped_matmul_out", "grouped_matmul_saved"),
}


def _experts() -> tuple[Any, list[jax.Array]]:
    op = ejx.GroupedMatmul(activation="silu", platform="triton-interpret")
    args = [normal(0, 6, 16), normal(1, 2, 16, 16), normal(2, 2, 16, 16)]
    return lambda x, gate, up: op(x, gate, jnp.array([2, 3]), up=up), args


@pytest.mark.parametrize(
    "name",
    [name if name == "experts" else pytest.param(name, marks=pytest.mark.slow) for name in KEPT],
)
def test_kernels_whose_results_are_kept_do_not_run_again(name, launches):
    op, args = _experts() if name == "experts" else made(name, "triton-interpret")
    policies = jax.checkpoint_policies

    def loss(*args):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(op(*map(jnp.tanh, args))))

    def ran(loss) -> list[str]:
        launches.clear()
        gradient = quick(jax.value_and_grad(loss, tuple(range(len(args)))))
        jax.block_until_ready(gradient(*args))
        return sorted(launches)

    once = ran(loss)
    assert ran(jax.checkpoint(loss, policy=policies.save_only_these_names(*KEPT[name]))) == once
    assert len(ran(jax.checkpoint(loss, policy=policies.nothing_saveable))) > len(once)
