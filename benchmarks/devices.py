"""Mixtures of experts and training steps over the GPUs of a host, compared with one of them.

    python -m benchmarks devices --parts experts --json experts.json    # needs two GPUs or more
    python -m benchmarks devices --parts train --only 'data; tensor'    # some of the training steps
    python -m benchmarks devices --devices 8 --parts train --only 'data and tensor' --json devices_h200_x8_data_and_tensor.json
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m benchmarks devices --quick

`experts`: the layer `MixtureOfExperts` with tokens and experts over the same axis of an explicit mesh, forward and with all gradients. `speedup`
is the time of one device with all tokens over this one's.

`train`: a step of a decoder with AdamW, its weights split over all devices. `data` has as many rows on each device as one device has alone,
`tensor` and `sequence` the same rows in all. `data and tensor` and `data and sequence`, for four devices and more, have two devices along `data`,
each with the rows of one device alone. `experts` is a decoder with experts, which lie over the axis of the rows. `speedup` is the tokens a second
over those of one device; `wanted` is what two devices should have, or part of the number of more. `halves`, over `tensor` and `sequence`, is the
mean of the losses of two halves of the rows: the products of one run beside the collectives of the other. `xla` is the same model on an automatic
mesh with XLA's attention: what plain `jit` makes of it.

Programs are compiled with `ejkernel_eqx.models.compiler_options`; `--compiler` sets others, or these to other values.

Every program is first compared with another: the layer's results and gradients with those of one device; the norm of a step's gradient with that of
one device, or, if it has more rows than one device, with that of the other program. Then calls are timed. `sent` is what one device gets in the
collectives of the compiled program; those in a loop count once. Processes that share the file `BENCHMARK_TURNS` compile beside each other, and take
turns on the devices.
"""

import argparse
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from benchmarks import measure, processes, report
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, MoEConfig
from ejkernel_eqx.models import mesh as meshes

PARTS = ("experts", "train")
EXPERT = "data"  # the axis of rows: experts lie over it, too
_ALLOWED = 0.03  # relative error of bfloat16


@dataclasses.dataclass(frozen=True)
class Experts:
    embed: int
    hidden: int
    count: int
    top_k: int
    tokens: int
    wanted: tuple[float, float]
    """Speed of two GPUs over one, forward and with gradients."""
    share: float | None = None
    """Of the number of more GPUs, the speed of so many over one."""


EXPERTS = {
    "64 experts, 32k": Experts(2048, 1408, 64, 6, 32768, (1.5, 1.6)),
    "64 experts, 128k": Experts(2048, 1408, 64, 6, 131072, (1.5, 1.6), share=0.7),
    "Mixtral, 32k": Experts(4096, 14336, 8, 2, 32768, (1.7, 1.75)),
}
QUICK_EXPERTS = {"8 experts": Experts(32, 48, 8, 2, 64, (1.0, 1.0))}
EXCHANGES = ("by_token", "ragged")


