"""The expanded form by its Pallas kernels for TPU, interpreted with races detected and memory poisoned, at lengths that cross tiles; and composed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.philox import philox_keep
from tests.attention.dense import causal, lse_of, normal
from tests.latent.cases import arrays_of, check, poison

pytestmark = pytest.mark.usefixtures("no_races")

attention = functools.partial(ejx.MultiHeadLatentAttention, platform="pallas-interpret")
T, S, HEADS = 140, 200, 2

# Each of these checks a kind of call of an operation of one platform.


def dense(attention: Any) -> None:
    """Bias, slopes, sinks, a soft cap and dropout at once."""
    key = jax.random.key(3)
    seeds = jax.random.bits(key, (1, HEADS, 2), jnp.uint32)
    kept = np.asarray(
        philox_keep(seeds[:, :, None, None], jnp.arange(T)[:, None] + S - T, jnp.arange(S), 0.3)
    )
    scores = {"bias": normal(5, T, S), "alibi_slopes": normal(6, HEADS) / 9, "sinks": normal(7, HEADS)}
    op = attention(causal=True, logits_soft_cap=1.5, dropout_rate=0.3)
    given = arrays_of(1, t=T, s=S, heads=HEADS) | scores
    check(lse_of(op, key=key), given, causal(T, S), cap=1.5, keep=kept, rate=0.3)


def lengths(attention: Any) -> None:
    """Rows without keys, of padding and of an empty sequence."""
    keys, queries = np.array([150, 0]), np.array([T, 131])
    given = arrays_of(2, t=T, s=S, heads=1)
    seen = (np.arange(S) < keys[:, None, None]) & (np.arange(T) < queries[:, None])[..., None]
    op = lse_of(attention(), kv_lengths=jnp.asarray(keys), q_lengths=jnp.asarray(queries))
    hidden = np.arange(S) >= keys[:, None], np.arange(T) >= queries[:, None]
    check(op, given, seen[:, None], poisoned=poison(given, *hidden))


def packed(attention: Any) -> None:
    offsets = np.array([0, 57, 57, 130])
    number = np.searchsorted(offsets[1:], np.arange(T), side="right")
    seen = (number[:, None] == number) & (number < 3) & causal(T, T)
    given = arrays_of(t=T, s=T, heads=HEADS, dtype=jnp.bfloat16)
    op = lse_of(attention(causal=True), cu_seqlens=jnp.asarray(offsets))
    check(op, given, seen, poisoned=poison(given, number == 3, number == 3))


def blocks(attention: Any) -> None:
    """Heads that see other tiles, and a block of keys that nobody sees, with a bias."""
    table = np.random.default_rng(0).random((3, 4)) < 0.5
    table[:, 2] = False
    seen = np.repeat(np.repeat(table, 48, 0), 48, 1)[:T, :190]
    given = arrays_of(1, t=T, s=190, heads=1) | {"bias": normal(5, T, 190)}
    poisoned = poison(given, np.arange(190)[None] // 48 == 2)
    check(lse_of(attention(), mask=ejx.Mask.from_blocks(table, 48)), given, seen, poisoned=poisoned)


def wide(attention: Any) -> None:
    """The sizes of DeepSeek-V3."""
    sizes = {"q": (1, 130, 2, 192), "k": (1, 130, 2, 128), "k_rope": (1, 130, 64), "v": (1, 130, 2, 128)}
    given = {name: normal(len(name), *size, dtype=jnp.bfloat16) for name, size in sizes.items()}
    check(lse_of(attention(causal=True)), given, causal(130, 130))


CASES = {case.__name__: case for case in (packed, wide, lengths, blocks, dense)}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_numpy(case):
    CASES[case](attention)


def test_what_it_does_not_take():
    with pytest.raises(ejx.UnsupportedError, match="takes float32 and bfloat16, not float16"):
        attention()(**arrays_of(1, dtype=jnp.float16))
