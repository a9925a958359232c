"""A kernel that stores what 8-bit pages are converted to. It has its own file because the interpreter compiles source code."""

import triton
import triton.language as tl

from ejkernel_eqx.paged.triton.latent_bytes import halves
from ejkernel_eqx.paged.triton.pairs import floats, integers


@triton.jit
def bytes_kernel(
    x_ptr, one_ptr, even_ptr, odd_ptr, PAIRS: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Of bytes `x [BLOCK]`: each, and the even and odd ones of `[BLOCK / 2]` pairs, in float16."""
    c = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(one_ptr + c, halves(tl.load(x_ptr + c), FAST))
    d = tl.arange(0, BLOCK // 2)  # [BLOCK / 2]
    pair = tl.load(x_ptr.to(tl.pointer_type(tl.int16)) + d)  # [BLOCK / 2]
    if PAIRS == 1:
        even, odd = integers(pair, True, FAST)  # [BLOCK / 2] each
    else:
        even, odd = floats(pair, PAIRS, FAST)  # [BLOCK / 2] each
    tl.store(even_ptr + d, even)
    tl.store(odd_ptr + d, odd)
