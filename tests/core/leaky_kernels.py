"""Kernels of the leaky integrator: a block of channels a program, token after token."""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x, decay, initial, T, out, states, final, C: tl.constexpr, BLOCK: tl.constexpr, SAVE: tl.constexpr
):
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < C
    a = tl.load(decay + channel, mask=real, other=0.0)
    h = tl.load(initial + row * C + channel, mask=real, other=0.0)  # [BLOCK]
    for t in range(0, T):
        at = (row * T + t) * C + channel
        if SAVE:
            tl.store(states + at, h, mask=real)
        h = a * h + tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        tl.store(out + at, h.to(out.dtype.element_ty), mask=real)
    tl.store(final + row * C + channel, h, mask=real)


@triton.jit
def backward_kernel(
    decay, states, dout, dfinal, T, dx, ddecay, dinitial, C: tl.constexpr, BLOCK: tl.constexpr
):
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < C
    a = tl.load(decay + channel, mask=real, other=0.0)
    dh = tl.load(dfinal + row * C + channel, mask=real, other=0.0)  # [BLOCK]: of the state after token t
    da = tl.zeros([BLOCK], tl.float32)
    for back in range(0, T):
        at = (row * T + T - 1 - back) * C + channel
        dh += tl.load(dout + at, mask=real, other=0.0).to(tl.float32)
        tl.store(dx + at, dh.to(dx.dtype.element_ty), mask=real)
        da += dh * tl.load(states + at, mask=real, other=0.0)
        dh = a * dh
    tl.store(ddecay + row * C + channel, da, mask=real)
    tl.store(dinitial + row * C + channel, dh, mask=real)
