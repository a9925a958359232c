"""A layer of a decoder for one token of one sequence, in one launch: six phases, with a barrier between two.

While a program waits, the weights of its next phase are on their way, as they depend on no program. Each warp has whole rows of a tile of weights,
and what they are multiplied by: sums over features do not cross warps.

**Why waiting ends.** A program waits only for programs of its own launch, of which there are no more than multiprocessors. So each gets a place
as soon as other kernels have left theirs, and those wait for nothing that this launch does.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit
def arrive(count_ptr):
    """Makes what this program has stored visible to those that wait."""
    tl.debug_barrier()  # of all threads, on behalf of which one arrives
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait(count_ptr, times: tl.constexpr):
    """Returns when all programs have arrived so many times. One thread looks."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .s32 v; mov.u32 v, %tid.x; setp.ne.s32 q, v, 0; @q bra DONE; "
        "WAIT: ld.acquire.gpu.global.s32 v, [$1]; setp.lt.s32 p, v, $2; @p bra WAIT; DONE: mov.s32 $0, 0; }",
        "=r,l,r", [count_ptr, times * tl.num_programs(0)], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def leave(count_ptr, times: tl.constexpr):
    """The last program to leave makes the counter zero again, for the next launch."""
    if tl.atomic_add(count_ptr, 1, sem="relaxed", scope="gpu") == (times + 1) * tl.num_programs(0) - 1:
        tl.store(count_ptr, 0)


