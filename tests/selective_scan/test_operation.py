"""`StateSpaceV1` in float64 on XLA: packing, padding, reverse, decoding, transformations; and a part of it on the interpreted kernels."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.arrays import array
from tests.recurrence.quick import quick
from tests.selective_scan.test_xla import xla
from tests.tolerances import assert_close

PER_TOKEN = ("x", "dt", "B", "C", "z")
T, I, N = 11, 4, 3


def module(platform="xla", **options):
    given: dict[str, Any] = {"config": xla.XlaConfig(4)} if platform == "xla" else {"platform": platform}
    given = {"dt_softplus": True} | given | options
    return ejx.StateSpaceV1(**given)


def make(*lead: int, length: int | None = T, dtype="float64", groups=1, I=I):
    rng = np.random.default_rng(0)
    normal = lambda *shape: array(rng.normal(size=shape), dtype)
    tokens = lead if length is None else (*lead, length)
    projection = (*tokens, N) if groups == 1 else (*tokens, groups, N)
    return dict(
        x=normal(*tokens, I),
        dt=normal(*tokens, I),
        A=-jnp.abs(normal(I, N)),
        B=normal(*projection),
        C=normal(*projection),
        D=normal(I),
        z=normal(*tokens, I),
        dt_bias=normal(I),
    ), normal(*lead, I, N)


def call(function, arrays, *positional, **named):
    first = ("x", "dt", "A", "B", "C")
    rest = {name: x for name, x in arrays.items() if name not in first}
    return function(*(arrays[name] for name in first), *positional, **rest, **named)


def at(arrays, index):
    return {name: x[index] if name in PER_TOKEN else x for name, x in arrays.items()}


@functools.partial(quick, static_argnums=0)
def with_gradients(function, arrays, state):
    def total(arrays, state):
        results = function(arrays, state)
        return sum(jnp.sum(jnp.sin(1 + x)) for x in jax.tree.leaves(results)), results

    (_, results), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(arrays, state)
    return results, gradients


def agree(first, second):
    jax.tree.map(lambda x, y: assert_close(x, y, kind="gradient"), first, second)


def poisoned(arrays, real):
    """NaN in every argument of a token that is padding."""
    hide = lambda x: jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim)), x, jnp.nan)
    return {name: hide(x) if name in PER_TOKEN else x for name, x in arrays.items()}


OFFSETS = np.array([1, 6, 6, 7, 10])


def apart(op, arrays, states):
    """Every sequence of `OFFSETS` by itself; the outputs in their places."""
    out, finals = jnp.zeros((T, I), arrays["x"].dtype), []
    for n, (begin, end) in enumerate(itertools.pairwise(OFFSETS)):
        y, final = call(op, at(arrays, slice(begin, end)), initial_state=states[n])
        out, finals = out.at[begin:end].set(y), [*finals, final]
    return out, jnp.stack(finals)


@pytest.mark.slow
@pytest.mark.parametrize("platform, reverse", [("xla", False), ("triton-interpret", True)])
def test_packed_sequences_are_those_alone(platform, reverse, enable_x64):
    dtype = "float64" if platform == "xla" else "float32"
    arrays, _ = make(dtype=dtype)
    states = make(len(OFFSETS) - 1, length=None, dtype=dtype)[1]
    seen = (np.arange(T) >= OFFSETS[0]) & (np.arange(T) < OFFSETS[-1])
    packed = module(platform, reverse=reverse)
    alone = module(reverse=reverse)
    run = lambda arrays, states: call(packed, arrays, initial_state=states, cu_seqlens=jnp.asarray(OFFSETS))
    got = with_gradients(run, poisoned(arrays, seen), states)
    agree(got, with_gradients(functools.partial(apart, alone), arrays, states))
    assert not any(np.asarray(got[1][0][name])[~seen].any() for name in PER_TOKEN)


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_rates_without_bound(platform, enable_x64):
    """A state of an infinite rate holds the last token's alone, and what it held where no time passes."""
    arrays, state = make(2, dtype="float64" if platform == "xla" else "float32")
    arrays |= {"dt": jnp.abs(arrays["dt"]).at[:, ::3].set(0), "dt_bias": 0 * arrays["dt_bias"]}
    rates = lambda rate: arrays | {"A": arrays["A"].at[1].set(rate)}
    run = lambda op: lambda arrays, state: call(op, arrays, initial_state=state)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (rates(-1e9), state))
    got = with_gradients(run(module(platform, dt_softplus=False)), rates(-jnp.inf), state)
    want = with_gradients(run(module(dt_softplus=False)), *wide)
    for gradients in (got[1][0], want[1][0]):
        # Where no time passes the slope in time is as steep as the rate.
        gradients["dt"] = gradients["dt"].at[:, ::3, 1].set(0)
        gradients["dt_bias"] = gradients["dt_bias"].at[1].set(0)
    agree(got, want)


IDS = np.array([[0, 0, -1, 0, 3, 3, 3, -1, -1, 7, -1], [-1, -1, 5, 5, 5, 5, 5, 1, 1, 1, 1]])


