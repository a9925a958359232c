"""Hopper's forward kernel whose tiles of queries overlap: as `forward_kernel`, but the last product of a tile runs under the first softmax of the next one,
whose queries have a place of their own, and a tile is stored while the other consumers multiply. So what happens before and after a tile's loop, which costs as
much as a tile of keys and a half, is hidden as the tiles of keys are."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .forward_kernel import (
    _await_turn,
    _barriers_of,
    _described,
    _give_turn,
    _key_tiles,
    _listed_bounds,
    _load,
    _scores,
    _tiles_of,
    ROWS_EACH,
)
from .listed_kernel import _begun, _finish, _place, _weighted, QUERY_PLACES
from .mail import _number, _receive, _send, _take, _taken, MAIL_PLACES, MAIL_WORDS
from .scores import _before_wait, _clear, _rescaled, _scored, _softmax, BOUND

KEYS_FREE = gl.constexpr(4)
VALUES_FREE = gl.constexpr(10)
"""The numbers of hardware barriers, one for each place, beside those of turns."""
PACKED_BFLOAT = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
PACKED_HALF = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


# fmt: off
@gluon.jit
def _limits(first_ptr, past_ptr, row, b, T, layout: gl.constexpr, TABLE: gl.constexpr):
    """The keys of each row, where only the device knows them."""
    rows = row + gl.arange(0, ROWS_EACH, layout)  # [64]
    start, end = rows, rows
    if TABLE:
        start = gl.load(first_ptr + b * T + rows, mask=rows < T, other=0)
        end = gl.load(past_ptr + b * T + rows, mask=rows < T, other=0)
    return start, end


@gluon.jit
def _free(place):
    """Of a warp: that it has read what is in a place of keys or values. The loader waits with `_await_free`. An arrival at a barrier in shared memory is one of
    the whole group, whose warps have to meet before it."""
    gl.inline_asm_elementwise("bar.arrive $1, 288; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(place)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await_free(place):
    gl.inline_asm_elementwise("bar.sync $1, 288; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(place)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release(empty, place, FIRST: gl.constexpr, BY_WARP: gl.constexpr, used=True):
    """From consumers to `_fill`; of a place that was not `used` by the latter only if `BY_WARP`."""
    if BY_WARP:
        _free(FIRST + place)
    else:
        mbarrier.arrive(empty.index(place), count=1, pred=used)


@gluon.jit
def _fill(desc, b, head, row, buffer, full, empty, at, FIRST: gl.constexpr, RELEASED: gl.constexpr, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr,
          NUM_STAGES: gl.constexpr, BY_WARP: gl.constexpr):
    """As `_load`. `RELEASED`: how many of the last places consumers release before anything is in them."""
    if BY_WARP:
        s = at % NUM_STAGES
        if at >= NUM_STAGES - RELEASED:
            _await_free(FIRST + s)
        mbarrier.expect(full.index(s), BLOCK_K * WIDTH * 2)
        tma.async_copy_global_to_shared(desc, [b, head, row, 0], full.index(s), buffer.index(s))
    else:
        _load(desc, b, head, row, buffer, full, empty, at, BLOCK_K, WIDTH, NUM_STAGES)


@gluon.jit
def _packed(weights, dtype: gl.constexpr):
    """Weights `[64, BLOCK_K]`, two in a word: if two loops carry halves, they are unpacked, or their order is changed, in every turn."""
    even, odd = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(PACKED_BFLOAT if dtype == gl.bfloat16 else PACKED_HALF, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _added(p, vs, place, acc, BLOCK_K: gl.constexpr, V: gl.constexpr):
    """Adds the product of `_packed` weights by values; not awaited."""
    layout: gl.constexpr = acc.type.layout
    even, odd = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(vs.dtype, vs.dtype), is_pure=True, pack=1)
    weights = gl.convert_layout(gl.join(even, odd).reshape([ROWS_EACH, BLOCK_K]), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    return warpgroup_mma(weights, vs.index(place).reshape([BLOCK_K, V]), acc, is_async=True)


@gluon.jit
def _consumer(buffers, staging, barriers, mail, out_desc, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr, marks_ptr, T, S,
              offset, W: gl.constexpr, CONSUMERS: gl.constexpr, H: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr,
              NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr,
              LEFT: gl.constexpr, RIGHT: gl.constexpr, TABLE: gl.constexpr, SEGMENTS: gl.constexpr, SINKS: gl.constexpr, EVEN_K: gl.constexpr,
              GUARD: gl.constexpr, PATIENCE: gl.constexpr, BY_WARP: gl.constexpr):
    """Attends with rows `64 W` to `64 W + 63` of every tile of queries: a loop over the tiles, in it what a tile's first keys share with the tile before, and a
    loop over its other keys."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    UNDER: gl.constexpr = CONSUMERS == 2 and GUARD and (V > 64 or TABLE or LEFT >= 0 or CAP > 0)  # as in `forward_kernel`
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    dtype: gl.constexpr = qs.index(0).dtype
    BOUNDED: gl.constexpr = CAP > 0 and MULTIPLIER <= BOUND and not SINKS and dtype == gl.bfloat16
    FACTOR: gl.constexpr = 1.0 if CAP > 0 else MULTIPLIER
    if W == CONSUMERS - 1:
        _give_turn(0)
    if TABLE:
        t, lo, full_lo, full_hi, hi, kind = _receive(mail, 0)
    else:
        t, kind = gl.load(schedule_ptr + gl.program_id(0)), 0
    done = 0  # tiles of keys before this tile of queries
    r = 0
    before = t + 0
    top, total = _begun(sinks_ptr, t, T, BLOCK_Q, SINKS, BOUNDED, of_rows)
    acc = gl.zeros([ROWS_EACH, V], gl.float32, layout)
    p = _packed(gl.zeros([ROWS_EACH, BLOCK_K], gl.float32, scores_layout), dtype)
    while t >= 0:
        # The last tile of keys, which may be partly hidden or past the end; and of the tile of queries before, the last values and the result. Before the first
        # tile of queries there is none: the product is of what happens to be there, and not used.
        place = r % QUERY_PLACES * CONSUMERS + W
        q = qs.index(place).reshape([ROWS_EACH, D])
        mbarrier.wait(q_full.index(place), (r // QUERY_PLACES) & 1)
        mbarrier.wait(k_full.index(done % NUM_STAGES), (done // NUM_STAGES) & 1)
        _await_turn(W)
        qk = _scores(q, ks, done, BLOCK_K, D, NUM_STAGES)
        last = (done + NUM_STAGES - 1) % NUM_STAGES
        mbarrier.wait(v_full.index(last), ((done - 1) // NUM_STAGES) & 1, pred=r > 0)
        acc = _added(p, vs, last, acc, BLOCK_K, V)
        _give_turn((W + 1) % CONSUMERS)
        # Which queries, and what they see.
        b, _, row = _place(t, T, H, BLOCK_Q)
        if not TABLE:
            upcoming = gl.load(schedule_ptr + (r + 1) * gl.num_programs(0) + gl.program_id(0))
            lo, full_lo, full_hi, hi = _key_tiles(tiles_ptr, b, row // BLOCK_Q, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
        row += W * ROWS_EACH
        limits = _limits(first_ptr, past_ptr, row, b, T, of_rows, TABLE)
        marks = marks_ptr + b * ((S + BLOCK_K - 1) // BLOCK_K * BLOCK_K)
        ended_top, ended_total = top, total
        top, total = _begun(sinks_ptr, t, T, BLOCK_Q, SINKS, BOUNDED, of_rows)
        qk = warpgroup_mma_wait(1, deps=[qk])
        _release(k_empty, done % NUM_STAGES, KEYS_FREE, BY_WARP)
        mbarrier.arrive(q_empty.index((r + 1) % QUERY_PLACES * CONSUMERS + W), count=1, pred=r > 0)  # of the tile before
        s, unseen = _scored(qk, True, row, (hi - 1) * BLOCK_K, T, S, offset, limits, kind, q_segments_ptr + b * T, marks, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT,
                            RIGHT, TABLE, SEGMENTS, EVEN_K, BOUNDED)
        weights, alpha, top, total = _softmax(s, top, total, FACTOR, GUARD, BOUNDED, PATIENCE)
        weights = _before_wait(weights, T)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(v_empty, last, VALUES_FREE, BY_WARP, used=r > 0)
        if TABLE:
            if unseen:
                _clear(vs, v_full, done, marks + (hi - 1) * BLOCK_K, BLOCK_K, V, NUM_STAGES)
        p = _packed(weights, dtype)
        if r > 0:
            _finish(acc, ended_top, ended_total, before, staging, out_desc, lse_ptr, T, W, H, V, BLOCK_Q, BOUNDED)
        before = t + 0
        acc = gl.zeros([ROWS_EACH, V], gl.float32, layout)
        # The others: scores of tile `n` and values of the one before it.
        for i in range(1, hi - lo):
            n = hi - 1 - i
            at = done + i
            mbarrier.wait(k_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
            _await_turn(W)
            qk = _scores(q, ks, at, BLOCK_K, D, NUM_STAGES)
            mbarrier.wait(v_full.index((at - 1) % NUM_STAGES), ((at - 1) // NUM_STAGES) & 1)
            acc = _added(p, vs, (at - 1) % NUM_STAGES, acc, BLOCK_K, V)
            _give_turn((W + 1) % CONSUMERS)
            qk = warpgroup_mma_wait(1, deps=[qk])
            _release(k_empty, at % NUM_STAGES, KEYS_FREE, BY_WARP)
            partly = GUARD
            if GUARD:
                partly = (n >= full_hi) | (n < full_lo)
            s, unseen = _scored(qk, partly, row, n * BLOCK_K, T, S, offset, limits, kind, q_segments_ptr + b * T, marks, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT,
                                RIGHT, TABLE, SEGMENTS, EVEN_K, BOUNDED)
            weights, alpha, top, total = _softmax(s, top, total, FACTOR, GUARD, BOUNDED, PATIENCE)
            if UNDER:
                weights = _before_wait(weights, T)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(v_empty, (at - 1) % NUM_STAGES, VALUES_FREE, BY_WARP)
            if TABLE:
                if unseen:
                    _clear(vs, v_full, at, marks + n * BLOCK_K, BLOCK_K, V, NUM_STAGES)
            if not BOUNDED:
                if PATIENCE > 0:
                    acc = _rescaled(acc, alpha)
                else:
                    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, layout)), 1)
            p = _packed(weights, dtype)
        done += hi - lo
        r += 1
        if TABLE:
            t, lo, full_lo, full_hi, hi, kind = _receive(mail, r)
        else:
            t = upcoming + 0
    last = (done - 1) % NUM_STAGES
    mbarrier.wait(v_full.index(last), ((done - 1) // NUM_STAGES) & 1)
    acc = warpgroup_mma_wait(0, deps=[_added(p, vs, last, acc, BLOCK_K, V)])
    _finish(acc, top, total, before, staging, out_desc, lse_ptr, T, W, H, V, BLOCK_Q, BOUNDED)
    tma.store_wait(0)


@gluon.jit
def _consumer_in_one_loop(buffers, staging, barriers, mail, out_desc, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr, marks_ptr, T, S,
              offset, W: gl.constexpr, CONSUMERS: gl.constexpr, H: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr,
              NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr,
              LEFT: gl.constexpr, RIGHT: gl.constexpr, TABLE: gl.constexpr, SEGMENTS: gl.constexpr, SINKS: gl.constexpr, EVEN_K: gl.constexpr,
              GUARD: gl.constexpr, PATIENCE: gl.constexpr):
    """The same with one loop over the keys of all tiles of queries."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    dtype: gl.constexpr = qs.index(0).dtype
    BOUNDED: gl.constexpr = CAP > 0 and MULTIPLIER <= BOUND and not SINKS and dtype == gl.bfloat16
    FACTOR: gl.constexpr = 1.0 if CAP > 0 else MULTIPLIER
    MASKED: gl.constexpr = GUARD or not EVEN_K
    padded = (S + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    if W == CONSUMERS - 1:
        _give_turn(0)
    # The first tile of keys. Nothing is weighted under its softmax.
    if TABLE:
        t, lo, full_lo, full_hi, hi, kind = _receive(mail, 0)
        upcoming = t
    else:
        t, kind = gl.load(schedule_ptr + gl.program_id(0)), 0
        upcoming = gl.load(schedule_ptr + gl.num_programs(0) + gl.program_id(0))
        m, b = t % ((T + BLOCK_Q - 1) // BLOCK_Q), 0
        lo, full_lo, full_hi, hi = _key_tiles(tiles_ptr, 0, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
    b, _, row = _place(t, T, H, BLOCK_Q)
    row += W * ROWS_EACH
    start, end = _limits(first_ptr, past_ptr, row, b, T, of_rows, TABLE)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    qk = warpgroup_mma_wait(0, deps=[_scores(qs.index(W).reshape([ROWS_EACH, D]), ks, 0, BLOCK_K, D, NUM_STAGES)])
    mbarrier.arrive(k_empty.index(0), count=1)
    top, total = _begun(sinks_ptr, t, T, BLOCK_Q, SINKS, BOUNDED, of_rows)
    n = hi - 1
    s, unseen = _scored(qk, MASKED, row, n * BLOCK_K, T, S, offset, (start, end), kind, q_segments_ptr + b * T, marks_ptr + b * padded, SCALE, CAP, FAST_TANH,
                        MULTIPLIER, LEFT, RIGHT, TABLE, SEGMENTS, EVEN_K, BOUNDED)
    weights, alpha, top, total = _softmax(s, top, total, FACTOR, GUARD, BOUNDED, PATIENCE)
    if TABLE:
        if unseen:
            _clear(vs, v_full, 0, marks_ptr + b * padded + n * BLOCK_K, BLOCK_K, V, NUM_STAGES)
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    acc = gl.zeros([ROWS_EACH, V], gl.float32, layout)
    # The others: scores of tile `n` of keys for tile `t` of queries, the tile number `r` of the program, and values of the tile of keys before it, which may
    # be of the tile of queries before.
    before, at, r = t + 0, 1, 0
    n -= 1
    more = lo < lo  # whether the tile of keys before is not the first of its tile of queries
    is_first = n < lo
    if is_first:
        r = 1
        if TABLE:
            t, lo, full_lo, full_hi, hi, kind = _receive(mail, r)
        else:
            t = upcoming + 0
            m = t % ((T + BLOCK_Q - 1) // BLOCK_Q)
            lo, full_lo, full_hi, hi = _key_tiles(tiles_ptr, 0, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
        n = hi - 1
    while t >= 0:
        place = r % QUERY_PLACES * CONSUMERS + W
        ended_top, ended_total = top, total
        if is_first:
            b, _, row = _place(t, T, H, BLOCK_Q)
            row += W * ROWS_EACH
            start, end = _limits(first_ptr, past_ptr, row, b, T, of_rows, TABLE)
            if not TABLE:
                upcoming = gl.load(schedule_ptr + (r + 1) * gl.num_programs(0) + gl.program_id(0))
            top, total = _begun(sinks_ptr, t, T, BLOCK_Q, SINKS, BOUNDED, of_rows)
            mbarrier.arrive(q_empty.index((r + 1) % QUERY_PLACES * CONSUMERS + W), count=1)  # of the tile before
            mbarrier.wait(q_full.index(place), (r // QUERY_PLACES) & 1)
        mbarrier.wait(k_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
        _await_turn(W)
        qk = _scores(qs.index(place).reshape([ROWS_EACH, D]), ks, at, BLOCK_K, D, NUM_STAGES)
        acc = _weighted(p, vs, v_full, at - 1, acc, more, BLOCK_K, V, NUM_STAGES)
        _give_turn((W + 1) % CONSUMERS)
        qk = warpgroup_mma_wait(1, deps=[qk])
        mbarrier.arrive(k_empty.index(at % NUM_STAGES), count=1)
        partly = MASKED
        if MASKED:
            partly = (n >= full_hi) | (n < full_lo) | (n == hi - 1)
        s, unseen = _scored(qk, partly, row, n * BLOCK_K, T, S, offset, (start, end), kind, q_segments_ptr + b * T, marks_ptr + b * padded, SCALE, CAP, FAST_TANH,
                            MULTIPLIER, LEFT, RIGHT, TABLE, SEGMENTS, EVEN_K, BOUNDED)
        weights, alpha, top, total = _softmax(s, top, total, FACTOR, GUARD, BOUNDED, PATIENCE)
        weights = _before_wait(weights, T)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
        if TABLE:
            if unseen:
                _clear(vs, v_full, at, marks_ptr + b * padded + n * BLOCK_K, BLOCK_K, V, NUM_STAGES)
        p = gl.convert_layout(weights.to(dtype), weights_layout)
        if is_first:
            _finish(acc, ended_top, ended_total, before, staging, out_desc, lse_ptr, T, W, H, V, BLOCK_Q, BOUNDED)
            before = t + 0
        # Of a new tile, what remains of the last one is not added to.
        if not BOUNDED:
            if PATIENCE > 0:
                acc = _rescaled(acc, alpha)
            else:
                acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, layout)), 1)
        more = n < hi - 1
        at += 1
        n -= 1
        is_first = n < lo
        if is_first:
            r += 1
            if TABLE:
                t, lo, full_lo, full_hi, hi, kind = _receive(mail, r)
            else:
                t = upcoming + 0
                m = t % ((T + BLOCK_Q - 1) // BLOCK_Q)
                lo, full_lo, full_hi, hi = _key_tiles(tiles_ptr, 0, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
            n = hi - 1
    acc = warpgroup_mma_wait(0, deps=[_weighted(p, vs, v_full, at - 1, acc, more, BLOCK_K, V, NUM_STAGES)])
    mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
    _finish(acc, top, total, before, staging, out_desc, lse_ptr, T, W, H, V, BLOCK_Q, BOUNDED)
    tma.store_wait(0)


@gluon.jit
def _loader(buffers, barriers, mail, q_desc, k_desc, v_desc, tiles_ptr, kinds_ptr, schedule_ptr, counter_ptr, B, T, S, offset, CONSUMERS: gl.constexpr, H: gl.constexpr,
            K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, LEFT: gl.constexpr,
            RIGHT: gl.constexpr, TABLE: gl.constexpr, BY_WARP: gl.constexpr):
    """Loads keys, queries with the first keys of their tile, and values one tile of keys later."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    at = 0
    r = 0
    if TABLE:
        t = _number(gl.program_id(0), T, B * H, BLOCK_Q)
        lo, full_lo, full_hi, hi, kind = _listed_bounds(t, tiles_ptr, kinds_ptr, T, S, H, BLOCK_Q, BLOCK_K)
        _send(mail, 0, t, (lo, full_lo, full_hi, hi, kind))
    else:
        t = gl.load(schedule_ptr + gl.program_id(0))
        lo, hi = t, t
    last_b, last_g, last_n = t * 0, t * 0, t * 0  # of the keys before
    while t >= 0:
        if TABLE:
            number = _take(counter_ptr)
        else:
            upcoming = gl.load(schedule_ptr + (r + 1) * gl.num_programs(0) + gl.program_id(0))
        b, h, row = _place(t, T, H, BLOCK_Q)
        g = h // (H // K)
        if not TABLE:
            seen = _key_tiles(tiles_ptr, b, row // BLOCK_Q, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, False)
            lo, hi = seen[0], seen[3]
        _fill(k_desc, b, g, (hi - 1) * BLOCK_K, ks, k_full, k_empty, at, KEYS_FREE, 0, BLOCK_K, D, NUM_STAGES, BY_WARP)
        for w in gl.static_range(CONSUMERS):
            place = r % QUERY_PLACES * CONSUMERS + w
            mbarrier.wait(q_empty.index(place), ((r // QUERY_PLACES) & 1) ^ 1)
            mbarrier.expect(q_full.index(place), ROWS_EACH * D * 2)
            tma.async_copy_global_to_shared(q_desc, [b, h, row + w * ROWS_EACH, 0], q_full.index(place), qs.index(place))
        if at > 0:
            _fill(v_desc, last_b, last_g, last_n * BLOCK_K, vs, v_full, v_empty, at - 1, VALUES_FREE, 1, BLOCK_K, V, NUM_STAGES, BY_WARP)
        if TABLE:  # known and read while the other keys are awaited
            upcoming = _number(gl.num_programs(0) + _taken(number), T, B * H, BLOCK_Q)
            following = _listed_bounds(upcoming, tiles_ptr, kinds_ptr, T, S, H, BLOCK_Q, BLOCK_K)
        at += 1
        for i in range(1, hi - lo):
            _fill(k_desc, b, g, (hi - 1 - i) * BLOCK_K, ks, k_full, k_empty, at, KEYS_FREE, 0, BLOCK_K, D, NUM_STAGES, BY_WARP)
            _fill(v_desc, b, g, (hi - i) * BLOCK_K, vs, v_full, v_empty, at - 1, VALUES_FREE, 1, BLOCK_K, V, NUM_STAGES, BY_WARP)
            at += 1
        last_b, last_g, last_n = b + 0, g + 0, lo + 0
        r += 1
        if TABLE:
            _send(mail, r, upcoming, following)
            lo, hi = following[0], following[3]
        t = upcoming + 0
    _fill(v_desc, last_b, last_g, last_n * BLOCK_K, vs, v_full, v_empty, at - 1, VALUES_FREE, 1, BLOCK_K, V, NUM_STAGES, BY_WARP)


@gluon.jit
def hopper_joined_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr,  # [B, T, H, D], [B, S, K, D], [B, S, K, V], [B, H]
    q_segments_ptr, marks_ptr, first_ptr, past_ptr,  # [B, T] and, of keys, [B, S rounded up to whole tiles]
    tiles_ptr, kinds_ptr, schedule_ptr, no_taken_ptr,  # [B, tiles, 4], [B, tiles], [tiles of each program + 1, programs], as taken
    B, T, S, offset,
    taken_ptr, out_ptr, lse_ptr,  # 0 [1], [B, T, H, V], [B, H, T]
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr,
    ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GUARD: gl.constexpr, PATIENCE: gl.constexpr, ONE_LOOP: gl.constexpr,
    BY_WARP: gl.constexpr,
):
    # As `hopper_forward_kernel`, for two consumers.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_Q // ROWS_EACH
    TABLE: gl.constexpr = ROWS or SEGMENTS
    q_desc = _described(q_ptr, B, T, H, D, ROWS_EACH, BLOCK_D)
    k_desc = _described(k_ptr, B, S, K, D, BLOCK_K, BLOCK_D)
    v_desc = _described(v_ptr, B, S, K, V, BLOCK_K, BLOCK_V)
    out_desc = _described(out_ptr, B, T, H, V, ROWS_EACH, BLOCK_V)
    buffers = (_tiles_of(dtype, QUERY_PLACES * CONSUMERS, ROWS_EACH, BLOCK_D), _tiles_of(dtype, NUM_STAGES, BLOCK_K, BLOCK_D),
               _tiles_of(dtype, NUM_STAGES, BLOCK_K, BLOCK_V))
    staging = _tiles_of(dtype, CONSUMERS, ROWS_EACH, BLOCK_V)
    q_full, q_empty = _barriers_of(QUERY_PLACES * CONSUMERS, 1)
    k_full, k_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    v_full, v_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    mail = (q_full, q_full, q_empty)  # not used
    if TABLE:
        mail_full, mail_empty = _barriers_of(MAIL_PLACES, CONSUMERS)
        letters = gl.allocate_shared_memory(gl.int32, [MAIL_PLACES * MAIL_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        mail = (letters, mail_full, mail_empty)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if ONE_LOOP:
        gl.warp_specialize([
            (_consumer_in_one_loop, (buffers, staging, barriers, mail, out_desc, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, T, S, offset, 0, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT, RIGHT,
                         TABLE, SEGMENTS, SINKS, EVEN_K, GUARD, PATIENCE)),
            (_consumer_in_one_loop, (buffers, staging, barriers, mail, out_desc, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, T, S, offset, 1, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT, RIGHT,
                         TABLE, SEGMENTS, SINKS, EVEN_K, GUARD, PATIENCE)),
            (_loader, (buffers, barriers, mail, q_desc, k_desc, v_desc, tiles_ptr, kinds_ptr, schedule_ptr, taken_ptr, B, T, S, offset, CONSUMERS, H, K, BLOCK_D, BLOCK_V,
                       BLOCK_K, NUM_STAGES, LEFT, RIGHT, TABLE, False)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_consumer, (buffers, staging, barriers, mail, out_desc, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, T, S, offset, 0, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT, RIGHT,
                         TABLE, SEGMENTS, SINKS, EVEN_K, GUARD, PATIENCE, BY_WARP)),
            (_consumer, (buffers, staging, barriers, mail, out_desc, lse_ptr, sinks_ptr, tiles_ptr, schedule_ptr, first_ptr, past_ptr, q_segments_ptr,
                         marks_ptr, T, S, offset, 1, CONSUMERS, H, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT, RIGHT,
                         TABLE, SEGMENTS, SINKS, EVEN_K, GUARD, PATIENCE, BY_WARP)),
            (_loader, (buffers, barriers, mail, q_desc, k_desc, v_desc, tiles_ptr, kinds_ptr, schedule_ptr, taken_ptr, B, T, S, offset, CONSUMERS, H, K, BLOCK_D, BLOCK_V,
                       BLOCK_K, NUM_STAGES, LEFT, RIGHT, TABLE, BY_WARP)),
        ], [4, 1], [240, 24])
