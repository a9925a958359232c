"""The contents of partly visible tiles, each once, as bits."""

import jax
import jax.numpy as jnp
import numpy as np

from ..functions import evaluate
from ..pattern import Pattern
from ..tile_shape import FULL, NONE, PARTIAL, Shape
from .evaluate import visible
from .tiles import Tiles

_MOST_PAIRS = 2**20  # looked at together: about what a cache of the processor holds
_WORD = 32


class Contents:
    """The contents of partly visible tiles by their bits, numbered from 1; number 0 is a tile whose pairs are all visible."""

    def __init__(self, shape: Shape):
        every = packed(np.ones((1, shape.block_q, shape.block_k), bool))
        self.shape, self.every = every.shape[1:], every.reshape(-1).view(np.uint64)
        self._numbers = {every.tobytes(): 0}

    def number(self, bits: np.ndarray) -> int:
        return self._numbers.setdefault(bits.tobytes(), len(self._numbers))

    def all(self) -> np.ndarray:
        """uint8 `[patterns, block_q, bytes]`."""
        return np.frombuffer(b"".join(self._numbers), np.uint8).reshape(-1, *self.shape)


def packed(tiles: np.ndarray) -> np.ndarray:
    """uint8 `[n, rows, bytes]` of booleans `[n, rows, columns]`, in whole words."""
    short = -tiles.shape[2] % _WORD
    padded = np.pad(tiles, ((0, 0), (0, 0), (0, short))) if short else tiles
    # Of one axis in far less time than of several.
    bits = np.packbits(np.ascontiguousarray(padded).reshape(-1), bitorder="little")
    return bits.reshape(*padded.shape[:2], -1)


def looked_at(
    pattern: Pattern, shape: Shape, head: int, m: np.ndarray, n: np.ndarray, known: Contents
) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of some tiles, and the numbers of their contents if they are partly visible, from all of their pairs."""
    kinds, numbers = np.zeros(len(m), np.int8), np.zeros(len(m), np.int32)
    step = max(1, _MOST_PAIRS // (shape.block_q * shape.block_k))
    for at in range(0, len(m), step):
        part = slice(at, at + step)
        tiles = _pairs(pattern, shape, head, m[part], n[part])
        bits = packed(tiles)
        flat = bits.reshape(len(bits), -1).view(np.uint64)
        some, every = flat.any(1), (flat == known.every).all(1)
        kinds[part] = np.where(every, FULL, np.where(some, PARTIAL, NONE))
        for i in np.flatnonzero(some & ~every):
            numbers[at + i] = known.number(bits[i])
    return kinds, numbers


def _pairs(pattern: Pattern, shape: Shape, head: int, m: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Every pair of some tiles, `[tiles, block_q, block_k]`. Queries past the end are like the last one, and keys past it hidden."""
    q = m[:, None, None] * shape.block_q + np.arange(shape.block_q)[:, None]
    k = n[:, None, None] * shape.block_k + np.arange(shape.block_k)
    position = q + pattern.offset
    tiles = Tiles((position, position), (k, k), head, (1, 1))
    result = visible(pattern.function, tiles)
    if result.exact:
        seen = np.broadcast_to(np.asarray(result.lo, bool), (len(m), shape.block_q, shape.block_k))
    else:
        seen = _by_jax(pattern, head, np.minimum(position, shape.queries - 1 + pattern.offset), k)
    past, rest = k >= shape.keys, shape.queries % shape.block_q
    if past.any():
        seen = seen & ~past
    if rest:
        last = m == shape.queries // shape.block_q
        seen = np.array(seen)
        seen[last, rest:] = seen[last, rest - 1 : rest]
    return seen


def _by_jax(pattern: Pattern, head: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Evaluates a function by JAX, which also knows operations without a rule."""
    with jax.ensure_compile_time_eval():
        heads, of_q, of_k = (jnp.asarray(x, jnp.int32) for x in ([head], q[:, :, 0], k[:, 0]))
        of_tile = lambda q, k: evaluate(pattern.function, heads, q, k)[0]
        return np.asarray(jax.jit(jax.vmap(of_tile))(of_q, of_k))
