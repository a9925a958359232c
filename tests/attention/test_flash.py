"""`FlashAttention`: what it computes, on every platform that runs anywhere, and its dropout."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.cases import xla_tiles
from tests.attention.dense import (
    causal,
    check,
    cotangents,
    exact,
    INTERPRET,
    lse_of,
    normal,
    qkv,
    quick,
    with_gradients,
)
from tests.tolerances import assert_close


def poison(arrays, q, k):
    """NaN in the tokens of `q`, and of `k` and `v`, that are marked."""
    where = dict(q=q, k=k, v=k)
    return arrays | {
        n: jnp.where(jnp.asarray(x)[..., None, None], jnp.nan, arrays[n]) for n, x in where.items()
    }


# What it computes


@pytest.mark.few(2)
@pytest.mark.parametrize("lead", [(2, 3), (1, 2, 1)], ids=str)
def test_any_number_of_leading_axes(flash, lead):
    check(lse_of(flash(causal=True)), qkv(*lead, t=20, s=26), causal(20, 26))


@pytest.mark.few(3)
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2), (8, 1)])
def test_grouped_heads_and_a_wide_value(flash, heads, kv_heads):
    check(
        lse_of(flash(softmax_scale=0.3)),
        qkv(2, t=9, s=17, heads=heads, kv_heads=kv_heads, d=24, v=40),
        scale=0.3,
    )


AT, KEYS, OFFSETS = np.arange(20), np.arange(33), np.array([[0, 5, -3], [13, 40, -30]])
BY_ROW = (AT + OFFSETS[..., None])[..., None]
LENGTHS, KEY_LENGTHS = np.array([20, 7, 0])[:, None], np.array([11, 33, 20])[:, None]
IDS = np.array([[0] * 4 + [1] * 7 + [2] * 5 + [-1] * 4, [3] * 2 + [-2] * 3 + [0] * 8 + [3] * 7])
Q_IDS = np.array([1, 1, 0, 0, 0, 2, 2, 2, 9, -1] * 2)
KEY_IDS = np.array([[0] * 11 + [1] * 11 + [2] * 11, [2, 1, 0] * 10 + [-1] * 3])
OTHERS, SOME = np.repeat([0, 0, 2, 2], 5), np.random.default_rng(0).random((2, 1, 20, 20)) < 0.5
SORTED = np.repeat([0, 1, 2, 3], 5)
same = lambda q, k: (q[..., :, None] == k[..., None, :]) & (q >= 0)[..., :, None]


class Shown(NamedTuple):
    """Options of the module and of the call, and the keys that queries see, as a function of positions or an array."""

    module: dict[str, Any]
    call: dict[str, Any]
    seen: Any
    lead: tuple[int, ...] = ()
    keys: int = 20


SHOWN = {
    "int": Shown(dict(causal=True, sliding_window=5), {}, lambda p, j: (p - 5 < j) & (j <= p), (), 33),
    "own key only": Shown(dict(causal=True, sliding_window=1), {}, lambda p, j: j == p, (), 33),
    "pair": Shown(dict(sliding_window=(5, 3)), {}, lambda p, j: (p - 5 <= j) & (j <= p + 3), (), 33),
    "left": Shown(dict(sliding_window=(5, None)), {}, lambda p, j: p - 5 <= j, (), 33),
    "right": Shown(dict(sliding_window=(None, 3)), {}, lambda p, j: j <= p + 3, (), 33),
    "causal pair": Shown(dict(causal=True, sliding_window=(5, 3)), dict(q_offset=4), lambda p, j: (p - 5 <= j) & (j <= p), (), 33),
    "an offset per row": Shown(dict(causal=True, sliding_window=8), dict(q_offset=jnp.asarray(OFFSETS)),
        ((KEYS <= BY_ROW) & (KEYS >= BY_ROW - 7))[..., None, :, :], (2, 3), 33),
    "lengths": Shown(dict(causal=True), dict(q_lengths=jnp.asarray(LENGTHS[:, 0]), kv_lengths=jnp.asarray(KEY_LENGTHS[:, 0])),
        ((AT < LENGTHS)[:, :, None] & (KEYS < KEY_LENGTHS)[:, None] & causal(20, 33))[:, None], (3,), 33),
    "a length": Shown({}, dict(kv_lengths=jnp.int32(20)), np.broadcast_to(KEYS < 20, (20, 33)), (), 33),
    "segments": Shown(dict(causal=True), dict(segment_ids=jnp.asarray(IDS)), (same(IDS, IDS) & causal(20, 20))[:, None], (2,)),
    "segments and a mask": Shown({}, dict(segment_ids=jnp.asarray(IDS), mask=ejx.Mask.causal()), (same(IDS, IDS) & causal(20, 20))[:, None], (2,)),
    "segments of keys": Shown({}, dict(segment_ids=jnp.asarray(Q_IDS), kv_segment_ids=jnp.asarray(KEY_IDS)),
        same(Q_IDS, KEY_IDS)[:, None], (2,), 33),
    # Each condition alone shows keys to some query that all together hide.
    "ids and lengths": Shown({}, dict(segment_ids=jnp.asarray(SORTED), q_lengths=jnp.int32(10)), same(SORTED, SORTED) & (AT < 10)[:, None]),
    "ids of keys, a window and lengths": Shown(dict(causal=True),
        dict(segment_ids=jnp.asarray(OTHERS), kv_segment_ids=jnp.asarray(SORTED), kv_lengths=jnp.int32(18)),
        same(OTHERS, SORTED) & causal(20, 20) & (AT < 18)),
    "two pairs of ids": Shown({}, dict(segment_ids=jnp.asarray(SORTED), mask=ejx.Mask.from_segments(jnp.asarray(OTHERS), jnp.asarray(SORTED))),
        same(SORTED, SORTED) & same(OTHERS, SORTED)),
    "a window and an array": Shown(dict(causal=True), dict(mask=jnp.asarray(SOME[0, 0] & (AT != 9) | (AT > AT[:, None]))),
        SOME[0, 0] & (AT != 9) & causal(20, 20)),
    "all": Shown(dict(causal=True, sliding_window=6),
        dict(mask=ejx.Mask.from_dense(SOME) & ejx.Mask.chunked(8) & ejx.Mask.from_lengths(kv_lengths=np.array([15, 20])),
             segment_ids=jnp.asarray(IDS)),
        same(IDS, IDS)[:, None] & SOME & (AT[:, None] // 8 == AT // 8) & causal(20, 20) & (AT > AT[:, None] - 6)
        & (AT < np.array([[15], [20]]))[:, None, None], (2,)),
}  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.parametrize("name", SHOWN)
def test_what_is_visible(flash, name):
    """With NaN in queries that see nothing, and in keys that no query sees."""
    module, call, seen, lead, keys = SHOWN[name]
    arrays = qkv(*lead, t=20, s=keys) | dict(alibi_slopes=jnp.asarray([0.3, 0.1, 0.05, 0.0]))
    positions = AT + OFFSETS[..., None] if lead == (2, 3) else AT + call.get("q_offset", keys - 20)
    shown: Any = seen(positions[:, None], KEYS) if callable(seen) else seen
    every = np.broadcast_to(shown, (*lead, 4, 20, keys))
    blind, hidden = ~every.any((-3, -1)), ~every.any((-3, -2))
    given = poison(arrays, blind, hidden)
    check(lse_of(flash(**module), **call), arrays, shown, poisoned=given, positions=positions)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [dict(causal=True), dict(sliding_window=(2, 1))],
    ids=str,
)
def test_packed_sequences_are_as_separate_ones(flash, options):
    """Different numbers of queries and keys, an empty sequence on either side, and padding behind all."""
    starts, kv_starts = np.array([0, 7, 7, 16, 21]), np.array([0, 11, 15, 15, 26])
    arrays = dict(qkv(t=24, s=30), alibi_slopes=jnp.asarray([0.3, 0.1, 0.05, 0.0]), sinks=normal(7, 4))
    module = flash(**options)
    dout, dlse = cotangents(arrays)
    real, kv_real = np.arange(24) < 21, np.arange(30) < 26
    given = poison(arrays, ~real, ~kv_real)
    packed = lse_of(module, cu_seqlens=jnp.asarray(starts), kv_cu_seqlens=jnp.asarray(kv_starts))
    (out, lse), grads = quick(lambda *a: with_gradients(lambda x: packed(**x), *a))(given, dout, dlse)
    expected = {name: np.zeros(x.shape) for name, x in arrays.items()}
    for n in range(4):
        rows, keys = slice(starts[n], starts[n + 1]), slice(kv_starts[n], kv_starts[n + 1])
        t, s = starts[n + 1] - starts[n], kv_starts[n + 1] - kv_starts[n]
        own = dict(arrays, q=arrays["q"][rows], k=arrays["k"][keys], v=arrays["v"][keys])
        distance = np.arange(s) - (np.arange(t)[:, None] + s - t)
        seen = distance <= 0 if options.get("causal") else np.ones((t, s), bool)
        seen = seen & (-2 <= distance) & (distance <= 1) if "sliding_window" in options else seen
        one, one_grads = exact(own, dout[rows], dlse[rows], seen)
        assert_close(out[rows], one[0], name=f"out of sequence {n}")
        assert_close(lse[rows], one[1], name=f"lse of sequence {n}")
        for name, index in (
            ("q", rows),
            ("k", keys),
            ("v", keys),
            ("alibi_slopes", slice(None)),
            ("sinks", slice(None)),
        ):
            expected[name][index] += one_grads[name]
    # What lies past the last offset sees nothing: zero, with the sinks for a denominator.
    assert not np.asarray(out[21:]).any()
    np.testing.assert_allclose(lse[21:], np.broadcast_to(arrays["sinks"], (3, 4)), rtol=1e-6)
    expected["sinks"] += np.asarray(dlse[21:], np.float64).sum(0)
    for name, gradient in expected.items():
        assert_close(grads[name], gradient, kind="gradient", name=name)


@pytest.mark.few(3)
@pytest.mark.parametrize("pattern", ["B1T1", "1H1S", "TS", "S"])
@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_every_way_to_broadcast(flash, pattern, kind):
    sizes = dict(B=2, H=4, T=20, S=26)
    shape = tuple(1 if letter == "1" else sizes[letter] for letter in pattern)
    arrays = qkv(2)
    if kind == "bias":
        check(lse_of(flash(causal=True)), dict(arrays, bias=normal(5, *shape)), causal(20, 26))
    else:
        mask = np.random.default_rng(0).random(shape) < 0.6
        check(lse_of(flash(), mask=jnp.asarray(mask)), arrays, mask)


@pytest.mark.few(1)
def test_a_bias_of_another_dtype(flash):
    check(lse_of(flash()), dict(qkv(2), bias=normal(5, 1, 4, 20, 26, dtype=jnp.bfloat16)))


@pytest.mark.parametrize(
    "platform", ["xla", "triton-interpret", pytest.param("pallas-interpret", marks=pytest.mark.slow)]
)
def test_a_finite_bias_hides_nothing(platform):
    """A row whose biases are all as low as floats go is the mean of its visible values; the others are as with minus infinity."""
    if platform == INTERPRET:
        pytest.importorskip("triton")
    low = np.finfo(np.float32).min
    bias = np.zeros((20, 26), np.float32)
    bias[3], bias[5, 10:], bias[7, 3:], bias[7, :3], bias[9] = low, low, low, -np.inf, 0.5 * low
    bias[11, 4] = -low
    arrays = dict(qkv(), bias=jnp.asarray(bias))
    dout, dlse = cotangents(arrays)
    (out, _), _ = exact(arrays, dout, dlse)
    call = lse_of(ejx.FlashAttention(platform=platform))
    (actual, lse), grads = quick(lambda *a: with_gradients(lambda x: call(**x), *a))(arrays, dout, dlse)
    assert_close(actual, out)
    assert np.isfinite(np.asarray(lse)).all()
    assert all(np.isfinite(np.asarray(x)).all() for x in grads.values())


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
def test_sinks(flash, shape):
    check(lse_of(flash(causal=True)), dict(qkv(2), sinks=normal(5, *shape)), causal(20, 26))


def test_soft_cap_and_slopes(flash):
    arrays = dict(
        qkv(2),
        alibi_slopes=jnp.asarray([0.5, 0.25, 0.1, 0.0]),
        bias=normal(5, 1, 4, 20, 26),
        sinks=normal(6, 4),
    )
    arrays["q"] = 4 * arrays["q"]
    check(lse_of(flash(causal=True, logits_soft_cap=2.0)), arrays, causal(20, 26), cap=2.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("t, s", [(0, 5), (5, 0), (0, 0)])
def test_empty(flash, t, s):
    arrays = dict(qkv(2, t=t, s=s), bias=normal(5, 1, 4, t, s), sinks=normal(6, 4), alibi_slopes=normal(7, 4))
    check(lse_of(flash()), arrays)
    del arrays["sinks"]
    ragged = (
        dict(kv_lengths=jnp.zeros((2,), int)),
        dict(segment_ids=jnp.zeros((t,), int), kv_segment_ids=jnp.zeros((s,), int)),
    )
    for options in ({}, *ragged):
        check(lse_of(flash(causal=True), **options), arrays, False)


EMPTY_ROWS: dict[str, dict] = {
    "padding": dict(segment_ids=jnp.asarray([0] * 9 + [-1] * 11)),
    "lengths": dict(q_lengths=jnp.asarray([9])),
    "mask": dict(mask=jnp.asarray(np.arange(20) < 9)[:, None]),
    "window": dict(q_offset=17),  # a window of 6 keys: from the tenth query on behind the last
    "bias": dict(bias=jnp.where(jnp.arange(20) < 9, 0, -jnp.inf)[:, None]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "hide, sinks", [*((hide, hide != "bias") for hide in EMPTY_ROWS), ("padding", False)]
)
def test_cotangents_of_rows_that_see_nothing(flash, hide, sinks):
    """NaN in the cotangents of output and lse takes no part, whatever hides: the gradients are those of the other rows."""
    arrays, options = qkv(1, t=20, s=20), dict(EMPTY_ROWS[hide])
    arrays |= dict(sinks=normal(6, 4)) if sinks else {}
    arrays |= dict(bias=options.pop("bias")) if hide == "bias" else {}
    window, early = hide == "window", np.arange(20) < 9
    seen = early[:, None] & (early | (hide != "padding"))
    if window:
        distance = np.arange(20)[:, None] + 17 - np.arange(20)
        seen = (distance >= 0) & (distance < 6)
    empty = ~seen.any(1)
    assert empty.any() and not empty.all()
    dout, dlse = cotangents(arrays)
    clean, clean_lse = (jnp.where(empty.reshape(-1, *[1] * (x.ndim - 2)), 0, x) for x in (dout, dlse))
    poisoned, poisoned_lse = (
        jnp.where(empty.reshape(-1, *[1] * (x.ndim - 2)), jnp.nan, x) for x in (dout, dlse)
    )
    call = lse_of(flash(causal=window, sliding_window=6 if window else None), **options)
    run = quick(lambda *args: with_gradients(lambda a: call(**a), *args))
    (out, lse), actual = run(arrays, poisoned, poisoned_lse)
    (expected_out, expected_lse), expected = exact(arrays, clean, clean_lse, seen)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    for name in arrays:
        assert_close(actual[name], expected[name], kind="gradient", name=f"gradient of {name}")


@pytest.mark.few(1)
def test_windows_as_large_as_numbers_go(flash):
    """Wider than any sequence is no window at all."""
    arrays = qkv(t=20, s=26)
    wide = 2**31 - 1
    for sliding, offset, seen in (
        (wide, None, causal(20, 26)),
        ((2, wide), None, np.arange(26) >= np.arange(20)[:, None] + 4),
    ):
        module = flash(causal=isinstance(sliding, int), sliding_window=sliding)
        out, lse = quick(lse_of(module, q_offset=offset))(**arrays)
        (expected, expected_lse), _ = exact(arrays, *cotangents(arrays), seen)
        assert_close(out, expected)
        assert_close(lse, expected_lse)
    chunks = ejx.Mask.chunked(2**31) & ejx.Mask.sliding_window(2**31) & ejx.Mask.prefix(2**31 - 1)
    out, lse = quick(lse_of(flash(), mask=chunks, q_offset=jnp.int32(3)))(**arrays)
    (expected, expected_lse), _ = exact(
        arrays, *cotangents(arrays), np.arange(26) <= np.arange(20)[:, None] + 3
    )
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(flash, dtype):
    arrays = dict(
        qkv(2, t=40, s=40, dtype=dtype), sinks=normal(6, 4), bias=normal(7, 1, 4, 40, 40, dtype=dtype)
    )
    # Fewer keys make the gradient a cancellation that 16-bit outputs cannot resolve, so all of them are seen.
    dout, dlse = cotangents(arrays)
    (out, lse), grads = exact(arrays, dout, 0 * dlse)
    call = lse_of(flash())
    actual, actual_grads = quick(lambda *a: with_gradients(lambda x: call(**x), *a))(arrays, dout, 0 * dlse)
    assert actual[0].dtype == dtype and actual[1].dtype == jnp.float32
    assert_close(actual[0], out, dtype)
    assert_close(actual[1], lse, dtype)
    for name in ("q", "k", "v", "bias"):
        assert actual_grads[name].dtype == dtype
        assert_close(actual_grads[name], grads[name], dtype, "gradient", name=name)


def test_scores_past_the_largest_of_float16(flash):
    """Scores are computed in float32: here up to 1.6 million, of which one outweighs all others."""
    arrays = {name: 300 * x if name != "v" else x for name, x in qkv(dtype=jnp.float16).items()}
    (out, lse), _ = exact(arrays, *cotangents(arrays), causal(20, 26), scale=1.0)
    assert np.abs(lse).max() > 65504
    actual, actual_lse = quick(lse_of(flash(causal=True, softmax_scale=1.0)))(**arrays)
    assert actual.dtype == jnp.float16
    assert_close(actual, out, jnp.float16)
    assert_close(actual_lse, lse, jnp.float16)


def test_double_precision(enable_x64):
    arrays = dict(
        qkv(2, dtype=jnp.float64),
        sinks=normal(6, 4, dtype=jnp.float64),
        alibi_slopes=normal(7, 4, dtype=jnp.float64),
    )
    check(lse_of(ejx.FlashAttention(causal=True, config=xla_tiles(16, 16))), arrays, causal(20, 26))


def test_numpy_arrays_are_arrays(flash, unchecked):
    arrays = {name: np.asarray(x) for name, x in qkv(2).items()}
    bias = np.ones((26,), np.float32)
    np.testing.assert_array_equal(flash()(**arrays, bias=bias), flash()(**qkv(2), bias=jnp.asarray(bias)))


# Dropout


def dropped(module, key, t=64, s=48, heads=2, **options):
    """The weights themselves: equal scores, and the identity for values."""
    eye = jnp.broadcast_to(jnp.eye(s)[:, None], (s, heads, s))
    return quick(
        lambda eye: s * module(jnp.zeros((t, heads, 8)), jnp.zeros((s, heads, 8)), eye, key=key, **options)
    )(eye)


def test_dropout_keeps_as_many_as_asked(flash):
    for rate in (0.1, 0.5):
        weights = np.asarray(dropped(flash(dropout_rate=rate), jax.random.key(0)))
        kept = weights > 0
        np.testing.assert_allclose(weights[kept], 1 / (1 - rate), rtol=1e-5)
        # Five standard deviations of 6144 independent draws.
        assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
        assert np.abs(kept.mean((1, 2)) - (1 - rate)).max() < 0.35 and (kept[:, 0] != kept[:, 1]).any()


@pytest.mark.few(1)
def test_dropout_belongs_to_its_key(flash):
    module, other = flash(dropout_rate=0.5), flash(dropout_rate=0.5, sliding_window=(1000, None))
    first = dropped(module, jax.random.key(0))
    np.testing.assert_array_equal(first, dropped(module, jax.random.key(0)))
    assert (np.asarray(first) != np.asarray(dropped(module, jax.random.key(1)))).any()
    # A split of the queries drops the same entries, as does another way to compute the same.
    parts = [
        dropped(module, jax.random.key(0), t=40, q_offset=-16),
        dropped(module, jax.random.key(0), t=24, q_offset=jnp.int32(24)),
    ]
    np.testing.assert_array_equal(first, np.concatenate(parts))
    np.testing.assert_array_equal(first, dropped(other, jax.random.key(0)))


def test_dropout_is_the_same_everywhere():
    pytest.importorskip("triton")
    key, arrays = jax.random.key(3), qkv(2, 3)
    xla, triton = (ejx.FlashAttention(causal=True, dropout_rate=0.3, platform=p) for p in ("xla", INTERPRET))
    np.testing.assert_array_equal(np.asarray(dropped(xla, key)) > 0, np.asarray(dropped(triton, key)) > 0)
    assert_close(*(quick(lambda **a: module(**a, key=key))(**arrays) for module in (triton, xla)))  # noqa: B023


@pytest.mark.few(1)
def test_gradient_through_dropout(flash):
    key, arrays = jax.random.key(3), dict(qkv(2), sinks=normal(6, 4))
    _, weights = quick(lambda a: ejx.Attention(causal=True, dropout_rate=0.3)(**a, key=key))(arrays)
    keep = np.asarray(weights) > 0
    assert 0.5 < keep.sum() / (2 * 4 * causal(20, 26).sum()) < 0.9
    check(lse_of(flash(causal=True, dropout_rate=0.3), key=key), arrays, causal(20, 26), keep=keep, rate=0.3)


def test_inference_drops_nothing(flash):
    arrays, module = qkv(2), flash(dropout_rate=0.5)
    expected = flash()(**arrays)
    np.testing.assert_array_equal(module(**arrays, inference=True), expected)
    quiet = eqx.nn.inference_mode(module)
    np.testing.assert_array_equal(quiet(**arrays), expected)
    np.testing.assert_array_equal(
        eqx.nn.inference_mode([module])[0](**arrays, key=jax.random.key(0)), expected
    )
    loud = quiet(**arrays, key=jax.random.key(0), inference=False)
    np.testing.assert_array_equal(loud, module(**arrays, key=jax.random.key(0)))
    assert (np.asarray(loud) != np.asarray(expected)).any()
