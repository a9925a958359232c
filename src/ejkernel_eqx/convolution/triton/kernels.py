"""The Triton kernels of the causal convolution. A program has `LANES` runs of `STEPS` tokens, `UNROLL` of which are loaded together. Each
thread walks along its run and keeps what it has loaded in registers, so nothing is loaded or computed twice except where runs meet."""

import triton
import triton.language as tl

from ...launch.activations import sigmoid


@triton.jit
def _mask(lanes, c, C: tl.constexpr):
    """`[LANES, BLOCK_C]`: these lanes, and channels that exist."""
    if ((c.shape[0] - 1) & C) == 0:  # whole blocks: `BLOCK_C` is a power of two
        return lanes[:, None] & tl.full([1, c.shape[0]], 1, tl.int1)
    return lanes[:, None] & (c < C)[None, :]


@triton.jit
def _offsets(order_ptr, b, place, c, T, inside, C: tl.constexpr, PACKED: tl.constexpr):
    """Memory offsets of the tokens at these places, `[LANES, BLOCK_C]`."""
    row = b * T + place  # [LANES]
    if PACKED:
        row = b * T + tl.load(order_ptr + row, mask=inside, other=0)  # [LANES]
    return row[:, None] * C + c[None, :]  # [LANES, BLOCK_C]


