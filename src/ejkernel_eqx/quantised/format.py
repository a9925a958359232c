"""How quantised weights are stored: the element of a code, the blocks that share a scale, and the dtype of scales."""

import dataclasses

from .._signatures import check_one_of

BITS = {"int8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "uint4": 4, "float4_e2m1fn": 4}
"""The bits of a code, by its element."""
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "uint4": 7.0, "float4_e2m1fn": 6.0}
"""The largest number of an element; of `uint4`, whose numbers are `code - 8`, the largest with both signs."""
SCALES = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e8m0fnu": 8, "float8_e4m3fn": 8}
"""The bits of a scale, by its dtype."""


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """How a weight matrix `[out, in]` is stored in 8 or 4 bits: `weight = (number(code) - zero) * scale`.

    **Arguments:**

    - `element`: of the codes: `"int8"`, `"float8_e4m3fn"`, `"float8_e5m2"`, `"uint4"` (0 to 15) or `"float4_e2m1fn"`.
    - `block`: `(rows, columns)` that share a scale; 0 stands for all. `(1, 0)` is a scale per output channel, `(0, 0)` one per matrix, `(1, 32)`
      groups of 32 along the input.
    - `scale`: the dtype of scales: `"float32"`, `"bfloat16"`, `"float16"`, `"float8_e8m0fnu"` (powers of two) or `"float8_e4m3fn"`.
    - `zeros`: whether each block has a zero point. Only `"uint4"` can have one; without, its zero point is 8.

    **Raises:** `ValueError` for an unknown name or a block that is no pair of integers >= 0.
    """

    element: str
    block: tuple[int, int] = (1, 0)
    scale: str = "float32"
    zeros: bool = False

    def __post_init__(self):
        check_one_of("element", self.element, BITS)
        check_one_of("scale", self.scale, SCALES)
        block = self.block
        if not (
            isinstance(block, tuple)
            and len(block) == 2
            and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in block)
        ):
            raise ValueError(
                f"block: expected two integers >= 0, rows and columns that share a scale, received {block!r}; 0 stands for all."
            )
        if self.zeros and self.element != "uint4":
            raise ValueError(
                f"zeros: expected False with {self.element}, received True; only uint4 has zero points."
            )

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return BITS[self.element]

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        along = lambda size, block: 1 if block == 0 else -(-size // block)
        return along(rows, self.block[0]), along(columns, self.block[1])

    def __str__(self) -> str:
        """The format in a few words, such as `uint4 with a float16 scale per 1x128`."""
        rows, columns = ("all" if n == 0 else n for n in self.block)
        return (
            f"{self.element} with {'zero points and ' * self.zeros}a {self.scale} scale per {rows}x{columns}"
        )


def word_of(form: QuantFormat) -> str:
    """A format as a word of a problem, such as `uint4-1x128-bfloat16-zeros`."""
    rows, columns = form.block
    return f"{form.element}-{rows}x{columns}-{form.scale}{'-zeros' * form.zeros}"


def form_of(word: str) -> QuantFormat:
    """The inverse of `word_of`."""
    element, block, scale, *zeros = word.split("-")
    rows, columns = map(int, block.split("x"))
    return QuantFormat(element, (rows, columns), scale, bool(zeros))
