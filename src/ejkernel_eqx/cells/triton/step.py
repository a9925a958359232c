"""One step of a cell on tiles, elementwise in rows and hidden features: what every form of the kernels computes between its products."""

import triton
import triton.language as tl

from .tile import activate, gate, gate_slope, slope


# fmt: off
@triton.jit
def advance(xs, us, bias_ptr, n, hidden, cell, H: tl.constexpr,
            CELL: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr):
    """The next hidden and cell state `[BM, BN]` from the projected inputs and the products of every gate; only an LSTM uses `cell`."""
    if CELL == "lstm":
        i = gate(xs[0].to(tl.float32) + us[0], GATE, FAST)  # [BM, BN]
        f = gate(xs[1].to(tl.float32) + us[1], GATE, FAST)
        g = activate(xs[2].to(tl.float32) + us[2], ACTIVATION, FAST, EXACT)
        o = gate(xs[3].to(tl.float32) + us[3], GATE, FAST)
        cell = f * cell + i * g
        hidden = o * activate(cell, ACTIVATION, FAST, EXACT)
    elif CELL == "gru":
        r = gate(xs[0].to(tl.float32) + us[0], GATE, FAST)  # [BM, BN]
        z = gate(xs[1].to(tl.float32) + us[1], GATE, FAST)
        inner = us[2]
        if BIAS:
            inner += tl.load(bias_ptr + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        candidate = activate(xs[2].to(tl.float32) + r * inner, ACTIVATION, FAST, EXACT)
        hidden = candidate + z * (hidden - candidate)
    else:
        hidden = activate(xs[0].to(tl.float32) + us[0], ACTIVATION, FAST, EXACT)  # [BM, BN]
    return hidden, cell


@triton.jit
def gradients(parts, cell, before, dh, dc,
              CELL: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr):
    """The gradients of the products of every gate, and of a GRU those of the inputs of n after them; then what of `dh` and `dc` reaches the
    states before the token without a product. `before` is the cell state of an LSTM before it, the hidden state of a GRU."""
    if CELL == "lstm":
        pi, pf = parts[0].to(tl.float32), parts[1].to(tl.float32)  # [BM, BN]
        pg, po, c = parts[2].to(tl.float32), parts[3].to(tl.float32), cell.to(tl.float32)
        i, f, o = gate(pi, GATE, FAST), gate(pf, GATE, FAST), gate(po, GATE, FAST)
        g, bent = activate(pg, ACTIVATION, FAST, EXACT), activate(c, ACTIVATION, FAST, EXACT)
        new = dc + dh * o * slope(c, bent, ACTIVATION, FAST)
        found = (
            new * g * gate_slope(pi, i, GATE),
            new * before * gate_slope(pf, f, GATE),
            new * i * slope(pg, g, ACTIVATION, FAST),
            dh * bent * gate_slope(po, o, GATE),
        )
        passing, dc = tl.zeros_like(dh), new * f
    elif CELL == "gru":
        pr, pz = parts[0].to(tl.float32), parts[1].to(tl.float32)  # [BM, BN]
        un = parts[3].to(tl.float32)
        r, z = gate(pr, GATE, FAST), gate(pz, GATE, FAST)
        pn = parts[2].to(tl.float32) + r * un
        y = activate(pn, ACTIVATION, FAST, EXACT)
        dn = dh * (1.0 - z) * slope(pn, y, ACTIVATION, FAST)
        found = (dn * un * gate_slope(pr, r, GATE), dh * (before - y) * gate_slope(pz, z, GATE), dn * r, dn)
        passing = z * dh
    else:
        p = parts[0].to(tl.float32)  # [BM, BN]
        found = (dh * slope(p, activate(p, ACTIVATION, FAST, EXACT), ACTIVATION, FAST),)
        passing = tl.zeros_like(dh)
    return found, passing, dc
