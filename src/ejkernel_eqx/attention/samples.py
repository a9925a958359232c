"""Representative inputs of an attention problem, generated from its description alone.

Values are random; documents, lengths and masks are as in training. Offset and bias match the problem exactly, so that a call with
these inputs has the same problem.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from ..core.workload import Inputs
from ..dispatch import Problem
from .masks.bounds.classify import visible_share
from .masks.functions import BlockTable
from .masks.pattern import Pattern
from .spec import AttentionArrays, AttentionSpec, RowRanges

SOFT_CAP, EXTREME_CAP, DROPOUT_RATE, VISIBLE = 30.0, 1e12, 0.1, 0.7
_BLOCK, _SHARE = 128, 0.25  # a block of a pattern, and the share of a map's blocks that is visible


def spec_of(problem: Problem) -> AttentionSpec:
    """The static half of a call of this problem."""
    window: Any = problem.flag("window")
    left, right = window or (None, None)
    scale, cap = problem.dim("D") ** -0.5, EXTREME_CAP if problem.flag("extreme_cap") else SOFT_CAP
    return AttentionSpec(
        scale=-scale if problem.flag("negative_scale") else scale,
        logits_soft_cap=cap if problem.flag("soft_cap") else None,
        left=left,
        right=right,
        offset=_offset(problem, left, right),
        dropout_rate=DROPOUT_RATE if problem.flag("dropout") else 0.0,
        deterministic=bool(problem.flag("deterministic")),
        return_lse=bool(problem.flag("lse")),
        same_segments=bool(problem.flag("same_segments")),
        pattern=_pattern(problem),
        block_size=_block_size(problem),
    )


def _pattern(problem: Problem) -> Pattern | None:
    """Blocks as large as a kernel's tile, of which the problem's share is visible."""
    tiles: Any = problem.flag("tiles")
    if tiles in (None, "any"):
        return None
    table = _visible_blocks(problem, (_BLOCK, _BLOCK), 1 / int(tiles.removeprefix("1/")))
    return Pattern(BlockTable(table[None], (_BLOCK, _BLOCK)), 0)


def _block_size(problem: Problem) -> tuple[int, int] | None:
    size: Any = problem.flag("block_size")
    return size


def _visible_blocks(problem: Problem, size: tuple[int, int], share: float) -> np.ndarray:
    """`[M, N]`: this share of blocks, alike in all rows and, as in most patterns, those around the diagonal among them."""
    rows, columns = (-(-problem.dim(name) // block) for name, block in zip("TS", size, strict=True))
    number = np.arange(rows)[:, None] * columns // max(rows, 1) - np.arange(columns)
    near, others = np.abs(number) * 2.0, np.random.default_rng(0).random((rows, columns)) * columns
    count = round(share * rows * columns)
    rank = np.argsort(np.argsort(np.minimum(near, others), axis=1), axis=1)  # of every block in its row
    at = np.argsort((rank * rows + np.arange(rows)[:, None]).reshape(-1))[:count]
    table = np.zeros(rows * columns, bool)
    table[at] = True
    return table.reshape(rows, columns)


def _offset(problem: Problem, left: int | None, right: int | None) -> int:
    """The first common offset that is consistent with the flags `top_left` and `unseen`."""
    queries, keys = problem.dim("T"), problem.dim("S")
    usual = keys - queries
    if problem.flag("rows") or (problem.flag("top_left") and usual == 0):
        return 0
    ranged = left is not None or right is not None
    for offset in (usual, 0, keys // 2, 1, -(queries // 2), -1):
        spec = AttentionSpec(scale=1.0, left=left, right=right, offset=offset)
        unseen = ranged and not spec.covers(queries, keys)
        if ((offset == 0), unseen) == (bool(problem.flag("top_left")), bool(problem.flag("unseen"))):
            return offset
    return 0 if problem.flag("top_left") else usual


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed. The log-sum-exp has a cotangent even if it is not requested. Without it, the gradient
    of a bias or slope is a difference of equal sums. In 16 bits nothing of it would be left to compare."""
    rng = np.random.default_rng(seed)
    ids, ranges = _segment_ids(problem, rng), _row_ranges(problem, rng)
    arrays, cotangents = _random(problem, seed)
    if ids is not None:
        queries = jnp.asarray(ids[:, ids.shape[1] - problem.dim("T") :], jnp.int32)
        keys = jnp.asarray(ids[:, ids.shape[1] - problem.dim("S") :], jnp.int32)
        arrays = arrays._replace(q_segments=queries, kv_segments=keys)
    if (size := _block_size(problem)) is not None:
        arrays = arrays._replace(blocks=jnp.asarray(_visible_blocks(problem, size, _SHARE))[None, None])
    if ranges is not None:
        arrays = arrays._replace(rows=RowRanges(*(jnp.asarray(x, jnp.int32) for x in ranges)))
    return Inputs(arrays, cotangents)


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> Inputs:
    # A generator that compiles and runs fast; its values need not be the same on every kind of device.
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 9))
    dtype = jnp.dtype(problem.dtype("qkv"))
    wide = accumulator(dtype)
    size = dict(problem.dims)

    def shape(pattern: str) -> tuple[int, ...]:
        return tuple(1 if letter == "1" else size[letter] for letter in pattern)

    def normal(pattern: str, dtype: Any = dtype) -> Array:
        return jax.random.normal(next(keys), shape(pattern), dtype)

    q, k, v, dout = normal("BTHD"), normal("BSKD"), normal("BSKV"), normal("BTHV")
    dlse = math.sqrt(size["V"]) * normal("BHT", wide)  # of the magnitude of a row of `dout`
    extra: dict[str, Any] = {}
    if problem.flag("bias"):
        extra["bias"] = normal(f"1{problem.flag('bias')}", jnp.dtype(problem.dtype("bias")))
    if problem.flag("sinks"):
        extra["sinks"] = normal("1H", wide)
    if problem.flag("alibi_slopes"):
        extra["alibi_slopes"] = 2.0 ** (-8.0 * jnp.arange(1, size["H"] + 1, dtype=wide) / size["H"])[None]
    if problem.flag("log_forget"):
        gates = -(2.0 ** (-8.0 * jnp.arange(1, size["H"] + 1, dtype=wide) / size["H"]))
        extra["log_forget"] = gates[None, None] * (1 + jnp.arange(size["S"], dtype=wide) % 3)[None, :, None]
    if problem.flag("mask"):
        extra["mask"] = _mask(next(keys), str(problem.flag("mask")), shape(f"1{problem.flag('mask')}"))
    if problem.flag("dropout"):
        extra["seeds"] = jax.random.bits(next(keys), (*shape("BH"), 2), jnp.uint32)
    return Inputs(AttentionArrays(q, k, v, **extra), {"out": dout, "lse": dlse})


