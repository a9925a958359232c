"""Code shared by the kernels of this family: the visible keys of a sequence, their addresses, and the contribution of one tile of keys.

A tile of scores is `[BM, BK]`: its rows are queries times the query heads that read one key head (row `r` is query `r // group`, head
`r % group` of the group), its columns are consecutive keys. Scores are kept in units of log2, so that `exp2` needs no further
multiplication.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ...attention.triton.tile import bias_in_log2, LARGE_CAP, tanh
from ...launch.constants import LOG2E

FILLED = tl.constexpr(16)  # tokens that one program checks
MOST_PAGES = 4  # of a tile of keys, whose numbers are loaded one by one
# Kinds of scales: for each token and head, for each head; 0: none.
TOKEN, HEAD = tl.constexpr(1), tl.constexpr(2)
LEAST_PEAK = tl.constexpr(1e-30)  # lower bound of the largest scale of a tile, which others are divided by
# Four numbers in float8_e4m3fn, to bfloat16 through float16 and float32.
_BFLOATS = tl.constexpr("""{
.reg .b16 low, high, part<4>;
.reg .b32 pair<2>;
.reg .f32 full<4>;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 pair0, low;
cvt.rn.f16x2.e4m3x2 pair1, high;
mov.b32 {part0, part1}, pair0;
mov.b32 {part2, part3}, pair1;
cvt.f32.f16 full0, part0;
cvt.f32.f16 full1, part1;
cvt.f32.f16 full2, part2;
cvt.f32.f16 full3, part3;
cvt.rn.bf16x2.f32 $0, full1, full0;
cvt.rn.bf16x2.f32 $1, full3, full2;
}""")


Sizes = namedtuple("Sizes", "D V R BLOCK_D BLOCK_V BLOCK_R BM BK")
"""Channels of keys, values and rotary keys, each also padded to a power of two, and rows and columns of a tile of scores; constants."""
Format = namedtuple("Format", "K LATENT K_SCALES V_SCALES R_SCALES FAST_BYTES")
"""Key heads of pages, whether values are the keys, the kinds of scales, and whether bytes are converted by NVIDIA's instructions; constants."""
Scoring = namedtuple("Scoring", "SCALE CAP FAST_TANH LEFT ALIBI QQ PRECISION GATES")
"""Options by which products become scores and weights; constants. `GATES`: numbers of a key's forget gates, two for each head; 0: none."""
Pages = namedtuple("Pages", "k v rope k_scale v_scale rope_scale head")
"""Pointers to pages `[P, PAGE, K, D, V or R]` and scales, `[P, PAGE, K]` or, for each head, `[rows, K]`; and the key head that is read."""
Factors = namedtuple("Factors", "k v rope")
"""Scales for each head, of keys, values and rotary keys; 1 if there are none."""
Queries = namedtuple("Queries", "i t slope chunk qq_bias Q gates own rest")
"""Rows of a tile, `[BM, 1]`: positions, numbers among the sequence's queries, and slopes in log2 units; the position of query 0; the bias
`[Q, Q]` between queries. Behind it pointers to the sums of gates of the rows' heads at slot 0, and both parts of the rows' own, `[BM, 1]` each."""
Keys = namedtuple("Keys", "j slot ok")
"""Columns of a tile, from `locate`: positions `[BK]`, slots, and which of them exist."""


@triton.jit
def sequence(n, q_len_ptr, kv_len_ptr, kv_start_ptr, M, PAGE: tl.constexpr, MOST: tl.constexpr, LEFT: tl.constexpr,
             RANGED: tl.constexpr):  # fmt: skip
    """The number of queries of sequence `n` (at most `MOST`), the position of query 0, and the first and the end of the keys that any of
    its queries sees."""
    q_len = tl.load(q_len_ptr + n)  # [], as all here
    chunk = tl.load(kv_len_ptr + n) - q_len
    queries = tl.minimum(q_len, MOST)
    first = q_len * 0
    if RANGED:
        first = tl.maximum(tl.load(kv_start_ptr + n), 0)
    # Query 0 sees furthest back.
    if LEFT >= 0:
        first = tl.maximum(first, chunk - LEFT)
    return queries, chunk, first, tl.maximum(tl.minimum(chunk + queries, M * PAGE), 0)


