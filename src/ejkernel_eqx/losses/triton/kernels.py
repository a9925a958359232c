"""The Triton kernel of the cross entropy: a program makes the numbers of a token from its row of logits, and writes their gradient over them. What
the kernel of divergences shares with it is here, too."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-2.3e38)  # in units of e, of exponents that are finite in powers of two


@triton.jit
def _curved(raw, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """The logits after soft cap and temperature, and the derivative of that."""
    if CAP > 0:
        u = raw / CAP  # of the shape of raw, as all below
        decay = tl.exp2(tl.abs(u) * (-2.0 * LOG2E))
        magnitude = (1.0 - decay) / (1.0 + decay)
        # Near zero by the series: an absolute error would be multiplied by a large cap.
        s = u * u
        series = u * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0))))
        t = tl.where(tl.abs(u) < 0.2, series, tl.where(u < 0, -magnitude, magnitude))
        return t * (CAP / TEMPERATURE), (1.0 - t * t) / TEMPERATURE
    return raw / TEMPERATURE, tl.full(raw.shape, 1.0 / TEMPERATURE, tl.float32)


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    """`FAST`: NVIDIA's instruction alone, with 0 for denormal numbers."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _tile(
    raw, bias_ptr, v, V: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, TEMPERATURE: tl.constexpr
):
    """Logits of the words `v`, and the derivative of cap and temperature. Minus infinity past the end."""
    raw = raw.to(tl.float32)  # of the shape of v, as all below
    if BIAS:
        raw += tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    l, curve = _curved(raw, CAP, TEMPERATURE)  # pyright: ignore[reportGeneralTypeIssues]
    if CAP > 0:
        l = tl.where(v < V, l, float("-inf"))
    return l, curve


@triton.jit
def _grown(most, l, FAST: tl.constexpr):
    """The largest logit of each thread with those of a tile, the factor of sums before, and the tile's exponents of 2 and their powers."""
    larger = tl.maximum(most, tl.max(l, 1))  # [ROWS]
    # It is 1 where nothing was larger.
    scale = tl.where(larger > most, _exp2((most - larger) * LOG2E, FAST), 1.0)  # [ROWS]
    # The product is rounded once for a thread, so a difference is one operation.
    shifted = l * LOG2E - (larger * LOG2E)[:, None]  # [ROWS, 8]
    return larger, scale, shifted, _exp2(shifted, FAST)


@triton.jit
def _slope(p, log_p, of_p, of_p_log_p, of_all, OF_P_LOG_P: tl.constexpr, OF_ALL: tl.constexpr):
    """`statistics.Slope`, but for what the label has besides."""
    slope = p * of_p  # of the shape of p
    if OF_P_LOG_P:
        # 0 times minus infinity is 0.
        slope += of_p_log_p * tl.where(p > 0, p * log_p, 0.0)
    if OF_ALL:
        slope += of_all
    return slope


@triton.jit
def _products(x, weight_ptr, place, E, BLOCK: tl.constexpr):
    """Their sum is the logit of the label in float32, without the bias; 0 if it is not among these words."""
    row = weight_ptr + tl.maximum(place, 0).to(tl.int64) * E
    products = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    for start in range(0, E, BLOCK):
        e = start + tl.arange(0, BLOCK)  # [BLOCK]
        a = tl.load(x + e, mask=e < E, other=0.0).to(tl.float32)  # [BLOCK]
        b = tl.load(row + e, mask=(e < E) & (place >= 0), other=0.0).to(tl.float32)  # [BLOCK]
        products += a * b  # [BLOCK]
    return products


