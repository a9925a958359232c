"""The choice of the expanded form for a chunk of a prompt, by a count of operations and bytes, in the family's README."""

import dataclasses

from .._shapes import is_symbolic

# What the kernels reach of a device's products in 16 bits: on an H200, of 989 TFLOP/s, attention over latents 265 (benchmarks/LOG.md). The
# others are as attention with heads of 128 channels and a large product reach them.
_ABSORBED, _EXPANDED, _PRODUCT = 0.27, 0.5, 0.7
_BALANCE = 200
"""Operations in the time of a byte: 156 on an A100, 206 on an H200, 295 on an H100."""
_BYTES = 2


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Heads, and channels of a key without and with a rotation, of a value and of a latent."""

    heads: int
    nope: int
    rope: int
    values: int
    latent: int


def expands(tokens: int, queries: int, sizes: LatentSizes) -> bool:
    """Reports whether computing keys and values of `tokens` new tokens, `queries` of each sequence, is expected to take less time than attending to
    their latents. Either way the tokens before them are attended to as latents. A
    symbolic number of tokens is not expanded."""
    if is_symbolic(tokens):
        return False
    own = sizes.nope + sizes.values
    pairs = tokens * sizes.heads * (queries + 1) / 2  # of a query and a key among its sequence's new tokens
    absorbed = pairs * 2 * (2 * sizes.latent + sizes.rope) / _ABSORBED
    expanded = pairs * 2 * (own + sizes.rope) / _EXPANDED
    # Keys and values are computed, written and read, by weights that are read once more; two results are read and one written.
    products = tokens * 2 * sizes.latent * sizes.heads * own / _PRODUCT
    numbers = sizes.latent * sizes.heads * own + tokens * sizes.heads * (2 * own + 3 * sizes.values)
    return expanded + products + _BALANCE * _BYTES * numbers < absorbed
