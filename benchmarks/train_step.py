"""A training step of `examples/train_lm.py` with its layers in a loop, unrolled, and with less kept for the gradient.

    python benchmarks/train_step.py --json out.json                      # 350M parameters, T = 2048, bf16; needs a GPU
    python benchmarks/train_step.py --variants scan,unrolled             # a minute
    python benchmarks/train_step.py --quick                              # a tiny model, anywhere

Every variant must first produce the same loss and gradient norm for the same weights and tokens. Then steps are timed in turn, so that
drifting clocks affect all variants equally. Compilation is timed in the order of the variants and in one process, so the first one
includes what the compiler times only once, such as matrix products.
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

from benchmarks import report
from benchmarks.tuned_model import GRADIENT_BOUND, LOSS_BOUND, make_optimiser, SIZES
from ejkernel_eqx.models import Decoder
from examples import train_lm

VARIANTS: dict[str, dict[str, Any]] = {
    "scan": {"scan_layers": True},
    "unrolled": {},
    "unrolled-matmuls": {"remat": "matmuls"},
    "unrolled-kernels": {"remat": "kernels"},
    "scan-kernels": {"scan_layers": True, "remat": "kernels"},
}
"""The decoder's options. `matmuls` and `kernels` are what the forward pass keeps."""


@dataclasses.dataclass
class Variant:
    """A compiled step `(state, tokens) -> (state, (loss, norm))` and its measurements."""

    name: str
    program: Any
    compile_seconds: float
    loss: float = float("nan")
    gradient_norm: float = float("nan")
    step_ms: list[float] = dataclasses.field(default_factory=list)

    def row(self, tokens: int) -> dict[str, Any]:
        ms = statistics.median(self.step_ms)
        memory = self.program.memory_analysis()
        return {
            "variant": self.name,
            "ms": ms,
            "spread": (max(self.step_ms) - min(self.step_ms)) / ms,
            "samples_ms": self.step_ms,
            "tokens_per_second": 1e3 * tokens / ms,
            "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
            "compile_seconds": self.compile_seconds,
            "first_loss": self.loss,
            "gradient_norm": self.gradient_norm,
        }


def make_model(name: str, options: argparse.Namespace) -> Decoder:
    sizes = (options.embed_dim, options.num_layers, options.num_heads, options.num_kv_heads)
    architecture = train_lm.Architecture(*sizes, mixer=options.mixer)
    config = dataclasses.replace(architecture.config(), vocab_size=options.vocabulary)
    return Decoder(config, platform=options.platform, **VARIANTS[name], key=jax.random.key(0))


def make_state(options: argparse.Namespace) -> Any:
    """The weights, as a list that all variants share, and the optimiser's state."""
    parameters = jax.tree.leaves(eqx.filter(make_model("scan", options), eqx.is_inexact_array))
    return parameters, make_optimiser().init(parameters)


def compiled(name: str, options: argparse.Namespace) -> Variant:
    """The variant for states and tokens of these sizes."""
    state = jax.eval_shape(lambda: make_state(options))
    tokens = jax.ShapeDtypeStruct((options.batch, options.seq + 1), jnp.int32)
    return make_variant(name, options, state, tokens)


def make_variant(name: str, options: argparse.Namespace, state: Any, tokens: Any) -> Variant:
    model = eqx.filter_eval_shape(make_model, name, options)
    shapes, rest = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    structure = jax.tree.structure(shapes)

    def step(state: Any, tokens: Array) -> tuple[Any, tuple[Array, Array]]:
        parameters, optimiser_state = state

        def mean_loss(parameters: list[Array]) -> Array:
            model = eqx.combine(jax.tree.unflatten(structure, parameters), rest)
            return train_lm.mean_loss(model, tokens, options.dtype)

        loss, gradients = jax.value_and_grad(mean_loss)(parameters)
        updates, optimiser_state = make_optimiser().update(gradients, optimiser_state, parameters)
        state = optax.apply_updates(parameters, updates), optimiser_state
        return state, (loss, jnp.sqrt(sum(jnp.sum(g * g) for g in gradients)))

    start = time.perf_counter()
    program = jax.jit(step, donate_argnums=0).lower(state, tokens).compile(train_lm.compiler_options())
    return Variant(name, program, time.perf_counter() - start)


