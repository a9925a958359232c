"""Numbers used in kernel bodies."""

import triton.language as tl

from . import by_name

LOG2E = tl.constexpr(by_name.LOG2E)
LARGEST_BIAS = tl.constexpr(by_name.LARGEST_BIAS)
LN2 = tl.constexpr(0.6931471805599453)
