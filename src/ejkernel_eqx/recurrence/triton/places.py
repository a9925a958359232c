"""The location of a program's tokens, and which of them see which.

Rows are flat: the tokens of all batch rows one after the other. A `TABLE` locates the sequences and chunks of packed rows (`tables.py`).
"""

from collections import namedtuple

import triton
import triton.language as tl

Chunk = namedtuple("Chunk", "first count seq")
"""A chunk's first row (64 bits), its number of rows, 0 for an unused entry of a table, and the index of its sequence."""


# fmt: off
@triton.jit
def chunk_of(index, chunks_ptr, T, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """The `Chunk` of an index."""
    # Packed rows: the table has every chunk, and entries that are not used.
    if TABLE:
        entry = chunks_ptr + index.to(tl.int64) * 3  # a row of [chunks, 3]: first row, end row, sequence
        start = tl.load(entry)
        count = tl.load(entry + 1) - start
        seq = tl.load(entry + 2)
        first = start.to(tl.int64)
    else:
        # Every sequence has as many chunks as the longest needs.
        each = tl.cdiv(T, CHUNK)
        seq = index // each
        start = (index % each) * CHUNK
        first = seq.to(tl.int64) * T + start
        count = tl.minimum(T - start, CHUNK)
    return Chunk(first, count, seq)


@triton.jit
def chunk_tile(index, chunks_ptr, T, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """The chunk, head or group of heads, and tile (fastest) of the program with this number, each by its index; the channel where the tile begins,
    and the `Chunk`. There are `HEADS` heads or groups of heads, and tiles of `BLOCK` of `WIDTH` channels."""
    # The program's number, taken apart from its fastest part on.
    tiles: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    tile = index % tiles
    start, index = tile * BLOCK, index // tiles
    head, chunk = index % HEADS, index // HEADS
    return chunk, head, tile, start, chunk_of(chunk, chunks_ptr, T, CHUNK, TABLE)


@triton.jit
def segment_starts(starts_ptr, chunk, T, CHUNK: tl.constexpr):
    """The start of each token's segment, relative to the chunk's first token; negative if the token sees the incoming state. Token
    i sees token j <= i iff j is not less than this."""
    r = tl.arange(0, CHUNK)  # [C]
    token = (chunk.first - chunk.seq.to(tl.int64) * T).to(tl.int32)  # the chunk's first, within its row of the batch
    return tl.load(starts_ptr + chunk.first + r, mask=r < chunk.count, other=0) - token  # [C]


@triton.jit
def last_start(starts_ptr, chunk, T):
    """`segment_starts` of the chunk's last token: the outgoing state holds token j iff j is not less than this, and the incoming state iff it
    is negative."""
    token = (chunk.first - chunk.seq.to(tl.int64) * T).to(tl.int32)  # the chunk's first, within its row of the batch
    return tl.load(starts_ptr + chunk.first + chunk.count - 1) - token


@triton.jit
def visible_to(starts_ptr, chunk, T, CHUNK: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr):
    """A mask of the tokens j (columns) that the tokens i (rows) of a chunk see, and `SCALE` for those that see the incoming state, else zero."""
    r = tl.arange(0, CHUNK)  # [C]
    visible = (r[:, None] >= r[None, :]) & (r < chunk.count)[:, None]  # [C, C]
    sees = tl.zeros([CHUNK], tl.float32) + SCALE  # [C]
    if SEGMENTS:
        starts = segment_starts(starts_ptr, chunk, T, CHUNK)  # [C]
        visible = visible & (r[None, :] >= starts[:, None])  # [C, C]
        sees = tl.where(starts < 0, sees, 0.0)  # [C]
    return visible, sees


@triton.jit
def readers_of(r, starts_ptr, chunk, T, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr):
    """Masks: the tokens i (columns) that see the tokens j (rows) of a chunk, and the tokens that the outgoing state holds; `r` numbers them."""
    visible = (r[:, None] <= r[None, :]) & (r < chunk.count)[None, :]  # [C, C]
    # Rows past the last token neither read nor are held.
    leaves = r < chunk.count  # [C]
    if SEGMENTS:
        starts = segment_starts(starts_ptr, chunk, T, CHUNK)  # [C]
        visible = visible & (r[:, None] >= starts[None, :])  # [C, C]
        leaves = leaves & (r >= last_start(starts_ptr, chunk, T))  # [C]
    return visible, leaves


@triton.jit
def pairs_below(starts_ptr, chunk, T, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr):
    """A mask of the earlier tokens j (columns) of its segment that each token i (row) of a chunk sees."""
    r = tl.arange(0, CHUNK)  # [C]
    below = r[:, None] > r[None, :]  # [C, C]
    if SEGMENTS:
        below = below & (r[None, :] >= segment_starts(starts_ptr, chunk, T, CHUNK)[:, None])  # [C, C]
    return below
