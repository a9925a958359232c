"""The Triton kernel of divergences: a program compares a token's rows of logits, and writes the student's gradient over its logits."""

import triton
import triton.language as tl

from .kernels import _erase, _exp2, _grown, _tile, LEAST, LOG2E

LEAST_NORMAL = tl.constexpr(1.2e-38)


@triton.jit
def _load(s_ptr, t_ptr, v, V: tl.constexpr):
    """Tiles of both rows."""
    s = tl.load(s_ptr + v, mask=v < V, other=float("-inf"))  # of the shape of v
    return s, tl.load(t_ptr + v, mask=v < V, other=float("-inf"))


@triton.jit
def _log_sum(most, sums):
    """Of all threads: the logarithm of their sum of exponentials, and the factor that makes shares of it of each thread's own sums."""
    largest = tl.max(most, 0)
    scale = tl.exp2((most - largest) * LOG2E)  # of the shape of most
    total = tl.sum(sums * scale, 0)
    return largest + tl.log(total), scale / total


@triton.jit
def _mixed(p, q, BETA: tl.constexpr):
    """The logarithm of the mixture of probabilities. Where both are 0, it is a finite number."""
    return tl.log(tl.maximum(p * BETA + q * (1.0 - BETA), LEAST_NORMAL))


@triton.jit
def divergence_kernel(
    before_ptr, labels_ptr, bias_ptr, teacher_ptr, teacher_bias_ptr, of_p_ptr,  # [N, STRIDE]; [N]; [V]; [N, TEACHER_STRIDE]; [V]; [N]
    logits_ptr, losses_ptr,  # [N, STRIDE], in the place of `before`; [N]
    V: tl.constexpr, STRIDE: tl.constexpr, TEACHER_STRIDE: tl.constexpr, BIAS: tl.constexpr, TEACHER_BIAS: tl.constexpr,
    CAP: tl.constexpr, TEACHER_CAP: tl.constexpr, TEMPERATURE: tl.constexpr, DIVERGENCE: tl.constexpr, BETA: tl.constexpr,
    SLOPE: tl.constexpr, BLOCK_V: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    # Of the student's logits s and probabilities q, and the teacher's t and p. With `SLOPE` the gradient, times `of_p`, is written over s.
    FORWARD: tl.constexpr = DIVERGENCE == "forward_kl"
    MIXED: tl.constexpr = DIVERGENCE == "jensen_shannon"
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * STRIDE
    teacher = teacher_ptr + row * TEACHER_STRIDE
    ROWS: tl.constexpr = BLOCK_V // 8
    offsets = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]  # [ROWS, 8]
    if tl.load(labels_ptr + row) < 0:
        # Ignored: nothing of it is read.
        tl.store(losses_ptr + row, 0.0)
        if SLOPE:
            _erase(logits, offsets, STRIDE, BLOCK_V)
    else:
        # As in `rows_kernel`, a thread has maxima and sums of its own.
        most_s = tl.full([ROWS], LEAST, tl.float32)  # [ROWS], as all of these
        most_t = tl.full([ROWS], LEAST, tl.float32)
        sums_s = tl.zeros([ROWS], tl.float32)
        sums_t = tl.zeros([ROWS], tl.float32)
        apart = tl.zeros([ROWS], tl.float32)
        raw_s, raw_t = _load(logits, teacher, offsets, V)  # [ROWS, 8] each
        for start in range(0, V, BLOCK_V):
            v = start + offsets  # [ROWS, 8], as what follows
            ahead_s, ahead_t = _load(logits, teacher, v + BLOCK_V, V)
            s, _ = _tile(raw_s, bias_ptr, v, V, BIAS, CAP, TEMPERATURE)
            t, _ = _tile(raw_t, teacher_bias_ptr, v, V, TEACHER_BIAS, TEACHER_CAP, TEMPERATURE)
            most_s, scale_s, _, power_s = _grown(most_s, s, FAST)
            most_t, scale_t, _, power_t = _grown(most_t, t, FAST)
            sums_s = sums_s * scale_s + tl.sum(power_s, 1)  # [ROWS]
            sums_t = sums_t * scale_t + tl.sum(power_t, 1)  # [ROWS]
            if not MIXED:
                scale = scale_t if FORWARD else scale_s  # [ROWS]
                power = power_t if FORWARD else power_s
                # 0 times infinity is 0.
                apart = tl.where(scale > 0, apart * scale, 0.0)  # [ROWS]
                apart += tl.sum(tl.where(power > 0, power * (s - t), 0.0), 1)  # [ROWS]
            raw_s = ahead_s
            raw_t = ahead_t
        lse_s, share_s = _log_sum(most_s, sums_s)
        lse_t, share_t = _log_sum(most_t, sums_t)
        if MIXED:
            of_p = tl.zeros([ROWS], tl.float32)  # [ROWS]
            of_q = tl.zeros([ROWS], tl.float32)  # [ROWS]
            for start in range(0, V, BLOCK_V):
                v = start + offsets  # [ROWS, 8], as what follows
                raw_s, raw_t = _load(logits, teacher, v, V)
                s, _ = _tile(raw_s, bias_ptr, v, V, BIAS, CAP, TEMPERATURE)
                t, _ = _tile(raw_t, teacher_bias_ptr, v, V, TEACHER_BIAS, TEACHER_CAP, TEMPERATURE)
                q = _exp2((s - lse_s) * LOG2E, FAST)
                p = _exp2((t - lse_t) * LOG2E, FAST)
                mixture = _mixed(p, q, BETA)
                of_p += tl.sum(tl.where(p > 0, p * (t - lse_t - mixture), 0.0), 1)  # [ROWS]
                of_q += tl.sum(tl.where(q > 0, q * (s - lse_s - mixture), 0.0), 1)  # [ROWS]
            mean = tl.sum(of_q, 0)
            loss = BETA * tl.sum(of_p, 0) + (1.0 - BETA) * mean
        else:
            share = share_t if FORWARD else share_s  # [ROWS]
            # The mean of log(q / p), over p or over q.
            mean = tl.sum(tl.where(share > 0, apart * share, 0.0), 0) - lse_s + lse_t
            loss = -mean if FORWARD else mean
        tl.store(losses_ptr + row, loss)
        if SLOPE:
            factor = tl.load(of_p_ptr + row) * (1.0 - BETA if MIXED else 1.0)
            # Backwards: what was read last is most likely in the cache.
            LAST: tl.constexpr = (STRIDE - 1) // BLOCK_V * BLOCK_V
            raw_s, raw_t = _load(logits, teacher, LAST + offsets, V)  # [ROWS, 8] each
            for back in range(0, STRIDE, BLOCK_V):
                v = LAST - back + offsets  # [ROWS, 8], as all below
                # After the first tile it is read once more, for nothing.
                ahead_s, ahead_t = _load(logits, teacher, tl.maximum(LAST - back - BLOCK_V, 0) + offsets, V)
                s, curve = _tile(raw_s, bias_ptr, v, V, BIAS, CAP, TEMPERATURE)
                t, _ = _tile(raw_t, teacher_bias_ptr, v, V, TEACHER_BIAS, TEACHER_CAP, TEMPERATURE)
                q = _exp2((s - lse_s) * LOG2E, FAST)
                if FORWARD:
                    slope = q - _exp2((t - lse_t) * LOG2E, FAST)
                else:
                    other = _mixed(_exp2((t - lse_t) * LOG2E, FAST), q, BETA) if MIXED else t - lse_t
                    slope = tl.where(q > 0, q * (s - lse_s - other - mean), 0.0)
                slope = slope * factor * curve
                tl.store(logits + v, slope.to(logits_ptr.dtype.element_ty), mask=v < STRIDE)
                raw_s = ahead_s
                raw_t = ahead_t