@triton.jit
def _erase(logits, offsets, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A gradient of 0 for a row that is ignored."""
    for start in range(0, STRIDE, BLOCK):
        v = start + offsets  # [ROWS, 8]
        tl.store(logits + v, tl.zeros(v.shape, logits.dtype.element_ty), mask=v < STRIDE)


@triton.jit
def rows_kernel(
    before_ptr, x_ptr, labels_ptr, places_ptr, weight_ptr, bias_ptr,  # [N, STRIDE]; [N, E]; [N] twice; [STRIDE, E]; [V]
    of_p_ptr, of_p_lse_ptr, of_p_log_p_ptr, of_label_ptr, of_all_ptr,  # [N] each: the slope
    lse_ptr, entropy_ptr,  # [N] each: of all words, where these are not all
    E,
    logits_ptr,  # [N, STRIDE], in the place of `before`
    largest_ptr, exponentials_ptr, target_ptr, total_ptr, weighted_ptr,  # [N] each: the part
    V: tl.constexpr, STRIDE: tl.constexpr, FEATURES: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    TOTAL: tl.constexpr, WEIGHTED: tl.constexpr, OF_P_LSE: tl.constexpr, OF_P_LOG_P: tl.constexpr, OF_ALL: tl.constexpr,
    PART: tl.constexpr, SLOPE: tl.constexpr, BLOCK_V: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    # Rows have `STRIDE` numbers, of which those past `V` are no logits, and have a gradient of 0.
    # With `PART` the numbers of `statistics.Part`; with `SLOPE` the gradient that `statistics.Slope` describes, written over the logits.
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * STRIDE
    place = tl.load(places_ptr + row)
    # A label among the words of another device is at no column, also not at one past the end.
    place = tl.where(place < V, place, -1)
    ROWS: tl.constexpr = BLOCK_V // 8
    offsets = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]  # [ROWS, 8]
    if tl.load(labels_ptr + row) < 0:
        # Ignored: nothing of it is read.
        if PART:
            tl.store(largest_ptr + row, 0.0)
            tl.store(exponentials_ptr + row, 1.0)
            tl.store(target_ptr + row, 0.0)
            if TOTAL:
                tl.store(total_ptr + row, 0.0)
            if WEIGHTED:
                tl.store(weighted_ptr + row, 0.0)
        if SLOPE:
            _erase(logits, offsets, STRIDE, BLOCK_V)
    else:
        # A loop of a constant number of turns is unrolled, which takes 15 registers more for 4,096 features.
        features = FEATURES if FEATURES > 0 else E
        products = _products(x_ptr + row * features, weight_ptr, place, features, ROWS)  # [ROWS]
        bias = 0.0
        if BIAS:
            bias = tl.load(bias_ptr + place, mask=place >= 0, other=0.0).to(tl.float32)
        if PART:
            # A thread has neighbouring columns, and a maximum and sums of its own, so nothing is exchanged before the end.
            most = tl.full([ROWS], LEAST, tl.float32)  # [ROWS], as all of these
            sums = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            weighted = tl.zeros([ROWS], tl.float32)
            raw = tl.load(logits + offsets, mask=offsets < V, other=float("-inf"))  # [ROWS, 8]
            for start in range(0, V, BLOCK_V):
                v = start + offsets  # [ROWS, 8]
                # The next tile is on its way while this one is computed.
                ahead = tl.load(logits + v + BLOCK_V, mask=v + BLOCK_V < V, other=float("-inf"))  # [ROWS, 8]
                l, _ = _tile(raw, bias_ptr, v, V, BIAS, CAP, TEMPERATURE)
                if TOTAL:
                    total += tl.sum(tl.where((v < V) & (v != place), l, 0.0), 1)  # [ROWS]
                # The rounded logit of the label is left out. Most tiles do not have it.
                if (place >= start) & (place < start + BLOCK_V):
                    l = tl.where(v == place, float("-inf"), l)  # [ROWS, 8]
                larger, scale, shifted, power = _grown(most, l, FAST)
                if WEIGHTED:
                    moved = weighted + (most - larger) * LOG2E * sums  # [ROWS]
                    weighted = tl.where(scale > 0, scale * moved, 0.0)  # [ROWS]
                    weighted += tl.sum(tl.where(power > 0, power * shifted, 0.0), 1)  # [ROWS]
                sums = sums * scale + tl.sum(power, 1)  # [ROWS]
                most = larger  # [ROWS]
                raw = ahead  # [ROWS, 8]
        target, curve_of_label = _curved(tl.sum(products, 0) + bias, CAP, TEMPERATURE)  # pyright: ignore[reportGeneralTypeIssues]
        if PART:
            own = tl.where(place >= 0, target, LEAST)
            largest = tl.maximum(tl.max(most, 0), own)
            scale = tl.exp2((most - largest) * LOG2E)  # [ROWS]
            power_of_label = tl.exp2((own - largest) * LOG2E)
            exponentials = tl.sum(sums * scale, 0) + power_of_label
            lse = largest + tl.log(exponentials)
            tl.store(largest_ptr + row, largest)
            tl.store(exponentials_ptr + row, exponentials)
            # Of a label that is not among these words it is 0, of which no cap or temperature makes another number.
            tl.store(target_ptr + row, target)
            if TOTAL:
                tl.store(total_ptr + row, tl.sum(total, 0) + target)
            if WEIGHTED:
                moved = tl.where(
                    scale > 0, scale * (weighted / LOG2E + (most - largest) * sums), 0.0
                )  # [ROWS]
                shifted_sum = tl.sum(moved, 0) + tl.where(place >= 0, power_of_label * (own - largest), 0.0)
                tl.store(weighted_ptr + row, shifted_sum)
                entropy = tl.log(exponentials) - shifted_sum / exponentials
        else:
            lse = tl.load(lse_ptr + row)
            if OF_P_LOG_P:
                entropy = tl.load(entropy_ptr + row)
        if SLOPE:
            of_p = tl.load(of_p_ptr + row)
            of_p_log_p = 0.0
            of_all = 0.0
            if OF_P_LSE:
                of_p += tl.load(of_p_lse_ptr + row) * lse
            if OF_P_LOG_P:
                of_p_log_p = tl.load(of_p_log_p_ptr + row)
                of_p += of_p_log_p * entropy
            if OF_ALL:
                of_all = tl.load(of_all_ptr + row)
            # Backwards: what was read last is most likely in the cache.
            LAST: tl.constexpr = (STRIDE - 1) // BLOCK_V * BLOCK_V
            v = LAST + offsets  # [ROWS, 8]
            raw = tl.load(logits + v, mask=v < V, other=float("-inf"))  # [ROWS, 8]
            for back in range(0, STRIDE, BLOCK_V):
                v = LAST - back + offsets  # [ROWS, 8], as all below
                # After the first tile it is read once more, for nothing.
                before = tl.maximum(LAST - back - BLOCK_V, 0) + offsets
                ahead = tl.load(logits + before, mask=before < V, other=float("-inf"))
                l, curve = _tile(raw, bias_ptr, v, V, BIAS, CAP, TEMPERATURE)
                p = _exp2(l * LOG2E - lse * LOG2E, FAST)
                slope = _slope(p, l - lse, of_p, of_p_log_p, of_all, OF_P_LOG_P, OF_ALL)
                if STRIDE > V:
                    slope = tl.where(v < V, slope, 0.0)
                tl.store(logits + v, (slope * curve).to(logits_ptr.dtype.element_ty), mask=v < STRIDE)
                raw = ahead
            if place >= 0:
                tl.debug_barrier()
                p = tl.exp2((target - lse) * LOG2E)
                slope = _slope(p, target - lse, of_p, of_p_log_p, of_all, OF_P_LOG_P, OF_ALL)
                slope = (slope + tl.load(of_label_ptr + row)) * curve_of_label
                tl.store(logits + place, slope.to(logits_ptr.dtype.element_ty))
