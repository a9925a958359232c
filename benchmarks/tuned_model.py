"""A training step of `examples/train_lm.py` with heuristic and with tuned kernel configurations, in one run.

    python benchmarks/tuned_model.py --json out.json        # 350M parameters, T = 2048, bf16; needs a GPU
    python benchmarks/tuned_model.py --quick                # a tiny model, anywhere

Every variant starts from the same weights and must first produce the same loss and gradients on the same tokens. Then steps are timed in
turn, so that drifting clocks affect all variants equally.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import report
from examples import train_lm

SIZES = {
    "full": {
        "embed_dim": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 16,
        "batch": 8,
        "seq": 2048,
    },
    "quick": {"embed_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "batch": 2, "seq": 64},
}
LOSS_BOUND = 2e-3  # relative; the variants differ in the order of sums in bf16
GRADIENT_BOUND = 3e-2  # relative root mean square over all parameters


@dataclasses.dataclass
class Variant:
    """A model with its optimiser state and measurements."""

    name: str
    model: Any
    optimiser_state: Any
    step: Any = None
    loss: float = float("nan")
    gradient_error: float = 0.0
    step_ms: list[float] = dataclasses.field(default_factory=list)

    def row(self, tokens: int) -> dict[str, Any]:
        ms = statistics.median(self.step_ms)
        return {
            "variant": self.name,
            "ms": ms,
            "spread": (max(self.step_ms) - min(self.step_ms)) / ms,
            "samples_ms": self.step_ms,
            "tokens_per_second": 1e3 * tokens / ms,
            "first_loss": self.loss,
            "gradient_error": self.gradient_error,
        }


def make_optimiser() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.98, weight_decay=0.01))


def make_variant(name: str, options: argparse.Namespace, platform: str | None, policy: str) -> Variant:
    architecture = train_lm.Architecture(
        options.embed_dim, options.num_layers, options.num_heads, options.num_kv_heads
    )
    with ejx.policy_override(policy):
        model = train_lm.make_model(architecture, platform, key=jax.random.key(0))
    return Variant(name, model, make_optimiser().init(eqx.filter(model, eqx.is_inexact_array)))


def tuned(variant: Variant, options: argparse.Namespace) -> tuple[Variant, float]:
    """The variant with tuned configurations, and the seconds that tuning took."""
    tokens = jax.ShapeDtypeStruct((options.batch, options.seq), jnp.int32)
    start = time.perf_counter()
    model, state = ejx.tune(
        variant.model,
        tokens,
        call=lambda model, tokens: train_lm.cast(model, options.dtype)(tokens),
        others=variant.optimiser_state,
        options=ejx.TuneOptions(time_budget=options.budget),
        force=True,
    )
    return Variant(f"{variant.name}, tuned", model, state), time.perf_counter() - start


def check(variants: Sequence[Variant], tokens: Array, dtype: str) -> None:
    """Compares loss and gradients of every variant with those of the first one."""
    value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(train_lm.mean_loss))
    expected = None
    for variant in variants:
        loss, gradients = value_and_grad(variant.model, tokens, dtype)
        variant.loss = float(loss)
        leaves = jax.tree.leaves(eqx.filter(gradients, eqx.is_array))
        expected = leaves if expected is None else expected
        difference = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(leaves, expected, strict=True))
        variant.gradient_error = (difference / sum(float(jnp.sum(b**2)) for b in expected)) ** 0.5
        loss_error = abs(variant.loss - variants[0].loss) / abs(variants[0].loss)
        if not (loss_error <= LOSS_BOUND and variant.gradient_error <= GRADIENT_BOUND):
            raise SystemExit(
                f"{variant.name}: loss off by {loss_error:.2g} (allowed {LOSS_BOUND}), gradients by "
                f"{variant.gradient_error:.2g} (allowed {GRADIENT_BOUND}); nothing is timed"
            )


def time_in_turn(
    variants: Sequence[Variant], batches: Sequence[np.ndarray], options: argparse.Namespace
) -> None:
    optimiser = make_optimiser()

    @eqx.filter_jit(donate="all")
    def step(model, optimiser_state, tokens):
        loss, gradients = eqx.filter_value_and_grad(train_lm.mean_loss)(model, tokens, options.dtype)
        updates, optimiser_state = optimiser.update(
            gradients, optimiser_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), optimiser_state, loss

    def run(variant: Variant, count: int) -> float:
        jax.block_until_ready(eqx.filter((variant.model, variant.optimiser_state), eqx.is_array))
        start = time.perf_counter()
        for tokens in itertools.islice(itertools.cycle(batches), count):
            variant.model, variant.optimiser_state, loss = step(
                variant.model, variant.optimiser_state, jnp.array(tokens)
            )
        jax.block_until_ready(loss)
        return 1e3 * (time.perf_counter() - start) / count

    for variant in variants:
        run(variant, 2)  # compiles and warms up
    for _ in range(options.samples):
        for variant in variants:
            variant.step_ms.append(run(variant, options.steps))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument(
        "--platforms", help="comma-separated; `default` is the device's choice; triton too on a GPU"
    )
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tuning per problem")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per sample")
    parser.add_argument("--commit", help="version of the code in the result, outside a checkout")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH")
    options = parser.parse_args(arguments)
    vars(options).update(SIZES["quick" if options.quick else "full"])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"

    every = "default" if jax.default_backend() != "gpu" else "default,triton"

    variants, tuning_seconds = [], {}
    for platform in (options.platforms or every).split(","):
        pinned = None if platform == "default" else platform
        heuristic = make_variant(f"{platform}, heuristics", options, pinned, "heuristic")
        found, seconds = tuned(make_variant(platform, options, pinned, "cached"), options)
        tuning_seconds[platform] = seconds
        variants += [heuristic, found]
        print(f"{platform}: tuned in {seconds:.0f} s\n{ejx.explain(found.model)}", flush=True)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 256, (options.batch, options.seq + 1), np.int32) for _ in range(4)]
    check(variants, jnp.asarray(batches[0]), options.dtype)
    time_in_turn(variants, batches, options)

    tokens = options.batch * options.seq
    rows = [variant.row(tokens) for variant in variants]
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        after["speed_over_heuristics"] = before["ms"] / after["ms"]
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(variants[0].model, eqx.is_inexact_array)))
    cells = [
        [row["variant"], f"{row['ms']:.2f}", f"{100 * row['spread']:.1f}", f"{row['tokens_per_second']:,.0f}"]
        + [f"{row['speed_over_heuristics']:.3f}" if "speed_over_heuristics" in row else ""]
        for row in rows
    ]
    print(f"{count:,} parameters, B{options.batch} T{options.seq}, {options.dtype}")
    print(report.table(["variant", "ms a step", "spread %", "tokens/s", "over heuristics"], cells))
    if options.json:
        size = {name: getattr(options, name) for name in SIZES["full"]} | {"parameters": count}
        content = {"environment": report.environment(options.commit), "size": size, "dtype": options.dtype}
        report.write_json(options.json, content | {"tuning_seconds": tuning_seconds, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