@triton.jit
def rest_of(block, q_start_ptr, q_len_ptr, N, T, LONGEST):
    """`FILLED` tokens, and those of them that are not among the first `LONGEST` queries of a sequence."""
    SEQUENCES: tl.constexpr = 64  # pyright: ignore[reportAssignmentType]
    token = block * FILLED + tl.arange(0, FILLED)  # [FILLED]
    taken = tl.zeros([FILLED], tl.int32)  # [FILLED]
    # Which tokens belong to a sequence: all sequences are checked, `SEQUENCES` at a time.
    for begin in tl.range(0, N, SEQUENCES):
        n = begin + tl.arange(0, SEQUENCES)  # [SEQUENCES]
        first = tl.load(q_start_ptr + n, mask=n < N, other=0)[None, :]  # [1, SEQUENCES]
        queries = tl.minimum(tl.load(q_len_ptr + n, mask=n < N, other=0), LONGEST)[None, :]  # [1, SEQUENCES]
        own = (token[:, None] >= first) & (token[:, None] < first + queries)  # [FILLED, SEQUENCES]
        taken |= tl.max(own.to(tl.int32), axis=1)  # [FILLED]
    return token, (taken == 0) & (token < T)  # [FILLED] both


@triton.jit
def fill_rest(block, q_start_ptr, q_len_ptr, out_ptr, lse_ptr, N, T, LONGEST, H: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Stores 0 and minus infinity for those of `FILLED` tokens that are not among the first `LONGEST` queries of a sequence."""
    NUMBERS: tl.constexpr = 512  # pyright: ignore[reportAssignmentType]
    token, rest = rest_of(block, q_start_ptr, q_len_ptr, N, T, LONGEST)  # [FILLED] both  # pyright: ignore[reportGeneralTypeIssues]
    # Usually there are no such tokens and nothing to store.
    if tl.max(rest.to(tl.int32), axis=0) > 0:
        row = token.to(tl.int64)[:, None]  # [FILLED, 1]
        for begin in tl.range(0, H * V, NUMBERS):
            c = (begin + tl.arange(0, NUMBERS))[None, :]  # [1, NUMBERS]
            nothing = tl.zeros([FILLED, NUMBERS], out_ptr.dtype.element_ty)  # [FILLED, NUMBERS]
            tl.store(out_ptr + row * (H * V) + c, nothing, mask=rest[:, None] & (c < H * V))
        for h in tl.range(0, H):
            tl.store(lse_ptr + token.to(tl.int64) * H + h, tl.full([FILLED], float("-inf"), tl.float32), mask=rest)  # fmt: skip


@triton.jit
def query_rows(row, kv_head, H: tl.constexpr, K: tl.constexpr, BM: tl.constexpr):
    """Query and query head of the rows from `row` on, `[BM]` each."""
    group: tl.constexpr = H // K
    r = row + tl.arange(0, BM)  # [BM]
    return r // group, kv_head * group + r % group


@triton.jit
def load_queries(q_ptr, token, h, inside, C0: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DQ: tl.constexpr,
                 H: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Channels `C0 .. C0 + WIDTH` of the queries at `token`, head `h`, as `[BM, BLOCK]`, zero where not `inside`."""
    c = tl.arange(0, BLOCK)  # [BLOCK]
    pointers = q_ptr + (token.to(tl.int64) * (H * DQ) + h * DQ)[:, None] + (C0 + c)[None, :]  # [BM, BLOCK]
    if WIDTH == BLOCK:
        q = tl.load(pointers, mask=inside[:, None], other=0.0)  # [BM, BLOCK]
    else:
        q = tl.load(pointers, mask=inside[:, None] & (c < WIDTH)[None, :], other=0.0)  # [BM, BLOCK]
    if WIDE:
        q = q.to(tl.float32)
    return q


@triton.constexpr_function
def pages_apart(page: int, keys: int) -> int:
    """The number of whole pages that fill a tile of keys, or 1 if one page holds the tile; 0 if neither, or if there are too many."""
    count = max(1, keys // page)
    return count if max(page, keys) % min(page, keys) == 0 and count <= MOST_PAGES else 0


@triton.jit
def load_pages(table_ptr, tile, end, PAGE: tl.constexpr, BK: tl.constexpr):
    """The page numbers of key tile `tile`, -1 from `end` on: a tuple of `pages_apart`, or `[BK]` if that is 0.

    All threads load each number of a tuple. So the compiler knows that the rows of a page share an address, and adds constant offsets.
    `table_ptr` points at the sequence's row. Tiles start at multiples of `BK`.
    """
    count: tl.constexpr = pages_apart(PAGE, BK)
    if count:
        page = ()
        for n in tl.static_range(count):  # pyright: ignore[reportGeneralTypeIssues]
            j = tile * BK + n * PAGE  # []
            page = page + (tl.load(table_ptr + j // PAGE, mask=j < end, other=-1),)
    else:
        j = tile * BK + tl.arange(0, BK)  # [BK]
        page = tl.load(table_ptr + j // PAGE, mask=j < end, other=-1)  # [BK]
    return page


@triton.jit
def locate(pages, tile, first, end, P, PAGE: tl.constexpr, BK: tl.constexpr, FAR: tl.constexpr):
    """Position `[BK]`, slot, and whether it exists and any query may see it, `[BK]`, of each key of a tile with these `pages`. A slot is the
    sum of two numbers: one of 64 bits, the same for all keys of a page if pages are separate, and one that does not depend on the page
    (with `FAR`, of 64 bits too)."""
    count: tl.constexpr = pages_apart(PAGE, BK)
    column = tl.arange(0, BK)  # [BK]
    j = tile * BK + column  # [BK]
    if count:
        page = pages[0]  # []; [BK] where there are several
        for n in tl.static_range(1, count):  # pyright: ignore[reportGeneralTypeIssues]
            page = tl.where(column < n * PAGE, page, pages[n])
        within = tile * BK % PAGE + column % PAGE  # [BK]
        if FAR:
            within = within.to(tl.int64)
        start = page.to(tl.int64) * PAGE  # of the shape of page
    else:
        page = pages
        within = tl.zeros([BK], tl.int32)  # [BK]
        start = ((page.to(tl.int64) if FAR else page) * PAGE + j % PAGE).to(tl.int64)  # [BK]
    ok = (page >= 0) & (page < P) & (j >= first) & (j < end)  # [BK]
    return j, (start, within), ok


@triton.jit
def own_gates(gates_ptr, own_gates_ptr, token, h, inside, GATES: tl.constexpr):
    """Pointers to the sums of gates of the rows' heads at slot 0, and both parts of the rows' own, `[BM, 1]` each; of no `GATES` anything."""
    own = 0.0
    rest = 0.0
    if GATES:
        at = own_gates_ptr + (token.to(tl.int64) * GATES + 2 * h)[:, None]  # [BM, 1]
        own = tl.load(at, mask=inside[:, None], other=0.0)
        rest = tl.load(at + 1, mask=inside[:, None], other=0.0)
    return gates_ptr + 2 * h[:, None], own, rest


@triton.jit
def load_keys(ptr, slot, ok, kv_head, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Rows `slot` of pages `[P, p, K, WIDTH]` at a head as `[BK, BLOCK]`; with `CHECK`, those that are not `ok` are zero and not read."""
    c = tl.arange(0, BLOCK)  # [BLOCK]
    start, within = slot
    rows = ptr + start * (K * WIDTH)  # [] or [BK]
    if start.type.is_block():
        rows = rows[:, None]
    pointers = (rows + kv_head * WIDTH + c[None, :]) + (within * (K * WIDTH))[:, None]  # [BK, BLOCK]
    if CHECK and WIDTH == BLOCK:
        return tl.load(pointers, mask=ok[:, None], other=0.0)
    if CHECK:
        return tl.load(pointers, mask=ok[:, None] & (c < WIDTH)[None, :], other=0.0)
    if WIDTH == BLOCK:
        return tl.load(pointers)
    return tl.load(pointers, mask=(c < WIDTH)[None, :], other=0.0)


@triton.jit
def widened(x, like, FAST: tl.constexpr):
    """Numbers of pages in the dtype of `like`."""
    # The compiler goes from float16 to bfloat16 in one step, of an eighth of the usual rate.
    if FAST and x.dtype == tl.float8e4nv and like.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOATS, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)  # pyright: ignore[reportArgumentType]  # fmt: skip
    else:
        return x.to(like.dtype)


@triton.jit
def load_scales(ptr, slot, ok, kv_head, K: tl.constexpr, CHECK: tl.constexpr):
    """Scales `[P, p, K]` of the slots at a head, `[BK]`."""
    start, within = slot
    pointers = ptr + start * K + (within * K + kv_head)  # [BK]
    if CHECK:
        return tl.load(pointers, mask=ok, other=0.0)
    return tl.load(pointers)


@triton.jit
def scores(qk, keys: Keys, queries: Queries, scoring: Scoring, QQ: tl.constexpr):
    """Scores in log2 units. `QQ`: with the bias between the sequence's new tokens."""
    j = keys.j[None, :]  # [1, BK]
    if scoring.CAP > 0:
        cap: tl.constexpr = scoring.CAP
        s = tanh(qk * (scoring.SCALE / cap), scoring.FAST_TANH, cap > LARGE_CAP) * (cap * LOG2E)  # [BM, BK]
    else:
        s = qk * (scoring.SCALE * LOG2E)  # [BM, BK]
    if scoring.ALIBI:
        s += queries.slope * (j - queries.i).to(tl.float32)  # [BM, BK]
    if scoring.GATES:
        start, within = keys.slot
        at = queries.gates + (start + within)[None, :] * scoring.GATES  # [BM, BK]
        ok = keys.ok[None, :]  # [1, BK]
        # Both parts apart: near sums are alike, however large.
        taken = queries.own - tl.load(at, mask=ok, other=0.0)  # [BM, BK]
        s += (taken + (queries.rest - tl.load(at + 1, mask=ok, other=0.0))) * LOG2E
    if QQ:
        # Key `u` and query `t` among the sequence's new tokens have a bias.
        u = j - queries.chunk  # [1, BK]
        t = queries.t  # [BM, 1]
        inside = (u >= 0) & (u <= t) & (t < queries.Q)  # [BM, BK]
        pointers = queries.qq_bias + t.to(tl.int64) * queries.Q + u  # [BM, BK]
        s += bias_in_log2(tl.load(pointers, mask=inside, other=0.0))
    return s


@triton.jit
def weights(qk, total, top, v_scale, keys: Keys, queries: Queries, scoring: Scoring, MASKED: tl.constexpr, RAISED: tl.constexpr,
            SCALED: tl.constexpr):  # fmt: skip
    """Weights of the keys relative to the rows' new maximum, the factor for earlier sums, and the denominators and maxima `[BM]` including this
    tile, from products `qk`. Weights and denominators are scaled by `2**RAISED`. Only tiles that are `MASKED` have a bias between queries.

    With `SCALED`, the maximum is that of weights times `v_scale [BK]`, from 2^-96 on and where they are finite: these products are at most 1.07
    (times `2**RAISED`), while weights are as large as the inverse of the scales, which float32 can represent."""
    biased: tl.constexpr = scoring.QQ and MASKED  # pyright: ignore[reportAssignmentType]
    # If nothing lies between the product and the softmax, scaling and subtracting the maximum take one instruction.
    folded: tl.constexpr = (
        scoring.CAP == 0 and not scoring.ALIBI and not scoring.GATES and not biased and scoring.SCALE > 0
    )  # pyright: ignore[reportAssignmentType]
    multiplier: tl.constexpr = scoring.SCALE * LOG2E if folded else 1.0  # pyright: ignore[reportAssignmentType]
    s = qk
    if not folded:
        s = scores(qk, keys, queries, scoring, biased)
    if MASKED:
        seen = keys.ok[None, :] & (keys.j[None, :] <= queries.i)  # [BM, BK]
        if scoring.LEFT >= 0:
            seen = seen & (keys.j[None, :] >= queries.i - scoring.LEFT)
        s = tl.where(seen, s, float("-inf"))
    # Online softmax; a row without visible keys so far is shifted by 0, since minus infinity minus itself is NaN.
    if SCALED:
        # The bits of a float are its logarithm, up to 0.09 too small, which suffices here.
        scale = tl.abs(v_scale)  # [BK]
        # Relative to a scale that is infinite or NaN, all else would vanish.
        scale = tl.where(scale < float("inf"), tl.maximum(scale, 2.0**-96), 1.0)  # [BK]
        bits = scale.to(tl.int32, bitcast=True)  # [BK]
        size = bits.to(tl.float32) * 2.0**-23 - 127.0  # [BK]
        new_top = tl.maximum(top, tl.max(tl.fma(s, multiplier, size[None, :]), axis=1))  # [BM]
    else:
        new_top = tl.maximum(top, tl.max(s, axis=1) * multiplier)  # [BM]
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BM]
    if RAISED:
        p = tl.exp2(s * multiplier - (shift - RAISED)[:, None])  # [BM, BK]
    else:
        p = tl.exp2(s * multiplier - shift[:, None])  # [BM, BK]
    alpha = tl.exp2(top - shift)  # [BM]
    return p, alpha, total * alpha + tl.sum(p, axis=1), new_top


@triton.jit
def attend_tile(acc, total, top, q, q_rope, keys: Keys, queries: Queries, pages: Pages, factors: Factors, sizes: Sizes, form: Format,
                scoring: Scoring, MASKED: tl.constexpr):  # fmt: skip
    """Adds one tile of `keys` to the sum `[BM, BLOCK_V]`, the denominator and the maximum `[BM]` of the rows `queries`.

    Without `MASKED` the caller knows that every row sees every key of the tile and that all are `ok`. Scales per head are scalars: those of keys
    and rotary keys are applied here; the caller applies that of the values to `acc` at the end.
    """
    slot, ok, head = keys.slot, keys.ok, pages.head
    k = load_keys(pages.k, slot, ok, head, form.K, sizes.D, sizes.BLOCK_D, MASKED)
    k = widened(k, q, form.FAST_BYTES)  # [BK, BLOCK_D]
    v = k  # latent pages are both keys and values
    if not form.LATENT:
        v = load_keys(pages.v, slot, ok, head, form.K, sizes.V, sizes.BLOCK_V, MASKED)
        v = widened(v, q, form.FAST_BYTES)  # [BK, BLOCK_V]
    qk = tl.dot(q, tl.trans(k), input_precision=scoring.PRECISION)  # [BM, BK]
    # Scales multiply the products, not the keys: one number per column instead of D.
    if form.K_SCALES == TOKEN:
        k_scale = load_scales(pages.k_scale, slot, ok, head, form.K, MASKED)  # [BK]
        qk *= k_scale[None, :]
    if form.K_SCALES == HEAD:
        qk *= factors.k
    # Rotary channels extend the same sums; if they have their own scales, these are applied before.
    if sizes.R > 0:
        rope = load_keys(pages.rope, slot, ok, head, form.K, sizes.R, sizes.BLOCK_R, MASKED)
        rope = widened(rope, q, form.FAST_BYTES)  # [BK, BLOCK_R]
        if form.R_SCALES == 0:
            qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=scoring.PRECISION)  # [BM, BK]
        else:
            more = tl.dot(q_rope, tl.trans(rope), input_precision=scoring.PRECISION)  # [BM, BK]
            if form.R_SCALES == TOKEN:
                qk += more * load_scales(pages.rope_scale, slot, ok, head, form.K, MASKED)[None, :]
            else:
                qk += more * factors.rope
    # p [BM, BK], alpha [BM]
    p, alpha, total, top = weights(qk, total, top, 0.0, keys, queries, scoring, MASKED, 0, False)
    acc = acc * alpha[:, None]  # [BM, BLOCK_V]
    # acc += p v, with the scales of values on the weights.
    if form.V_SCALES == TOKEN:
        if form.LATENT:
            v_scale = k_scale  # [BK]
        else:
            v_scale = load_scales(pages.v_scale, slot, ok, head, form.K, MASKED)  # [BK]
        if q.dtype == tl.float16:
            # Scales are relative to the largest of the tile, because float16 cannot represent small scales times small probabilities.
            peak = tl.maximum(tl.max(v_scale, axis=0), LEAST_PEAK)  # []
            p = (p * (v_scale / peak)[None, :]).to(q.dtype)  # [BM, BK]
            acc += tl.dot(p, v, input_precision=scoring.PRECISION) * peak  # [BM, BLOCK_V]
        else:
            p = (p * v_scale[None, :]).to(q.dtype)  # [BM, BK]
            acc = tl.dot(p, v, acc, input_precision=scoring.PRECISION)  # [BM, BLOCK_V]
    else:
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=scoring.PRECISION)  # [BM, BLOCK_V]
    return acc, total, top


@triton.jit
def head_factors(pages: Pages, row, form: Format, R: tl.constexpr):
    """Scales per head for keys, values and rotary keys; 1 if there are none. `row`: the row of the small arrays, see `Call`."""
    k_factor = 1.0  # [], as all three
    v_factor = 1.0
    rope_factor = 1.0
    if form.K_SCALES == HEAD:
        k_factor = tl.load(pages.k_scale + row * form.K + pages.head)
    if form.V_SCALES == HEAD:
        if form.LATENT:
            v_factor = k_factor
        else:
            v_factor = tl.load(pages.v_scale + row * form.K + pages.head)
    if R > 0 and form.R_SCALES == HEAD:
        rope_factor = tl.load(pages.rope_scale + row * form.K + pages.head)
    return Factors(k_factor, v_factor, rope_factor)
