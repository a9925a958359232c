"""The expanded form on XLA and by its Triton kernels, interpreted: against numpy, with every mask, composed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.philox import philox_keep
from tests.attention.cases import xla_tiles
from tests.attention.dense import causal, INTERPRET, lse_of, normal, quick
from tests.latent.cases import arrays_of, check, poison
from tests.tolerances import assert_close


@pytest.fixture(params=["xla", INTERPRET])
def attention(request):
    """On one platform, with tiles small enough for several to be at work."""
    if request.param == INTERPRET:
        pytest.importorskip("triton")
        return functools.partial(ejx.MultiHeadLatentAttention, platform=INTERPRET)
    return functools.partial(ejx.MultiHeadLatentAttention, config=xla_tiles(16, 16))


CAUSAL: dict[str, Any] = dict(causal=True)
RANDOM, OFFSETS = np.random.default_rng(0), np.array([0, 17, 17, 40])
IDS, BLOCKS = np.sort(RANDOM.integers(-1, 3, (2, 1, 45)), axis=-1), RANDOM.random((6, 6)) < 0.4
BLOCKS[:, 2] = False
DENSE = RANDOM.random((2, 3, 45, 45)) < 0.5
DENSE[..., 3, :], DENSE[..., :, 7] = False, False
LENGTHS, ROWS = np.array([29, 0]), np.array([21, 5])
ALIKE, NUMBER = np.repeat([0, 1, 2], 15), np.searchsorted(OFFSETS[1:], np.arange(45), side="right")
I, J = np.arange(45)[:, None], np.arange(45)
FUNCTION = ejx.Mask.from_function(lambda h, q, k: (abs(q - k) <= 2 * h) & (k != 30))
# Options of the operation, arguments of the call, and what is seen.
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "top left": (CAUSAL, dict(q_offset=0), J <= I),
    "window": (CAUSAL | dict(sliding_window=9), {}, (J <= I) & (J > I - 9)),
    "both sides": (dict(sliding_window=(5, 3)), {}, (J <= I + 3) & (J >= I - 5)),
    "lengths": (
        {},
        dict(kv_lengths=jnp.asarray(LENGTHS), q_lengths=jnp.asarray(ROWS)),
        (LENGTHS[:, None, None, None] > J) & (ROWS[:, None, None, None] > I),
    ),
    "ids and lengths": (
        {},
        dict(segment_ids=jnp.asarray(np.stack([ALIKE] * 2)), q_lengths=jnp.array([20, 20])),
        (ALIKE[:, None] == ALIKE) & (I < 20),
    ),
    "segments": (
        CAUSAL,
        dict(segment_ids=jnp.asarray(IDS[:, 0])),
        (IDS[..., None] == IDS[..., None, :]) & (IDS >= 0)[..., None] & (J <= I),
    ),
    "dense": ({}, dict(mask=jnp.asarray(DENSE)), DENSE),
    "function of heads": (
        {},
        dict(mask=FUNCTION),
        (abs(I - J) <= 2 * np.arange(3)[:, None, None]) & (J != 30),
    ),
    "map of blocks": (
        {},
        dict(mask=ejx.Mask.from_blocks(BLOCKS, 8)),
        np.kron(BLOCKS, np.ones((8, 8), bool))[:45, :45],
    ),
    "union": (
        {},
        dict(mask=ejx.Mask.sliding_window(4, 4) | ejx.Mask.global_tokens(3)),
        (abs(I - J) <= 4) | (I < 3) | (J < 3),
    ),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", MASKS)
def test_masks(attention, name):
    """Keys that nobody sees, and queries that see nothing, hold NaN."""
    options, call, seen = MASKS[name]
    given = arrays_of(2, t=45, s=45)
    bias = {"bias": normal(5, 45, 45)} if "mask" in call else {}
    every = np.broadcast_to(seen, (2, 3, 45, 45))
    hidden = poison(given, ~every.any((1, 2)), ~every.any((1, 3)))
    check(lse_of(attention(**options), **call), given | bias, seen, poisoned=hidden | bias)


@pytest.mark.few(4)
@pytest.mark.parametrize("t, s, is_causal", [(37, 70, True), (64, 64, False), (5, 3, True)])
def test_lengths_that_tiles_do_not_divide(attention, t, s, is_causal):
    check(lse_of(attention(causal=is_causal)), arrays_of(2, t=t, s=s), causal(t, s) if is_causal else True)


def test_packed_sequences(attention):
    given = arrays_of(t=45, s=45)
    seen = (NUMBER[:, None] == NUMBER) & (NUMBER < 3) & (J <= I)
    op = lse_of(attention(causal=True), cu_seqlens=jnp.asarray(OFFSETS))
    check(op, given, seen, poisoned=poison(given, NUMBER == 3, NUMBER == 3))


@pytest.mark.parametrize("platform", ["xla", INTERPRET, "pallas-interpret"])
@pytest.mark.parametrize("t,s", [(0, 3), (3, 0)])
def test_empty(platform, t, s):
    given, op = arrays_of(2, t=t, s=s), ejx.MultiHeadLatentAttention(platform=platform)
    out, lse = op(**given, return_lse=True)
    assert out.shape == (2, t, 3, 12) and not out.any() and np.all(np.asarray(lse) == -np.inf)
    assert not any(x.any() for x in jax.grad(lambda a: op(**a).sum())(given).values())


@pytest.mark.few(1)
@pytest.mark.parametrize("shared", [False, True])
def test_maps_and_repeats(attention, shared):
    """`vmap` of everything and of the queries alone, and the same bits every time."""
    op, given = attention(causal=True), arrays_of(3, t=18, s=18)
    loss = lambda a: (op(**a) ** 2).sum()
    gradient = quick(jax.grad(loss))
    axes = {name: None if shared and name != "q" else 0 for name in given}
    taken = {name: x if axes[name] == 0 else x[0] for name, x in given.items()}
    whole = {name: x if axes[name] == 0 else jnp.stack([x[0]] * 3) for name, x in given.items()}
    expected, again = gradient(whole), gradient(whole)
    mapped = lambda a: (jax.vmap(lambda a: op(**a), in_axes=(axes,))(a) ** 2).sum()
    for name, x in quick(jax.grad(mapped))(taken).items():
        np.testing.assert_array_equal(again[name], expected[name])
        assert_close(
            x, expected[name].sum(0) if axes[name] is None else expected[name], kind="gradient", name=name
        )


def test_soft_cap_sinks_and_scale(attention):
    given = arrays_of(2, t=21, s=40) | {"sinks": normal(7, 3)}
    op = attention(causal=True, logits_soft_cap=1.5, softmax_scale=0.4)
    check(lse_of(op), given, causal(21, 40), scale=0.4, cap=1.5)


BIASES = {
    "all": (2, 3, 21, 34),
    "of heads and keys": (1, 3, 1, 34),
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
    check(op, given, seen, poisoned=poison(given, ~seen[:, 0, 0]), positions=positions)


def test_dropout(attention):
    """The entries that a key drops are those of `FlashAttention`, on every platform."""
    given, key = arrays_of(2, t=21, s=34), jax.random.key(3)
    seeds = jax.random.bits(key, (2, 3, 2), jnp.uint32)
    kept = np.asarray(philox_keep(seeds[:, :, None, None], jnp.arange(21)[:, None] + 13, jnp.arange(34), 0.3))
    op = attention(causal=True, dropout_rate=0.3)
    check(lse_of(op, key=key), given, causal(21, 34), keep=kept, rate=0.3)
    check(lse_of(op, inference=True), given, causal(21, 34))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(attention, dtype):
    """With many heads: the gradient that they share is summed in float32."""
    check(lse_of(attention(causal=True)), arrays_of(t=33, s=33, heads=16, dtype=dtype), causal(33, 33))


def test_double_precision(enable_x64):
    given = {name: x.astype(jnp.float64) for name, x in arrays_of(2).items()}
    check(lse_of(ejx.MultiHeadLatentAttention(platform="xla")), given)


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