@dataclasses.dataclass(frozen=True)
class Step:
    axis: str
    rows: int
    """Of one device alone."""
    tokens: int
    wanted: float | None = None
    """Speed of two GPUs over one."""
    share: float | None = None
    """Of the number of more GPUs, the speed of so many over one."""
    data: int = 1
    """Devices along `data` beside those of another axis."""
    experts: bool = False
    layers: int = 28

    def sizes(self, devices: int) -> dict[str, int]:
        """The axes of a mesh of so many devices."""
        sizes = dict.fromkeys(meshes.MESH_AXES, 1) | {meshes.DATA: self.data}
        return sizes | {self.axis: devices // self.data}

    def rows_on(self, devices: int) -> int:
        return self.rows * self.sizes(devices)[meshes.DATA]


STEPS = {
    "data": Step(meshes.DATA, 8, 2048, 1.9, share=0.94),
    "tensor": Step(meshes.TENSOR, 8, 2048, 1.5),
    "tensor, long": Step(meshes.TENSOR, 8, 8192, 1.6),
    "sequence": Step(meshes.SEQUENCE, 2, 16384, 1.75),
    "data and tensor": Step(meshes.TENSOR, 8, 2048, share=0.75, data=2),
    "data and sequence": Step(meshes.SEQUENCE, 1, 32768, share=0.75, data=2),
    # A layer with experts is four times as long a program, which XLA takes a minute and more to compile for 28 of them.
    "experts": Step(meshes.DATA, 8, 2048, 1.7, experts=True, layers=8),
}
_SIZES = {"embed_dim": 1024, "num_heads": 16}
_QUICK_SIZES = {"embed_dim": 64, "num_heads": 4}
_VOCABULARY = 256


# Experts


def layer_of(problem: Experts, exchange: Any, dtype: Any) -> Any:
    parallel = None if exchange is None else ejx.nn.ExpertParallel(exchange=exchange)
    sizes: Any = {"num_experts": problem.count, "top_k": problem.top_k, "dtype": dtype}
    return ejx.nn.MixtureOfExperts(
        problem.embed, problem.hidden, **sizes, parallel=parallel, key=jax.random.key(0)
    )


def layer_and_tokens(
    problem: Experts, exchange: Any, options: argparse.Namespace
) -> tuple[Any, Array, Array]:
    """A layer, its input and a cotangent; over an explicit mesh if there is an exchange."""
    dtype = jnp.dtype(options.dtype)
    random = np.random.default_rng(0)
    x, dy = (
        random.standard_normal((problem.tokens, problem.embed), np.float32).astype(dtype) for _ in range(2)
    )
    layer = layer_of(problem, exchange, dtype)
    if exchange is None:
        return layer, jnp.asarray(x), jnp.asarray(dy)
    mesh = jax.make_mesh((options.devices,), (EXPERT,), axis_types=(AxisType.Explicit,))

    def put(path: Any, leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        spec = P(EXPERT) if ".experts" in jax.tree_util.keystr(path) else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    rows = NamedSharding(mesh, P(EXPERT))
    return jax.tree_util.tree_map_with_path(put, layer), jax.device_put(x, rows), jax.device_put(dy, rows)


def forward_of(static: Any) -> Callable[..., Any]:
    return lambda arrays, x, dy: eqx.combine(arrays, static)(x)


def gradients_of(static: Any) -> Callable[..., Any]:
    def both(arrays: Any, x: Array, dy: Array) -> Any:
        out, pull = jax.vjp(forward_of(static), arrays, x, dy)
        return out, pull(dy)[:2]

    return both


DIRECTIONS = {"forward": forward_of, "with gradients": gradients_of}


def measure_experts(name: str, problem: Experts, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, expected = [], {}
    for exchange in (None, *EXCHANGES):
        if exchange == "ragged" and jax.default_backend() == "cpu":
            continue  # which has no such collective
        layer, x, dy = layer_and_tokens(problem, exchange, options)
        arrays, static = eqx.partition(layer, eqx.is_array)
        for direction, make in DIRECTIONS.items():
            row: dict[str, Any] = {
                "problem": name,
                "direction": direction,
                "variant": exchange or "one device",
            }
            compiler = meshes.compiler_options(getattr(x.sharding, "mesh", None)) | options.compiler
            call = jax.jit(make(static), compiler_options=compiler)
            run = functools.partial(call, arrays, x, dy)
            found = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(jax.device_get(run()))]
            row["error"] = _error(found, expected.setdefault(direction, found))
            rows.append(row)
            if not row["error"] <= _ALLOWED:
                row["reason"] = f"wrong: relative error {row['error']:.2g}"
                continue
            text = call.lower(arrays, x, dy).compile().as_text()
            row |= {"sent_gb": sent_bytes(text) / 1e9} | times_of(run, options)
            of_two = problem.wanted[direction == "with gradients"]
            _compare(rows, row, row["ms"], of_two if options.devices == 2 else _part(problem.share, options))
            print(f"{name}, {direction}, {row['variant']}: {row['ms']:.2f} ms", flush=True)
    return rows


def _error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest relative error of any array."""
    norm = np.linalg.norm
    return max(float(norm(x - y) / max(norm(y), 1e-30)) for x, y in zip(found, expected, strict=True))


# Training


def config_of(step: Step, sizes: dict[str, int]) -> DecoderConfig:
    width, heads = sizes["embed_dim"], sizes["num_heads"]
    hidden = -(-8 * width // 3 // 32) * 32
    mlp = (
        MoEConfig({"hidden_dim": hidden // 4, "num_experts": 16, "top_k": 4})
        if step.experts
        else MLPConfig(hidden)
    )
    attention = {"num_heads": heads, "rope": ejx.nn.RotaryEmbedding(width // heads)}
    layers = (LayerConfig("attention", attention, mlp),) * sizes.get("num_layers", step.layers)
    return DecoderConfig(_VOCABULARY, width, layers)


def cast(model: Decoder, dtype: str) -> Decoder:
    """The model in the dtype of the computation; weights and the optimiser's state stay in float32."""
    narrow = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(narrow, model)


def step_of(step: Step, variant: str, options: argparse.Namespace) -> tuple[Callable[[], Any], Any, int]:
    """A call that takes a training step and returns loss and gradient norm, the compiled program, and the tokens of a step."""
    sizes = _QUICK_SIZES | {"num_layers": 2} if options.quick else _SIZES
    split = step.sizes(options.devices) if variant != "one device" else {}
    rows = step.rows_on(options.devices) if split else step.rows
    tokens = 64 if options.quick else step.tokens
    given: dict[str, Any] = {"platform": "xla"} if variant == "xla" else {}
    if step.axis == meshes.SEQUENCE and variant in ("explicit", "halves"):
        given |= {"sequence_axis": meshes.SEQUENCE}
    model = Decoder(config_of(step, sizes), **given, key=jax.random.key(0))
    optimiser = optax.adamw(1e-4, b2=0.98, weight_decay=0.01)
    batch = np.random.default_rng(0).integers(0, _VOCABULARY, (rows, tokens + 1), np.int32)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    state, inputs = (arrays, optimiser.init(arrays)), (jnp.asarray(batch[:, :-1]), jnp.asarray(batch[:, 1:]))
    mesh = None
    if split:
        mesh = jax.make_mesh(
            tuple(split.values()),
            tuple(split),
            axis_types=(AxisType.Explicit,) * len(split),
            devices=jax.devices()[: options.devices],
        )
        state = meshes.place(state, model, mesh)
        if variant == "xla":
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(split))
            state = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), state)
        inputs = meshes.place_tokens(batch, mesh)
        if variant == "halves":
            inputs = meshes.place_tokens(batch.reshape(2, rows // 2, tokens + 1), mesh)

    def update(state: Any, inputs: Any) -> Any:
        arrays, optimiser_state = state

        def loss_of_rows(arrays: Any, tokens: Array, targets: Array) -> Array:
            logits = cast(eqx.combine(arrays, static), options.dtype)(tokens)
            if variant in ("explicit", "halves"):
                return meshes.split_cross_entropy(logits, targets)
            return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets))

        def loss_of(arrays: Any) -> Array:
            if variant != "halves":
                return loss_of_rows(arrays, *inputs)
            first, second = (loss_of_rows(arrays, inputs[0][half], inputs[1][half]) for half in range(2))
            return (first + second) / 2

        loss, gradients = jax.value_and_grad(loss_of)(arrays)
        updates, optimiser_state = optimiser.update(gradients, optimiser_state, arrays)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        return (optax.apply_updates(arrays, updates), optimiser_state), (loss, norm)

    kept = jax.tree.map(lambda x: x.sharding, state) if split else None
    lowered = jax.jit(update, donate_argnums=0, out_shardings=(kept, None)).lower(state, inputs)
    program = lowered.compile(meshes.compiler_options(mesh) | options.compiler)

    def call() -> Any:
        nonlocal state
        state, result = program(state, inputs)
        return result

    return call, program, rows * tokens


