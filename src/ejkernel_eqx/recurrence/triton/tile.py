"""Shared by the Triton kernels of all recurrences: the location of a chunk, its tiles, its decay, and visibility within it.

Rows are flat: the tokens of all batch rows one after the other. Decays are kept as base-2 logarithms, summed from the first token
of their chunk on (`log_decays`), and as a pair of numbers for float32 operands, because differences of large sums must be exact.

Shapes of tiles in all kernels here: `C` is `CHUNK`, `BK` is `BLOCK_K` key channels, `BV` is `BLOCK_V` value channels; rows come first.
"""

import triton
import triton.language as tl

from ...launch.constants import LOG2E

# Values of DECAY.
NONE, CONSTANT, SCALAR, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

NOTHING_LEFT = tl.constexpr(-150.5)  # 2 to this power is zero in float32
TF32_HALF = tl.constexpr(0x1000)  # half of the last bit of a float32 that tf32 keeps
TF32_KEPT = tl.constexpr(-0x2000)  # the bits that it keeps
SHORT = tl.constexpr(-256)  # the bits of a float32 without the last 8


# fmt: off
@triton.jit
def chunk_of(index, chunks_ptr, T, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """The first row of a chunk (64 bits), its number of rows and its sequence; 0 rows for an unused entry."""
    if TABLE:
        entry = chunks_ptr + index.to(tl.int64) * 3  # a row of [chunks, 3]: first row, end row, sequence
        start = tl.load(entry)
        count = tl.load(entry + 1) - start
        seq = tl.load(entry + 2)
        first = start.to(tl.int64)
    else:
        each = tl.cdiv(T, CHUNK)
        seq = index // each
        start = (index % each) * CHUNK
        first = seq.to(tl.int64) * T + start
        count = tl.minimum(T - start, CHUNK)
    return first, count, seq


@triton.jit
def sequence_of(seq, bounds_ptr, T, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """The first row of a sequence (64 bits), its number of rows and the index of its first chunk (64 bits)."""
    if TABLE:
        entry = bounds_ptr + seq.to(tl.int64) * 3  # a row of [sequences, 3]: first row, end row, first chunk
        start = tl.load(entry)
        count = tl.load(entry + 1) - start
        chunk = tl.load(entry + 2).to(tl.int64)
        first = start.to(tl.int64)
    else:
        count = T + 0 * seq
        chunk = seq.to(tl.int64) * tl.cdiv(T, CHUNK)
        first = seq.to(tl.int64) * T
    return first, count, chunk


@triton.jit
def state_tile(bounds_ptr, T, HS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
               BLOCK_V: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr = 1):
    """For programs over sequences, `SPLITS` splits of them, state heads, tiles of key channels and tiles of value channels (fastest): the
    sequence, the split, the head, the channels where the tiles begin, the results of `sequence_of`, and the offset of the state `[D, V]`."""
    tiles_v: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tiles_k: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    index = tl.program_id(0)
    v0, index = index % tiles_v * BLOCK_V, index // tiles_v
    d0, index = index % tiles_k * BLOCK_K, index // tiles_k
    h, index = index % HS, index // HS
    split, seq = index % SPLITS, index // SPLITS
    first, length, chunk = sequence_of(seq, bounds_ptr, T, CHUNK, TABLE)
    return seq, split, h, d0, v0, first, length, chunk, (seq.to(tl.int64) * HS + h) * (D * V)


@triton.jit
def chunks_of_split(split, length, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """The first chunk of a split of a sequence and the one after its last. The last splits of a short sequence are shorter or empty."""
    chunks = tl.cdiv(length, CHUNK)
    if SPLITS == 1:
        return 0 * chunks, chunks
    each = tl.cdiv(chunks, SPLITS)
    return tl.minimum(split * each, chunks), tl.minimum((split + 1) * each, chunks)


@triton.jit
def chunk_tile(chunks_ptr, T, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """For programs over chunks, `HEADS` heads or groups of heads, and tiles of `WIDTH` channels (fastest): the index of each, the channel
    where the tile begins, and the results of `chunk_of`."""
    tiles: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    index = tl.program_id(0)
    tile = index % tiles
    start, index = tile * BLOCK, index // tiles
    head, chunk = index % HEADS, index // HEADS
    first, count, seq = chunk_of(chunk, chunks_ptr, T, CHUNK, TABLE)
    return chunk, head, tile, start, first, count, seq


@triton.jit
def load_tile(ptr, stride, count, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """The `[ROWS, COLUMNS]` tile at `column` of the rows at `ptr`, zero past `count` rows and `WIDTH` columns. `EVEN`: all rows are inside."""
    r = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    c = column + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    pointers = ptr + (r * stride + c)  # [ROWS, COLUMNS]
    # The smallest mask that suffices; conditions that are always true (`r >= 0`, `c >= 0`) give it the shape of the tile.
    if EVEN:
        if WIDTH % COLUMNS == 0:
            return tl.load(pointers)
        return tl.load(pointers, mask=(c < WIDTH) & (r >= 0), other=0.0)
    if WIDTH % COLUMNS == 0:
        return tl.load(pointers, mask=(r < count) & (c >= 0), other=0.0)
    return tl.load(pointers, mask=(r < count) & (c < WIDTH), other=0.0)


@triton.jit
def store_tile(ptr, tile, stride, count, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The counterpart of `load_tile`; stores in the dtype of the memory."""
    r = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    c = column + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    tl.store(ptr + (r * stride + c), tile.to(ptr.dtype.element_ty), mask=(r < count) & (c < WIDTH))


@triton.jit
def load_state(ptr, d0, v0, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """A tile of a state `[D, V]`, zero past its channels."""
    return load_tile(ptr + d0 * V, V, D - d0, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0)  # [BK, BV]


@triton.jit
def load_edge(edges_ptr, split, seq, h, d0, v0, HS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
              BLOCK_V: tl.constexpr, SPLITS: tl.constexpr):
    """A tile of the state before a split, or of the gradient after it: `edges [sequences, SPLITS, HS, D, V]`."""
    at = (seq.to(tl.int64) * SPLITS + split) * HS + h
    return load_state(edges_ptr + at * (D * V), d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]


@triton.jit
def load_carry(ptr, d0, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """The decay of each key channel over a whole chunk."""
    d = d0 + tl.arange(0, BLOCK_K)  # [BK]
    return tl.load(ptr + d, mask=d < D, other=0.0)  # [BK]


@triton.jit
def operand_of(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 result as an operand of products. Numbers for a single pass of `"tf32"` are rounded to its 11 bits here, because the
    hardware truncates towards zero, which would be visible in sums over many tokens."""
    if DTYPE == tl.float32 and PRECISION == "tf32":
        x = x.to(tl.float32)
        rounded = (x.to(tl.int32, bitcast=True) + TF32_HALF) & TF32_KEPT  # of x's shape
        # The addition would turn NVIDIA's NaN, 0x7fffffff, into a zero.
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def products_of(a_ptr, b_ptr, a_stride, b_stride, count, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
                PRECISION: tl.constexpr):
    """The products of a chunk's rows of two operands, summed over all key channels."""
    products = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    for d in tl.static_range(0, D, BLOCK_K):
        a = load_tile(a_ptr, a_stride, count, d, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        b = load_tile(b_ptr, b_stride, count, d, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        products = tl.dot(a, tl.trans(b), products, input_precision=PRECISION)  # [C, C]
    return products


@triton.jit
def load_vector(ptr, stride, count, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """One number per row, in float32, zero past `count`."""
    r = tl.arange(0, ROWS)  # [ROWS]
    if EVEN:
        return tl.load(ptr + r * stride).to(tl.float32)
    return tl.load(ptr + r * stride, mask=r < count, other=0.0).to(tl.float32)


@triton.jit
def closed(g):
    """Log2 decays, bounded below by one whose power is zero, so that no sum of them is infinite or NaN."""
    g = g * LOG2E
    return tl.where(g < NOTHING_LEFT, NOTHING_LEFT, g)


@triton.jit
def add_pairs(high, low, high2, low2):
    """The sum of two pairs; the rounding error of the high part goes to the low one."""
    # Knuth's two-sum: `rest` is the part of `high2` that entered the total, `error` the part of both that did not.
    total = high + high2
    rest = total - high
    error = (high - (total - rest)) + (high2 - rest)
    return total, (low + low2) + error


@triton.jit
def log_decays(g_ptr, first, count, seq, h, HS: tl.constexpr, HG: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr,
               EVEN: tl.constexpr, EXACT: tl.constexpr):
    """The log2 decay from before the chunk up to and including each of its tokens, `[CHUNK]`, and its rounding error (zero if not
    `EXACT`). For kinds without key channels; for a constant decay, `g_ptr` holds one number per sequence and head."""
    r = tl.arange(0, CHUNK)  # [C]
    low = tl.zeros([CHUNK], tl.float32)  # [C]
    if DECAY == SCALAR:
        # A number a token: G_i = g_1 + .. + g_i.
        g = closed(load_vector(g_ptr + first * HG + h // (HS // HG), HG, count, CHUNK, EVEN))  # [C]
        if EXACT:
            high, low = tl.associative_scan((g, low), 0, add_pairs)  # [C] each
        else:
            high = tl.cumsum(g, axis=0)  # [C]
    elif DECAY == CONSTANT:
        # One number for all tokens: G_i = i g. Rows past the last token decay no further.
        g = closed(tl.load(g_ptr + seq.to(tl.int64) * HG + h // (HS // HG)).to(tl.float32))  # []
        steps = r + 1  # [C]
        if not EVEN:
            steps = tl.minimum(steps, count)
        steps = steps.to(tl.float32)
        if EXACT:
            # Of few bits, so that its multiples are exact.
            short = (g.to(tl.int32, bitcast=True) & SHORT).to(tl.float32, bitcast=True)  # []
            high = steps * short
            low = steps * (g - short)
        else:
            high = steps * g
    else:
        high = tl.zeros([CHUNK], tl.float32)
    return high, low


@triton.jit
def decays_of(g_ptr, logs_ptr, first, count, seq, h, TOKENS, HS: tl.constexpr, HG: tl.constexpr, CHUNK: tl.constexpr,
              DECAY: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):
    """Log2 decays of a chunk without key channels: `high`, `low` as in `log_decays`, from each token to the end, and of the whole
    chunk; per-token ones are read from `logs_ptr` (`decays_kernel`). Rows past `count` are undefined."""
    low = tl.zeros([CHUNK], tl.float32)  # [C]
    if DECAY == SCALAR:
        # One number per token: the sums are read, [planes, TOKENS] for each head that has its own decays.
        planes: tl.constexpr = 3 if EXACT else 2
        logs = logs_ptr + (h // (HS // HG)).to(tl.int64) * (planes * TOKENS) + first
        end = tl.maximum(count, 1) - 1  # the chunk's last token, also for an unused entry
        whole = tl.load(logs + end)  # []
        high = load_vector(logs, 1, count, CHUNK, EVEN)  # [C]
        rest = load_vector(logs + TOKENS, 1, count, CHUNK, EVEN)  # [C]
        if EXACT:
            low = load_vector(logs + 2 * TOKENS, 1, count, CHUNK, EVEN)  # [C]
            whole += tl.load(logs + 2 * TOKENS + end)
    elif DECAY == CONSTANT:
        # One number for all tokens: G_i = i g, and (C - i) g to the end.
        g = closed(tl.load(g_ptr + seq.to(tl.int64) * HG + h // (HS // HG)).to(tl.float32))  # []
        steps = tl.arange(0, CHUNK) + 1  # [C]
        if not EVEN:
            steps = tl.minimum(steps, count)
        high = steps.to(tl.float32) * g  # [C]
        if EXACT:
            # Of few bits, so that its multiples are exact.
            short = (g.to(tl.int32, bitcast=True) & SHORT).to(tl.float32, bitcast=True)  # []
            high = steps.to(tl.float32) * short
            low = steps.to(tl.float32) * (g - short)
        rest = (count - steps).to(tl.float32) * g  # [C]
        whole = count.to(tl.float32) * g  # []
    else:
        high = tl.zeros([CHUNK], tl.float32)  # [C]
        rest = high
        whole = 0.0
    return high, low, rest, whole  # [C], [C], [C], []


@triton.jit
def last(x, CHUNK: tl.constexpr):
    """The last entry of a vector: for log decays, that of the whole chunk, even if it is short."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, x, 0.0), axis=0)


@triton.jit
def from_start(high, low, DECAY: tl.constexpr, EXACT: tl.constexpr):
    """The factors from before the chunk to its tokens."""
    if EXACT and DECAY != NONE:
        return tl.exp2(high + low)  # [C]
    return tl.exp2(high)  # [C]


@triton.jit
def to_end(high, low, CHUNK: tl.constexpr, DECAY: tl.constexpr, EXACT: tl.constexpr):
    """The factors from a chunk's tokens to its end."""
    if DECAY == NONE:
        return tl.zeros([CHUNK], tl.float32) + 1.0  # [C]
    if EXACT:
        return tl.exp2((last(high, CHUNK) - high) + (last(low, CHUNK) - low))  # [C]
    return tl.exp2(last(high, CHUNK) - high)  # [C]


@triton.jit
def _differences(x, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        return x[None, :] - x[:, None]  # [C, C]
    return x[:, None] - x[None, :]  # [C, C]


@triton.jit
def between(high, low, visible, DECAY: tl.constexpr, EXACT: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """The factors from token j (column, `TRANSPOSED` row) to token i (row, `TRANSPOSED` column), zero where not `visible`."""
    if DECAY == NONE:
        return tl.where(visible, 1.0, 0.0)  # [C, C]
    exponent = _differences(high, TRANSPOSED)  # [C, C]
    if EXACT:
        exponent += _differences(low, TRANSPOSED)
    return tl.exp2(tl.where(visible, exponent, float("-inf")))  # [C, C]


@triton.jit
def segment_starts(starts_ptr, first, count, seq, T, CHUNK: tl.constexpr):
    """Where each token's segment starts, relative to the chunk's first token; negative if the token sees the incoming state. Token
    i sees token j <= i iff j is not less than this."""
    r = tl.arange(0, CHUNK)  # [C]
    token = (first - seq.to(tl.int64) * T).to(tl.int32)  # the chunk's first, within its row of the batch
    return tl.load(starts_ptr + first + r, mask=r < count, other=0) - token  # [C]


@triton.jit
def visible_to(starts_ptr, first, count, seq, T, CHUNK: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr):
    """Which tokens j (columns) the tokens i (rows) of a chunk see, and `SCALE` for those that see the incoming state, else zero."""
    r = tl.arange(0, CHUNK)  # [C]
    visible = (r[:, None] >= r[None, :]) & (r < count)[:, None]  # [C, C]
    sees = tl.zeros([CHUNK], tl.float32) + SCALE  # [C]
    if SEGMENTS:
        starts = segment_starts(starts_ptr, first, count, seq, T, CHUNK)  # [C]
        visible = visible & (r[None, :] >= starts[:, None])  # [C, C]
        sees = tl.where(starts < 0, sees, 0.0)  # [C]
    return visible, sees


@triton.jit
def last_start(starts_ptr, first, count, seq, T):
    """The same for the chunk's last token: the outgoing state holds token j iff j is not less than this, and the incoming state iff it
    is negative."""
    token = (first - seq.to(tl.int64) * T).to(tl.int32)  # the chunk's first, within its row of the batch
    return tl.load(starts_ptr + first + count - 1) - token
