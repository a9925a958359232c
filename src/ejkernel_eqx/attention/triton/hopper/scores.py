"""Soft cap, mask and softmax of a tile of scores in Hopper's kernels, and zeros for values of keys that no query sees."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..tile import LARGE_CAP, tanh
from .assembly import cap_operands, cap_text, rescale_operands, rescale_text, within_operands, within_text
from .work_queue import _uniform

# From products to weights. BOUNDED: scores are so small that no maximum is needed. RESCALE_THRESHOLD: of lazy rescaling, in units of log2.
# GATES: of forget gates, which are subtracted from scores in units of log2.
Scoring = namedtuple(
    "Scoring", "SCALE CAP FAST_TANH MULTIPLIER BOUNDED RESCALE_THRESHOLD GATES", defaults=(False,)
)
# Which keys are hidden. TABLE: ROWS or SEGMENTS; GUARD: whether any tile of keys is partly hidden, in the forward except for keys past the end.
Masking = namedtuple("Masking", "LEFT RIGHT ROWS SEGMENTS TABLE EVEN_K GUARD")
Lengths = namedtuple("Lengths", "B T S offset")
# The first of 64 queries, the first key that each sees and the one behind the last, [64] each, and where segments of the queries' row begin.
Queries = namedtuple("Queries", "row first past segments")
BOUND = gl.constexpr(80.0)
"""Scores in units of log2 up to which no maximum is needed in bfloat16: weights and their sums over all keys stay between 2^-126 and 2^127."""

LEAST = gl.constexpr(2.0**-126)
"""The least float32 that the GPU's fast instructions do not take for 0."""
SCATTERED = gl.constexpr(2)
"""The kind of the keys that a tile of queries may see: 0, or 1 if no query at all sees one of them, plus this if the keys of a segment are not all side by
side, so that segments have to be compared."""


# fmt: off
@gluon.jit
def _scored(qk, partly, queries, first, kind, marks_ptr, lengths, scoring: gl.constexpr, masking: gl.constexpr):
    """`_capped` of a product by the keys from `first` on, hidden as by `_visible` if the tile is `partly` visible. What is hidden decides nothing: not how the
    others are capped, either."""
    unseen = first < 0
    # Before the cap, whose polynomial runs if all scores of a warp are in its range.
    if scoring.CAP > 0:
        if partly:
            qk, unseen = _visible(qk, queries, first, kind, marks_ptr, lengths, masking, 0.0)
    s = _capped(qk, scoring, qk.shape[1] // 2)
    if partly:
        s, unseen = _visible(s, queries, first, kind, marks_ptr, lengths, masking, 0.0 if scoring.BOUNDED else float("-inf"))
    return s, unseen


@gluon.jit
def _visible(s, queries, first, kind, marks_ptr, lengths, masking: gl.constexpr, HIDDEN: gl.constexpr):
    """Scores or weights `[64, BLOCK_K]` of these queries and the keys from `first` on, `HIDDEN` where hidden; and whether no query at all sees one of
    the keys, as `marks_ptr` says."""
    LEFT: gl.constexpr = masking.LEFT
    RIGHT: gl.constexpr = masking.RIGHT
    layout: gl.constexpr = s.type.layout
    rows = queries.row + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))  # [64]
    unseen = False
    if masking.TABLE:
        s = _within(s, queries.first - first, queries.past - first, True, HIDDEN)
        # Of kind 0 the range says all: see `SCATTERED`.
        if kind != 0:
            mark = gl.load(gl.multiple_of(marks_ptr + first + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), [16]))  # [BLOCK_K]
            unseen = _uniform(gl.min(mark, 0)) < 0
            if masking.SEGMENTS:
                if kind >= SCATTERED:
                    q_segment = gl.load(queries.segments + rows, mask=rows < lengths.T, other=-1)  # [64]
                    q_segment = gl.where(q_segment < 0, -2, q_segment)  # padding, equal to no key's
                    s = gl.where(gl.expand_dims(q_segment, 1) == gl.expand_dims(mark, 0), s, HIDDEN)
    elif LEFT >= 0 or RIGHT >= 0 or not masking.EVEN_K:
        last = rows * 0 + lengths.S if RIGHT < 0 else rows + (lengths.offset + RIGHT + 1)
        if not masking.EVEN_K and RIGHT >= 0:
            last = gl.minimum(last, lengths.S)
        s = _within(s, rows + (lengths.offset - LEFT - first), last - first, LEFT >= 0, HIDDEN)
    return s, unseen


@gluon.jit
def _within(s, low, high, BELOW: gl.constexpr, HIDDEN: gl.constexpr):
    """Scores or weights `[64, BLOCK_K]`, `HIDDEN` outside of the columns that a row sees: up to `high` and, if `BELOW`, from `low`."""
    PACK: gl.constexpr = s.shape[1] // 2
    if BELOW:
        bounds = [s, gl.expand_dims(high, 1), gl.expand_dims(low, 1)]
    else:
        bounds = [s, gl.expand_dims(high, 1)]
    text: gl.constexpr = within_text(PACK, BELOW, "0fFF800000" if HIDDEN < 0 else "0f00000000")
    return gl.inline_asm_elementwise(text, within_operands(PACK, BELOW), bounds, dtype=gl.float32, is_pure=True, pack=PACK)


