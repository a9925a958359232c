"""The expanded form on XLA and by its Triton kernels, interpreted: against numpy, with every mask, composed."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.philox import philox_keep
from tests.attention.cases import xla_tiles
from tests.attention.dense import causal, INTERPRET, lse_of, normal, quick
from tests.latent.cases import arrays_of, check, exact_expanded
from tests.tolerances import assert_close


@pytest.fixture(params=["xla", INTERPRET])
def attention(request):
    """On one platform, with tiles small enough for several to be at work."""
    if request.param == INTERPRET:
        pytest.importorskip("triton")
        return functools.partial(ejx.MultiHeadLatentAttention, platform=INTERPRET)
    return functools.partial(ejx.MultiHeadLatentAttention, config=xla_tiles(16, 16))


def poison(given, keys=None, queries=None):
    """NaN where nothing may be read."""

    def put(x, where):
        return (
            x
            if where is None
            else jnp.where(jnp.reshape(where, (*where.shape, *(1,) * (x.ndim - where.ndim))), jnp.nan, x)
        )

    return {
        name: put(x, queries if name == "q" else keys) if name != "sinks" else x for name, x in given.items()
    }


WINDOWS = {
    "causal": (dict(causal=True), {}, lambda t, s: causal(t, s)),
    "all": ({}, {}, lambda t, s: True),
    "top left": (dict(causal=True), dict(q_offset=0), lambda t, s: causal(t, s, 0)),
    "window": (
        dict(causal=True, sliding_window=9),
        {},
        lambda t, s: causal(t, s) & ~causal(t, s, s - t - 9),
    ),
    "both sides": (
        dict(sliding_window=(5, 3)),
        {},
        lambda t, s: causal(t, s, s - t + 3) & ~causal(t, s, s - t - 6),
    ),
}


@pytest.mark.parametrize("t,s", [(37, 70), (64, 64), (5, 3)])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.few(6)
def test_windows(attention, name, t, s):
    options, call, seen = WINDOWS[name]
    check(lse_of(attention(**options), **call), arrays_of(2, t=t, s=s), seen(t, s))


def test_soft_cap_sinks_and_scale(attention):
    given = arrays_of(2, t=21, s=40) | {"sinks": normal(7, 3)}
    op = attention(causal=True, logits_soft_cap=1.5, softmax_scale=0.4)
    check(lse_of(op), given, causal(21, 40), scale=0.4, cap=1.5)


def test_keys_that_ids_and_lengths_hide_together_may_be_nan(attention):
    ids = np.repeat([0, 1, 2], 8)
    given = arrays_of(t=24, s=24)
    seen = (ids[:, None] == ids) & (np.arange(24) < 12)[:, None]
    call = lse_of(attention(), segment_ids=jnp.asarray(ids), q_lengths=jnp.int32(12))
    check(call, given, seen, poisoned=poison(given, keys=~seen.any(0), queries=~seen.any(1)))


def test_lengths_hide_what_is_behind(attention):
    lengths, queries = np.array([29, 0, 40]), np.array([21, 5, 11])
    given = arrays_of(3, t=21, s=40)
    seen = (np.arange(40) < lengths[:, None, None]) & (np.arange(21) < queries[:, None])[..., None]
    keys, rows = np.arange(40) >= lengths[:, None], np.arange(21) >= queries[:, None]
    op = lse_of(attention(), kv_lengths=jnp.asarray(lengths), q_lengths=jnp.asarray(queries))
    check(op, given, seen[:, None], poisoned=poison(given, keys, rows))


def test_segments(attention):
    ids = np.sort(np.random.default_rng(0).integers(-1, 3, (2, 45)), axis=1)
    given = arrays_of(2, t=45, s=45)
    seen = (ids[..., None] == ids[:, None]) & (ids >= 0)[..., None] & causal(45, 45)
    op = lse_of(attention(causal=True), segment_ids=jnp.asarray(ids))
    check(op, given, seen[:, None], poisoned=poison(given, ids < 0, ids < 0))


def test_packed_sequences(attention):
    offsets = np.array([0, 17, 17, 40])
    given = arrays_of(t=45, s=45)
    number = np.searchsorted(offsets[1:], np.arange(45), side="right")
    seen = (number[:, None] == number) & (number < 3) & causal(45, 45)
    op = lse_of(attention(causal=True), cu_seqlens=jnp.asarray(offsets))
    check(op, given, seen, poisoned=poison(given, number == 3, number == 3))


BIASES = {
    "all": (2, 3, 21, 34),
    "of heads": (1, 3, 1, 1),
    "of keys": (1, 1, 1, 34),
    "of queries and keys": (21, 34),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", BIASES)
def test_bias_and_slopes(attention, shape):
    given = arrays_of(2, t=21, s=34) | {"bias": normal(5, *BIASES[shape]), "alibi_slopes": normal(6, 3) / 9}
    check(lse_of(attention(causal=True, logits_soft_cap=2.0)), given, causal(21, 34), cap=2.0)


def test_slopes_beside_lengths(attention):
    """Positions count from each row's own last key."""
    lengths = np.array([29, 40])
    given = arrays_of(2, t=21, s=40) | {"alibi_slopes": normal(6, 3) / 9}
    seen = np.arange(40) < lengths[:, None, None, None]
    op = lse_of(attention(), kv_lengths=jnp.asarray(lengths), q_offset=jnp.asarray(lengths - 21))
    positions = np.arange(21) + (lengths - 21)[:, None]
    poisoned = poison({name: x for name, x in given.items() if name != "alibi_slopes"}, ~seen[:, 0, 0])
    check(op, given, seen, poisoned=poisoned | {"alibi_slopes": given["alibi_slopes"]}, positions=positions)


