"""The Triton kernels of the causal convolution. A program has `LANES` runs of `STEPS` tokens, `UNROLL` of which are loaded together; each
thread walks along its run with what it has loaded in registers, so that nothing is loaded or computed twice but where runs meet."""

import triton
import triton.language as tl

from ...launch.activations import sigmoid


@triton.jit
def _locate(T, C: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Batch row, number of the run of tokens, the first place of each lane, channels."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    runs = tl.cdiv(T, LANES * STEPS)
    run = pid // blocks % runs
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    start = (run * LANES + tl.arange(0, LANES)) * STEPS
    return (pid // (blocks * runs)).to(tl.int64), run, start, c


@triton.jit
def _mask(lanes, c, C: tl.constexpr):
    """`[LANES, BLOCK_C]`: these lanes, and channels that there are."""
    if ((c.shape[0] - 1) & C) == 0:
        return lanes[:, None] & tl.full([1, c.shape[0]], 1, tl.int1)
    return lanes[:, None] & (c < C)[None, :]


@triton.jit
def _offsets(order_ptr, b, place, c, T, inside, C: tl.constexpr, PACKED: tl.constexpr):
    """Where in memory the tokens at these places are, `[LANES, BLOCK_C]`."""
    row = b * T + place
    if PACKED:
        row = b * T + tl.load(order_ptr + row, mask=inside, other=0)
    return row[:, None] * C + c[None, :]


@triton.jit
def _firsts(first_ptr, b, place, T, PACKED: tl.constexpr):
    """Where the sequences at these places begin; -1 for padding and behind the end."""
    if PACKED:
        return tl.load(first_ptr + b * T + place, mask=place < T, other=-1)
    return tl.where(place < T, 0, -1)


@triton.jit
def _inputs_before(
    x_ptr,
    initial_ptr,
    order_ptr,
    b,
    start,
    c,
    T,
    C: tl.constexpr,
    HELD: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The `HELD` inputs before these places, the oldest first; those before a row that is one sequence are its state's."""
    held = ()
    for i in tl.static_range(HELD):
        place = start + (i - HELD)
        inside = (place >= 0) & (place < T)
        at = _offsets(order_ptr, b, place, c, T, inside, C, PACKED)
        x = tl.load(x_ptr + at, mask=_mask(inside, c, C), other=0.0)
        if INITIAL and not PACKED:
            before = place < 0
            at = (b * HELD + HELD + place)[:, None] * C + c[None, :]
            state = tl.load(initial_ptr + at, mask=_mask(before, c, C), other=0.0)
            x = tl.where(before[:, None], state, x)
        held = held + (x,)
    return held


@triton.jit
def _inputs(x_ptr, order_ptr, b, start, c, T, C: tl.constexpr, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """The inputs at `COUNT` places from `start` on."""
    inputs = ()
    for i in tl.static_range(COUNT):
        inside = start + i < T
        if PACKED:
            at = _offsets(order_ptr, b, start + i, c, T, inside, C, PACKED)
        else:
            at = _offsets(order_ptr, b, start, c, T, inside, C, PACKED) + i * C
        inputs = inputs + (tl.load(x_ptr + at, mask=_mask(inside, c, C), other=0.0),)
    return inputs


@triton.jit
def _behind(items, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """`COUNT` items from `FIRST` on."""
    kept = ()
    for i in tl.static_range(COUNT):
        kept = kept + (items[FIRST + i],)
    return kept


@triton.jit
def _taps(
    window,
    i: tl.constexpr,
    place,
    first,
    initial_ptr,
    enter_ptr,
    b,
    c,
    T,
    N,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """What the token at `place`, number `i` behind those held, sees: `WIDTH` tiles in float32, the oldest first."""
    taps = ()
    if PACKED and INITIAL:
        enter = tl.load(enter_ptr + b * T + place, mask=place < T, other=-1)
    for w in tl.static_range(WIDTH):
        tap = window[i + w].to(tl.float32)
        if PACKED:
            # Padding sees nothing, not even itself: it may be NaN.
            seen = (first >= 0) & (place - (WIDTH - 1 - w) >= first)
            tap = tl.where(seen[:, None], tap, 0.0)
            if INITIAL and w < WIDTH - 1:
                row = (b * N + enter) * (WIDTH - 1) + (place + w - first)
                entered = (enter >= 0) & (first >= 0) & (place + w - first < WIDTH - 1)
                at = row[:, None] * C + c[None, :]
                tap += tl.load(initial_ptr + at, mask=_mask(entered, c, C), other=0.0).to(tl.float32)
        taps = taps + (tap,)
    return taps


@triton.jit
def _weights(
    weight_ptr, bias_ptr, b, c, C: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, MAPPED: tl.constexpr
):
    """The weights by age of what they meet, the oldest first, and the bias, of one batch row: tiles `[1, BLOCK_C]`."""
    base = tl.where(MAPPED, b * C, 0) + c
    weights = ()
    for w in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + base * WIDTH + w, mask=c < C, other=0.0)
        weights = weights + (weight.to(tl.float32)[None, :],)
    bias = tl.zeros([1, c.shape[0]], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + base, mask=c < C, other=0.0).to(tl.float32)[None, :]
    return weights, bias


@triton.jit
def _weighted(taps, weights, bias, WIDTH: tl.constexpr):
    y = bias + weights[WIDTH - 1] * taps[WIDTH - 1]
    for w in tl.static_range(WIDTH - 1):
        y += weights[w] * taps[w]
    return y


@triton.jit
def forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    order_ptr,
    first_ptr,
    enter_ptr,
    T,
    N,
    out_ptr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    MAPPED: tl.constexpr,
    FAST: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b, _, start, c = _locate(T, C, LANES, STEPS, BLOCK_C)
    held: tl.constexpr = WIDTH - 1
    weights, bias = _weights(weight_ptr, bias_ptr, b, c, C, WIDTH, BIAS, MAPPED)
    kept = _inputs_before(x_ptr, initial_ptr, order_ptr, b, start, c, T, C, held, INITIAL, PACKED)
    for turn in range(STEPS // UNROLL):
        begin = start + turn * UNROLL
        window = kept + _inputs(x_ptr, order_ptr, b, begin, c, T, C, UNROLL, PACKED)
        at = _offsets(order_ptr, b, begin, c, T, begin < T, C, False)
        for i in tl.static_range(UNROLL):
            place = begin + i
            first = _firsts(first_ptr, b, place, T, PACKED)
            taps = _taps(
                window, i, place, first, initial_ptr, enter_ptr, b, c, T, N, C, WIDTH, INITIAL, PACKED
            )
            y = _weighted(taps, weights, bias, WIDTH)
            if SILU:
                y *= sigmoid(y, FAST)
            inside = place < T
            to = at + i * C
            if PACKED:
                y = tl.where((first >= 0)[:, None], y, 0.0)
                to = _offsets(order_ptr, b, place, c, T, inside, C, PACKED)
            tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=_mask(inside, c, C))
        kept = _behind(window, UNROLL, held)


@triton.jit
def _store_dx(
    dx_ptr,
    dfinal_ptr,
    order_ptr,
    leave_ptr,
    inner,
    firsts,
    weights,
    b,
    place,
    start,
    c,
    T,
    N,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The gradient of the input at `place`, which the tokens `place .. place + HELD` see: `inner` are their gradients before the activation."""
    held: tl.constexpr = WIDTH - 1
    dx = weights[held] * inner[0]
    for ahead in tl.static_range(1, WIDTH):
        d = inner[ahead]
        if PACKED:
            d = tl.where((place >= firsts[ahead])[:, None], d, 0.0)
        dx += weights[held - ahead] * d
    inside = (place >= start) & (place < T)
    if PACKED:
        leave = tl.load(leave_ptr + b * T + place, mask=inside, other=-1)
    else:
        leave = place - (T - held)
    at = (b * N * held + leave)[:, None] * C + c[None, :]
    dx += tl.load(dfinal_ptr + at, mask=_mask(inside & (leave >= 0), c, C), other=0.0).to(tl.float32)
    at = _offsets(order_ptr, b, place, c, T, inside, C, PACKED)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=_mask(inside, c, C))


@triton.jit
def backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    order_ptr,
    first_ptr,
    enter_ptr,
    leave_ptr,
    dout_ptr,
    dfinal_ptr,
    T,
    N,
    dx_ptr,
    partial_ptr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    MAPPED: tl.constexpr,
    FAST: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`dx`, and this run's share of the gradients of weight and bias, `partial [B, runs, W + 1, C]`."""
    b, run, start, c = _locate(T, C, LANES, STEPS, BLOCK_C)
    held: tl.constexpr = WIDTH - 1
    weights, bias = _weights(weight_ptr, bias_ptr, b, c, C, WIDTH, BIAS, MAPPED)
    kept = _inputs_before(x_ptr, initial_ptr, order_ptr, b, start, c, T, C, held, INITIAL, PACKED)
    shares = ()
    for _ in tl.static_range(WIDTH + 1):
        shares = shares + (tl.zeros([LANES, BLOCK_C], tl.float32),)
    # Gradients before the activation, of the last tokens that were passed; those before the lane's own have none here.
    inner = ()
    firsts = ()
    for _ in tl.static_range(held):
        inner = inner + (tl.zeros([LANES, BLOCK_C], tl.float32),)
        firsts = firsts + (start * 0,)
    for turn in range(STEPS // UNROLL):
        begin = start + turn * UNROLL
        window = kept + _inputs(x_ptr, order_ptr, b, begin, c, T, C, UNROLL, PACKED)
        douts = _inputs(dout_ptr, order_ptr, b, begin, c, T, C, UNROLL, PACKED)
        for i in tl.static_range(UNROLL):
            place = begin + i
            first = _firsts(first_ptr, b, place, T, PACKED)
            taps = _taps(
                window, i, place, first, initial_ptr, enter_ptr, b, c, T, N, C, WIDTH, INITIAL, PACKED
            )
            d = _inner(douts[i], taps, weights, bias, first, WIDTH, SILU, PACKED, FAST)
            summed = ()
            for w in tl.static_range(WIDTH):
                summed = summed + (shares[w] + d * taps[w],)
            shares = summed + (shares[WIDTH] + d,)
            inner = inner + (d,)
            firsts = firsts + (first,)
            _store_dx(
                dx_ptr, dfinal_ptr, order_ptr, leave_ptr, inner, firsts, weights, b, place - held, start, c, T, N, C, WIDTH, PACKED
            )  # fmt: skip
            inner = _behind(inner, 1, held)
            firsts = _behind(firsts, 1, held)
        kept = _behind(window, UNROLL, held)
    # Tokens behind the lane's own see its last ones.
    begin = start + STEPS
    window = kept + _inputs(x_ptr, order_ptr, b, begin, c, T, C, held, PACKED)
    douts = _inputs(dout_ptr, order_ptr, b, begin, c, T, C, held, PACKED)
    for i in tl.static_range(held):
        place = begin + i
        first = _firsts(first_ptr, b, place, T, PACKED)
        taps = _taps(window, i, place, first, initial_ptr, enter_ptr, b, c, T, N, C, WIDTH, INITIAL, PACKED)
        inner = inner + (_inner(douts[i], taps, weights, bias, first, WIDTH, SILU, PACKED, FAST),)
        firsts = firsts + (first,)
        _store_dx(
            dx_ptr, dfinal_ptr, order_ptr, leave_ptr, inner, firsts, weights, b, place - held, start, c, T, N, C, WIDTH, PACKED
        )  # fmt: skip
        inner = _behind(inner, 1, held)
        firsts = _behind(firsts, 1, held)
    base = (b * tl.cdiv(T, LANES * STEPS) + run) * (WIDTH + 1)
    for w in tl.static_range(WIDTH + 1):
        tl.store(partial_ptr + (base + w) * C + c, tl.sum(shares[w], 0), mask=c < C)


@triton.jit
def _inner(
    dout,
    taps,
    weights,
    bias,
    first,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """The gradient before the activation; none for padding."""
    d = dout.to(tl.float32)
    if PACKED:
        d = tl.where((first >= 0)[:, None], d, 0.0)
    if SILU:
        y = _weighted(taps, weights, bias, WIDTH)
        s = sigmoid(y, FAST)
        d *= s * (1.0 + y * (1.0 - s))
    return d
