"""Costs of calls and masks on the host, without a GPU.

    python -m benchmarks host-cost --json host-cost.json
    python -m benchmarks mask-construction --json masks.json

`host-cost`: tracing the gradient of one more layer, of 24 layers, and an eager call, compared with `jax.nn`'s attention. Each number is the median of
`--samples` in this process; the first two only trace. Layers are equal, so caches of JAX and of the package from earlier layers apply.

`mask-construction`: building a mask of 131,072 tokens and lowering it to the lists of tiles of a forward and a backward kernel. Time of this process
on the processor, the least of `--samples` without caches from the one before; and the size of both lists.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import report
from ejkernel_eqx import Mask
from ejkernel_eqx.attention.masks.bounds.classify import classify
from ejkernel_eqx.attention.masks.bounds.evaluate import traced_once
from ejkernel_eqx.attention.masks.tile_lists import lists_of
from ejkernel_eqx.attention.masks.tile_shape import Shape

MANY = 24


def layers(attend: Callable[..., Array], count: int) -> Callable[[Array], Array]:
    def loss(x: Array) -> Array:
        for _ in range(count):
            x = x + attend(x, x, x)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    return loss


def tracing_ms(attend: Callable[..., Array], count: int, x: Any, samples: int) -> float:
    """The time to trace a gradient of so many layers, without caches from the previous sample."""
    results = []
    for _ in range(samples):
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(jax.grad(layers(attend, count))).trace(x)
        results.append(1e3 * (time.perf_counter() - start))
    return statistics.median(results)


def eager_us(attend: Callable[..., Array], x: Array, samples: int, calls: int = 50) -> float:
    """The time of a call, waiting only for the last result."""
    jax.block_until_ready(attend(x, x, x))
    results = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            out = attend(x, x, x)
        results.append(1e6 * (time.perf_counter() - start) / calls)
        jax.block_until_ready(out)
    return statistics.median(results)


def call_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    samples = 1 if options.quick else options.samples
    x = jnp.asarray(jax.random.normal(jax.random.key(0), (1, 64, 4, 64)), jnp.bfloat16)
    platforms: Sequence[Any] = options.platforms.split(",")
    calls: dict[str, Callable[..., Array]] = {
        name: ejx.FlashAttention(causal=True, platform=name) for name in platforms
    }
    calls["jax.nn"] = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    rows = []
    for name, attend in calls.items():
        one, two, many = (tracing_ms(attend, count, x, samples) for count in (1, 2, MANY))
        row = {"name": name, "one_layer_ms": one, "one_more_layer_ms": two - one, f"layers_{MANY}_ms": many}
        rows.append(row | {"eager_us": eager_us(attend, x, samples)})
        _say(rows[-1])
    return rows


# Masks

LONG, SHORT = 131_072, 16_384
BLOCK = 128


@functools.cache
def _documents(length: int, count: int) -> Any:
    cuts = np.random.default_rng(3).choice(length - 1, count - 1, replace=False) + 1
    return jnp.asarray(np.searchsorted(np.sort(cuts), np.arange(length), side="right"))


@functools.cache
def _map(length: int, share: float) -> np.ndarray:
    return np.random.default_rng(1).random((length // BLOCK, length // BLOCK)) < share


def _of_documents(count: int) -> Callable[[int], Mask]:
    def make(length: int) -> Mask:
        ids = _documents(length, count)
        return Mask.from_function(lambda head, query, key: (key <= query) & (ids[query] == ids[key]))

    return make


MASKS: Mapping[str, Callable[[int], Mask]] = {
    "prefix, as a function": lambda n: Mask.causal() | Mask.from_function(lambda h, q, k: k < n // 4),
    "local and global": lambda n: Mask.causal() & (Mask.sliding_window(4095) | Mask.global_tokens(128)),
    "local and strided": lambda n: Mask.causal() & (Mask.sliding_window(4095) | Mask.strided(1000)),
    "dilated by 4": lambda n: Mask.dilated(4095, rate=4),
    "dilated by 7": lambda n: Mask.dilated(4095, rate=7),
    "chunks and global": lambda n: Mask.chunked(8192) | Mask.global_tokens(64),
    "outside a window": lambda n: ~Mask.sliding_window(4095, 4095),
    "12 documents": _of_documents(12),
    "100 documents": _of_documents(100),
    "1000 documents": _of_documents(1000),
    "a tenth of blocks": lambda n: Mask.from_blocks(_map(n, 0.1), BLOCK),
    "half of blocks": lambda n: Mask.from_blocks(_map(n, 0.5), BLOCK),
    "half of blocks, causal": lambda n: Mask.causal() & Mask.from_blocks(_map(n, 0.5), BLOCK),
}


def construction(make: Callable[[int], Mask], length: int, block_k: int) -> tuple[float, float]:
    """Milliseconds and megabytes."""
    for cached in (lists_of, classify, traced_once):
        cached.cache_clear()
    start = time.process_time()
    pattern = make(length).lower(length, length).pattern
    assert pattern is not None
    size = 0
    for by_key in (False, True):
        lists = lists_of(pattern, Shape(length, length, BLOCK, block_k, by_key))
        size += sum(x.nbytes for x in lists if isinstance(x, np.ndarray))
    return 1e3 * (time.process_time() - start), 1e-6 * size


def mask_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    length, samples = (SHORT, 1) if options.quick else (LONG, options.samples)
    rows = []
    for name, make in MASKS.items():
        row: dict[str, Any] = {"name": name, "length": length}
        for block_k in (128, 64):
            taken = [construction(make, length, block_k) for _ in range(samples)]
            row[f"ms_{block_k}"], row[f"mb_{block_k}"] = min(ms for ms, _ in taken), taken[0][1]
        rows.append(row)
        _say(row)
    return rows


# The commands


def _say(row: Mapping[str, Any]) -> None:
    numbers = (f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
    print(f"{row['name']:24}  {', '.join(numbers)}", flush=True)


def parse(arguments: Sequence[str] | None = None, name: str = "host-cost") -> argparse.Namespace:
    platforms = "triton,xla" if jax.default_backend() == "gpu" else "xla"
    return report.parser(name, __doc__, platforms=platforms).parse_args(arguments)


def main(arguments: Sequence[str] | None = None, name: str = "host-cost") -> int:
    options = parse(arguments, name)
    rows = (call_rows if name == "host-cost" else mask_rows)(options)
    report.save(options, schema=1, benchmark=name.replace("-", " "), rows=rows)
    return 0