@gluon.jit
def _clear(vs, v_full, at, marks_ptr):
    """Zeros for the values that were loaded as number `at` of keys that no query sees, which can be anything: 0 * NaN is NaN. All consumers write the
    same, each before its own product."""
    ROWS: gl.constexpr = 16
    STAGES: gl.constexpr = vs.shape[0]
    V: gl.constexpr = vs.shape[4]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8] if V < 256 else [1, 32], [4, 1], [1, 0])
    mbarrier.wait(v_full.index(at % STAGES), (at // STAGES) & 1)
    v = vs.index(at % STAGES).reshape([vs.shape[3], V])
    for n in gl.static_range(vs.shape[3] // ROWS):
        part = v.slice(n * ROWS, ROWS)
        # Marks are negative for keys that no query sees.
        mark = gl.load(marks_ptr + n * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout)))  # [ROWS]
        part.store(gl.where(gl.expand_dims(mark, 1) < 0, 0.0, part.load(layout)).to(v.dtype))
    fence_async_shared()


@gluon.jit
def _capped(qk, scoring: gl.constexpr, PACK: gl.constexpr):
    """Scores; if they are capped, in units of log2, or weights if they are `BOUNDED`. `PACK`: how many of a thread are looked at together."""
    CAP: gl.constexpr = scoring.CAP
    MULTIPLIER: gl.constexpr = scoring.MULTIPLIER
    if CAP > 0 and scoring.FAST_TANH:
        text: gl.constexpr = cap_text(PACK, scoring.SCALE / CAP, MULTIPLIER, scoring.BOUNDED)
        qk = gl.inline_asm_elementwise(text, cap_operands(PACK), [qk], dtype=gl.float32, is_pure=True, pack=PACK)
    elif CAP > 0:
        qk = tanh(qk * (scoring.SCALE / CAP), False, CAP > LARGE_CAP) * MULTIPLIER
        if scoring.BOUNDED:
            qk = gl.exp2(qk)
    return qk


@gluon.jit
def _log2(x):
    """Logarithms with 22 bits, in one instruction where Triton's takes two dozen; of numbers from `LEAST` on."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _softmax(s, top, total, scoring: gl.constexpr, GUARD: gl.constexpr, far=0.0):
    """Weights of a tile of scores, what earlier sums are scaled by, and the new maximum and denominator, as in Triton's kernel. `BOUNDED`: without a maximum,
    and so nothing to scale: a soft cap keeps the weights far from the ends of their range. Lazy rescaling: a maximum that grows by no more than
    `RESCALE_THRESHOLD` stays what it was: weights and sums have room for it, and sums are not scaled. `far`: what gates take from all scores besides."""
    MULTIPLIER: gl.constexpr = 1.0 if scoring.CAP > 0 else scoring.MULTIPLIER
    if scoring.BOUNDED:  # `s` are the weights
        return s, top, top, total + _own_sum(s)
    most = gl.max(s, 1) * MULTIPLIER  # [64]
    if scoring.GATES:
        most -= far
    if scoring.RESCALE_THRESHOLD > 0:
        new_top = gl.where(most > top + scoring.RESCALE_THRESHOLD, most, top)  # [64]
    else:
        new_top = gl.maximum(top, most)  # [64]
    shift = new_top
    # Rows that have seen no key yet: minus infinity from itself would be NaN.
    if GUARD:
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # [64]
    lower = shift + far if scoring.GATES else shift  # [64]
    p = gl.exp2(s * MULTIPLIER - gl.expand_dims(lower, 1))  # [64, BLOCK_K]
    alpha = gl.exp2(top - shift)  # [64]
    # Each thread keeps the sums of its own columns.
    decay = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return p, alpha, new_top, total * gl.expand_dims(decay, 1) + _own_sum(p)


@gluon.jit
def _own_sum(p):
    """Sums of each row, `[64, 4]`: each over the columns of one of the four threads that have the row, which are added only when the tile of queries ends."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _row_sum(total, layout: gl.constexpr):
    """The sum of each row `[64]` of such sums."""
    return gl.convert_layout(gl.sum(total, 1), layout, assert_trivial=True)


@gluon.jit
def _rescaled(acc, alpha, RESCALE_THRESHOLD: gl.constexpr):
    """Sums `[64, V]` times the factors of their rows, which with lazy rescaling are mostly 1."""
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1)
    if RESCALE_THRESHOLD == 0:
        return acc * factor
    # A branch of the whole warp skips the products.
    PACK: gl.constexpr = acc.shape[1] // 2
    return gl.inline_asm_elementwise(rescale_text(PACK), rescale_operands(PACK), [acc, factor], dtype=gl.float32, is_pure=True, pack=PACK)
