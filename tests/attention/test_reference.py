"""The formula that kernels are measured by: by hand, by differences, and its random bits by another formula."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention.cases import Case, make
from tests.attention.inner import AttentionArrays, AttentionSpec, philox, reference
from tests.tolerances import assert_close

attend = jax.jit(reference.attend, static_argnums=1)
philox_keep = jax.jit(philox.philox_keep, static_argnums=3)


def _philox_numpy(seeds, rows, keys):
    """Word 0 of Philox4x32-7, with 64-bit products."""
    mask = np.uint64(0xFFFFFFFF)
    k0, k1 = (np.asarray(seeds[..., n], np.uint64) for n in (0, 1))
    c = [np.asarray(x).astype(np.uint32).astype(np.uint64) for x in (rows, keys, 0, 0)]
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k0, b & mask, (a >> np.uint64(32)) ^ c[3] ^ k1, a & mask]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return c[0].astype(np.uint32)


def test_philox_known_answer():
    # The first vector of Random123's kat_vectors for philox4x32 with 7 rounds: all zeros.
    assert _philox_numpy(np.zeros((2,), np.uint32), 0, 0) == 0x5F6FB709
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**32, (2, 3, 1, 1, 2), np.uint32)
    rows = rng.integers(-(2**31), 2**31, (2, 1, 17, 1), np.int64).astype(np.int32)
    keys = np.arange(29, dtype=np.int32)
    for rate in (0.1, 0.5, 0.999):
        keep = philox_keep(jnp.asarray(seeds), jnp.asarray(rows), jnp.asarray(keys), rate)
        assert keep.shape == (2, 3, 17, 29)
        np.testing.assert_array_equal(keep, _philox_numpy(seeds, rows, keys) >= philox.threshold(rate))


def _arrays(q, k, v, **others) -> AttentionArrays:
    q, k, v = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v))
    return AttentionArrays(q, k, v, **others)


def test_by_hand():
    # Two keys with scores 0 and log 3: weights 1/4 and 3/4.
    arrays = _arrays([[1.0]], [[0.0], [np.log(3.0)]], [[4.0], [8.0]])
    out, lse = attend(arrays, AttentionSpec(scale=1.0))
    assert_close(out, np.full((1, 1, 1, 1), 7.0))
    assert_close(lse, np.full((1, 1, 1), np.log(4.0)))
    # A sink of log 4 takes half of the weight; ALiBi of slope log 2 doubles the weight of each next key.
    out, lse = attend(arrays._replace(sinks=jnp.full((1, 1), np.log(4.0))), AttentionSpec(scale=1.0))
    assert_close(out, np.full((1, 1, 1, 1), 3.5))
    assert_close(lse, np.full((1, 1, 1), np.log(8.0)))
    out, _ = attend(arrays._replace(alibi_slopes=jnp.full((1, 1), np.log(2.0))), AttentionSpec(scale=1.0))
    assert_close(out, np.full((1, 1, 1, 1), (4.0 + 6 * 8.0) / 7))
    # The soft cap bends log 3 to tanh(log 3) = 0.8.
    out, lse = attend(arrays, AttentionSpec(scale=1.0, logits_soft_cap=1.0))
    assert_close(lse, np.full((1, 1, 1), np.log(1 + np.exp(0.8))))


def test_window_by_hand():
    v = [[1.0], [10.0], [100.0], [1000.0]]
    arrays = _arrays(np.zeros((3, 1)), np.zeros((4, 1)), v)
    # Positions 1, 2, 3; each sees its own key and one to the left.
    out, lse = attend(arrays, AttentionSpec(scale=1.0, left=1, right=0, offset=1))
    assert_close(out[0, :, 0, 0], np.array([5.5, 55.0, 550.0]))
    assert_close(lse[0, 0], np.full(3, np.log(2.0)))
    # Positions -2, -1, 0: only the last sees a key.
    out, lse = attend(arrays, AttentionSpec(scale=1.0, right=0, offset=-2))
    assert_close(out[0, :, 0, 0], np.array([0.0, 0.0, 1.0]))
    assert_close(lse[0, 0], np.array([-np.inf, -np.inf, 0.0]))


def test_hidden_nan_reaches_nothing():
    arrays, spec = make(Case(T=6, S=8, D=4, V=4, right=0, offset=-2, sinks="1H"))
    clean = jax.jit(jax.grad(lambda a: sum(jnp.sum(x) for x in attend(a, spec))))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(clean(arrays)))
    nan = arrays._replace(
        q=arrays.q.at[:, :2].set(jnp.nan),
        k=arrays.k.at[:, 4:].set(jnp.nan),
        v=arrays.v.at[:, 4:].set(jnp.nan),
    )
    for before, after in zip(jax.tree.leaves(clean(arrays)), jax.tree.leaves(clean(nan)), strict=True):
        np.testing.assert_array_equal(before, after)