def test_dropout(attention):
    """The entries that a key drops are those of `FlashAttention`, on every platform."""
    given, key = arrays_of(2, t=21, s=34), jax.random.key(3)
    seeds = jax.random.bits(key, (2, 3, 2), jnp.uint32)
    kept = np.asarray(philox_keep(seeds[:, :, None, None], jnp.arange(21)[:, None] + 13, jnp.arange(34), 0.3))
    assert 0.6 < kept.mean() < 0.8
    op = attention(causal=True, dropout_rate=0.3)
    check(lse_of(op, key=key), given, causal(21, 34), keep=kept, rate=0.3)
    check(lse_of(op, inference=True), given, causal(21, 34))


def test_inference_mode():
    """It turns dropout off; an operation without dropout has no leaves and stays a function of its arrays."""
    given, op = arrays_of(2), ejx.MultiHeadLatentAttention(dropout_rate=0.3)
    plain = ejx.MultiHeadLatentAttention()
    assert not jax.tree.leaves(plain)
    expected = plain(**given)
    assert np.abs(op(**given, key=jax.random.key(0)) - expected).max() > 0.1
    np.testing.assert_array_equal(eqx.nn.inference_mode(op)(**given), expected)
    np.testing.assert_array_equal(eqx.nn.inference_mode(plain)(**given), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(1, 1, 20, 26), (2, 3, 20, 26)])
