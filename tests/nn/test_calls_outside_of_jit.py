"""Calls of layers and models outside of `jit` are compiled once, and differ in nothing else from calls that are not."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import MultiHeadAttention
from tests.arrays import normal
from tests.nn.recurrent_layers import build, inputs
from tests.tolerances import assert_close


class Counted(eqx.Module):
    """A projection that counts how often Python runs it, and on what."""

    inner: eqx.nn.Linear
    calls: list = eqx.field(static=True)

    def __call__(self, x):
        self.calls.append(not isinstance(x, Tracer))
        return self.inner(x)


class Calls(list):
    """A list with a hash."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]
    __eq__ = object.__eq__


def counted(calls) -> MultiHeadAttention:
    return eqx.tree_at(lambda m: m.o_proj, LAYER, Counted(LAYER.o_proj, calls))


LAYER = MultiHeadAttention(16, num_heads=2, key=jax.random.key(0))
X = normal(1, (2, 5, 16))


def test_python_runs_once_for_a_shape():
    layer = counted(calls := Calls())
    first = layer(X)
    traced = len(calls)
    assert_close(layer(X), first)
    assert len(calls) == traced
    layer(X[:, :3])
    assert len(calls) > traced


@pytest.mark.parametrize(
    "setting",
    [pytest.param(jax.disable_jit, marks=pytest.mark.slow), lambda: jax.debug_nans(True), ejx.check_values],
)
def test_a_debugger_sees_single_operations(setting):
    layer = counted(calls := Calls())
    compiled = layer(X)
    del calls[:]
    with setting():
        for _ in range(2):
            y = layer(X)
    assert len(calls) == 2
    assert_close(y, compiled)


def test_fields_without_a_hash():
    layer = counted(calls := [])
    for _ in range(2):
        layer(X)
    assert len(calls) == 2


def test_nothing_is_compiled_apart_in_a_trace():
    layer = LAYER
    program = lambda function: str(eqx.filter_make_jaxpr(function)(layer, X)[0])
    assert "_program" not in program(lambda layer, x: layer(x))
    assert "_program" not in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x))))(X))


def test_true_is_not_one():
    LAYER(X, return_lse=True)
    with pytest.raises((ValueError, TypeError), match="return_lse"):
        LAYER(X, return_lse=1)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_values_are_checked_at_every_call():
    """Also at those that trace nothing, and of arrays of NumPy."""
    layer = LAYER
    right = np.array([[True, True, True, False, False]] * 2)
    wrong = np.array([[True, False, True, False, False]] * 2)
    for convert in (jnp.asarray, np.asarray):
        for _ in range(2):
            y = layer(X, padding_mask=convert(right))
            with pytest.raises(ValueError, match="padding_mask: expected contiguous real tokens"):
                layer(X, padding_mask=convert(wrong))
            assert_close(layer(X, padding_mask=convert(right)), y)


def test_offsets_are_checked_at_every_call():
    layer, x = build("mamba2"), inputs(1, 7)[0]
    y = layer(x, cu_seqlens=jnp.array([0, 3, 7]))
    for wrong in ([0, 4, 3], [0, 3, 8], [-1, 3, 7]):
        with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
            layer(x, cu_seqlens=jnp.array(wrong))
    assert_close(layer(x, cu_seqlens=jnp.array([0, 3, 7])), y)


def test_a_call_that_was_refused_takes_no_check_from_later_ones():
    layers = (ejx.models.LayerConfig("attention", {"num_heads": 2}),)
    model = ejx.models.Decoder(ejx.models.DecoderConfig(20, 16, layers), key=jax.random.key(0))
    right, wrong = jnp.array([[1, 2, 3]]), jnp.array([[1, 50, 3]])
    for _ in range(2):
        with pytest.raises(ValueError, match="tokens: expected numbers from 0 to 19"):
            model(wrong)
        model(right)
    hidden = jnp.array([[True, False, True]])  # from segments that the mask is derived from
    model(wrong, segment_ids=jnp.where(hidden, 0, -1))
    with pytest.raises(ValueError, match="received 50"):
        model(wrong, segment_ids=jnp.where(hidden, 0, 1))


def test_other_numbers_of_the_same_shapes():
    """Arrays are no constants of the program: weights, caches and offsets."""
    layer: Any = build("mamba2")
    x = inputs(1, 7)[0]
    doubled = eqx.tree_at(lambda m: m.out_proj.weight, layer, 2 * layer.out_proj.weight)
    assert_close(doubled(x), 2 * layer(x))
    apart = layer(x, cu_seqlens=jnp.array([0, 4, 7]))
    assert_close(apart, jnp.concatenate([layer(x[:4]), layer(x[4:])]))
    assert not np.allclose(apart, layer(x, cu_seqlens=jnp.array([0, 3, 7])))


@pytest.mark.slow
def test_a_program_is_let_go_with_the_caches_of_jax():
    layer = counted(calls := Calls())
    layer(X)
    traced = len(calls)
    jax.clear_caches()
    layer(X)
    assert len(calls) == 2 * traced
