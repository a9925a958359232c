"""Shared by the kernels: the tokens of a program at a step, activations and their derivatives."""

import triton
import triton.language as tl

from ...launch.activations import sigmoid

_STARTS, _PADDING = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def rows_of(bounds_ptr, R, TILES: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a program `[BM]`, their first tokens and lengths, and its tile of columns."""
    pid = tl.program_id(0)
    row = pid // TILES * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    # Rows that do not exist have no tokens.
    begin = tl.load(bounds_ptr + 2 * row, mask=row < R, other=0).to(tl.int64)  # [BM]
    length = tl.load(bounds_ptr + 2 * row + 1, mask=row < R, other=0)  # [BM]
    return row.to(tl.int64), begin, length, pid % TILES


@triton.jit
def marks_of(marks_ptr, token, inside, MARKS: tl.constexpr):
    """Two masks `[BM]`: tokens that start from zeros, and real tokens. Tokens that are not inside are in neither."""
    starts = inside & (token < 0)
    real = inside
    # Marks may start a sequence anywhere, or skip a token.
    if MARKS:
        mark = tl.load(marks_ptr + token, mask=inside, other=0)  # [BM]
        starts = inside & (mark == _STARTS)
        real = inside & (mark != _PADDING)
    return starts, real


@triton.jit
def gates_of(gates_ptr, token, n, mask, H: tl.constexpr, PARTS: tl.constexpr):
    """The arguments of gates, or projected inputs: a tuple of tiles `[BM, BN]`."""
    parts = ()
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        at = token[:, None] * (PARTS * H) + (part * H + n)[None, :]  # [BM, BN]
        parts = parts + (tl.load(gates_ptr + at, mask=mask, other=0.0),)
    return parts


@triton.jit
def within(rows, columns, SIZE: tl.constexpr):
    """`[rows, columns]`: these rows, and columns that exist; no test if blocks of columns are whole."""
    # A multiple of the block needs no test.
    if ((columns.shape[0] - 1) & SIZE) == 0:  # the block is a power of two
        return rows[:, None] & tl.full([1, columns.shape[0]], 1, tl.int1)
    return rows[:, None] & (columns < SIZE)[None, :]


@triton.jit
def gate(x, kind):
    """The activation of gates."""
    # relu6(x + 3) / 6.
    if kind.GATE == "hard_sigmoid":
        return tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return sigmoid(x, kind.FAST)


@triton.jit
def gate_slope(x, y, kind):
    """The derivative of `y = gate(x)`."""
    if kind.GATE == "hard_sigmoid":
        return tl.where((x > -3.0) & (x < 3.0), 1.0 / 6.0, 0.0)
    return y * (1.0 - y)


@triton.jit
def tanh(x, FAST: tl.constexpr, EXACT: tl.constexpr):
    """tanh from a sigmoid, with an absolute error of 1e-7. With `EXACT` the relative error is small near zero, too, by the series there."""
    # tanh(x) = 2 sigmoid(2 x) - 1.
    y = 2.0 * sigmoid(2.0 * x, FAST) - 1.0
    if EXACT:
        s = x * x
        series = x * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0))))
        y = tl.where(tl.abs(x) < 0.2, series, y)
    return y


@triton.jit
def activate(x, kind):
    """The activation of candidates and outputs."""
    if kind.ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    if kind.ACTIVATION == "sigmoid":
        return sigmoid(x, kind.FAST)
    if kind.ACTIVATION == "hard_tanh":
        return tl.minimum(tl.maximum(x, -1.0), 1.0)
    if kind.ACTIVATION == "silu":
        return x * sigmoid(x, kind.FAST)
    if kind.ACTIVATION == "identity":
        return x
    return tanh(x, kind.FAST, kind.EXACT)


@triton.jit
def slope(x, y, kind):
    """The derivative of `y = activate(x)`."""
    if kind.ACTIVATION == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    if kind.ACTIVATION == "sigmoid":
        return y * (1.0 - y)
    if kind.ACTIVATION == "hard_tanh":
        return tl.where((x >= -1.0) & (x <= 1.0), 1.0, 0.0)
    if kind.ACTIVATION == "silu":
        s = sigmoid(x, kind.FAST)
        return s * (1.0 + x * (1.0 - s))
    if kind.ACTIVATION == "identity":
        return tl.full(x.shape, 1.0, tl.float32)
    return 1.0 - y * y
