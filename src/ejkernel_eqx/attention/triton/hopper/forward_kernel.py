"""Hopper's forward kernel: programs that stay, and go from tile to tile of queries.

A program has one warp that loads and two or three groups of four warps, the consumers, each with 64 of a tile's queries. Products run
asynchronously: those of one tile of keys with the weights of the tile before, under the softmax of the tile itself; and the consumers
take turns to start theirs, so that one's softmax runs under another's products. Memory moves by tensor descriptors (TMA), which read 0
past the end of a head's rows and write nothing there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....launch.constants import LN2, LOG2E
from ..tile import key_tiles
from .mail import _number, _receive, _send, _take, _taken, MAIL_PLACES, MAIL_WORDS
from .scores import _clear, _own_sum, _rescaled, _row_sum, _scored, _softmax, BOUND

ROWS_EACH = gl.constexpr(64)
FIRST_TURN = gl.constexpr(8)
"""The number of the first consumer's hardware barrier; Triton uses those from 0 on, one for each group of warps and a few more."""


# fmt: off
@gluon.jit
def _await_turn(consumer: gl.constexpr):
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(FIRST_TURN + consumer)], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def _give_turn(consumer: gl.constexpr):
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(FIRST_TURN + consumer)], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def _key_tiles(tiles_ptr, b, m, offset, T, S, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
               TABLE: gl.constexpr):
    """As `key_tiles`, but at least one tile."""
    lo, full_lo, full_hi, hi = key_tiles(tiles_ptr, b, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, TABLE, False)
    lo = gl.maximum(gl.minimum(lo, (S + BLOCK_K - 1) // BLOCK_K - 1), 0)
    return lo, full_lo, full_hi, gl.maximum(hi, lo + 1)


@gluon.jit
def _scores(q, ks, at, BLOCK_K: gl.constexpr, D: gl.constexpr, NUM_STAGES: gl.constexpr):
    """The product by the keys that were loaded as number `at`; not awaited."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    zero = gl.zeros([ROWS_EACH, BLOCK_K], gl.float32, layout)
    return warpgroup_mma(q, ks.index(at % NUM_STAGES).reshape([BLOCK_K, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weighted(p, vs, v_full, at, acc, BLOCK_K: gl.constexpr, V: gl.constexpr, NUM_STAGES: gl.constexpr):
    """Adds the product by the values that were loaded as number `at`; not awaited."""
    mbarrier.wait(v_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
    return warpgroup_mma(p, vs.index(at % NUM_STAGES).reshape([BLOCK_K, V]), acc, is_async=True)


@gluon.jit
def _consumer(buffers, staging, barriers, mail, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr, marks_ptr, B, T,
              S, offset, WIDTHS: gl.constexpr, W: gl.constexpr, CONSUMERS: gl.constexpr, H: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr,
              NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr,
              LEFT: gl.constexpr, RIGHT: gl.constexpr, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, SINKS: gl.constexpr,
              EVEN_K: gl.constexpr, GUARD: gl.constexpr, IN_PLACE: gl.constexpr, PATIENCE: gl.constexpr):
    """Attends with rows `64 W` to `64 W + 63` of every tile of queries."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    TABLE: gl.constexpr = ROWS or SEGMENTS
    # Where it was measured to be faster, or as fast: not with three consumers, without a mask, or at 256 channels.
    UNDER: gl.constexpr = CONSUMERS == 2 and GUARD and V < 256 and (V > 64 or TABLE or LEFT >= 0 or CAP > 0)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    out_desc = _described(out_ptr, B, T, H, WIDTHS[1], ROWS_EACH, V)
    q = qs.index(W).reshape([ROWS_EACH, D])
    dtype: gl.constexpr = q.dtype
    BOUNDED: gl.constexpr = CAP > 0 and MULTIPLIER <= BOUND and not SINKS and dtype == gl.bfloat16
    if W == CONSUMERS - 1:
        _give_turn(0)
    done = 0  # tiles of keys before this tile of queries
    r = 0
    if TABLE:
        t, lo, full_lo, full_hi, hi, kind = _receive(mail, r)
    else:
        t, kind = gl.load(schedule_ptr + gl.program_id(0)), 0
    while t >= 0:
        # Which queries, and what they see.
        count = (T + BLOCK_Q - 1) // BLOCK_Q
        m, bh = t % count, t // count
        b, h = bh // H, bh % H
        if not TABLE:
            upcoming = gl.load(schedule_ptr + (r + 1) * gl.num_programs(0) + gl.program_id(0))
            lo, full_lo, full_hi, hi = _key_tiles(tiles_ptr, b, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
        row = m * BLOCK_Q + W * ROWS_EACH
        rows = row + gl.arange(0, ROWS_EACH, of_rows)  # [64]
        limits = (rows, rows)
        if TABLE:
            limits = (gl.load(first_ptr + b * T + rows, mask=rows < T, other=0), gl.load(past_ptr + b * T + rows, mask=rows < T, other=0))
        marks = marks_ptr + b * ((S + BLOCK_K - 1) // BLOCK_K * BLOCK_K)
        total = _own_sum(gl.zeros([ROWS_EACH, BLOCK_K], gl.float32, scores_layout))  # [64, 4]
        top = gl.full([ROWS_EACH], 0.0 if BOUNDED else float("-inf"), gl.float32, of_rows)
        if SINKS:
            top = gl.full([ROWS_EACH], 0.0, gl.float32, of_rows) + gl.load(sinks_ptr + bh) * LOG2E
            total = total + 0.25
        acc = gl.zeros([ROWS_EACH, V], gl.float32, layout)
        # The last tile of keys, which may be partly hidden or past the end. (A sum that two loops or branches carry would be spilled or unpacked:
        # there is one loop, and what hides keys is a branch in it.)
        mbarrier.wait(q_full.index(W), r & 1)
        mbarrier.wait(k_full.index(done % NUM_STAGES), (done // NUM_STAGES) & 1)
        qk = warpgroup_mma_wait(0, deps=[_scores(q, ks, done, BLOCK_K, D, NUM_STAGES)])
        mbarrier.arrive(k_empty.index(done % NUM_STAGES), count=1)
        s, unseen = _scored(qk, True, row, (hi - 1) * BLOCK_K, T, S, offset, limits, kind, q_segments_ptr + b * T, marks, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT,
                            RIGHT, TABLE, SEGMENTS, EVEN_K, BOUNDED)
        p, alpha, top, total = _softmax(s, top, total, 1.0 if CAP > 0 else MULTIPLIER, GUARD, BOUNDED, PATIENCE)
        if TABLE:
            if unseen:
                _clear(vs, v_full, done, marks + (hi - 1) * BLOCK_K, BLOCK_K, V, NUM_STAGES)
        p = gl.convert_layout(p.to(dtype), weights_layout)
        # The others: scores of tile `n` and values of the one before it.
        for i in range(1, hi - lo):
            n = hi - 1 - i
            at = done + i
            mbarrier.wait(k_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
            _await_turn(W)
            qk = _scores(q, ks, at, BLOCK_K, D, NUM_STAGES)
            acc = _weighted(p, vs, v_full, at - 1, acc, BLOCK_K, V, NUM_STAGES)
            _give_turn((W + 1) % CONSUMERS)
            qk = warpgroup_mma_wait(1, deps=[qk])
            mbarrier.arrive(k_empty.index(at % NUM_STAGES), count=1)
            partly = GUARD
            if GUARD:
                partly = (n >= full_hi) | (n < full_lo)
            s, unseen = _scored(qk, partly, row, n * BLOCK_K, T, S, offset, limits, kind, q_segments_ptr + b * T, marks, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT,
                                RIGHT, TABLE, SEGMENTS, EVEN_K, BOUNDED)
            weights, alpha, top, total = _softmax(s, top, total, 1.0 if CAP > 0 else MULTIPLIER, GUARD, BOUNDED, PATIENCE)
            if UNDER:
                # Never so. NVIDIA's assembler would else move the wait to before the softmax, which runs under the product; it moves none across a branch
                # that changes the weights.
                if T < 0:
                    weights = weights * 2.0
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
            if TABLE:
                if unseen:
                    _clear(vs, v_full, at, marks + n * BLOCK_K, BLOCK_K, V, NUM_STAGES)
            if not BOUNDED:
                acc = _rescaled(acc, alpha, PATIENCE)
            p = gl.convert_layout(weights.to(dtype), weights_layout)
        if not IN_PLACE:
            mbarrier.arrive(q_empty.index(W), count=1)
        done += hi - lo
        acc = _weighted(p, vs, v_full, done - 1, acc, BLOCK_K, V, NUM_STAGES)
        r += 1
        if TABLE:
            upcoming, next_lo, next_full_lo, next_full_hi, next_hi, next_kind = _receive(mail, r)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((done - 1) % NUM_STAGES), count=1)
        # out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw no key.
        total = _row_sum(total, of_rows)
        some = (total != 0) if BOUNDED else (top > float("-inf"))  # [64]
        total = gl.where(some, total, 1.0)
        lse = gl.where(some, (top + gl.log2(total)) * LN2, float("-inf"))
        gl.store(lse_ptr + gl.to_tensor(bh).to(gl.int64) * T + rows, lse, mask=rows < T)
        acc = acc * gl.expand_dims(gl.convert_layout(gl.where(some, 1.0 / total, 0.0), gl.SliceLayout(1, layout)), 1)
        tma.store_wait(0)
        out = staging.index(W)
        out.reshape([ROWS_EACH, V]).store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [b, h, row, 0], out)
        if IN_PLACE:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(W), count=1)
        t = upcoming
        if TABLE:
            lo, full_lo, full_hi, hi, kind = next_lo, next_full_lo, next_full_hi, next_hi, next_kind
    tma.store_wait(0)


@gluon.jit
def _loader(buffers, barriers, mail, operands, tiles_ptr, kinds_ptr, schedule_ptr, counter_ptr, B, T, S, offset, WIDTHS: gl.constexpr,
            CONSUMERS: gl.constexpr, H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, LEFT: gl.constexpr,
            RIGHT: gl.constexpr, TABLE: gl.constexpr):
    """Loads the queries of every tile, and keys and values as far ahead as there are stages; across tiles of queries, too."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_ptr, k_ptr, v_ptr = operands
    k_desc = _described(k_ptr, B, S, K, WIDTHS[0], BLOCK_K, D)
    q_desc = _described(q_ptr, B, T, H, WIDTHS[0], ROWS_EACH, D)
    v_desc = _described(v_ptr, B, S, K, WIDTHS[1], BLOCK_K, V)
    done = 0
    r = 0
    if TABLE:
        t = _number(gl.program_id(0), T, B * H, BLOCK_Q)
        lo, full_lo, full_hi, hi, kind = _listed_bounds(t, tiles_ptr, kinds_ptr, T, S, H, BLOCK_Q, BLOCK_K)
        _send(mail, 0, t, (lo, full_lo, full_hi, hi, kind))
    else:
        t = gl.load(schedule_ptr + gl.program_id(0))
    while t >= 0:
        if not TABLE:
            upcoming = gl.load(schedule_ptr + (r + 1) * gl.num_programs(0) + gl.program_id(0))
        count = (T + BLOCK_Q - 1) // BLOCK_Q
        m, bh = t % count, t // count
        b, h = bh // H, bh % H
        g = h // (H // K)
        if not TABLE:
            seen = _key_tiles(tiles_ptr, b, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
            lo, hi = seen[0], seen[3]
        _load(k_desc, b, g, (hi - 1) * BLOCK_K, ks, k_full, k_empty, done, BLOCK_K, D, NUM_STAGES)
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(w), (r & 1) ^ 1)
            mbarrier.expect(q_full.index(w), ROWS_EACH * D * 2)
            tma.async_copy_global_to_shared(q_desc, [b, h, m * BLOCK_Q + w * ROWS_EACH, 0], q_full.index(w), qs.index(w))
        if TABLE:
            number = _take(counter_ptr)
        for i in range(1, hi - lo):
            _load(k_desc, b, g, (hi - 1 - i) * BLOCK_K, ks, k_full, k_empty, done + i, BLOCK_K, D, NUM_STAGES)
            _load(v_desc, b, g, (hi - i) * BLOCK_K, vs, v_full, v_empty, done + i - 1, BLOCK_K, V, NUM_STAGES)
        done += hi - lo
        r += 1
        if TABLE:  # while all but the last values are on their way
            upcoming = _number(gl.num_programs(0) + _taken(number), T, B * H, BLOCK_Q)
            following = _listed_bounds(upcoming, tiles_ptr, kinds_ptr, T, S, H, BLOCK_Q, BLOCK_K)
            _send(mail, r, upcoming, following)
        _load(v_desc, b, g, lo * BLOCK_K, vs, v_full, v_empty, done - 1, BLOCK_K, V, NUM_STAGES)
        t = upcoming
        if TABLE:
            lo, hi = following[0], following[3]


@gluon.jit
def _listed_bounds(t, tiles_ptr, kinds_ptr, T, S, H: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """`_key_tiles` of tile number `t` from the table, and of which kind its keys are; of any tile if that is -1."""
    count = (T + BLOCK_Q - 1) // BLOCK_Q
    t = gl.maximum(t, 0)
    b, m = t // count // H, t % count
    lo, full_lo, full_hi, hi = _key_tiles(tiles_ptr, b, m, 0, T, S, BLOCK_Q, BLOCK_K, -1, -1, True)
    return lo, full_lo, full_hi, hi, gl.load(kinds_ptr + b * count + m)


@gluon.jit
def _load(desc, b, head, row, buffer, full, empty, at, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr, NUM_STAGES: gl.constexpr):
    s = at % NUM_STAGES
    mbarrier.wait(empty.index(s), ((at // NUM_STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(s), BLOCK_K * WIDTH * 2)
    tma.async_copy_global_to_shared(desc, [b, head, row, 0], full.index(s), buffer.index(s))


@gluon.jit
def _described(ptr, B, length, HEADS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A descriptor of `[B, length, HEADS, WIDTH]` with boxes of rows of one head."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], ptr.dtype.element_ty)
    row: gl.constexpr = HEADS * WIDTH
    return tma.make_tensor_descriptor(ptr, [B, HEADS, length, WIDTH], [gl.to_tensor(length).to(gl.int64) * row, WIDTH, row, 1], [1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def _tiles_of(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, 1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def _barriers_of(COUNT: gl.constexpr, READERS: gl.constexpr):
    """A barrier for every buffer that is loaded, and one for every buffer that all its readers have read."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def hopper_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr,  # [B, T, H, D], [B, S, K, D], [B, S, K, V], [B, H]
    q_segments_ptr, marks_ptr, first_ptr, past_ptr,  # [B, T] and, of keys, [B, S rounded up to whole tiles]
    tiles_ptr, kinds_ptr, schedule_ptr, no_taken_ptr,  # [B, tiles, 4], [B, tiles], [tiles of each program + 1, programs], as taken
    B, T, S, offset,
    taken_ptr, out_ptr, lse_ptr,  # 0 [1], [B, T, H, V], [B, H, T]
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr,
    ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GUARD: gl.constexpr, IN_PLACE: gl.constexpr,
    PATIENCE: gl.constexpr,
):
    # As `forward_kernel`. `GUARD`: whether any tile of keys is partly hidden, except for keys past the end. Which tiles of keys are seen may be known on
    # the device only, in `tiles_ptr`: then programs have no schedule, and take the next tile when they have loaded one. Descriptors are made by who uses
    # them, side by side: each takes most of a microsecond.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_Q // ROWS_EACH
    WIDTHS: gl.constexpr = (D, V)
    operands = (q_ptr, k_ptr, v_ptr)
    qs = _tiles_of(dtype, CONSUMERS, ROWS_EACH, BLOCK_D)
    ks = _tiles_of(dtype, NUM_STAGES, BLOCK_K, BLOCK_D)
    vs = _tiles_of(dtype, NUM_STAGES, BLOCK_K, BLOCK_V)
    staging = qs
    if not IN_PLACE:
        staging = _tiles_of(dtype, CONSUMERS, ROWS_EACH, BLOCK_V)
    q_full, q_empty = _barriers_of(CONSUMERS, 1)
    k_full, k_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    v_full, v_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    buffers = (qs, ks, vs)
    mail = (q_full, q_full, q_empty)  # not used
    if ROWS or SEGMENTS:
        mail_full, mail_empty = _barriers_of(MAIL_PLACES, CONSUMERS)
        letters = gl.allocate_shared_memory(gl.int32, [MAIL_PLACES * MAIL_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        mail = (letters, mail_full, mail_empty)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (buffers, staging, barriers, mail, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, B, T, S, offset, WIDTHS, 0, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH,
                         MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, SINKS, EVEN_K, GUARD, IN_PLACE, PATIENCE)),
            (_consumer, (buffers, staging, barriers, mail, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, B, T, S, offset, WIDTHS, 1, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH,
                         MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, SINKS, EVEN_K, GUARD, IN_PLACE, PATIENCE)),
            (_loader, (buffers, barriers, mail, operands, tiles_ptr, kinds_ptr, schedule_ptr, taken_ptr, B, T, S, offset, WIDTHS, CONSUMERS, H, K, BLOCK_D, BLOCK_V,
                       BLOCK_K, NUM_STAGES, LEFT, RIGHT, ROWS or SEGMENTS)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_consumer, (buffers, staging, barriers, mail, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, B, T, S, offset, WIDTHS, 0, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH,
                         MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, SINKS, EVEN_K, GUARD, IN_PLACE, PATIENCE)),
            (_consumer, (buffers, staging, barriers, mail, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, B, T, S, offset, WIDTHS, 1, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH,
                         MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, SINKS, EVEN_K, GUARD, IN_PLACE, PATIENCE)),
            (_consumer, (buffers, staging, barriers, mail, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, B, T, S, offset, WIDTHS, 2, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH,
                         MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, SINKS, EVEN_K, GUARD, IN_PLACE, PATIENCE)),
            (_loader, (buffers, barriers, mail, operands, tiles_ptr, kinds_ptr, schedule_ptr, taken_ptr, B, T, S, offset, WIDTHS, CONSUMERS, H, K, BLOCK_D, BLOCK_V,
                       BLOCK_K, NUM_STAGES, LEFT, RIGHT, ROWS or SEGMENTS)),
        ], [4, 4, 1], [160, 160, 24])
