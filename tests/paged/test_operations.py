"""The operations as they are called: what they compute, with caches and batches, and under JAX's transformations."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import exact, normal
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

H, K, D, p, P = 4, 2, 16, 4, 24
SMALL = ejx.kernel_registry.get("paged_attention", "xla").load().config_type(4, 8, 2)


def dense(lengths, seed=0, *, d=D, v=D, heads=K):
    """Keys and values of each sequence."""
    return [
        (normal(seed + 2 * n, s, heads, d), normal(seed + 2 * n + 1, s, heads, v))
        for n, s in enumerate(lengths)
    ]


@quick
def _append(cache, k, v, slots):
    return cache.append(k, v, slots)


def cached(pairs, seed=0, **options):
    """A cache that holds them, in pages of any order, and NaN everywhere else; and the table."""
    order = iter(np.random.default_rng(seed).permutation(P))
    rows = [[int(next(order)) for _ in range(-(-len(k) // p))] for k, _ in pairs]
    table = np.full((len(rows), max(map(len, rows)) + 1), -1, np.int32)
    for n, row in enumerate(rows):
        table[n, : len(row)] = row
    cache = ejx.PagedKVCache.init(P, p, K, pairs[0][0].shape[-1], pairs[0][1].shape[-1], **options)
    cache = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, np.nan, x.dtype)), cache)
    slots = [row[j // p] * p + j % p for row, (k, _) in zip(rows, pairs) for j in range(len(k))]
    k, v = (jnp.concatenate(x) for x in zip(*pairs))
    cache = _append(cache, k, v, jnp.array(slots))
    return cache.bind(table, jnp.array([len(k) for k, _ in pairs]))


def plain(q, k, v, seen=None, **options):
    """The last queries of one sequence on dense keys, and the lse: in numpy."""
    t, s = q.shape[-3], k.shape[-3]
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {name: options.pop(name) for name in ("sinks", "alibi_slopes") if name in options}
    left = options.pop("window", s + t) - 1
    i, j = np.arange(t)[:, None] + s - t, np.arange(s)
    seen = (j <= i) & (j >= i - left) if seen is None else seen
    dout = np.zeros((*q.shape[:-1], v.shape[-1]))
    return exact(arrays, dout, dout[..., 0], seen, **options)[0]


def packed(pairs, q, query_lens, **options):
    """`plain` on each sequence."""
    parts = np.split(np.asarray(q), np.cumsum(query_lens)[:-1])
    found = [plain(part, *pair, **options) for part, pair in zip(parts, pairs) if len(part)]
    return tuple(np.concatenate(x) for x in zip(*found))


def offsets(*query_lens):
    return jnp.array([0, *np.cumsum(query_lens)], jnp.int32)


def test_decode_is_the_last_row_of_attention():
    pairs, q, sinks = dense((1, 9, 14), v=8), normal(9, 3, H, D), normal(5, H, 2)
    op = ejx.PagedAttention(sliding_window=6, logits_soft_cap=2.0, config=SMALL)
    out, lse = quick(functools.partial(op, return_lse=True))(q, cached(pairs), sinks=sinks)
    expected = packed(pairs, q, (1, 1, 1), window=6, cap=2.0, sinks=sinks)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    assert out.shape == (3, H, 8)


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [1, (2, 5), None])
def test_windows_count_as_in_flash_attention(window):
    pairs, q = dense((9, 14)), normal(9, 9, H, D)
    op = functools.partial(ejx.PrefillPagedAttention(window, config=SMALL), max_query_len=6)
    out = quick(op)(q, cached(pairs), query_start_loc=offsets(3, 6))
    flash = ejx.FlashAttention(True, (2, 0) if window == (2, 5) else window)
    for part, pair in ((slice(0, 3), pairs[0]), (slice(3, 9), pairs[1])):
        assert_close(out[part], quick(flash)(q[part], *pair))


def test_append_writes_before_it_reads():
    pairs, held = dense((5, 9, 1)), (0, 8, 0)
    table = cached(pairs).page_table
    slots = jnp.array([int(table[1, j // p]) * p + j % p for j in range(8)])
    empty = ejx.PagedKVCache.init(P, p, K, D)
    before = _append(empty, pairs[1][0][:8], pairs[1][1][:8], slots).bind(table, jnp.array([5, 9, 1]))
    new = [(k[n:], v[n:]) for (k, v), n in zip(pairs, held)]
    # Behind them two tokens of no sequence.
    k, v = (jnp.concatenate([*x, jnp.full((2, K, D), jnp.nan)]) for x in zip(*new))
    q = normal(7, 9, H, D)

    @functools.partial(quick, donate_argnums=0)
    def step(cache, q, k, v):
        op = ejx.RaggedPagedAttention(append=True, config=SMALL)
        return op(q, cache, k, v, query_start_loc=offsets(5, 1, 1), max_query_len=5, return_lse=True)

    given = before.k.unsafe_buffer_pointer()
    out, lse, after = step(before, q, k, v)
    expected = packed(pairs, q[:7], (5, 1, 1))
    assert_close(out[:7], expected[0])
    assert_close(lse[:7], expected[1])
    assert (out[7:] == 0).all() and (lse[7:] == -jnp.inf).all()
    assert after.k.unsafe_buffer_pointer() == given and before.k.is_deleted()
    np.testing.assert_array_equal(quick(lambda cache: cache.gather(9)[0])(after)[1], pairs[1][0])
    assert not np.isnan(np.asarray(after.k)).any()


def test_unified_decodes_a_tree():
    """Two drafts after one token: neither sees the other."""
    ((k, v),) = dense((7,))
    q, slopes = normal(9, 3, H, D), jnp.array([0.5, 0.25, 0.1, 0.0])
    bias = jnp.zeros((4, 4)).at[2, 1].set(-jnp.inf)
    op = ejx.UnifiedAttention(config=SMALL)
    call = quick(functools.partial(op, max_query_len=3))
    out = call(q, cached([(k, v)]), query_start_loc=offsets(3), alibi_slopes=slopes, qq_bias=bias)
    seen = np.tril(np.ones((3, 7), bool), 4)
    seen[2, 5] = False
    assert_close(out, plain(q, k, v, seen, alibi_slopes=slopes)[0])


@pytest.mark.parametrize(
    "platform", ["xla", "triton-interpret", pytest.param("pallas-interpret", marks=pytest.mark.slow)]
)
def test_a_finite_bias_between_drafts_hides_nothing(platform):
    """A draft that is the first token of its sequence and has the lowest bias of all is its own value."""
    if platform == "triton-interpret":
        pytest.importorskip("triton")
    ((k, v),) = dense((2,))
    bias = jnp.full((2, 2), jnp.finfo(jnp.float32).min)
    op = ejx.UnifiedAttention(platform=platform)
    call = quick(functools.partial(op, max_query_len=2))
    out = call(normal(9, 2, H, D), cached([(k, v)]), query_start_loc=offsets(2), qq_bias=bias)
    values = np.asarray(jnp.repeat(v, H // K, axis=1), np.float64)
    assert_close(out, np.stack([values[0], values.mean(0)]))


@pytest.mark.few(1)
@pytest.mark.parametrize("scales", [None, "token", "head"])
def test_latent_cache(scales):
    latent, rope, q = normal(1, 9, 24), normal(2, 9, 8), normal(3, 2, 3, H, 32)
    cache = ejx.PagedLatentCache.init(P, p, 24, 8, dtype=jnp.int8 if scales else jnp.float32, scales=scales)
    cache = cache if scales != "head" else cache.with_scales(jnp.float32(0.03), jnp.float32(0.04))
    slots = jnp.array([*range(20, 24), *range(8, 12), 0])
    cache = _append(cache, latent, rope, slots).bind(jnp.array([[5, 2, 0]]), jnp.array([9]))
    op = functools.partial(ejx.RaggedPagedAttention(softmax_scale=0.2), query_start_loc=offsets(3))
    out, lse = quick(functools.partial(op, return_lse=True))(q[0], cache)
    latents, ropes = quick(lambda cache: cache.gather(9))(cache)
    keys = np.concatenate([latents, ropes], -1)[0, :, None]
    expected = plain(q[0], keys, latents[0, :, None], scale=0.2)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    more = quick(ejx.PagedAttention(softmax_scale=0.2))(q[:, 2:], cache)  # leading axes of the queries alone
    assert_close(more[0, 0], out[2])


@pytest.mark.slow
@pytest.mark.parametrize("keys", (11, 48))
def test_dense_ranges(keys):
    """Keys that are one page, and that are several."""
    k, v, q = normal(1, 2, 2, keys, K, D), normal(2, 2, 2, keys, K, 8), normal(3, 2, 2, H, D)
    start, end = jnp.array([[0, 3], [5, 4]]), jnp.array([[keys, 7], [keys - 5, 4]])
    op = ejx.RaggedDecodeAttention(sliding_window=5, config=SMALL)
    j = jnp.arange(keys)[None, None]
    inside = (j >= start[..., None]) & (j < end[..., None])
    hidden = lambda x: jnp.where(inside[..., None, None], x, jnp.nan)
    out, lse = quick(functools.partial(op, return_lse=True))(q, hidden(k), hidden(v), start, end)
    seen = inside & (j >= end[..., None] - 5)
    expected = plain(q[..., None, :, :], k, v, seen[..., None, None, :])
    assert_close(out, expected[0][..., 0, :, :])
    assert_close(lse, expected[1][..., 0, :])
    assert (out[1, 1] == 0).all() and (lse[1, 1] == -jnp.inf).all()
    mapped = quick(jax.vmap(op, (0, 0, 0, 0, None)))(q, k, v, start, jnp.array([keys, 9]))
    assert_close(mapped, op(q, k, v, start, jnp.array([[keys, 9]] * 2)))
    one = op(q[0, 0], k[0, 0], v[0, 0], start[0, 0], end[0, 0])
    assert_close(one, out[0, 0])


@pytest.mark.slow
def test_mapped():
    pairs, q = dense((9, 14)), normal(9, 3, 5, H, D)
    op = functools.partial(
        ejx.RaggedPagedAttention(config=SMALL), query_start_loc=offsets(1, 4), return_lse=True
    )
    caches = [cached(pairs), cached(dense((9, 14), seed=20), seed=4), cached(dense((9, 14), seed=40), seed=5)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    both = quick(jax.vmap(op))(q, stacked)
    queries = quick(jax.vmap(op, (0, None)))(q, caches[0])
    explicit = quick(op)(q, caches[0])
    nested = quick(jax.vmap(jax.vmap(op, (None, 0)), (0, None)))(q[:2], stacked)
    one = quick(op)
    for n in range(3):
        for i, result in enumerate(one(q[n], caches[n])):
            assert_close(both[i][n], result)
        for i, result in enumerate(one(q[n], caches[0])):
            assert_close(queries[i][n], result)
            assert_close(explicit[i][n], result)
    for i, result in enumerate(one(q[1], caches[2])):
        assert_close(nested[i][1, 2], result)


def test_differentiation_is_refused():
    pairs, q = dense((9, 5)), normal(9, 2, H, D)
    cache, op = cached(pairs), ejx.PagedAttention()
    for differentiate in (jax.grad, jax.jacfwd):
        with pytest.raises(ejx.UnsupportedError, match=r"no gradient[\s\S]*stop_gradient"):
            differentiate(lambda q: op(q, cache).sum())(q)
    with pytest.raises(ejx.UnsupportedError, match="gather"):
        jax.grad(lambda k: op(q, eqx.tree_at(lambda c: c.k, cache, k)).sum())(cache.k)
    constant = quick(jax.grad(lambda q: (q * op(jax.lax.stop_gradient(q), cache)).sum()))(q)
    assert_close(constant, quick(op)(q, cache))