def test_dense_masks(attention, shape):
    """With rows and keys that nobody sees, which hold NaN."""
    seen = np.random.default_rng(0).random(shape) < 0.5
    seen[..., 3, :], seen[..., :, 7] = False, False
    given = arrays_of(2) | {"bias": normal(5, 1, 3, 20, 26)}
    hidden = np.arange(20) == 3, np.arange(26) == 7
    poisoned = poison(
        {name: x for name, x in given.items() if name != "bias"}, *(np.tile(x, (2, 1)) for x in hidden[::-1])
    )
    check(
        lse_of(attention(), mask=jnp.asarray(seen)), given, seen, poisoned=poisoned | {"bias": given["bias"]}
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(attention, dtype):
    """With many heads: the gradient that they share is summed in float32."""
    check(lse_of(attention(causal=True)), arrays_of(t=33, s=33, heads=16, dtype=dtype), causal(33, 33))


def test_double_precision(enable_x64):
    given = {name: x.astype(jnp.float64) for name, x in arrays_of(2).items()}
    check(lse_of(ejx.MultiHeadLatentAttention(platform="xla")), given)


@pytest.mark.parametrize("t,s", [(0, 3), (3, 0)])
def test_empty(attention, t, s):
    given = arrays_of(2, t=t, s=s)
    out, lse = attention()(**given, return_lse=True)
    assert out.shape == (2, t, 3, 12) and not out.any() and np.all(np.asarray(lse) == -np.inf)
    grads = jax.grad(lambda a: attention()(**a).sum())(given)
    assert not any(x.any() for x in grads.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["vmap", "map", "shared keys"])
def test_maps_and_repeats(attention, way):
    """vmap of everything and of the queries alone, loops, and the same bits every time."""
    op, given = attention(causal=True), arrays_of(3, t=18, s=18)
    loss = lambda a: (op(**a) ** 2).sum()
    if way != "shared keys":
        gradient = quick(jax.grad(loss))
        mapped = jax.vmap(jax.grad(loss)) if way == "vmap" else lambda a: jax.lax.map(jax.grad(loss), a)
        expected, again, found = gradient(given), gradient(given), quick(mapped)(given)
        for name, x in expected.items():
            np.testing.assert_array_equal(again[name], x)
            assert_close(found[name], x, kind="gradient")
        return
    shared = {name: x[0] if name != "q" else x for name, x in given.items()}
    axes = ({name: None if name != "q" else 0 for name in given},)
    of_all = lambda a: (jax.vmap(lambda a: op(**a), in_axes=axes)(a) ** 2).sum()
    found, one_by_one = quick(jax.grad(of_all))(shared), jax.tree.map(jnp.zeros_like, shared)
    for row in range(3):
        own = quick(jax.grad(loss))(shared | {"q": shared["q"][row]})
        one_by_one = {
            name: one_by_one[name].at[row].set(x) if name == "q" else one_by_one[name] + x
            for name, x in own.items()
        }
    for name, x in one_by_one.items():
        assert_close(found[name], x, kind="gradient", name=name)


def test_parts_of_the_keys_are_merged(attention):
    given = arrays_of(2, t=16, s=40)
    op, first = attention(), {name: x if name == "q" else x[:, :23] for name, x in given.items()}
    last = {name: x if name == "q" else x[:, 23:] for name, x in given.items()}
    out, lse = ejx.merge_attention(op(**first, return_lse=True), op(**last, return_lse=True))
    expected = exact_expanded(given, np.zeros((2, 16, 3, 12)), np.zeros((2, 16, 3)))[0]
    assert_close(out, expected[0], "float32")
    assert_close(lse, expected[1], "float32")


WRONG = {
    "k_rope of another width": (lambda a: a | {"k_rope": a["k_rope"][..., :5]}, "k: expected shape"),
    "rotary keys of heads": (lambda a: a | {"k_rope": a["k_rope"][:, None]}, "k_rope: expected shape"),
    "no part without rotation": (lambda a: a | {"q": a["q"][..., :8]}, "q: expected more channels"),
    "other heads": (lambda a: a | {"k": a["k"][..., :2, :]}, "k: expected shape"),
    "other keys": (lambda a: a | {"v": a["v"][..., 1:, :, :]}, "v: expected shape"),
    "dtypes": (lambda a: a | {"v": a["v"].astype(jnp.bfloat16)}, "expected one dtype"),
    "a list": (lambda a: a | {"q": [1.0]}, "q: expected an array"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arrays(name, unchecked):
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ejx.MultiHeadLatentAttention()(**change(arrays_of(2)))


@pytest.mark.parametrize("kind", ["function of heads", "map of blocks", "union"])
def test_masks_of_tiles(attention, kind):
    """Functions that differ between heads, maps and unions: only the tiles that they touch run. A key that nobody sees holds NaN."""
    seen: Any
    if kind == "map of blocks":
        blocks = np.random.default_rng(0).random((6, 6)) < 0.4
        blocks[:, 2] = False
        mask, seen = ejx.Mask.from_blocks(blocks, 8), np.repeat(np.repeat(blocks, 8, 0), 8, 1)[:45, :45]
    elif kind == "union":
        mask = ejx.Mask.sliding_window(4, 4) | ejx.Mask.global_tokens(3)
        i, j = np.arange(45)[:, None], np.arange(45)
        seen = (abs(i - j) <= 4) | (i < 3) | (j < 3)
    else:
        mask = ejx.Mask.from_function(lambda h, q, k: (abs(q - k) <= 2 * h) & (k != 30))
        i, j = np.arange(45)[:, None], np.arange(45)
        seen = (abs(i - j) <= 2 * np.arange(3)[:, None, None]) & (j != 30)
    given = arrays_of(2, t=45, s=45) | {"bias": normal(5, 45, 45)}
    unseen = ~np.broadcast_to(seen, (3, 45, 45)).any((0, 1))
    clean = {name: x for name, x in given.items() if name != "bias"}
    poisoned = poison(clean, np.tile(unseen, (2, 1))) | {"bias": given["bias"]}
    check(lse_of(attention(), mask=mask), given, seen, poisoned=poisoned)
