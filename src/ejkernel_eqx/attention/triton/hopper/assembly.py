"""PTX for the scores of a thread in Hopper's kernels: where a branch of a whole warp, or bits as predicates, save instructions that Triton's operations
cannot."""

from triton.experimental import gluon


# fmt: off
@gluon.constexpr_function
def cap_text(pack, slope, factor, weigh):
    """`factor * tanh(slope * x)` of `pack` scores `x`, or 2 to the power of it if `weigh`: if those of the whole warp are in its range, by a polynomial, since
    powers of two wait for the unit that has `tanh.approx`, too."""
    # tanh(y) / y in powers of y * y, of least relative error (6e-5, where `tanh.approx` has 5e-4) up to 0.6.
    terms = (0.99993685, -0.33012801, 0.10839778)
    coefficients = [number(factor * slope ** (2 * n + 1) * term) for n, term in enumerate(terms)]
    scores, parts = [f"${pack + i}" for i in range(pack)], 4
    # The largest magnitude of the warp's scores decides.
    lines = [f".reg .f32 u, r, most<{parts}>;", ".reg .pred far;"]
    lines += [f"abs.f32 most{i}, {scores[i]};" for i in range(parts)]
    for i in range(parts, pack):
        lines += [f"abs.f32 u, {scores[i]};", f"max.NaN.f32 most{i % parts}, most{i % parts}, u;"]
    lines += [f"max.NaN.f32 most0, most0, most{i};" for i in range(1, parts)]
    lines += [f"setp.gtu.f32 far, most0, {number(0.6 / slope)};", "vote.sync.any.pred far, far, -1;", "@far bra.uni FAR;"]
    for i, x in enumerate(scores):
        lines += [f"mul.f32 u, {x}, {x};", f"fma.rn.f32 r, u, {coefficients[-1]}, {coefficients[-2]};"]
        lines += [f"fma.rn.f32 r, u, r, {c};" for c in coefficients[-3::-1]]
        lines += [f"mul.f32 ${i}, r, {x};", *([f"ex2.approx.ftz.f32 ${i}, ${i};"] if weigh else [])]
    lines += ["bra.uni DONE;", "FAR:"]
    for i, x in enumerate(scores):
        lines += [f"mul.f32 r, {x}, {number(slope)};", "tanh.approx.f32 r, r;", f"mul.f32 ${i}, r, {number(factor)};"]
        lines += [f"ex2.approx.ftz.f32 ${i}, ${i};"] if weigh else []
    return "{\n" + "\n".join([*lines, "DONE:", "}"])


@gluon.constexpr_function
def cap_operands(pack):
    return ",".join(["=f"] * pack + ["f"] * pack)


@gluon.constexpr_function
def number(x):
    """A float32 in PTX."""
    return f"{x:.9e}"


@gluon.constexpr_function
def within_text(pack, bounded_below, hidden):
    """Scores or weights `[16, columns]` of a warp, `hidden` outside of the columns that a row sees: from `low`, if there is one, up to `high`. A thread has of two
    rows, 8 apart, columns 0 and 1, or 2 and 3, ..., 6 and 7 of every 8, by its lane."""
    columns = pack * 2
    highs, lows = (f"${2 * pack}", f"${2 * pack + 2}"), (f"${3 * pack}", f"${3 * pack + 2}")
    lines = [".reg .b32 base, c, r, seen<2>;", ".reg .pred p;", "mov.u32 base, %laneid;", "and.b32 base, base, 3;", "shl.b32 base, base, 1;"]

    def count(bound, result):
        """The number of the thread's columns before `bound`."""
        return [f"sub.s32 c, {bound}, base;", "max.s32 c, c, 0;", f"min.s32 c, c, {columns};", "and.b32 r, c, 7;", "min.s32 r, r, 2;", "shr.u32 c, c, 3;",
                f"mad.lo.s32 {result}, c, 2, r;"]

    # Which columns each row sees, as bits, which become predicates.
    for half in range(2):
        lines += [*count(highs[half], "c"), f"shl.b32 seen{half}, 1, c;", f"sub.s32 seen{half}, seen{half}, 1;"]
        if bounded_below:
            lines += [*count(lows[half], "c"), "shl.b32 c, -1, c;", f"and.b32 seen{half}, seen{half}, c;"]
    for half, bit in [(half, bit) for half in range(2) for bit in range(pack // 2)]:
        i = bit // 2 * 4 + half * 2 + bit % 2
        lines += [f"and.b32 c, seen{half}, {1 << bit};", "setp.ne.s32 p, c, 0;", f"selp.f32 ${i}, ${pack + i}, {hidden}, p;"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def within_operands(pack, bounded_below):
    return ",".join(["=f"] * pack + ["f"] * pack + ["r"] * (pack * (2 if bounded_below else 1)))


@gluon.constexpr_function
def rescale_text(pack):
    """`pack` sums of two rows of a thread, times the factor of their row: unless all factors of the warp are 1."""
    # A thread has two rows: columns 0 and 1 of one, then of the other.
    factors = [f"${2 * pack + i}" for i in range(pack)]
    lines = [".reg .pred some, other;", f"setp.neu.f32 some, {factors[0]}, 1.0;", f"setp.neu.f32 other, {factors[2]}, 1.0;", "or.pred some, some, other;"]
    lines += ["vote.sync.any.pred some, some, -1;", "@!some bra.uni DONE;", *[f"mul.f32 ${i}, ${i}, {factor};" for i, factor in enumerate(factors)], "DONE:"]
    return "{\n" + "\n".join([*lines, "}"])


@gluon.constexpr_function
def rescale_operands(pack):
    return ",".join(["=f"] * pack + [str(i) for i in range(pack)] + ["f"] * pack)
