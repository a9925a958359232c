"""The reference against the recurrence written with numpy, token by token and channel by channel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.selective_scan.cases import Case, make, named, over, padded, reference, SHARED
from tests.tolerances import assert_close

OURS = named("everything", "segments", "offsets", "many sequences", "groups of packed")


def by_hand(arrays, softplus):
    """One row."""
    given = {name: np.asarray(x, np.float64) for name, x in arrays._asdict().items() if x is not None}
    (length, channels), states = given["x"].shape, given["A"].shape[1]
    per_group = channels // given["B"].shape[1]
    bounds = given.get("offsets", np.array([0, length])).astype(int)
    shape = (len(bounds) - 1, channels, states)
    finals = np.array(given.get("initial_state", np.zeros(shape))).reshape(shape)
    out = np.zeros((length, channels))
    for s, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for t in range(begin, end):
            for i in range(channels):
                dt = given["dt"][t, i] + given.get("dt_bias", np.zeros(channels))[i]
                dt = np.log1p(np.exp(dt)) if softplus else dt
                if given.get("starts", np.full(length, -1))[t] == t:
                    finals[s, i] = 0
                group = i // per_group
                x = given["x"][t, i]
                finals[s, i] = np.exp(dt * given["A"][i]) * finals[s, i] + dt * x * given["B"][t, group]
                y = finals[s, i] @ given["C"][t, group] + given.get("D", np.zeros(channels))[i] * x
                z = given.get("z", np.zeros((length, channels)))[t, i]
                out[t, i] = y * (z / (1 + np.exp(-z)) if "z" in given else 1)
    return out, finals if "offsets" in given else finals[0]


@pytest.mark.few(1)
@over(OURS, *(case.name for case in OURS))
def test_agrees_with_numpy(case: Case, enable_x64):
    arrays, spec = make(case)
    arrays = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float64), arrays)
    out, final = reference.scan(padded(case, arrays), spec)
    assert out.dtype == final.dtype == jnp.float64
    for b in range(case.B):
        of_row = {n: x[b] for n, x in arrays._asdict().items() if x is not None and n not in SHARED}
        row = arrays._replace(**of_row)
        expected, state = by_hand(row, case.softplus)
        assert_close(out[b], expected, "float64")
        assert_close(final[b], state, "float64")


@pytest.mark.parametrize("softplus", [True, False])
def test_padding_leaves_no_gradient(softplus):
    """A time step that is minus infinity is 0, whatever bias is added to it, and passes no gradient to that bias."""
    dt = jnp.array([-jnp.inf, 0.5])
    time_step = lambda dt, bias: reference.time_step(dt, bias, softplus, jnp.float32)
    step, pull = jax.vjp(time_step, dt, jnp.ones(2))
    assert step[0] == 0 and step[1] > 1
    assert all(x[0] == 0 and x[1] > 0 for x in pull(jnp.ones(2)))
