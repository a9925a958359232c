"""Triton's kernels of attention, which tests of this room name, in one place; tests that import this are skipped without Triton."""

import pytest

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled
from ejkernel_eqx.attention.triton.compiled import interpreted, TileConfig, TritonConfig
from ejkernel_eqx.attention.triton.hopper import backward_call, backward_tiles, lists, schedule, tile_sizes
from ejkernel_eqx.attention.triton.hopper import call as forward_call
from ejkernel_eqx.testing import interpret

__all__ = [
    "TileConfig", "TritonConfig", "backward_call", "backward_tiles", "compiled", "forward_call", "interpret", "interpreted", "lists",
    "schedule", "tile_sizes",
]  # fmt: skip
