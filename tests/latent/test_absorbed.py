"""The absorbed form on dense latents and over pages, on XLA and by the interpreted kernels: the numbers of the expanded form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import platforms
from tests.attention.dense import causal, normal, quick
from tests.latent.cases import exact_absorbed, LATENT, latents_of, NOPE, ROPE
from tests.tolerances import assert_close

SCALE = (NOPE + ROPE) ** -0.5


platform = platforms()


def assert_agrees(found, expected, dtype="float32"):
    for x, y, name in zip(found, expected, ("out", "lse"), strict=True):
        assert_close(x, y, dtype, name=name)


def rows(q_starts, q_lengths, kv_lengths, t, s, causal):
    """Which keys each query sees, `[B, 1, T, S]`."""
    place, j = np.arange(t)[None, :, None] - q_starts[:, None, None], np.arange(s)
    position = kv_lengths[:, None, None] - q_lengths[:, None, None] + place if causal else s
    real = (place >= 0) & (place < q_lengths[:, None, None])
    return (real & (j <= position) & (j < kv_lengths[:, None, None]))[:, None]


@pytest.mark.parametrize("is_causal", [True, False])
def test_dense_rows(platform, is_causal):
    """Of unequal lengths, with padding queries on both sides; what is behind a length may be NaN."""
    given = latents_of(3, t=5, s=30) | {"sinks": normal(8, 3)}
    starts, counts, lengths = np.array([0, 2, 1]), np.array([5, 3, 2]), np.array([30, 0, 17])
    seen = rows(starts, counts, lengths, 5, 30, is_causal)
    behind = (np.arange(30) >= lengths[:, None])[..., None]
    poisoned = {name: jnp.where(behind, jnp.nan, given[name]) for name in ("latent", "k_rope")}
    op = ejx.AbsorbedLatentAttention(is_causal, softmax_scale=SCALE, platform=platform)
    how = {"q_starts": starts, "q_lengths": counts, "kv_lengths": lengths}
    found = quick(lambda a, how: op(**a, **how, return_lse=True))(given | poisoned, how)
    out, lse = exact_absorbed(given, seen, scale=SCALE)
    # Queries of no sequence join no sinks either.
    lse = np.where(
        ((np.arange(5) >= starts[:, None]) & (np.arange(5) < (starts + counts)[:, None]))[..., None],
        lse,
        -np.inf,
    )
    assert_agrees(found, (out, lse))


@pytest.mark.parametrize("queries, is_causal", [((1, 1, 1), False), ((4, 1, 0), True)])
def test_pages(platform, queries, is_causal):
    """Sequences of unequal lengths in shuffled pages, the rest of them NaN."""
    lengths, size, tables = np.array([9, 4, 7]), 4, [[5, 1, 3], [0], [2, 6]]
    batch = ejx.RaggedBatch.build(list(queries), lengths, tables, page_size=size)
    cache = jax.tree.map(lambda x: x * jnp.nan, ejx.PagedLatentCache.init(8, size, LATENT, ROPE)).bind(batch)
    every, own = latents_of(3, t=1, s=9), []
    weights = {name: every[name] for name in ("w_uk", "w_uv")}
    for n, table in enumerate(tables):
        own.append({name: every[name][n, : lengths[n]] for name in ("latent", "k_rope")})
        slots = [table[j // size] * size + j % size for j in range(lengths[n])]
        cache = cache.append(own[n]["latent"], own[n]["k_rope"], jnp.asarray(slots))
    q = latents_of(t=batch.num_tokens)["q"]
    op = ejx.AbsorbedLatentAttention(is_causal, softmax_scale=SCALE, platform=platform)
    sizes: Any = dict(query_start_loc=batch.query_start_loc, max_query_len=max(queries))
    out, lse = quick(lambda q, cache: op(q, cache, **weights, **sizes, return_lse=True))(q, cache)
    starts = np.concatenate([[0], np.cumsum(queries)])
    for n, count in enumerate(queries):
        at = slice(starts[n], starts[n + 1])
        seen = causal(count, lengths[n]) if is_causal else True
        expected = exact_absorbed(weights | own[n] | {"q": q[at]}, seen, scale=SCALE)
        assert_agrees((out[at], lse[at]), expected)


@pytest.mark.parametrize("lead, dtype", [((), "float32"), ((2, 2), "bfloat16")])
def test_any_leading_axes(platform, lead, dtype):
    given = latents_of(*lead, t=4, s=20, dtype=jnp.dtype(dtype))
    op = ejx.AbsorbedLatentAttention(
        sliding_window=6, softmax_scale=SCALE, logits_soft_cap=2.0, platform=platform
    )
    seen = causal(4, 20) & ~causal(4, 20, 10)
    assert_agrees(op(**given, return_lse=True), exact_absorbed(given, seen, scale=SCALE, cap=2.0), dtype)


def test_without_weights(platform):
    """Queries and outputs in the channels of the latents."""
    given = latents_of(2, t=2, s=11)
    op = ejx.AbsorbedLatentAttention(softmax_scale=SCALE, platform=platform)
    q, own = given["q"][..., :NOPE], given["q"][..., NOPE:]
    q = jnp.concatenate([jnp.einsum("bthd,hdr->bthr", q, given["w_uk"], precision="highest"), own], axis=-1)
    out = op(q, given["latent"], given["k_rope"])
    assert out.shape == (2, 2, 3, LATENT)
    out = jnp.einsum("bthr,hvr->bthv", out, given["w_uv"], precision="highest")
    assert_close(out, exact_absorbed(given, causal(2, 11), scale=SCALE)[0], "float32")


def test_a_chunk_of_a_prompt_is_expanded_and_what_was_before_is_not(platform):
    """Merged by their lse, they are the whole."""
    given = latents_of(2, t=6, s=24)
    k = jnp.einsum("bsr,hdr->bshd", given["latent"], given["w_uk"], precision="highest")
    v = jnp.einsum("bsr,hvr->bshv", given["latent"], given["w_uv"], precision="highest")
    past = ejx.AbsorbedLatentAttention(False, softmax_scale=SCALE, platform=platform)
    chunk = ejx.MultiHeadLatentAttention(causal=True, platform=platform)
    merged = ejx.merge_attention(
        past(**given, kv_lengths=18, return_lse=True),
        chunk(given["q"], k[:, 18:], given["k_rope"][:, 18:], v[:, 18:], return_lse=True),
    )
    assert_agrees(merged, exact_absorbed(given, causal(6, 24), scale=SCALE))


def test_it_has_no_gradient():
    given = latents_of(t=1)
    with pytest.raises(ejx.UnsupportedError, match=r"latents in a cache.*no gradient\n.*without a cache"):
        jax.grad(lambda q: ejx.AbsorbedLatentAttention(softmax_scale=1.0)(**given | {"q": q}).sum())(
            given["q"]
        )


Absorbed = ejx.AbsorbedLatentAttention
OP = Absorbed(softmax_scale=1.0)
WRONG = {
    "no scale": (lambda a: Absorbed(), "softmax_scale: expected a number"),
    "a window of all keys": (
        lambda a: Absorbed(False, 4, softmax_scale=1.0),
        "sliding_window: expected None",
    ),
    "no rotary keys": (lambda a: OP(**a | {"k_rope": None}), "k_rope: expected the rotary keys"),
    "another weight": (lambda a: OP(**a | {"w_uk": a["w_uk"][:2]}), "w_uk: expected shape"),
    "another width": (lambda a: OP(**a | {"w_uk": None}), "q: expected latent and rotary channels"),
    "offsets of rows": (lambda a: OP(**a, query_start_loc=jnp.arange(2)), "query_start_loc: expected None"),
    "too long": (lambda a: OP(**a, kv_lengths=27), "kv_lengths: expected numbers from 0 to 26"),
    "no keys": (lambda a: OP(**a | {name: a[name][:0] for name in ("latent", "k_rope")}), "at least one key"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, unchecked):
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        change(latents_of())
