"""Numbers used in kernel bodies."""

import triton.language as tl

from . import by_name

LOG2E = tl.constexpr(by_name.LOG2E)
MOST_NATURAL = tl.constexpr(by_name.MOST_NATURAL)
LN2 = tl.constexpr(0.6931471805599453)
