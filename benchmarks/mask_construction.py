"""What a mask costs on the host: building it and lowering it to the lists of tiles of a forward and a backward kernel, without a GPU.

    python benchmarks/mask_construction.py --json masks.json
    python benchmarks/mask_construction.py --quick                  # 16,384 tokens, one sample

Time of this process on the processor, the least of `--samples` without caches from the one before; and the size of both lists.
"""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import report
from ejkernel_eqx import Mask
from ejkernel_eqx.attention.masks.bounds.classify import classify
from ejkernel_eqx.attention.masks.bounds.evaluate import traced_once
from ejkernel_eqx.attention.masks.tile_lists import lists_of
from ejkernel_eqx.attention.masks.tile_shape import Shape

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
        size += lists_of(pattern, Shape(length, length, BLOCK, block_k, by_key)).nbytes
    return 1e3 * (time.process_time() - start), 1e-6 * size


def rows(length: int, samples: int) -> list[dict[str, Any]]:
    found = []
    for name, make in MASKS.items():
        row: dict[str, Any] = {"name": name, "length": length}
        for block_k in (128, 64):
            taken = [construction(make, length, block_k) for _ in range(samples)]
            row[f"ms_{block_k}"], row[f"mb_{block_k}"] = min(ms for ms, _ in taken), taken[0][1]
        print(
            f"{name:24}" + "".join(f"  {key} {row[key]:6.2f}" for key in row if key[:2] in ("ms", "mb")),
            flush=True,
        )
        found.append(row)
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="short sequences, one sample")
    parser.add_argument("--commit")
    parser.add_argument("--json", metavar="PATH")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    content = {
        "schema": 1,
        "benchmark": "mask construction",
        "environment": report.environment(options.commit),
    }
    content["rows"] = rows(SHORT, 1) if options.quick else rows(LONG, options.samples)
    if options.json:
        report.write_json(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
