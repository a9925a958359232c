"""Masks that lists of tiles say, each beside its definition as a numpy function of head, query position and key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx import Mask

T, S, H = 70, 77, 4
IDS = np.sort(np.random.default_rng(1).integers(0, 5, 128))
TABLE = np.random.default_rng(0).random((H, 5, 6)) < 0.4
SIZE = (16, 13)


class Known(NamedTuple):
    mask: Mask
    sees: Callable[[Any, Any, Any], Any]


def _documents(h: Any, q: Any, k: Any) -> Any:
    ids = jnp.asarray(IDS)
    return (k <= q) & (ids[q] == ids[k])


def _in_table(h: Any, q: Any, k: Any) -> Any:
    return TABLE[h, (q - (S - T)) // SIZE[0], k // SIZE[1]]


def _window(q: Any, k: Any, left: int, right: int) -> Any:
    return (k >= q - left) & (k <= q + right)


PATTERNS = {
    "local or global": Known(
        Mask.sliding_window(9, 4) | Mask.global_tokens(12),
        lambda h, q, k: _window(q, k, 9, 4) | (q < 12) | (k < 12),
    ),
    "not causal": Known(~Mask.causal(), lambda h, q, k: k > q),
    "strided": Known(
        Mask.causal() & (Mask.sliding_window(5) | Mask.strided(7)),
        lambda h, q, k: (k <= q) & ((k >= q - 5) | ((q - k) % 7 == 0)),
    ),
    "dilated": Known(Mask.dilated(4, 2, rate=3), lambda h, q, k: _window(q, k, 12, 6) & ((q - k) % 3 == 0)),
    "prefix": Known(
        Mask.causal() | Mask.from_function(lambda h, q, k: k < 21), lambda h, q, k: (k <= q) | (k < 21)
    ),
    "chunks": Known(
        Mask.chunked(11) | Mask.strided(13), lambda h, q, k: (q // 11 == k // 11) | ((q - k) % 13 == 0)
    ),
    "documents": Known(Mask.from_function(_documents), lambda h, q, k: (k <= q) & (IDS[q] == IDS[k])),
    "wider heads": Known(
        Mask.from_function(lambda h, q, k: jnp.abs(q - k) <= 4 * h + 1),
        lambda h, q, k: abs(q - k) <= 4 * h + 1,
    ),
    "blocks": Known(Mask.from_blocks(TABLE, SIZE), _in_table),
    "no such blocks": Known(
        (Mask.causal() & ~Mask.from_blocks(TABLE, SIZE)) | Mask.chunked(9),
        lambda h, q, k: ((k <= q) & ~_in_table(h, q, k)) | (q // 9 == k // 9),
    ),
    # Nothing is known of whether a number is finite, and its tiles are not alike where the other condition is decided.
    "finite": Known(
        Mask.from_function(
            lambda h, q, k: (k <= q) & jnp.isfinite(1 / ((q - k + 70) // 16 % 2).astype("float32"))
        ),
        lambda h, q, k: (k <= q) & ((q - k + 70) // 16 % 2 == 1),
    ),
    # No bounds are known of a sine.
    "sine": Known(
        Mask.from_function(lambda h, q, k: jnp.sin(0.5 * q.astype("float32") + k.astype("float32")) > 0.2),
        lambda h, q, k: np.sin(np.float32(0.5) * q.astype(np.float32) + k.astype(np.float32)) > 0.2,
    ),
}


def defined(sees: Callable[[Any, Any, Any], Any], t: int = T, s: int = S, heads: int = H) -> np.ndarray:
    """`[H, T, S]`."""
    h, i, j = np.ogrid[:heads, :t, :s]
    return np.broadcast_to(sees(h, i + s - t, j), (heads, t, s))


def data(name: str) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of a call that are arrays, and what is visible, for batches of 2 and `T` queries as keys."""
    i = np.arange(T)
    wide = PATTERNS["local or global"].sees(0, i[:, None], i)
    ids = np.stack([i // 20, i // 33])
    together = ids[:, :, None] == ids[:, None]
    lengths = np.array([50, 7])
    table = np.random.default_rng(2).random((2, H, 5, 6)) < 0.5
    blocks = lambda x: x[..., (i // 16)[:, None], i // 13]
    mask = PATTERNS["local or global"].mask
    return {
        "segments": (dict(mask=mask, segment_ids=ids), (together & wide)[:, None]),
        "lengths": (
            dict(mask=mask, kv_lengths=lengths, q_lengths=lengths),
            (wide & (i < lengths[:, None])[:, None] & (i < lengths[:, None])[:, :, None])[:, None],
        ),
        "map": (dict(block_map=jnp.asarray(table)), blocks(table)),
        "one map for all": (
            dict(block_map=jnp.asarray(table[0, :1]), mask=ejx.Mask.causal()),
            (blocks(table[0, :1]) & (i <= i[:, None]))[None],
        ),
        "map and pattern": (
            dict(block_map=jnp.asarray(table[:, :1]), mask=mask),
            blocks(table[:, :1]) & wide,
        ),
        "union with segments": (
            dict(mask=Mask.from_segments(ids) | Mask.global_tokens(3)),
            (together | (i < 3) | (i < 3)[:, None])[:, None],
        ),
    }[name]


DATA = ("segments", "lengths", "map", "one map for all", "map and pattern", "union with segments")
