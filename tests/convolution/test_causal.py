"""The causal convolution on XLA and by its Triton kernels, interpreted: against the reference, packed, padded, in pieces, composed."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import assert_agrees, assert_same, platforms
from tests.attention.dense import INTERPRET, quick
from tests.convolution.cases import Case, CASES, exact, make, poison, results
from tests.tolerances import assert_close

platform = platforms()


DEFAULT = {("offsets", INTERPRET), ("short segments", "xla")}
PAIRS = [(name, platform) for name in CASES for platform in ("xla", INTERPRET)]


@pytest.mark.parametrize(
    "name, platform",
    [pytest.param(*pair, marks=() if pair in DEFAULT else pytest.mark.slow) for pair in PAIRS],
    indirect=["platform"],
)
def test_agrees_with_the_reference(name, platform):
    """Results and every gradient; bit for bit the same with NaN in the padding."""
    case = CASES[name]
    inputs, cotangents = make(case)
    op = ejx.CausalConv1d(case.activation, norm_size=case.norm, platform=platform)
    found = results(op, inputs, case.packing, cotangents)
    assert all(found[n].dtype == x.dtype and found[n].shape == x.shape for n, x in inputs.items())
    assert found["out"].dtype == found["final_state"].dtype == inputs["x"].dtype
    assert_agrees(case, found, exact(case, inputs, cotangents))
    assert not np.asarray(found["out"])[~case.real].any()
    if not case.real.all():
        again = results(op, poison(case, inputs), case.packing, cotangents)
        assert_same(again, found)


def test_heads_are_normalised(platform):
    """By hand; in a call, in steps, and by a convolution made from one that does not."""
    inputs, _ = make(CASES["heads"])
    op = ejx.CausalConv1d("silu", platform=platform).normalising(4)
    out, final = quick(lambda inputs: op(**inputs))(inputs)
    state = inputs["initial_state"]
    for row in range(2):
        y, last = plain(inputs["x"][row], inputs["weight"], inputs["bias"], state[row])
        heads = y.reshape(-1, 2, 4)
        assert_close(out[row], (heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)).reshape(y.shape))
        assert_close(final[row], last)
    for t in range(3):
        y, state = op.step(inputs["x"][:, t], inputs["weight"], inputs["bias"], state)
        assert_close(y, out[:, t])


def plain(x, weight, bias, initial):
    """By hand, in float64: one sequence `[T, C]`."""
    x, weight, bias, initial = (np.asarray(a, np.float64) for a in (x, weight, bias, initial))
    whole = np.concatenate([initial, x])
    width = weight.shape[1]
    windows = np.stack([whole[w : w + len(x)] for w in range(width)])
    y = np.einsum("cw,wtc->tc", weight, windows) + bias
    return y / (1 + np.exp(-y)), whole[len(whole) - width + 1 :]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["padding inside", "short segments", "offsets"])
def test_the_reference_is_the_sum_as_it_is_written(name):
    case = dataclasses.replace(CASES[name], initial=True)
    inputs, cotangents = make(case)
    expected = exact(case, inputs, cotangents)
    by_hand = lambda x, state: plain(x, inputs["weight"], inputs["bias"], state)
    if case.offsets is not None:
        for n, (start, end) in enumerate(itertools.pairwise(case.offsets)):
            y, state = by_hand(inputs["x"][start:end], inputs["initial_state"][n])
            np.testing.assert_allclose(expected["out"][start:end], y, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(expected["final_state"][n], state)
        return
    assert case.ids is not None
    for row, ids in enumerate(case.ids):
        state = np.asarray(inputs["initial_state"][row], np.float64)
        for n, segment in enumerate(dict.fromkeys(ids[ids >= 0])):
            mine = ids == segment
            y, state = by_hand(inputs["x"][row][mine], np.zeros_like(state) if n else state)
            np.testing.assert_allclose(expected["out"][row][mine], y, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(expected["final_state"][row], state)


@pytest.mark.few(2)
@pytest.mark.parametrize("pieces", [(1, 1, 7), (2, 3, 4)])
def test_in_pieces(pieces, platform):
    """A prompt in chunks shorter than the width too: what the whole at once gives, exactly; and token by token."""
    inputs, _ = make(CASES["plain"])
    op = ejx.CausalConv1d("silu", platform=platform)
    call, step = quick(lambda inputs: op(**inputs)), quick(op.step)
    whole, last = call(inputs)
    state, outs, at = inputs["initial_state"], [], 0
    for size in pieces:
        piece = inputs["x"][:, at : at + size]
        if size == 1:
            y, state = step(piece[:, 0], inputs["weight"], inputs["bias"], state)
        else:
            y, state = call(inputs | {"x": piece, "initial_state": state})
        outs.append(y.reshape(piece.shape))
        at += size
    assert_close(jnp.concatenate(outs, 1), whole)
    np.testing.assert_array_equal(state, last)


@pytest.mark.slow
def test_composes(platform):
    """jit, vmap of rows, cotangents of any layout."""
    case = Case(B=3, T=7, C=4)
    inputs, (dout, _) = make(case)
    op = ejx.CausalConv1d("silu", platform=platform)

    def loss(x, weight, bias, state, d):
        out, final = op(x, weight, bias, initial_state=state)
        # Transposed: what comes back is strided as JAX likes it.
        return (jnp.swapaxes(out, -1, -2) * jnp.swapaxes(d, -1, -2)).sum() + (final**2).sum()

    args, gradient = (*inputs.values(), dout), jax.grad(loss, (0, 1, 2, 3))
    wanted, by_row = quick(gradient)(*args), quick(jax.vmap(gradient, (0, None, None, 0, 0)))(*args)
    for n, (one, rows) in enumerate(zip(wanted, by_row)):
        assert_close(rows.sum(0) if n in (1, 2) else rows, one, kind="gradient")


def test_any_leading_axes():
    inputs, _ = make(Case(B=6))
    op = ejx.CausalConv1d("silu", platform="xla")
    out, final = op(**inputs)
    deep = inputs | {n: inputs[n].reshape(2, 3, *inputs[n].shape[1:]) for n in ("x", "initial_state")}
    for found, wanted in zip(op(**deep), (out, final)):
        np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
    none = inputs | {n: inputs[n][0] for n in ("x", "initial_state")}
    assert_close(op(**none)[0], out[0])
    _, state = op(inputs["x"][:, :0], inputs["weight"], initial_state=inputs["initial_state"])
    np.testing.assert_array_equal(state, inputs["initial_state"])


def test_forward_mode_and_second_derivatives_on_xla():
    inputs, (dout, _) = make(Case(T=5))
    op = ejx.CausalConv1d("silu", platform="xla")
    loss = lambda x: (op(x, inputs["weight"])[0] * dout).sum()
    x, v = inputs["x"], jnp.ones_like(inputs["x"])
    assert_close(jax.jvp(loss, (x,), (v,))[1], (jax.grad(loss)(x) * v).sum(), kind="gradient")
    assert jnp.isfinite(jax.jvp(jax.grad(loss), (x,), (v,))[1]).all()


@pytest.mark.slow
def test_float64(enable_x64):
    case = Case(dtype="float64", bias=False)
    inputs, cotangents = make(case)
    inputs["weight"] = inputs["weight"].astype(jnp.float64)
    found = results(ejx.CausalConv1d("silu", platform="xla"), inputs, case.packing, cotangents)
    assert_agrees(case, found, exact(case, inputs, cotangents))


# Steps


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_with_slots(dtype):
    """A row without a slot touches nothing: not the last slot either; the pool keeps its dtype, in place when donated."""
    case = Case(B=3, T=1, dtype=dtype)
    inputs, _ = make(case)
    op = ejx.CausalConv1d("silu")
    x, weight, bias = inputs["x"][:, 0], inputs["weight"], inputs["bias"]
    pool = jnp.asarray(np.random.default_rng(1).standard_normal((5, 3, case.C)), jnp.float32)
    before, indices = np.array(pool), jnp.array([3, -1, 0], jnp.int32)
    step = jax.jit(lambda pool, x: op.step(x, weight, bias, pool, state_indices=indices), donate_argnums=0)
    out, new = step(pool, x.at[1].set(jnp.nan))
    assert new.dtype == jnp.float32 and out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(new)[[1, 2, 4]], before[[1, 2, 4]])
    assert not np.asarray(out[1]).any()
    for row, slot in ((0, 3), (2, 0)):
        wanted, state = op.step(x[row], weight, bias, jnp.asarray(before[slot]))
        assert_close(out[row], wanted)
        np.testing.assert_array_equal(np.asarray(new[slot]), np.asarray(state))


def test_a_state_of_another_dtype_keeps_it():
    inputs, _ = make(Case(dtype="bfloat16"))
    op = ejx.CausalConv1d()
    state = inputs["initial_state"].astype(jnp.float32)
    assert op(inputs["x"], inputs["weight"], initial_state=state)[1].dtype == jnp.float32
    assert op.step(inputs["x"][:, 0], inputs["weight"], None, state)[1].dtype == jnp.float32


# What it is told


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(weight=jnp.ones((4, 3))), ["weight", "[C, W] with C = 5", "(4, 3)"]),
        (dict(weight=jnp.ones((5, 1, 3))), ["weight", "drop the middle axis"]),
        (dict(bias=jnp.ones(4)), ["bias", "(4,)"]),
        (dict(x=jnp.ones(5)), ["x", "rank 2"]),
        (dict(x=jnp.ones((2, 3, 5), jnp.int32)), ["x", "int32"]),
        (dict(initial_state=jnp.ones((2, 4, 5))), ["initial_state", "(2, 4, 5)"]),
    ],
)
def test_wrong_arguments(change, words, unchecked):
    inputs = make(Case())[0] | change
    with pytest.raises(ValueError) as caught:
        ejx.CausalConv1d()(**inputs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.slow
def test_wrong_options_and_steps(unchecked):
    inputs, _ = make(Case())
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(activation="gelu"), "'silu', received 'gelu'"),
        (dict(norm_size=0), "norm_size: expected a positive integer"),
        (dict(norm_size=4, sequence_axis="seq"), "norm_size: expected None with sequence_axis='seq'"),
    )
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            ejx.CausalConv1d(**options)
    with pytest.raises(ValueError, match="multiple of norm_size=2 channels, received 5"):
        ejx.CausalConv1d(norm_size=2)(**inputs)
    step = functools.partial(ejx.CausalConv1d().step, inputs["x"][:, 0], inputs["weight"], None)
    with pytest.raises(ValueError, match="state: expected shape"):
        step(inputs["initial_state"][:, :2])
    with pytest.raises(ValueError, match="one integer per row"):
        step(inputs["initial_state"], state_indices=jnp.array([0]))
