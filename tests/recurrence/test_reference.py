"""The oracle itself: against loops in numpy, and packed sequences against calls of their own."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.recurrence import cases
from tests.recurrence.cases import Case, CONSTANT, EMPTY, heads_of, KEY, make, MEMBERS, reference, SCALAR
from tests.tolerances import assert_close

HEADS: Any = dict(Hq=4, Hk=1, Hv=2, Hg=2, Hb=1)
WIDE: Any = dict(D=3, initial_state=True, dtype="float64", state_dtype="float64")


def loops(arrays: cases.RecurrenceArrays, spec: cases.RecurrenceSpec) -> tuple[np.ndarray, np.ndarray]:
    """One token, one head at a time, as the formula reads."""
    a: Any = cases.RecurrenceArrays(*(None if x is None else np.asarray(x, np.float64) for x in arrays))  # pyright: ignore[reportArgumentType]
    heads = heads_of(arrays, spec)
    batch, length, _, dim = a.q.shape
    values = a.v.shape[-1]
    out, final = np.zeros((batch, length, heads.out, values)), np.zeros((batch, heads.state, dim, values))

    def head(x, s, axis=-2):
        return s * x.shape[axis] // heads.state

    for b in range(batch):
        for s in range(heads.state):
            state = np.zeros((dim, values)) if a.initial_state is None else a.initial_state[b, s].copy()
            for t in range(length):
                if a.starts is not None and a.starts[b, t] == t:
                    state[:] = 0
                before = state.copy()
                if spec.decay == CONSTANT:
                    state *= np.exp(a.g[b, head(a.g, s, -1)])
                elif spec.decay == SCALAR:
                    state *= np.exp(a.g[b, t, head(a.g, s, -1)])
                elif a.g is not None:
                    factor = np.exp(a.g[b, t, head(a.g, s)])
                    state *= factor[:, None] if spec.decay == KEY else factor[None]
                k, v = a.k[b, t, head(a.k, s)], a.v[b, t, head(a.v, s)]
                write = v - k @ state if spec.delta else v
                strength = 1.0 if a.beta is None else a.beta[b, t, head(a.beta, s, -1)]
                state += strength * np.outer(k, write)
                if a.a is not None and a.b is not None:
                    state += np.outer(a.b[b, t, head(a.b, s)], a.a[b, t, head(a.a, s)] @ before)
                for r in range(heads.out):
                    if r * heads.state // heads.out == s:
                        q = a.q[b, t, r * a.q.shape[-2] // heads.out]
                        out[b, t, r] = spec.scale * q @ (before if spec.before else state)
                        if a.skip is not None:
                            out[b, t, r] += a.skip[b, s] * v
            final[b, s] = state
    return out, final


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case", [*MEMBERS, cases.NAMED["dplr-heads"], cases.NAMED["gla-before"]], ids=lambda case: case.name
)
def test_agrees_with_loops(case, enable_x64):
    heads = {} if case.skip else HEADS
    case = dataclasses.replace(case, T=9, V=5, **(heads | WIDE | {"packing": "segments"}))
    arrays, spec = make(case)
    out, state = reference.recur(arrays, spec)
    expected_out, expected_state = loops(arrays, spec)
    assert_close(out, expected_out, name="out")
    assert_close(state, expected_state, name="final state")


@pytest.mark.slow
@pytest.mark.parametrize("decay", [CONSTANT, KEY])
def test_packed_is_each_sequence_alone(decay, enable_x64):
    case = Case(B=1, T=20, V=4, decay=decay, delta=True, packing="offsets", **WIDE)
    arrays, spec = make(case)
    g = arrays.g
    assert g is not None and arrays.initial_state is not None
    initial = arrays.initial_state[:, :4]
    arrays = arrays._replace(offsets=jnp.asarray([[2, 7, 7, 8, 19]], jnp.int32), initial_state=initial)
    out, states = reference.recur(arrays, spec)
    assert arrays.offsets is not None
    offsets = np.asarray(arrays.offsets[0])
    assert not np.asarray(out[:, :2]).any() and not np.asarray(out[:, 19:]).any()
    for n, (first, end) in enumerate(itertools.pairwise(offsets)):
        cut = lambda x, first=first, end=end: x[:, first:end]
        alone = arrays._replace(q=cut(arrays.q), k=cut(arrays.k), v=cut(arrays.v), offsets=None)
        alone = alone._replace(g=g if decay == CONSTANT else cut(g), initial_state=initial[:, n])
        expected, state = loops(alone, spec)
        assert_close(cut(out), expected)
        assert_close(states[:, n], state)


@pytest.mark.few(2)
@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.name)
def test_nothing_gives_the_initial_state(case):
    arrays, spec = make(case)
    out, state = reference.recur(arrays, spec)
    assert out.size == 0
    expected = np.zeros(state.shape) if arrays.initial_state is None else arrays.initial_state
    np.testing.assert_array_equal(state, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("transposed", [False, True])
def test_step_in_slots_is_one_token(transposed, enable_x64):
    case = Case(B=3, T=1, V=4, decay=KEY, delta=True, beta=1.0, **HEADS, **WIDE)
    arrays, spec = make(case)
    expected, state = loops(arrays, spec)
    turn = (lambda x: x.swapaxes(-1, -2)) if transposed else (lambda x: x)
    slots = np.asarray([4, -1, 0])
    pool = np.random.default_rng(0).standard_normal((6, *turn(state).shape[1:]))
    before = pool.copy()
    pool[[4, 0]] = turn(np.asarray(arrays.initial_state))[[0, 2]]
    q, k, v, g, beta = (x[:, 0] for x in arrays[:5] if x is not None)
    given = cases.StepArrays(q, k, v, jnp.asarray(pool), g, beta, None, jnp.asarray(slots))
    out, new = reference.step(given, cases.RecurrenceSpec(spec.scale, KEY, True, transposed=transposed))
    expected[1] = 0
    assert_close(out, expected[:, 0])
    before[[4, 0]] = turn(state)[[0, 2]]
    assert_close(new, before)
