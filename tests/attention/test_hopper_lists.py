"""Hopper's forward kernel over lists of tiles, without a Hopper: what it is given, its barriers, and that its tiles compile without spills."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Mask
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.masks.lower import lower
from ejkernel_eqx.attention.masks.tile_lists import keys_seen
from ejkernel_eqx.attention.masks.tile_shape import Shape
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable
from tests.attention import hopper_protocol
from tests.attention.patterns import defined, H, PATTERNS, S, T
from tests.compiled import DEVICES

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled as triton
from ejkernel_eqx.attention.triton.hopper import lists, tile_sizes
from tests.attention.test_hopper import call, configured, launches, needs_gluon, waits

HOPPER = DEVICES["sm_90"]
MAP = Mask.from_blocks(np.random.default_rng(0).random((64, 64)) < 0.1, 128)
BY_HEAD = Mask.from_blocks(np.random.default_rng(0).random((16, 64, 64)) < 0.1, 128)
WIDE = Mask.causal() & (Mask.sliding_window(1000) | Mask.global_tokens(100))
BIG: dict[str, Any] = dict(batch=2, queries=8192, keys=8192, heads=16, kv_heads=16)


def pattern_of(mask: Any, queries: int, keys: int, heads: int):
    return lower(mask, queries, keys, None, heads).pattern


@pytest.mark.parametrize("seed", range(40))
def test_every_product_reads_what_it_should(seed):
    """As the test of the dense kernel: of every tile of queries all entries in order, and the one past the end for a list without entries."""
    kernels = pytest.importorskip("ejkernel_eqx.attention.triton.hopper.listed_kernel", exc_type=ImportError)
    rng = np.random.default_rng(seed)
    stages, block_k, heads = int(rng.integers(1, 5)), int(rng.choice([64, 128])), int(rng.integers(1, 5))
    queries, keys = int(rng.integers(1, 900)), int(rng.integers(1, 900))
    count, others = -(-queries // 128), -(-keys // block_k)
    which = [[np.flatnonzero(rng.random(others) < rng.random()) for _ in range(count)] for _ in range(heads)]
    entries = np.concatenate([np.concatenate(row) for row in which] + [np.zeros(1)]).astype(np.int64)
    records: list[Any] = []
    for h, m in np.random.default_rng(seed).permutation(list(np.ndindex(heads, count))).tolist():
        begin = sum(len(x) for row in which[:h] for x in row) + sum(len(x) for x in which[h][:m])
        length = len(which[h][m])
        records.append([h * count + m, begin, begin + int(rng.integers(0, length + 1)), begin + length, 0, 0, 0, 0])
    table = np.array([*records, [-1] + [0] * 7])[:, None]
    size, tile = 64 * 64 * 2, block_k * 64 * 2
    program = hopper_protocol.Program(kernels, 2, stages, query_places=2)
    anything = hopper_protocol.Anything()
    shared = dict(
        buffers=program.buffers, barriers=program.barriers, list_ptr=hopper_protocol.Pointer(entries), schedule_ptr=hopper_protocol.Pointer(table),
        T=queries, S=keys, CONSUMERS=2, H=heads, D=64, V=64, BLOCK_K=block_k, NUM_STAGES=stages,
    )  # fmt: skip
    loader = shared | dict(q_desc=("q", size), k_desc=("k", tile), v_desc=("v", tile), K=1)
    consumer = shared | dict(
        staging=hopper_protocol.Several(hopper_protocol.Buffer() for _ in range(2)), out_desc=anything, lse_ptr=anything, sinks_ptr=anything,
        pattern_ptr=anything, bits_ptr=anything, offset=0, SCALE=1.0, CAP=0.0, FAST_TANH=False, MULTIPLIER=1.0, LEFT=-1, RIGHT=-1, SINKS=False,
        BITS=0,
    )  # fmt: skip
    program.run(loader, consumer)
    for w in range(2):
        rows = [(t // count, t % count * 128 + w * 64) for t, *_ in records]
        seen = [which[t // count][t % count].tolist() or [others] for t, *_ in records]
        flat = [(h, row, n) for (h, row), tiles in zip(rows, seen, strict=True) for n in tiles]
        products: list[Any] = []
        for at, (h, row, n) in enumerate(flat):
            products.append((("q", 0, h, row, 0), ("k", 0, 0, n * block_k, 0)))
            if at:
                products.append((None, ("v", 0, 0, flat[at - 1][2] * block_k, 0)))
        products.append((None, ("v", 0, 0, flat[-1][2] * block_k, 0)))
        assert program.read[w] == products
        assert program.stored[w] == [((0, h, row, 0), "result") for h, row in rows]
