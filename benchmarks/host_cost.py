"""The host cost of a call: tracing the gradient of one more layer, of 24 layers, and an eager call, compared with `jax.nn`'s attention.

    python benchmarks/host_cost.py --json host-cost.json

Each number is the median of `--samples` in this process; the first two only trace. Layers are equal, so caches of JAX and of the package
from earlier layers apply.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ejkernel_eqx as ejx
from benchmarks import report

MANY = 24


def layers(attend: Callable[..., Array], count: int) -> Callable[[Array], Array]:
    def loss(x: Array) -> Array:
        for _ in range(count):
            x = x + attend(x, x, x)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    return loss


def tracing_ms(attend: Callable[..., Array], count: int, x: Any, samples: int) -> float:
    """The time to trace a gradient of so many layers, without caches from the previous sample."""
    found = []
    for _ in range(samples):
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(jax.grad(layers(attend, count))).trace(x)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def eager_us(attend: Callable[..., Array], x: Array, samples: int, calls: int = 50) -> float:
    """The time of a call, waiting only for the last result."""
    jax.block_until_ready(attend(x, x, x))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            out = attend(x, x, x)
        found.append(1e6 * (time.perf_counter() - start) / calls)
        jax.block_until_ready(out)
    return statistics.median(found)


def rows(platforms: list[str], samples: int) -> list[dict[str, Any]]:
    x = jnp.asarray(jax.random.normal(jax.random.key(0), (1, 64, 4, 64)), jnp.bfloat16)
    calls: dict[str, Callable[..., Array]] = {
        platform: ejx.FlashAttention(causal=True, platform=platform) for platform in platforms
    }
    calls["jax.nn"] = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    found = []
    for name, attend in calls.items():
        one, two = (tracing_ms(attend, count, x, samples) for count in (1, 2))
        many = tracing_ms(attend, MANY, x, samples)
        row = {"name": name, "one_layer_ms": one, "one_more_layer_ms": two - one, f"layers_{MANY}_ms": many}
        row["eager_us"] = eager_us(attend, x, samples)
        print(
            ", ".join(f"{key} {value:.1f}" if key != "name" else value for key, value in row.items()),
            flush=True,
        )
        found.append(row)
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "triton,xla" if jax.default_backend() == "gpu" else "xla"
    parser.add_argument("--platforms", default=default, help="comma-separated (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one sample")
    parser.add_argument("--commit")
    parser.add_argument("--json", metavar="PATH")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    content = {"schema": 1, "benchmark": "host cost", "environment": report.environment(options.commit)}
    content["rows"] = rows(options.platforms.split(","), 1 if options.quick else options.samples)
    if options.json:
        report.write_json(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