@triton.jit
def prefetch(at):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.s32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _tile(w_ptr, row, step: tl.constexpr, K: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr):
    """A tile `[TR, KS]` of rows of a weight `[*, K]`: step by step the tiles of `TR` rows, then those of the next ones."""
    n = row + step // (K // KS) * TR + tl.arange(0, TR)[:, None]
    return tl.load(w_ptr + n * K + step % (K // KS) * KS + tl.arange(0, KS)[None, :])


@triton.jit
def ahead(w_ptr, row, K: tl.constexpr, COUNT: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr, MOST: tl.constexpr):
    """The first tiles of `COUNT * TR` rows of a weight."""
    loaded = ()
    for step in tl.static_range(min(MOST, COUNT * (K // KS))):  # pyright: ignore[reportGeneralTypeIssues]
        loaded = loaded + (_tile(w_ptr, row, step, K, TR, KS),)
    return loaded


@triton.jit
def features(x_ptr, K: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr):
    """A row `[K]` as tiles `[TR, KS]` of equal rows, past this multiprocessor's own cache, where other programs' results are not."""
    xs = ()
    for chunk in tl.static_range(K // KS):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.zeros([TR, 1], tl.int32) + (chunk * KS + tl.arange(0, KS))[None, :]
        xs = xs + (tl.load(x_ptr + at, cache_modifier=".cg"),)
    return xs


@triton.jit
def factors(norm_ptr, K: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr):
    """The weights of a norm as tiles `[TR, KS]` of equal rows."""
    out = ()
    for chunk in tl.static_range(K // KS):  # pyright: ignore[reportGeneralTypeIssues]
        out = out + (tl.load(norm_ptr + tl.zeros([TR, 1], tl.int32) + (chunk * KS + tl.arange(0, KS))[None, :]),)
    return out


@triton.jit
def normed(xs, weights, K: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr, EPS: tl.constexpr):
    """The row times the weights of its norm, and the factor of the norm `[TR]`, which scales products."""
    squares = tl.zeros([TR, KS], tl.float32)
    out = ()
    for chunk in tl.static_range(K // KS):  # pyright: ignore[reportGeneralTypeIssues]
        x = xs[chunk].to(tl.float32)
        squares += x * x
        out = out + (x * weights[chunk].to(tl.float32),)
    return out, tl.rsqrt(tl.sum(squares, 1) / K + EPS)


@triton.jit
def product(xs, w_ptr, row, loaded, tile: tl.constexpr, K: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr, MOST: tl.constexpr):
    """The row times a tile of rows of a weight, `[TR]`. What is not loaded yet is loaded now."""
    total = tl.zeros([TR, KS], tl.float32)
    for chunk in tl.static_range(K // KS):  # pyright: ignore[reportGeneralTypeIssues]
        if tile * (K // KS) + chunk < MOST:
            w = loaded[tile * (K // KS) + chunk]
        else:
            w = _tile(w_ptr, row, tile * (K // KS) + chunk, K, TR, KS)
        total += w.to(tl.float32) * xs[chunk].to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def halves(x_ptr, D: tl.constexpr, BK: tl.constexpr):
    """Both halves of the features of a head, `[BK, D / 2]` with equal rows."""
    r = tl.zeros([BK, 1], tl.int32) + tl.arange(0, D // 2)[None, :]
    return tl.load(x_ptr + r, cache_modifier=".cg").to(tl.float32), tl.load(x_ptr + D // 2 + r, cache_modifier=".cg").to(tl.float32)


@triton.jit
def rotated(x_ptr, first, second, cos, sin, D: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, BK: tl.constexpr):
    """The halves of a head, times those of the weights of its norm, and rotated, as they are stored."""
    a, b = halves(x_ptr, D, BK)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + EPS)[:, None]
        a *= scale * first
        b *= scale * second
    kept = x_ptr.dtype.element_ty
    return (a * cos - b * sin).to(kept).to(tl.float32), (b * cos + a * sin).to(kept).to(tl.float32)


@triton.jit
def slots_of(table_ptr, begin, length, head, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BK: tl.constexpr):
    """The places of a tile of keys of a head, `[BK]`."""
    j = begin + tl.arange(0, BK)
    page = tl.load(table_ptr + j // PAGE, mask=j < length, other=0)
    return (page.to(tl.int64) * PAGE + j % PAGE) * (HK * D) + head * D


@triton.jit
def layer_kernel(
    x_ptr, norm_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, o_weight_ptr, mlp_norm_ptr,
    gate_weight_ptr, up_weight_ptr, down_weight_ptr, table_ptr, lengths_ptr, count_ptr, k_ptr, v_ptr, row_ptr, parts_ptr,
    new_k_ptr, new_v_ptr, new_row_ptr, new_parts_ptr, out_ptr,  # row: [N], [E], [F], [NQ]; parts: [HQ, S, D], [HQ, S]
    E: tl.constexpr, F: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, HEAD_EPS: tl.constexpr, SCALE: tl.constexpr, PROGRAMS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, TR: tl.constexpr, KS: tl.constexpr, MOST: tl.constexpr,
):
    # Phases FIRST to LAST of: queries, keys and values; attention to a split of the keys; its merge; its projection; gate and up; down.
    pid = tl.program_id(0)
    NQ: tl.constexpr = HQ * D
    N: tl.constexpr = NQ + 2 * HK * D
    G: tl.constexpr = HQ // HK
    h_ptr = new_row_ptr + N
    act_ptr = h_ptr + E
    att_ptr = act_ptr + F
    lse_ptr = new_parts_ptr + HQ * S * D
    kept = x_ptr.dtype.element_ty
    LINE: tl.constexpr = 32  # elements of at most 128 bytes
    t = tl.arange(0, TR)
    # Of the rows of weights, a program has as many as any other.
    own_e = pid * (E // PROGRAMS)
    own_f = pid * (F // PROGRAMS)
    CE: tl.constexpr = E // (PROGRAMS * TR)
    CF: tl.constexpr = F // (PROGRAMS * TR)

    if FIRST == 0:
        CQ: tl.constexpr = N // (PROGRAMS * TR)
        row = pid * (N // PROGRAMS)
        w_ptr = q_weight_ptr
        if row >= NQ + HK * D:
            w_ptr = v_weight_ptr - (NQ + HK * D) * E
        elif row >= NQ:
            w_ptr = k_weight_ptr - NQ * E
        loaded = ahead(w_ptr, row, E, CQ, TR, KS, MOST)
        xs, scale = normed(features(x_ptr, E, TR, KS), factors(norm_ptr, E, TR, KS), E, TR, KS, EPS)
        for tile in tl.static_range(CQ):  # pyright: ignore[reportGeneralTypeIssues]
            tl.store(new_row_ptr + row + tile * TR + t, (product(xs, w_ptr, row, loaded, tile, E, TR, KS, MOST) * scale).to(kept))
    if FIRST == 0 and LAST > 0:
        arrive(count_ptr)

    head = pid // S
    split = pid % S
    if FIRST <= 1 and LAST >= 1:
        length = tl.load(lengths_ptr)
        size = tl.cdiv(tl.cdiv(length, BK), S) * BK
        first = split * size
        end = tl.minimum(first + size, length)
        r = tl.zeros([BK, 1], tl.int32) + tl.arange(0, D // 2)[None, :]
        cos = tl.load(cos_ptr + r).to(tl.float32)
        sin = tl.load(sin_ptr + r).to(tl.float32)
        q_first = cos
        q_second = cos
        k_first = cos
        k_second = cos
        if NORM:
            q_first, q_second = halves(q_norm_ptr, D, BK)
            k_first, k_second = halves(k_norm_ptr, D, BK)
    if FIRST == 0 and LAST > 0:
        # The first keys on their way, into the cache that all multiprocessors share.
        if head < HK:
            line = slots_of(table_ptr, first, length, head, HK, D, PAGE, BK)[:, None] + tl.arange(0, D // LINE)[None, :] * LINE
            prefetch(new_k_ptr + line)
            prefetch(new_v_ptr + line)
        wait(count_ptr, 1)
    if FIRST <= 1 and LAST >= 1:
        if head < HK:
            d = tl.arange(0, D)
            na, nb = rotated(new_row_ptr + NQ + head * D, k_first, k_second, cos, sin, D, NORM, HEAD_EPS, BK)
            nv = tl.load(new_row_ptr + NQ + (HK + head) * D + tl.zeros([BK, 1], tl.int32) + d[None, :], cache_modifier=".cg").to(tl.float32)
            for g in tl.static_range(G):  # pyright: ignore[reportGeneralTypeIssues]
                qa, qb = rotated(new_row_ptr + (head * G + g) * D, q_first, q_second, cos, sin, D, NORM, HEAD_EPS, BK)
                top = tl.full([], float("-inf"), tl.float32)
                total = tl.full([], 0.0, tl.float32)
                acc = tl.zeros([D], tl.float32)
                for begin in tl.range(first, end, BK):
                    slot = slots_of(table_ptr, begin, length, head, HK, D, PAGE, BK)[:, None]
                    j = begin + tl.arange(0, BK)
                    old = (j < length - 1)[:, None]
                    new = (j == length - 1)[:, None]
                    # The key of the new token takes its place here, and in its page once.
                    a = tl.where(new, na, tl.load(new_k_ptr + slot + r, mask=old, other=0.0).to(tl.float32))
                    b = tl.where(new, nb, tl.load(new_k_ptr + slot + D // 2 + r, mask=old, other=0.0).to(tl.float32))
                    values = tl.where(new, nv, tl.load(new_v_ptr + slot + d[None, :], mask=old, other=0.0).to(tl.float32))
                    score = tl.sum(qa * a + qb * b, 1) * (SCALE * LOG2E)  # [BK]
                    score = tl.where(j < end, score, float("-inf"))
                    above = tl.maximum(top, tl.max(score, 0))
                    p = tl.exp2(score - above)
                    less = tl.exp2(top - above)
                    total = total * less + tl.sum(p, 0)
                    acc = acc * less + tl.sum(p[:, None] * values, 0)
                    top = above
                    if g == G - 1:
                        stored = new_k_ptr.dtype.element_ty
                        tl.store(new_k_ptr + slot + r, a.to(stored), mask=new)
                        tl.store(new_k_ptr + slot + D // 2 + r, b.to(stored), mask=new)
                        tl.store(new_v_ptr + slot + d[None, :], values.to(stored), mask=new)
                at = (head * G + g) * S + split
                some = total > 0
                total = tl.where(some, total, 1.0)
                tl.store(new_parts_ptr + at * D + d, acc / total)
                tl.store(lse_ptr + at, tl.where(some, top + tl.log2(total), float("-inf")))
    if FIRST <= 1 and LAST > 1:
        arrive(count_ptr)
    # A fence before an arrival would wait for what was asked for before it.
    if FIRST <= 3 and LAST >= 3:
        o_ahead = ahead(o_weight_ptr, own_e, NQ, CE, TR, KS, MOST)
    if FIRST <= 1 and LAST > 1:
        wait(count_ptr, 2 - FIRST)

    if FIRST <= 2 and LAST >= 2:
        mine = pid * (NQ // PROGRAMS) + tl.arange(0, NQ // PROGRAMS)
        part = mine // D * S
        lses = ()
        parts = ()
        for i in tl.static_range(S):  # pyright: ignore[reportGeneralTypeIssues]
            lses = lses + (tl.load(lse_ptr + part + i, cache_modifier=".cg"),)
            parts = parts + (tl.load(new_parts_ptr + (part + i) * D + mine % D, cache_modifier=".cg"),)
        high = tl.full([NQ // PROGRAMS], -1e30, tl.float32)  # finite, if no split has keys
        for i in tl.static_range(S):  # pyright: ignore[reportGeneralTypeIssues]
            high = tl.maximum(high, lses[i])
        weights = tl.zeros([NQ // PROGRAMS], tl.float32)
        merged = tl.zeros([NQ // PROGRAMS], tl.float32)
        for i in tl.static_range(S):  # pyright: ignore[reportGeneralTypeIssues]
            weight = tl.exp2(lses[i] - high)
            weights += weight
            merged += weight * parts[i]
        tl.store(att_ptr + mine, (merged / tl.where(weights > 0, weights, 1.0)).to(kept))
    if FIRST <= 2 and LAST > 2:
        arrive(count_ptr)
        wait(count_ptr, 3 - FIRST)

    if FIRST <= 3 and LAST >= 3:
        heads = features(att_ptr, NQ, TR, KS)
        for tile in tl.static_range(CE):  # pyright: ignore[reportGeneralTypeIssues]
            n = own_e + tile * TR + t
            y = product(heads, o_weight_ptr, own_e, o_ahead, tile, NQ, TR, KS, MOST) + tl.load(x_ptr + n).to(tl.float32)
            tl.store(h_ptr + n, y.to(kept))
    if FIRST <= 3 and LAST > 3:
        arrive(count_ptr)
    if FIRST <= 4 and LAST >= 4:
        gate_ahead = ahead(gate_weight_ptr, own_f, E, CF, TR, KS, MOST)
        up_ahead = ahead(up_weight_ptr, own_f, E, CF, TR, KS, MOST)
        mlp_factors = factors(mlp_norm_ptr, E, TR, KS)
    if FIRST <= 3 and LAST > 3:
        wait(count_ptr, 4 - FIRST)

    if FIRST <= 4 and LAST >= 4:
        hs, scale = normed(features(h_ptr, E, TR, KS), mlp_factors, E, TR, KS, EPS)
        for tile in tl.static_range(CF):  # pyright: ignore[reportGeneralTypeIssues]
            gate = product(hs, gate_weight_ptr, own_f, gate_ahead, tile, E, TR, KS, MOST) * scale
            up = product(hs, up_weight_ptr, own_f, up_ahead, tile, E, TR, KS, MOST) * scale
            tl.store(act_ptr + own_f + tile * TR + t, (gate * tl.sigmoid(gate) * up).to(kept))
    if FIRST <= 4 and LAST > 4:
        arrive(count_ptr)
    if LAST >= 5:
        down_ahead = ahead(down_weight_ptr, own_e, F, CE, TR, KS, MOST)
    if FIRST <= 4 and LAST > 4:
        wait(count_ptr, 5 - FIRST)

    if LAST >= 5:
        acts = features(act_ptr, F, TR, KS)
        for tile in tl.static_range(CE):  # pyright: ignore[reportGeneralTypeIssues]
            n = own_e + tile * TR + t
            y = product(acts, down_weight_ptr, own_e, down_ahead, tile, F, TR, KS, MOST)
            tl.store(out_ptr + n, (y + tl.load(h_ptr + n, cache_modifier=".cg").to(tl.float32)).to(kept))
    if LAST > FIRST:
        leave(count_ptr, LAST - FIRST)
