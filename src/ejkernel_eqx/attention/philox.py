"""Dropout decisions that depend only on seed, query position and key position.

Philox4x32 with seven rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): any
platform, tiling or sharding that evaluates the same counter drops the same entries, forward and backward.
"""

import jax.numpy as jnp
from jax import Array

from .._broadcast import aligned

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def threshold(rate: float) -> int:
    """The 32-bit threshold below which an entry is dropped."""
    return min(round(rate * 2**32), 2**32 - 1)


def _mulhilo(constant: int, x: Array) -> tuple[Array, Array]:
    """High and low words of the 64-bit product, through 16-bit halves: no 64-bit integers needed."""
    a, b = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    high, low = x >> 16, x & 0xFFFF
    middle = a * low + ((b * low) >> 16)
    carry = b * high + (middle & 0xFFFF)
    return a * high + (middle >> 16) + (carry >> 16), jnp.uint32(constant) * x


def philox(key: tuple[Array, Array], counter: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
    """Philox4x32-7: maps two key words and four counter words, all uint32 and broadcast together, to four words."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        hi0, lo0 = _mulhilo(MULTIPLIERS[0], c0)
        hi1, lo1 = _mulhilo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def philox_keep(seeds: Array, row_positions: Array, key_positions: Array, rate: float) -> Array:
    """Returns whether each entry survives dropout; `seeds[..., 0]`, `row_positions` and `key_positions` broadcast together. A third word of the seeds
    is added to both positions."""
    rows, keys = row_positions.astype(jnp.uint32), key_positions.astype(jnp.uint32)
    if seeds.shape[-1] == 3:
        rows, keys, ahead = aligned(rows, keys, seeds[..., 2])
        rows, keys = rows + ahead, keys + ahead
    rows, keys, first, second = aligned(rows, keys, seeds[..., 0], seeds[..., 1])
    zero = jnp.zeros_like(rows)
    word = philox((first, second), (rows, keys, zero, zero))[0]
    return word >= jnp.uint32(threshold(rate))