def check(variants: Sequence[Variant], state: Any, tokens: Array) -> None:
    """Compares loss and gradient norm of every variant with those of the first one."""
    for variant in variants:
        _, (loss, norm) = variant.program(jax.tree.map(jnp.copy, state), tokens)
        variant.loss, variant.gradient_norm = float(loss), float(norm)
        loss_error = abs(variant.loss / variants[0].loss - 1)
        norm_error = abs(variant.gradient_norm / variants[0].gradient_norm - 1)
        if not (loss_error <= LOSS_BOUND and norm_error <= GRADIENT_BOUND):
            raise SystemExit(
                f"{variant.name}: loss off by {loss_error:.2g} (allowed {LOSS_BOUND}), the gradient's norm by "
                f"{norm_error:.2g} (allowed {GRADIENT_BOUND}); nothing is timed"
            )


def time_in_turn(
    variants: Sequence[Variant], state: Any, batches: Sequence[Array], options: argparse.Namespace
) -> Any:
    """Every variant continues with the weights of the previous one; returns those of the last."""

    def run(variant: Variant, state: Any, count: int) -> tuple[Any, float]:
        jax.block_until_ready(state)
        start = time.perf_counter()
        for tokens in itertools.islice(itertools.cycle(batches), count):
            state, _ = variant.program(state, tokens)
        jax.block_until_ready(state)
        return state, 1e3 * (time.perf_counter() - start) / count

    for variant in variants:
        state, _ = run(variant, state, 1)
    for _ in range(options.samples):
        for variant in variants:
            state, ms = run(variant, state, options.steps)
            variant.step_ms.append(ms)
    return state


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model")
    add("--variants", default=",".join(VARIANTS), help="comma-separated (default: %(default)s)")
    add("--vocabulary", type=int, default=train_lm.VOCABULARY)
    add("--mixer", default="attention", help="of the layers in turn, by commas (default: %(default)s)")
    add("--platform", help="of the kernels (default: chosen by device)")
    add("--samples", type=int, default=5)
    add("--steps", type=int, default=4, help="steps per sample")
    add("--commit", help="version of the code in the result, outside a checkout")
    add("--json", type=pathlib.Path, metavar="PATH")
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    if unknown := sorted(set(options.variants) - set(VARIANTS)):
        parser.error(f"--variants: expected some of {', '.join(VARIANTS)}, received {', '.join(unknown)}")
    vars(options).update(SIZES["quick" if options.quick else "full"])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    random = np.random.default_rng(0)
    shape = (4, options.batch, options.seq + 1)
    batches = [*jnp.asarray(random.integers(0, options.vocabulary, shape, np.int32))]
    state = make_state(options)
    count = sum(x.size for x in state[0])
    variants = []
    for name in options.variants:
        variants.append(make_variant(name, options, state, batches[0]))
        print(f"{name}: compiled in {variants[-1].compile_seconds:.1f} s", flush=True)
    check(variants, state, batches[0])
    time_in_turn(variants, state, batches, options)

    rows = [variant.row(options.batch * options.seq) for variant in variants]
    cells = [
        [row["variant"], f"{row['ms']:.2f}", f"{100 * row['spread']:.1f}", f"{row['tokens_per_second']:,.0f}"]
        + [f"{(row['temporary_bytes'] or 0) / 1e9:.2f}", f"{row['compile_seconds']:.1f}"]
        for row in rows
    ]
    print(f"{count:,} parameters, B{options.batch} T{options.seq}, {options.dtype}")
    header = ["variant", "ms a step", "spread %", "tokens/s", "temporary GB", "compiled s"]
    print(report.table(header, cells))
    if options.json:
        size = {name: getattr(options, name) for name in SIZES["full"]} | {"parameters": count}
        content = {"environment": report.environment(options.commit), "size": size, "dtype": options.dtype}
        report.write_json(options.json, content | {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