def by_segment(op, arrays, state):
    """Row by row, the padding taken out and a segment after the other."""
    outs, finals = [], []
    for b in range(2):
        row, last, out = at(arrays, b), state[b], jnp.zeros((T, I), arrays["x"].dtype)
        ids = IDS[b]
        for n, segment in enumerate(dict.fromkeys(i for i in ids if i >= 0)):
            where = np.flatnonzero(ids == segment)
            y, last = call(op, at(row, where), initial_state=last if n == 0 else jnp.zeros_like(last))
            out = out.at[where].set(y)
        outs, finals = [*outs, out], [*finals, last]
    return jnp.stack(outs), jnp.stack(finals)


@pytest.mark.slow
@pytest.mark.parametrize("platform, softplus", [("xla", False), ("triton-interpret", True)])
def test_segments_and_padding(platform, softplus, enable_x64):
    arrays, state = make(2, dtype="float64" if platform == "xla" else "float32")
    op, plain = module(platform, dt_softplus=softplus), module(dt_softplus=softplus)
    run = lambda a, s: call(op, a, initial_state=s, segment_ids=jnp.asarray(IDS))
    agree(
        with_gradients(run, poisoned(arrays, IDS >= 0), state),
        with_gradients(functools.partial(by_segment, plain), arrays, state),
    )


def test_reverse_is_flipped_time(enable_x64):
    arrays, state = make(2)
    flip = lambda x: jnp.flip(x, 1)
    out, final = call(module(reverse=True), arrays, initial_state=state)
    expected, last = call(module(), at(arrays, (slice(None), slice(None, None, -1))), initial_state=state)
    assert_close(out, flip(expected))
    assert_close(final, last)


@pytest.mark.few(1)
@pytest.mark.parametrize("groups", [1, 2])
def test_steps_and_parts_are_the_whole(groups, enable_x64):
    op = module(num_groups=groups)
    arrays, state = make(2, length=6, groups=groups)
    out, final = call(op, arrays, initial_state=state)
    part = lambda where: at(arrays, (slice(None), where))
    first, between = call(op, part(slice(0, 4)), initial_state=state)
    second, last = call(op, part(slice(4, None)), initial_state=between)
    assert_close(jnp.concatenate([first, second], 1), out)
    assert_close(last, final)
    outs = []
    for t in range(6):
        y, state = call(op.step, part(t), state)
        outs.append(y)
    assert_close(jnp.stack(outs, 1), out)
    assert_close(state, final)


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_step_with_slots(platform):
    op, slots = module(platform), jnp.array([3, -1, 0])
    arrays, _ = make(3, length=None, dtype="float32")
    pool = make(5, length=None, dtype="float32")[1]
    out, new = call(op.step, arrays, pool, state_indices=slots)
    own, states = call(module().step, arrays, pool[slots])
    assert not np.any(np.asarray(out[1]))
    for row, slot in ((0, 3), (2, 0)):
        assert_close(out[row], own[row])
        assert_close(new[slot], states[row])
    for untouched in (1, 2, 4):
        np.testing.assert_array_equal(new[untouched], pool[untouched])


def test_gradients_of_an_interpreted_step():
    arrays, state = make(2, length=None, dtype="float32")
    step = lambda op: lambda a, s: call(op.step, a, s)
    agree(*(with_gradients(step(op), arrays, state) for op in (module("triton-interpret"), module())))


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_vmap_and_leading_axes(platform):
    """A mapped axis is a leading one; what is not mapped takes the sum of gradients."""
    arrays, state = make(2, length=5, dtype="float32")
    op = module(platform)
    axes = {name: 0 if name in PER_TOKEN else None for name in arrays}
    run = lambda op: lambda a, s: call(op, a, initial_state=s)
    mapped = jax.vmap(run(op), in_axes=(axes, 0))
    agree(with_gradients(mapped, arrays, state), with_gradients(run(module()), arrays, state))


def test_no_token_leaves_the_state():
    arrays, state = make(2, length=0, dtype="float32")
    out, final = call(module(state_dtype=jnp.bfloat16), arrays, initial_state=state.astype("bfloat16"))
    assert out.shape == (2, 0, I) and final.dtype == jnp.bfloat16
    np.testing.assert_array_equal(final, state.astype("bfloat16"))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(dt=jnp.ones((2, T, I + 1))), ["dt", "received (2, 11, 5)"]),
        (dict(A=jnp.ones((N, I))), ["A", "expected shape [4"]),
        (dict(C=jnp.ones((2, T, N + 1))), ["C", "received (2, 11, 4)"]),
        (dict(D=jnp.ones((I, 1))), ["D", "(4, 1)"]),
        (dict(initial_state=jnp.ones((2, N, I))), ["initial_state", "I N"]),
        (dict(cu_seqlens=jnp.array([0, T])), ["cu_seqlens", "leading axes"]),
        (
            dict(num_groups=3, B=jnp.ones((2, T, 3, N)), C=jnp.ones((2, T, 3, N))),
            ["divisor of the 4 channels"],
        ),
        (dict(num_groups=0), ["num_groups"]),
    ],
)
def test_what_does_not_fit(change, words, unchecked):
    arrays = make(2, dtype="float32")[0] | change
    with pytest.raises(ValueError) as caught:
        call(module(num_groups=arrays.pop("num_groups", 1)), arrays)
    assert all(word in str(caught.value) for word in words), str(caught.value)