@triton.jit
def _inputs_before(x_ptr, initial_ptr, order_ptr, b, start, c, T,
                   C: tl.constexpr, HELD: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """The `HELD` inputs before these places, oldest first; for a row that is one sequence, those before it come from its state."""
    held = ()
    for i in tl.static_range(HELD):
        place = start + (i - HELD)  # [LANES]
        inside = (place >= 0) & (place < T)  # [LANES]
        at = _offsets(order_ptr, b, place, c, T, inside, C, PACKED)  # [LANES, BLOCK_C]
        x = tl.load(x_ptr + at, mask=_mask(inside, c, C), other=0.0)  # [LANES, BLOCK_C]
        if INITIAL and not PACKED:
            before = place < 0
            at = (b * HELD + HELD + place)[:, None] * C + c[None, :]  # [LANES, BLOCK_C]
            state = tl.load(initial_ptr + at, mask=_mask(before, c, C), other=0.0)  # [LANES, BLOCK_C]
            x = tl.where(before[:, None], state, x)
        held = held + (x,)
    return held


@triton.jit
def _inputs(x_ptr, order_ptr, b, start, c, T, C: tl.constexpr, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """The inputs at `COUNT` places starting at `start`."""
    inputs = ()
    for i in tl.static_range(COUNT):
        inside = start + i < T  # [LANES]
        if PACKED:
            at = _offsets(order_ptr, b, start + i, c, T, inside, C, PACKED)  # [LANES, BLOCK_C]
        else:
            at = _offsets(order_ptr, b, start, c, T, inside, C, PACKED) + i * C
        inputs = inputs + (tl.load(x_ptr + at, mask=_mask(inside, c, C), other=0.0),)  # [LANES, BLOCK_C]
    return inputs


@triton.jit
def _behind(items, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """`COUNT` items starting at `FIRST`."""
    kept = ()
    for i in tl.static_range(COUNT):
        kept = kept + (items[FIRST + i],)
    return kept


@triton.jit
def _taps(window, i: tl.constexpr, place, initial_ptr, first_ptr, enter_ptr, b, c, T, N,
          C: tl.constexpr, WIDTH: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """The first place of the sequence at `place`, `[LANES]`, -1 for padding and past the end; and the inputs that the token there, the `i`-th after
    those held, sees: `WIDTH` tiles in float32, oldest first."""
    if PACKED:
        first = tl.load(first_ptr + b * T + place, mask=place < T, other=-1)  # [LANES]
    else:
        first = tl.where(place < T, 0, -1)  # [LANES]
    taps = ()
    if PACKED and INITIAL:
        enter = tl.load(enter_ptr + b * T + place, mask=place < T, other=-1)  # [LANES], the sequence whose state a token may see  # fmt: skip
    for w in tl.static_range(WIDTH):
        tap = window[i + w].to(tl.float32)  # [LANES, BLOCK_C]
        if PACKED:
            # Padding sees nothing, not even itself, since it may be NaN.
            seen = (first >= 0) & (place - (WIDTH - 1 - w) >= first)  # [LANES]
            tap = tl.where(seen[:, None], tap, 0.0)  # [LANES, BLOCK_C]
            # Inputs before the sequence come from its initial state; at most one of the two is non-zero.
            if INITIAL and w < WIDTH - 1:
                row = (b * N + enter) * (WIDTH - 1) + (place + w - first)  # [LANES]
                entered = (enter >= 0) & (first >= 0) & (place + w - first < WIDTH - 1)  # [LANES]
                at = row[:, None] * C + c[None, :]  # [LANES, BLOCK_C]
                tap += tl.load(initial_ptr + at, mask=_mask(entered, c, C), other=0.0).to(tl.float32)  # [LANES, BLOCK_C]  # fmt: skip
        taps = taps + (tap,)
    return first, taps


@triton.jit
def _weights(weight_ptr, bias_ptr, b, c, C: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, MAPPED: tl.constexpr):  # fmt: skip
    """The weights of one batch row by the age of the input they multiply, oldest first, and the bias: tiles `[1, BLOCK_C]`."""
    base = tl.where(MAPPED, b * C, 0) + c  # [BLOCK_C]
    weights = ()
    for w in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + base * WIDTH + w, mask=c < C, other=0.0)  # [BLOCK_C]
        weights = weights + (weight.to(tl.float32)[None, :],)
    bias = tl.zeros([1, c.shape[0]], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + base, mask=c < C, other=0.0).to(tl.float32)[None, :]
    return weights, bias


@triton.jit
def _begin(x_ptr, weight_ptr, bias_ptr, initial_ptr, order_ptr, T, C: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
           INITIAL: tl.constexpr, PACKED: tl.constexpr, MAPPED: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
           BLOCK_C: tl.constexpr):  # fmt: skip
    """Batch row, index of the run of tokens, first place of each lane, channels; weights, bias, the inputs before the run."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    runs = tl.cdiv(T, LANES * STEPS)
    run = pid // blocks % runs
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    start = (run * LANES + tl.arange(0, LANES)) * STEPS  # [LANES]
    b = (pid // (blocks * runs)).to(tl.int64)
    weights, bias = _weights(weight_ptr, bias_ptr, b, c, C, WIDTH, BIAS, MAPPED)
    kept = _inputs_before(x_ptr, initial_ptr, order_ptr, b, start, c, T, C, WIDTH - 1, INITIAL, PACKED)  # W - 1 tiles [LANES, BLOCK_C]  # fmt: skip
    return b, run, start, c, weights, bias, kept


@triton.jit
def _weighted(taps, weights, bias, WIDTH: tl.constexpr):
    # y_t = bias + sum over w of weight_w x_{t - (W - 1) + w}.
    y = bias + weights[WIDTH - 1] * taps[WIDTH - 1]  # [LANES, BLOCK_C]
    for w in tl.static_range(WIDTH - 1):
        y += weights[w] * taps[w]
    return y


@triton.jit
def _sums(x, SIZE: tl.constexpr):
    """The sums over the `SIZE` channels of each head, in each of them, `[LANES, BLOCK_C]`."""
    lanes: tl.constexpr = x.shape[0]
    heads: tl.constexpr = x.shape[1] // SIZE
    sums = tl.sum(tl.reshape(x, [lanes, heads, SIZE]), 2)  # [LANES, heads]
    return tl.reshape(tl.broadcast_to(sums[:, :, None], [lanes, heads, SIZE]), [lanes, heads * SIZE])


@triton.jit
def _inverse_lengths(x, SIZE: tl.constexpr):
    return tl.rsqrt(_sums(x * x, SIZE) + 1e-6)


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr,  # [B, T, C], [C, W], [C], [B, W - 1, C] or [B, N, W - 1, C]
    order_ptr, first_ptr, enter_ptr, T, N,  # [B, T] each
    out_ptr,  # [B, T, C]
    C: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
    MAPPED: tl.constexpr, FAST: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Each lane begins with the inputs before its run, and carries along those that the next turn needs.
    held: tl.constexpr = WIDTH - 1
    b, _, start, c, weights, bias, kept = _begin(
        x_ptr, weight_ptr, bias_ptr, initial_ptr, order_ptr, T, C, WIDTH, BIAS, INITIAL, PACKED, MAPPED, LANES, STEPS, BLOCK_C)  # fmt: skip
    for turn in range(STEPS // UNROLL):
        begin = start + turn * UNROLL  # [LANES]
        window = kept + _inputs(x_ptr, order_ptr, b, begin, c, T, C, UNROLL, PACKED)  # W - 1 + UNROLL tiles [LANES, BLOCK_C]  # fmt: skip
        at = _offsets(order_ptr, b, begin, c, T, begin < T, C, False)  # [LANES, BLOCK_C]
        for i in tl.static_range(UNROLL):
            place = begin + i  # [LANES]
            first, taps = _taps(window, i, place, initial_ptr, first_ptr, enter_ptr, b, c, T, N, C, WIDTH, INITIAL, PACKED)  # W tiles  # fmt: skip
            y = _weighted(taps, weights, bias, WIDTH)  # [LANES, BLOCK_C]
            if SILU:
                y *= sigmoid(y, FAST)
            if NORM > 0:
                y *= _inverse_lengths(y, NORM)
            inside = place < T
            to = at + i * C  # [LANES, BLOCK_C]
            if PACKED:
                y = tl.where((first >= 0)[:, None], y, 0.0)  # [LANES, BLOCK_C]
                to = _offsets(order_ptr, b, place, c, T, inside, C, PACKED)
            tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=_mask(inside, c, C))
        kept = _behind(window, UNROLL, held)


@triton.jit
def _store_dx(dx_ptr, dfinal_ptr, order_ptr, leave_ptr, inner, firsts, weights, b, place, start, c, T, N,
              C: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """The gradient of the input at `place`, which the tokens `place .. place + held` see: `inner` are their gradients before the activation,
    `firsts` where their sequences begin. Returns both without the first."""
    held: tl.constexpr = WIDTH - 1
    # dx_t = sum over w of weight_w d_{t + (W - 1) - w}, of the tokens of its own sequence.
    dx = weights[held] * inner[0]  # [LANES, BLOCK_C]
    for ahead in tl.static_range(1, WIDTH):
        d = inner[ahead]  # [LANES, BLOCK_C]
        if PACKED:
            d = tl.where((place >= firsts[ahead])[:, None], d, 0.0)
        dx += weights[held - ahead] * d
    inside = (place >= start) & (place < T)  # [LANES]; the lane before stores what is before its start
    # The last inputs of a sequence are also its final state, whose gradient is added.
    if PACKED:
        leave = tl.load(leave_ptr + b * T + place, mask=inside, other=-1)  # [LANES]
    else:
        leave = place - (T - held)  # [LANES]
    at = (b * N * held + leave)[:, None] * C + c[None, :]  # [LANES, BLOCK_C]
    dx += tl.load(dfinal_ptr + at, mask=_mask(inside & (leave >= 0), c, C), other=0.0).to(tl.float32)  # [LANES, BLOCK_C]  # fmt: skip
    at = _offsets(order_ptr, b, place, c, T, inside, C, PACKED)  # [LANES, BLOCK_C]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=_mask(inside, c, C))
    return _behind(inner, 1, held), _behind(firsts, 1, held)


@triton.jit
def backward_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, order_ptr, first_ptr, enter_ptr,  # as in the forward kernel
    leave_ptr, dout_ptr, dfinal_ptr, T, N,  # [B, T], [B, T, C], as initial
    dx_ptr, partial_ptr,  # [B, T, C]
    C: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
    MAPPED: tl.constexpr, FAST: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`dx`, and this run's share of the gradients of weight and bias, `partial [B, runs, W + 1, C]`."""
    held: tl.constexpr = WIDTH - 1
    b, run, start, c, weights, bias, kept = _begin(
        x_ptr, weight_ptr, bias_ptr, initial_ptr, order_ptr, T, C, WIDTH, BIAS, INITIAL, PACKED, MAPPED, LANES, STEPS, BLOCK_C)  # fmt: skip
    # Gradients of the weights, by age, and of the bias, per lane.
    shares = ()
    for _ in tl.static_range(WIDTH + 1):
        shares = shares + (tl.zeros([LANES, BLOCK_C], tl.float32),)  # [LANES, BLOCK_C]
    # Gradients before the activation of the last tokens passed; zero here for those before the lane's own.
    inner = ()
    firsts = ()
    for _ in tl.static_range(held):
        inner = inner + (tl.zeros([LANES, BLOCK_C], tl.float32),)  # [LANES, BLOCK_C]
        firsts = firsts + (start * 0,)  # [LANES]
    for turn in range(STEPS // UNROLL):
        begin = start + turn * UNROLL  # [LANES]
        window = kept + _inputs(x_ptr, order_ptr, b, begin, c, T, C, UNROLL, PACKED)  # W - 1 + UNROLL tiles [LANES, BLOCK_C]  # fmt: skip
        douts = _inputs(dout_ptr, order_ptr, b, begin, c, T, C, UNROLL, PACKED)  # UNROLL tiles [LANES, BLOCK_C]  # fmt: skip
        # A token's gradient d before the activation is added to the weights at once; it completes that of the input `held` places before.
        for i in tl.static_range(UNROLL):
            place = begin + i  # [LANES]
            first, taps = _taps(window, i, place, initial_ptr, first_ptr, enter_ptr, b, c, T, N, C, WIDTH, INITIAL, PACKED)  # W tiles  # fmt: skip
            d = _inner(douts[i], taps, weights, bias, first, WIDTH, SILU, NORM, PACKED, FAST)  # as taps
            summed = ()
            for w in tl.static_range(WIDTH):
                summed = summed + (shares[w] + d * taps[w],)  # [LANES, BLOCK_C]
            shares = summed + (shares[WIDTH] + d,)
            inner, firsts = _store_dx(
                dx_ptr, dfinal_ptr, order_ptr, leave_ptr, inner + (d,), firsts + (first,), weights, b, place - held, start, c, T, N,
                C, WIDTH, PACKED)  # fmt: skip
        kept = _behind(window, UNROLL, held)
    # Tokens after the lane's own see its last ones.
    begin = start + STEPS  # [LANES]
    window = kept + _inputs(x_ptr, order_ptr, b, begin, c, T, C, held, PACKED)  # 2 (W - 1) tiles [LANES, BLOCK_C]  # fmt: skip
    douts = _inputs(dout_ptr, order_ptr, b, begin, c, T, C, held, PACKED)  # W - 1 tiles [LANES, BLOCK_C]
    for i in tl.static_range(held):
        place = begin + i  # [LANES]
        first, taps = _taps(window, i, place, initial_ptr, first_ptr, enter_ptr, b, c, T, N, C, WIDTH, INITIAL, PACKED)  # W tiles  # fmt: skip
        d = _inner(douts[i], taps, weights, bias, first, WIDTH, SILU, NORM, PACKED, FAST)  # [LANES, BLOCK_C]
        inner, firsts = _store_dx(
            dx_ptr, dfinal_ptr, order_ptr, leave_ptr, inner + (d,), firsts + (first,), weights, b, place - held, start, c, T, N,
            C, WIDTH, PACKED)  # fmt: skip
    base = (b * tl.cdiv(T, LANES * STEPS) + run) * (WIDTH + 1)
    for w in tl.static_range(WIDTH + 1):
        tl.store(partial_ptr + (base + w) * C + c, tl.sum(shares[w], 0), mask=c < C)  # [BLOCK_C]


@triton.jit
def _inner(dout, taps, weights, bias, first,
           WIDTH: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """The gradient before the activation; zero for padding."""
    d = dout.to(tl.float32)  # [LANES, BLOCK_C]
    if PACKED:
        d = tl.where((first >= 0)[:, None], d, 0.0)  # [LANES, BLOCK_C]
    if SILU or NORM > 0:
        y = _weighted(taps, weights, bias, WIDTH)  # [LANES, BLOCK_C]
    if SILU:
        s = sigmoid(y, FAST)  # [LANES, BLOCK_C]
    # Of n = a |a|^-1: (d - n (n . d)) |a|^-1.
    if NORM > 0:
        a = y * s if SILU else y  # [LANES, BLOCK_C]
        scale = _inverse_lengths(a, NORM)  # [LANES, BLOCK_C]
        n = a * scale  # [LANES, BLOCK_C]
        d = scale * (d - n * _sums(n * d, NORM))  # [LANES, BLOCK_C]
    # d silu(y) = s (1 + y (1 - s)), with s = sigmoid(y).
    if SILU:
        d *= s * (1.0 + y * (1.0 - s))  # [LANES, BLOCK_C]
    return d
