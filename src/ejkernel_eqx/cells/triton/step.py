"""One step of a cell on tiles, elementwise in rows and hidden features: the computation between products, in every form of the kernels."""

from collections import namedtuple

import triton
import triton.language as tl

from .tile import activate, gate, gate_slope, slope

Cell = namedtuple("Cell", "CELL ACTIVATION GATE FAST EXACT")
"""The cell, its activations, and whether they are approximate, or exact near zero; all are constants."""


# fmt: off
@triton.jit
def advance(xs, us, bias_ptr, n, hidden, cell, H: tl.constexpr, BIAS: tl.constexpr, kind):
    """The next hidden and cell state `[BM, BN]` from the projected inputs and the products of every gate; only an LSTM uses `cell`."""
    if kind.CELL == "lstm":
        # The gates, then the candidate that they let in.
        i = gate(xs[0].to(tl.float32) + us[0], kind)  # [BM, BN]
        f = gate(xs[1].to(tl.float32) + us[1], kind)
        g = activate(xs[2].to(tl.float32) + us[2], kind)
        o = gate(xs[3].to(tl.float32) + us[3], kind)
        cell = f * cell + i * g
        hidden = o * activate(cell, kind)
    elif kind.CELL == "gru":
        r = gate(xs[0].to(tl.float32) + us[0], kind)  # [BM, BN]
        z = gate(xs[1].to(tl.float32) + us[1], kind)
        inner = us[2]
        if BIAS:
            inner += tl.load(bias_ptr + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        candidate = activate(xs[2].to(tl.float32) + r * inner, kind)
        hidden = candidate + z * (hidden - candidate)
    else:
        hidden = activate(xs[0].to(tl.float32) + us[0], kind)  # [BM, BN]
    return hidden, cell


@triton.jit
def gradients(parts, cell, before, dh, dc, kind):
    """The gradients of the products of every gate, and of a GRU those of the inputs of n after them; then what of `dh` and `dc` reaches the
    states before the token without a product. `before` is the cell state of an LSTM before it, the hidden state of a GRU."""
    if kind.CELL == "lstm":
        # Gates are computed again from their arguments.
        pi, pf = parts[0].to(tl.float32), parts[1].to(tl.float32)  # [BM, BN]
        pg, po, c = parts[2].to(tl.float32), parts[3].to(tl.float32), cell.to(tl.float32)
        i, f, o = gate(pi, kind), gate(pf, kind), gate(po, kind)
        g, bent = activate(pg, kind), activate(c, kind)
        new = dc + dh * o * slope(c, bent, kind)
        gates = (
            new * g * gate_slope(pi, i, kind),
            new * before * gate_slope(pf, f, kind),
            new * i * slope(pg, g, kind),
            dh * bent * gate_slope(po, o, kind),
        )
        passing, dc = tl.zeros_like(dh), new * f
    elif kind.CELL == "gru":
        pr, pz = parts[0].to(tl.float32), parts[1].to(tl.float32)  # [BM, BN]
        un = parts[3].to(tl.float32)
        r, z = gate(pr, kind), gate(pz, kind)
        pn = parts[2].to(tl.float32) + r * un
        y = activate(pn, kind)
        dn = dh * (1.0 - z) * slope(pn, y, kind)
        gates = (dn * un * gate_slope(pr, r, kind), dh * (before - y) * gate_slope(pz, z, kind), dn * r, dn)
        passing = z * dh
    else:
        # A plain cell has a single activation.
        p = parts[0].to(tl.float32)  # [BM, BN]
        gates = (dh * slope(p, activate(p, kind), kind),)
        passing = tl.zeros_like(dh)
    return gates, passing, dc
