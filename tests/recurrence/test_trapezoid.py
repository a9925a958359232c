"""Mamba-3 against numbers of its published code, angles over many tokens, and ranks in 16 bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel_eqx as ejx
from ejkernel_eqx.core.frame import frame_of
from ejkernel_eqx.recurrence.neighbours import neighbours_of, turns
from tests.recurrence.operations import CASES
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

T, H, N, P = 3, 2, 4, 2
# The gated outputs and the last `h`, in float64, of the functions `mamba3_siso_step_ref` and `mamba3_MIMO_step_ref` in the tests of
# state-spaces/mamba, commit e9594ce1, run with PyTorch on the inputs that are drawn below.
PUBLISHED = {
    None: (
        [0.3052433600, 0.4121097166, -0.2987686607, 0.4057123106, 0.7133912249, 0.1307180780]
        + [0.4628529810, 0.0984308270, 0.2574011137, -1.3217214465, -0.0956227186, 0.3548515277],
        [1.0343724866, 0.7093731635, -0.4492706042, 0.5897782096, -0.5238964335, 0.7474537449]
        + [1.2585747024, -1.2784074038, -0.0607192457, -0.1026313602, 0.2097610352, -0.1115165776]
        + [-0.0278851580, 0.0572133812, 0.3055689816, 0.1661811909],
    ),
    2: (
        [0.5052289636, -0.1035204820, -0.6631907502, -0.0076101321, -1.8526917913, 0.5146128667]
        + [0.5307521548, 0.0046347492, -2.4724515718, 0.0796595287, -3.0563648982, 0.0007070027],
        [-1.9154867959, 1.5581756146, 3.0865276220, -1.5573461404, 0.2983998077, -0.2568050565]
        + [0.1013864033, 0.1459071543, 0.3469091025, 0.9157774846, 0.5333853670, 0.5493354826]
        + [0.0810246287, -0.1854165238, 0.0372953328, -0.1254029155],
    ),
}


@pytest.mark.parametrize("ranks", PUBLISHED)
def test_numbers_of_published_code(ranks, enable_x64):
    random, several = np.random.default_rng(3), ranks or 1
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape))
    x, dt, g = normal(T, H, P), jnp.abs(normal(T, H)), -jnp.abs(normal(T, H))
    B, C, trap, angles = normal(T, several, 1, N), normal(T, several, 1, N), normal(T, H), normal(T, H, 2)
    shared = {name: normal(H, several, N) for name in ("B_bias", "C_bias")} | {"D": normal(H)}
    shared |= {} if ranks is None else {"mimo_x": normal(H, ranks, P)}
    z = normal(T, H, P)
    call = quick(ejx.StateSpaceV3(platform="xla").__call__)
    y, (S, last) = call(x, dt, g, B, C, jax.nn.sigmoid(trap), jnp.pi * jnp.tanh(angles), **shared)
    factors = shared.get("mimo_x", jnp.ones((H, 1, P)))
    if ranks is None:
        y = y[:, 0] * jax.nn.silu(z)
    else:
        gate, out = normal(H, ranks, P), normal(H, ranks, P)
        y = jnp.einsum("trhp,hrp->thp", y * jax.nn.silu(jnp.einsum("thp,hrp->trhp", z, gate)), out)
    size = several * N
    key, value, weight = last[:, :size].reshape(H, -1, N), last[:, size : size + P], last[:, size + P]
    h = S + jnp.einsum("h,hrp,hrn->hpn", weight, value[:, None] * factors, key)
    expected = [np.reshape(x, like.shape) for x, like in zip(PUBLISHED[ranks], (y, h))]
    # As many digits as are written down.
    np.testing.assert_allclose(y, expected[0], atol=2e-9)
    np.testing.assert_allclose(h, expected[1], atol=2e-9)


@pytest.mark.parametrize("length", [65, 64 * 64 + 130])
def test_angles_over_many_tokens(length):
    """Whole turns aside they are the sums in float64: of rows, of segments within one and over several blocks, and of one that enters."""
    x = np.random.default_rng(0).uniform(-1, 3, (2, length, 1, 2)).astype(np.float32)
    begins = np.zeros((2, length), bool)
    begins[1, [5, 9, length // 2, length - 1]] = True
    starts = np.maximum.accumulate(np.where(begins, np.arange(length), -1), axis=1).astype(np.int32)
    before = np.cumsum(x, 1, dtype=np.float64)
    of_segments = before - np.take_along_axis(before - x, np.maximum(starts, 0)[..., None, None], 1)
    for of, expected in ((None, before), (jnp.asarray(starts), of_segments)):
        found = np.asarray(quick(lambda x, of=of: turns(x, of, 1))(x), np.float64)
        assert np.abs(found).max() <= np.pi + 1e-5
        # Each addition rounds a number of at most 64 tokens' angles.
        for part in (np.cos, np.sin):
            np.testing.assert_allclose(part(found), part(expected), atol=2e-4)


IDS = np.array([[0, 0, -1, 0, 3, 3, -1, 7, 7], [-1, 5, 5, -1, 1, -1, -1, -1, -1], [-1] * 9])
OFFSETS = [1, 4, 4, 6, 8]


@pytest.mark.parametrize("packing", ["segments", "offsets"])
def test_the_token_before_each_and_the_last(packing):
    """Padding is skipped. A segment begins with zero, and what enters is the token before the first one of a row, or of each sequence."""
    x = np.arange(1.0, 28).reshape(3, 9, 1, 1).astype(np.float32)
    ids, given = IDS, {"cu_seqlens": None, "segment_ids": jnp.asarray(IDS)}
    if packing == "offsets":
        x, given = x[0], {"cu_seqlens": jnp.asarray(OFFSETS), "segment_ids": None}
        place = np.arange(9)
        ids = np.stack([np.where((a <= place) & (place < b), 0, -1) for a, b in itertools.pairwise(OFFSETS)])
    entering = -np.arange(1.0, 1 + len(ids), dtype=np.float32)[:, None, None]

    @quick
    def call(x, entering):
        tokens = neighbours_of(frame_of(x, "x", "H P", **given, reverse=False), x)
        return tokens.shift(x, entering), tokens.end(x, entering)

    shifted, last = map(np.asarray, call(x, entering))
    rows, shifted = (np.broadcast_to(y, (len(ids), *y.shape[-3:])) for y in (x, shifted))
    for n in range(len(ids)):
        latest, of_segment = entering[n], None
        for t in np.flatnonzero(ids[n] >= 0):
            begins = of_segment is not None and ids[n, t] != of_segment
            np.testing.assert_array_equal(shifted[n, t], 0 if begins else latest, err_msg=f"{n}, {t}")
            latest, of_segment = rows[n, t], ids[n, t]
        np.testing.assert_array_equal(last[n], latest)


@pytest.mark.slow
def test_ranks_in_sixteen_bits():
    case = CASES["trapezoid ranks"]
    arrays, state = case.make(2, 70, dtype=jnp.bfloat16), case.make_state(2, dtype=jnp.float32)
    y, (S, last) = quick(case.run(case.module(state_dtype=jnp.bfloat16)))(arrays, state)
    assert (y.dtype, S.dtype, last.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    expected, _ = quick(case.run(case.module()))(wide(arrays), wide(state))
    assert_close(y, expected, jnp.bfloat16)


@pytest.mark.slow
def test_tokens_that_a_mesh_splits_without_a_sequence_axis():
    """All devices then have all of them, also outside of `jit`."""
    case = CASES["trapezoid"]
    arrays = case.make(2, 8, dtype=jnp.float32)
    expected, _ = quick(lambda arrays: case.call(case.module(), arrays))(arrays)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    split = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(None, "tokens")))
    for compiled in (quick, lambda f: f):
        found, _ = compiled(lambda arrays: case.call(case.module(), arrays))(split)
        assert_close(found, expected)
