"""Small Triton kernels for the launch tests. Triton reads their source, so they live in a file."""

import triton
import triton.language as tl


@triton.jit
def scaled(x, scale: tl.constexpr):
    y = x * scale
    return y, y + 1.0


@triton.jit
def matmul_softmax_kernel(
    a,
    b,
    M,
    out,
    logits_max,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """out = softmax(SCALE * a @ b) over the row, for M and N not multiples of the tile."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    row_ok = rows < M
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for start in tl.range(0, K, BK, disallow_acc_multi_buffer=True):
        inner = start + tl.arange(0, BK)
        x = tl.load(
            a + rows[:, None] * K + inner[None, :], mask=row_ok[:, None] & (inner < K)[None, :], other=0.0
        )
        y = tl.load(
            b + inner[:, None] * N + columns[None, :],
            mask=(inner < K)[:, None] & (columns < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, y, acc=acc, input_precision="ieee")
    logits, _ = scaled(acc, SCALE)
    logits = tl.where((columns < N)[None, :], logits, float("-inf"))
    top = tl.max(logits, axis=1)
    p = tl.exp2((logits - top[:, None]) * 1.4426950408889634)
    p = p / tl.sum(p, axis=1)[:, None]
    where = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + where, p.to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < N)[None, :])
    tl.store(logits_max + rows, top, mask=row_ok)


@triton.jit
def square_kernel(x, n, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, v * v, mask=i < n)


@triton.jit
def pick_kernel(x, FLAG_ONLY, out, out_int, BLOCK: tl.constexpr):
    """Writes the first half of its outputs only."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if FLAG_ONLY:
        v = -v
    tl.store(out + i, v, mask=i < BLOCK // 2)
    tl.store(out_int + i, i, mask=i < BLOCK // 2)


@triton.jit
def affine_combine(a0, b0, a1, b1):
    return a0 * a1, b0 * a1 + b1


@triton.jit
def tour_kernel(
    decay,
    value,
    ints,
    state,
    backward,
    sums,
    best,
    flipped,
    gate,
    extremes,
    loops,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """One of everything else the package's kernels use."""
    t = tl.arange(0, T)
    d = tl.arange(0, D)
    at = t[:, None] * D + d[None, :]
    at = tl.max_contiguous(tl.multiple_of(at, (1, 4)), (1, 4))
    a = tl.load(decay + at)
    x = tl.load(value + at)
    _, h = tl.associative_scan((a, x), 0, affine_combine)
    tl.store(state + at, h)
    _, h_back = tl.associative_scan((a, x), 0, affine_combine, reverse=True)
    tl.store(backward + at, h_back)
    tl.store(sums + at, tl.cumsum(x, axis=0))
    tl.store(best + d, tl.argmax(x, axis=0))
    tl.store(flipped + t[None, :] + d[:, None] * T, tl.trans(tl.flip(x, 0)))
    tl.store(gate + at, tl.sigmoid(x) + tl.log2(tl.exp(tl.abs(x))) + tl.maximum(x, 0.0) - tl.minimum(x, 0.5))
    n = tl.load(ints)
    tl.store(extremes, tl.max(tl.max(x, axis=1), axis=0))
    tl.store(extremes + 1, tl.sum(x))
    tl.store(extremes + 2, (n // 2 + n % 2 + tl.cdiv(n, 4)).to(tl.float32))
    total = tl.full((), 0, tl.int64)
    for i in range(0, n):
        total += i.to(tl.int64) * i
    steps = 0
    while n > 1:
        n = n // 2
        steps += 1
    if steps > 2 and total > 0:
        steps += 100
    tl.store(loops, total)
    tl.store(loops + 1, steps.to(tl.int64))
    tl.store(loops + 2, (tl.num_programs(0) * 10 + tl.program_id(0)).to(tl.int64))


@triton.jit
def wild_kernel(x, out, OFFSET: tl.constexpr, WRITE_INPUT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i + OFFSET)
    tl.store(out + i, v)
    if WRITE_INPUT:
        tl.store(x + i, v)


@triton.jit
def unguarded_kernel(x, n, out, BLOCK: tl.constexpr):
    """The masked load has no `other`: its masked elements are undefined."""
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n)))


@triton.jit
def block_truth_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + i, v, mask=(i > 1) and (i < 3))


@triton.jit
def output_first_kernel(out, x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def copy_through_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def add_to_slots_kernel(pool, amount, slots, n, new_pool, old, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    """new_pool[slot] += amount for each row's slot, in place; `old` is what was there. A negative slot takes part in nothing."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    before = tl.zeros([BLOCK], tl.float32)
    if slot >= 0:
        before = tl.load((pool if WRONG else new_pool) + slot * n + i, mask=i < n, other=0.0)
        after = before + tl.load(amount + row)
        tl.store(new_pool + slot * n + i, after, mask=i < n)
    tl.store(old + row * n + i, before, mask=i < n)


@triton.jit
def product_kernel(x, y, out, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION))


@triton.jit
def parting_kernel(counts, pool, bad, new_pool, sums, steps, BLOCK: tl.constexpr):
    """Programs whose loops and branches differ, some after they have written; program `bad` reads past the end."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, BLOCK)
    n = tl.load(counts + program)
    before = tl.load(new_pool + program * BLOCK + i)
    tl.store(new_pool + program * BLOCK + i, before + 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(n // 2, n):
        total += tl.load(counts + i + k * 0).to(tl.float32) * k
    if n % 3 == 1:
        now = tl.load(new_pool + program * BLOCK + i)
        tl.store(new_pool + program * BLOCK + i, now * 2.0)
    left = n
    count = 0
    while left > 1:
        left = left // 2
        count += 1
    tl.store(sums + program * BLOCK + i, total)
    tl.store(steps + program, count)
    tl.load(counts + tl.where(program == bad, -1, 0))


@triton.jit
def shapes_kernel(x, y, order, gathered, counted, joined, moved, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of each program, its own plane `[ROWS, COLUMNS]`."""
    plane = tl.program_id(0)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = plane * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    given, other = tl.load(x + at), tl.load(y + column[None, :] + 0 * row[:, None])
    tl.store(gathered + at, tl.gather(given, tl.load(order + at), 0))
    tl.store(
        counted + plane * COLUMNS + column,
        tl.histogram(tl.load(order + plane * ROWS * COLUMNS + row), COLUMNS),
    )
    pairs = tl.join(given, other)
    first, second = tl.split(pairs)
    tl.store(joined + at, tl.sum(pairs, axis=2) + 2 * first - second)
    block = tl.make_tensor_descriptor(
        x + plane * ROWS * COLUMNS,
        shape=[ROWS - 1, COLUMNS],
        strides=[COLUMNS, 1],
        block_shape=[ROWS, COLUMNS],
    )
    shifted = block.load([1, 0])
    tl.store(moved + at, tl.where(row[:, None] < ROWS - 1 - plane, shifted, plane * 1.0))


@triton.jit
def talking_kernel(x, out):
    program = tl.program_id(0)
    value = tl.load(x + program)
    tl.device_print("value", value)
    if value > 1:
        value = value * 2
    else:
        value = value - 1
    tl.store(out + program, value)


@triton.jit
def counting_kernel(x, out):
    program = tl.program_id(0)
    total = 0.0
    for _ in range(int(tl.load(x + program))):
        total += 1.0
    tl.store(out + program, total)


@triton.jit
def rows_kernel(x, rows, out, scattered, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Rows anywhere, by a descriptor; out of bounds there is 0."""
    source = tl.make_tensor_descriptor(x, shape=[R, C], strides=[C, 1], block_shape=[1, C])
    target = tl.make_tensor_descriptor(scattered, shape=[R, C], strides=[C, 1], block_shape=[1, C])
    n = tl.arange(0, N)
    at = tl.program_id(0) * N + n
    row = tl.load(rows + at)
    found = source.gather(row, 0)
    tl.store(out + at[:, None] * C + tl.arange(0, C)[None, :], found)
    target.scatter(found, row, 0)


@triton.jit
def mixed_kernel(x_ptr, bias_ptr, state_ptr, n, new_state_ptr, out_ptr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """state += x, and out = SCALE * x + bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # [BLOCK]
    tl.store(new_state_ptr + at, tl.load(new_state_ptr + at, mask=inside, other=0.0) + x, mask=inside)
    out = SCALE * x
    if BIAS:
        out += tl.load(bias_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, out, mask=inside)


@triton.jit
def constant_tail_kernel(x, n, out, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """out = x, and `TAIL` from element n on."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=TAIL))


@triton.jit
def specialised_kernel(a, b, out, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """out = a @ b, tile by tile, loaded by warps of their own."""
    rows = tl.make_tensor_descriptor(
        a, shape=[SIZE * STEPS, SIZE], strides=[SIZE, 1], block_shape=[SIZE, SIZE]
    )
    right = tl.make_tensor_descriptor(b, shape=[SIZE, SIZE], strides=[SIZE, 1], block_shape=[SIZE, SIZE])
    made = tl.make_tensor_descriptor(
        out, shape=[SIZE * STEPS, SIZE], strides=[SIZE, 1], block_shape=[SIZE, SIZE]
    )
    for step in tl.range(STEPS, warp_specialize=True):
        product = tl.dot(rows.load([step * SIZE, 0]), right.load([0, 0]))
        made.store([step * SIZE, 0], product.to(out.dtype.element_ty))


@triton.jit
def arriving_kernel(zeros, count, order, total):
    """Programs of each of two groups number themselves, whichever comes first; the last one of a group stores how many there are."""
    program = tl.program_id(0)
    before = tl.atomic_add(count + program % 2, 1, sem="acq_rel", scope="gpu")
    tl.store(order + program, before)
    if before == (tl.num_programs(0) + 1 - program % 2) // 2 - 1:
        tl.store(total + program % 2, before + 1)


@triton.jit
def atomic_sum_kernel(zeros, total):
    tl.atomic_add(total, 0.5)