def _mask(key: Array, pattern: str, shape: tuple[int, ...]) -> Array:
    """Most entries are visible; with both query and key axes, causal and aligned at the last key."""
    mask = jax.random.bernoulli(key, VISIBLE, shape)
    if pattern.endswith("TS"):
        queries, keys = shape[-2:]
        mask &= like(jnp.tri(queries, keys, keys - queries, dtype=bool), mask)
    return mask


def _segment_ids(problem: Problem, rng: np.random.Generator) -> np.ndarray | None:
    """`[B, max(T, S)]`: documents of various lengths, with padding where no whole document fits."""
    if not problem.flag("segments"):
        return None
    batch, length = problem.dim("B"), max(problem.dim("T"), problem.dim("S"))
    ids = np.full((batch, length), -1)
    for row in ids:
        ends = _documents(length, rng)
        row[: ends[-1]] = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    return ids


def _documents(length: int, rng: np.random.Generator) -> np.ndarray:
    """Returns where documents end in a row of tokens. Lengths are from a sixteenth to half of the row, short ones more often."""
    least = max(length // 16, 1)
    ends = [0]
    while ends[-1] + least <= length:
        size = round(math.exp(rng.uniform(math.log(least), math.log(max(length // 2, least)))))
        ends.append(min(ends[-1] + size, length))
    return np.array(ends[1:] or [length])


def _row_ranges(problem: Problem, rng: np.random.Generator) -> tuple[np.ndarray, ...] | None:
    """Start, end and position of every query, `[B, T]`, all causal. A single row is packed with documents, as with offsets of
    sequences; of several rows, each has its own number of keys, between half of them and all."""
    if not problem.flag("rows"):
        return None
    batch, queries, keys = (problem.dim(name) for name in "BTS")
    index = np.arange(queries)[None]
    if batch == 1 and queries == keys and queries > 0:
        ends = _documents(queries, rng)
        number = np.searchsorted(ends, index, side="right")
        start = np.concatenate([[0], ends])[number]
        return start, np.where(index < ends[-1], index + 1, start), index
    lengths = rng.integers(keys // 2, keys + 1, (batch, 1))
    # Rows of a training batch are padded at the end; new queries after cached keys are the last of their row.
    position = index + np.zeros_like(lengths) if queries >= keys else index + lengths - queries
    end = np.where(position < lengths, np.clip(position + 1, 0, lengths), 0)
    return np.zeros_like(end), end, position


def visible_scores(problem: Problem) -> int:
    """Visible (query, key) pairs of one head over all batch rows. Dense masks are ignored, because no kernel can skip what they
    hide. Patterns and maps of blocks are counted by their share of all blocks."""
    share, spec = 1.0, spec_of(problem)
    if spec.pattern is not None:
        share *= visible_share(spec.pattern, problem.dim("T"), problem.dim("S"), _BLOCK)
    if spec.block_size is not None:
        share *= _visible_blocks(problem, spec.block_size, _SHARE).mean()
    return round(share * _in_ranges(problem))


def _in_ranges(problem: Problem) -> int:
    """Pairs that window, ranges and segments leave visible."""
    batch, queries, keys = (problem.dim(name) for name in "BTS")
    spec, rng = spec_of(problem), np.random.default_rng(0)
    ids, ranges = _segment_ids(problem, rng), _row_ranges(problem, rng)
    if ranges is not None:
        start, end = ranges[:2]
    else:
        position = np.arange(queries)[None] + spec.offset
        left, right = (np.iinfo(np.int32).max if side is None else side for side in (spec.left, spec.right))
        start, end = np.clip(position - left, 0, keys), np.clip(position + right + 1, 0, keys)
    start, end = (np.broadcast_to(x, (batch, queries)) for x in (start, end))
    if ids is None:
        return int(np.maximum(end - start, 0).sum())
    total = 0
    for row, first, last in zip(ids, start, end, strict=True):
        ours, theirs = row[len(row) - queries :], row[len(row) - keys :]
        # Ids increase along the row, with padding at the end, so the keys of a document form one range.
        real = np.where(theirs < 0, np.iinfo(np.int64).max, theirs)
        begin, stop = np.searchsorted(real, ours, "left"), np.searchsorted(real, ours, "right")
        seen = np.minimum(stop, last) - np.maximum(begin, first)
        total += int(np.where(ours < 0, 0, np.maximum(seen, 0)).sum())
    return total
