"""The Triton kernel of the cross entropy: a program makes the numbers of a token from its row of logits, and writes their gradient over them."""

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
    logits, bias_ptr, start, offsets, place, exact, V: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Logits of the words from `start` on, and the derivative of cap and temperature; that of the label is `exact`. Minus infinity past the end."""
    v = start + offsets
    inside = v < V
    raw = tl.load(logits + v, mask=inside, other=float("-inf")).to(
        tl.float32
    )  # of the shape of v, as all below
    if BIAS:
        raw += tl.load(bias_ptr + v, mask=inside, other=0.0).to(tl.float32)
    # Most tiles do not have the label.
    if (place >= start) & (place < start + BLOCK_V):
        raw = tl.where(v == place, exact, raw)
    l, curve = _curved(raw, CAP, TEMPERATURE)  # pyright: ignore[reportGeneralTypeIssues]
    if CAP > 0:
        l = tl.where(inside, l, float("-inf"))
    return l, curve


@triton.jit
def _exact(x, weight_ptr, bias_ptr, place, E: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The logit of the label in float32, before cap and temperature; 0 if it is not among these words."""
    is_here = place >= 0
    row = weight_ptr + tl.maximum(place, 0).to(tl.int64) * E
    products = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    for start in range(0, E, BLOCK):
        e = start + tl.arange(0, BLOCK)  # [BLOCK]
        a = tl.load(x + e, mask=e < E, other=0.0).to(tl.float32)  # [BLOCK]
        b = tl.load(row + e, mask=(e < E) & is_here, other=0.0).to(tl.float32)  # [BLOCK]
        products += a * b  # [BLOCK]
    exact = tl.sum(products, 0)
    if BIAS:
        exact += tl.load(bias_ptr + place, mask=is_here, other=0.0).to(tl.float32)
    return exact


@triton.jit
def rows_kernel(
    before_ptr, x_ptr, labels_ptr, places_ptr, weight_ptr, bias_ptr,  # [N, STRIDE]; [N, E]; [N] twice; [STRIDE, E]; [V]
    of_p_ptr, of_p_lse_ptr, of_p_log_p_ptr, of_label_ptr, of_all_ptr,  # [N] each: the slope
    lse_ptr, entropy_ptr,  # [N] each: of all words, where these are not all
    logits_ptr,  # [N, STRIDE], in the place of `before`
    largest_ptr, exponentials_ptr, target_ptr, total_ptr, weighted_ptr,  # [N] each: the part
    V: tl.constexpr, STRIDE: tl.constexpr, E: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, TEMPERATURE: tl.constexpr,
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
    # A thread has neighbouring columns, and a maximum and sums of its own, so nothing is exchanged before the end.
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
            for start in range(0, STRIDE, BLOCK_V):
                v = start + offsets  # [ROWS, 8]
                tl.store(logits + v, tl.zeros([ROWS, 8], logits_ptr.dtype.element_ty), mask=v < STRIDE)
    else:
        exact = _exact(x_ptr + row * E, weight_ptr, bias_ptr, place, E, BIAS, ROWS)
        if PART:
            most = tl.full([ROWS], LEAST, tl.float32)  # [ROWS], as all of these
            sums = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            weighted = tl.zeros([ROWS], tl.float32)
            for start in range(0, V, BLOCK_V):
                l, _ = _tile(
                    logits, bias_ptr, start, offsets, place, exact, V, BIAS, CAP, TEMPERATURE, BLOCK_V
                )
                if TOTAL:
                    total += tl.sum(tl.where(start + offsets < V, l, 0.0), 1)  # [ROWS]
                larger = tl.maximum(most, tl.max(l, 1))  # [ROWS]
                # The product is rounded once for a thread, so a difference is one operation. It is 0 where nothing was larger.
                scale = tl.where(larger > most, _exp2((most - larger) * LOG2E, FAST), 1.0)  # [ROWS]
                shifted = l * LOG2E - (larger * LOG2E)[:, None]  # [ROWS, 8]
                power = _exp2(shifted, FAST)  # [ROWS, 8]
                if WEIGHTED:
                    # 0 times minus infinity is 0.
                    moved = tl.where(
                        scale > 0, scale * (weighted + (most - larger) * LOG2E * sums), 0.0
                    )  # [ROWS]
                    weighted = moved + tl.sum(tl.where(power > 0, power * shifted, 0.0), 1)  # [ROWS]
                sums = sums * scale + tl.sum(power, 1)  # [ROWS]
                most = larger  # [ROWS]
            largest = tl.max(most, 0)
            scale = _exp2((most - largest) * LOG2E, FAST)  # [ROWS]
            exponentials = tl.sum(sums * scale, 0)
            lse = largest + tl.log(exponentials)
            tl.store(largest_ptr + row, largest)
            tl.store(exponentials_ptr + row, exponentials)
            # Of a label that is not among these words it is 0, and no cap or temperature makes another number of that.
            target, _ = _curved(exact, CAP, TEMPERATURE)
            tl.store(target_ptr + row, target)
            if TOTAL:
                tl.store(total_ptr + row, tl.sum(total, 0))
            if WEIGHTED:
                moved = tl.where(
                    scale > 0, scale * (weighted / LOG2E + (most - largest) * sums), 0.0
                )  # [ROWS]
                tl.store(weighted_ptr + row, tl.sum(moved, 0))
                entropy = tl.log(exponentials) - tl.sum(moved, 0) / exponentials
        else:
            lse = tl.load(lse_ptr + row)
            if OF_P_LOG_P:
                entropy = tl.load(entropy_ptr + row)
        if SLOPE:
            of_p = tl.load(of_p_ptr + row)
            of_label = tl.load(of_label_ptr + row)
            if OF_P_LSE:
                of_p += tl.load(of_p_lse_ptr + row) * lse
            if OF_P_LOG_P:
                of_p_log_p = tl.load(of_p_log_p_ptr + row)
                of_p += of_p_log_p * entropy
            if OF_ALL:
                of_all = tl.load(of_all_ptr + row)
            for start in range(0, STRIDE, BLOCK_V):
                v = start + offsets  # [ROWS, 8], as all below
                l, curve = _tile(
                    logits, bias_ptr, start, offsets, place, exact, V, BIAS, CAP, TEMPERATURE, BLOCK_V
                )
                p = _exp2(l * LOG2E - lse * LOG2E, FAST)
                slope = p * of_p
                if OF_ALL:
                    slope += of_all
                if OF_P_LOG_P:
                    slope += of_p_log_p * tl.where(p > 0, p * (l - lse), 0.0)
                if (place >= start) & (place < start + BLOCK_V):
                    slope += tl.where(v == place, of_label, 0.0)
                if STRIDE > V:
                    slope = tl.where(v < V, slope, 0.0)
                tl.store(logits + v, (slope * curve).to(logits_ptr.dtype.element_ty), mask=v < STRIDE)