def measure_step(name: str, step: Step, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    halves = () if step.axis == meshes.DATA or step.rows == 1 else ("halves",)
    for variant in ("one device", "explicit", *halves, "xla"):
        row: dict[str, Any] = {"problem": name, "direction": "step", "variant": variant}
        rows.append(row)
        try:
            start = time.perf_counter()
            call, program, tokens = step_of(step, variant, options)
            row["compile_seconds"] = time.perf_counter() - start
            memory, sent = report.bytes_of(program.memory_analysis()), sent_bytes(program.as_text()) / 1e9
            with processes.held():
                row["first_loss"], row["gradient_norm"] = map(float, call())
                same = step.rows_on(options.devices) == step.rows  # as one device
                alike = rows if same else rows[1:]
                if row in alike:
                    row["error"] = abs(row["gradient_norm"] / alike[0].get("gradient_norm", math.nan) - 1)
                    if not row["error"] <= _ALLOWED:
                        row["reason"] = f"wrong: the norm of the gradient is off by {row['error']:.2g}"
                        continue
                row |= {"bytes": memory, "sent_gb": sent} | times_of(call, options)
                if options.profile:
                    folder = options.profile / f"{name}-{variant}"
                    row["hidden"] = measure.hidden(measure.traced(call, folder))
        except (RuntimeError, ValueError) as error:  # out of memory, among others
            row["reason"] = str(error).splitlines()[0][:200]
            print(f"{name}, {variant}: {row['reason']}", flush=True)
            continue
        row["tokens_per_second"] = 1e3 * tokens / row["ms"]
        wanted = step.wanted if options.devices == 2 else _part(step.share, options)
        _compare(rows, row, 1 / row["tokens_per_second"], wanted)
        print(f"{name}, {variant}: {row['ms']:.2f} ms", flush=True)
    return rows


# Both


_ALONE = r"replica_groups=(?:\{\{\d+\}[,}]|\[\d+,1\])"
"""Groups of one device, over an axis of one device: nothing is sent."""
_SENDS = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|ragged-all-to-all"
_COLLECTIVE = re.compile(rf"= (.*?) ({_SENDS})(-start)?\((?!.*{_ALONE})")
_SHAPE = re.compile(r"(\w+?)(\d+)\w*\[([\d,]+)\]")
_WITH_OPERANDS = ("all-gather", "collective-permute")
"""What begins returns its operands, too, before the results."""


def sent_bytes(text: str) -> int:
    """The bytes of the results of all collectives of a compiled program, on one device; loops count once."""
    total = 0
    for results, kind, begins in _COLLECTIVE.findall(text):
        shapes = _SHAPE.findall(results)
        first = len(shapes) // 2 if begins and kind in _WITH_OPERANDS else 0
        for _, bits, dims in shapes[first:]:
            total += math.prod(map(int, dims.split(","))) * int(bits) // 8
    return total


def times_of(call: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    measure.host_ms(call, 2)
    samples = [measure.host_ms(call, options.calls) for _ in range(options.samples)]
    return report.times_of(samples)


def _part(share: float | None, options: argparse.Namespace) -> float | None:
    return None if share is None else share * options.devices


def _compare(rows: Sequence[dict[str, Any]], row: dict[str, Any], cost: float, wanted: float | None) -> None:
    """Adds how many times as fast as one device a variant is, by the time of the same work."""
    row["cost"] = cost
    alone = next(r for r in rows if r["direction"] == row["direction"] and r["variant"] == "one device")
    if row is not alone and "cost" in alone:
        row |= {"speedup": alone["cost"] / cost, "wanted": wanted}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("devices", __doc__, parts=",".join(PARTS), devices=jax.device_count())
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, received {', '.join(unknown)}")
    asked = options.only
    options.only = (
        [name.strip() for name in options.only.split(";")]
        if options.only
        else [*EXPERTS, *QUICK_EXPERTS, *STEPS]
    )
    if unknown := sorted(set(options.only) - {*EXPERTS, *QUICK_EXPERTS, *STEPS}):
        parser.error(
            f"--only: expected some of {'; '.join((*EXPERTS, *STEPS))}, received {'; '.join(unknown)}"
        )
    if not 2 <= options.devices <= jax.device_count():
        parser.error(
            f"--devices: expected 2 to the {jax.device_count()} that JAX sees, received {options.devices}"
        )
    few = [name for name in options.only if name in STEPS and options.devices < 2 * STEPS[name].data]
    if few and asked:
        least = 2 * STEPS[few[0]].data
        parser.error(f"--devices: expected {least} or more for {few[0]!r}, received {options.devices}")
    options.only = [name for name in options.only if name not in few]
    if options.quick:
        options.dtype, options.samples, options.calls = "float32", 1, 1
    options.compiler = dict(entry.split("=", 1) for entry in options.compiler.split(",") if entry)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options, rows = parse(arguments), []
    save = lambda: report.save(options, devices=options.devices, dtype=options.dtype, rows=rows)
    if "experts" in options.parts:
        for name, problem in (QUICK_EXPERTS if options.quick else EXPERTS).items():
            rows += measure_experts(name, problem, options) if name in options.only else []
            save()
    if "train" in options.parts:
        for name, step in STEPS.items():
            rows += measure_step(name, step, options) if name in options.only else []
            save()
    print(report.table_of("devices", [row for row in rows if "ms" in row]))
    return int(any(row.get("reason", "").startswith("wrong") for row in rows))
