"""Functions for kernel bodies that `triton.language` has only in a slower form."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """`1 / (1 + exp(-x))` in float32. `FAST`: NVIDIA's instructions alone, without the handling of denormal numbers."""
    if FAST:
        decay = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [-1.4426950408889634 * x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + decay], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sigmoid(x)
