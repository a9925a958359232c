"""Slopes of attention with linear biases (ALiBi)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arguments import check_numbers, read_sizes


def alibi_slopes(num_heads: int) -> np.ndarray:
    r"""The slopes of ALiBi (Press et al. 2022, arXiv:2108.12409), float64 `[H]`.

    $m_h = 2^{-8 h / H}$ for $h = 1 .. H$ if `num_heads` $= H$ is a power of two. Otherwise the slopes of the largest
    power of two below $H$ come first. Every second slope of twice that power follows, starting with its first. The
    authors' code and BLOOM do the same.
    """
    (num_heads,) = read_sizes(num_heads=num_heads)
    below = 1 << (int(num_heads).bit_length() - 1)
    slopes = _powers(below)
    return np.concatenate([slopes, _powers(2 * below)[::2][: num_heads - below]])


def _powers(count: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)


def read_alibi(alibi: Any, num_heads: int, causal: bool) -> tuple[float, ...] | None:
    """The slopes of a layer, or `None`."""
    if alibi is False or alibi is None:
        return None
    if not causal:
        raise ValueError(
            "alibi: expected False in a layer with causal=False, received slopes; the bias would favour later keys; pass bias= instead."
        )
    if alibi is True:
        return tuple(alibi_slopes(num_heads).tolist())
    if isinstance(alibi, str) or not isinstance(alibi, Sequence | np.ndarray) or len(alibi) != num_heads:
        raise ValueError(
            f"alibi: expected True, False or {num_heads} slopes, one per head, received {alibi!r}; True uses the published slopes."
        )
    check_numbers(**{f"alibi[{h}]": slope for h, slope in enumerate(alibi)})
    return tuple(float(slope) for slope in alibi)
