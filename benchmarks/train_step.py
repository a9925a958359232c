"""A training step of `examples/train_lm.py`: with its layers in a loop, unrolled, and with less kept for the gradient; with the heuristics' and with
tuned configurations; and beside the same model in PyTorch, compiled with `torch.compile`.

    python -m benchmarks train-step --json out.json                      # 350M parameters, T = 2048, bf16; needs a GPU
    python -m benchmarks train-step --variants scan,unrolled             # a minute
    python -m benchmarks train-step --tuned --platforms default,triton   # heuristics and tuned, unrolled
    python -m benchmarks train-step --peers --problems B8_T2048_V256     # PyTorch too, on one of the problems
    python -m benchmarks train-step --size 8b --variants unrolled,float8 # layers of an 8B model, in bf16 and in float8
    python -m benchmarks train-step --quick                              # a tiny model, anywhere

Every variant must first produce the same loss and gradient norm for the same weights and tokens. Then steps are timed in turn, so that drifting
clocks affect all variants equally. Compilation is timed in the order of the variants and in one process, so the first one includes what the compiler
times only once, such as matrix products.

PyTorch runs in a process of its own (`train_step_torch.py`), one for each problem, which compiles while this one does. Both must report the same
first loss, as they initialise in the same way. Memory is what a step needs in all, with parameters, the optimiser's state, gradients and
activations: for PyTorch the most that was allocated, for JAX what the compiled program reserves.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import processes, report
from benchmarks.measure import by_kind, kernel_times
from benchmarks.peers import is_missing
from ejkernel_eqx.models import Decoder, MLPConfig
from examples import train_lm

SIZES = {
    "full": {"embed_dim": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 16},
    "8b": {"embed_dim": 4096, "num_layers": 4, "num_heads": 32, "num_kv_heads": 8, "hidden_dim": 14336},
    "quick": {"embed_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
}
"""`8b`: four layers of Llama 3.1 8B."""
SHAPES = {"full": ((8, 2048), (2, 8192)), "8b": ((1, 8192),), "quick": ((2, 64),)}
VOCABULARY = 256  # bytes; the default
VOCABULARIES = {"full": (256, 50304), "8b": (256,), "quick": (256,)}
HYBRIDS = {name: ",".join([name] * 3 + ["attention"]) for name in ("gated_deltanet", "kda", "mamba2")}
"""Mixers of the layers in turn, by the name in a problem, where their peer is installed; by default for the first shape and vocabulary."""
VARIANTS: dict[str, dict[str, Any]] = {
    "scan": {"scan_layers": True},
    "unrolled": {},
    "unrolled-matmuls": {"remat": "matmuls"},
    "unrolled-kernels": {"remat": "kernels"},
    "scan-kernels": {"scan_layers": True, "remat": "kernels"},
    "float8": {},
}
"""The decoder's options. `matmuls` and `kernels` are what the forward pass keeps. `float8` is unrolled, with products in float8."""
TUNED = ("heuristics", "tuned")
LOSS_BOUND, NORM_BOUND = 2e-3, 3e-2  # relative; the variants differ in the order of sums in bf16


def peer_bound(tokens: int) -> float:
    """The most that first losses may differ. Weights and tokens of both are random: the mean loss of 128 tokens has a standard deviation of 0.064,
    and five of the difference of two are allowed."""
    return max(0.05, 5 * 0.064 * (2 * 128 / tokens) ** 0.5)


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
        memory = self.program.memory_analysis()
        return {
            "variant": self.name,
            **_times(self.step_ms, tokens),
            "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
            "bytes": report.bytes_of(memory),
            "compile_seconds": self.compile_seconds,
            "first_loss": self.loss,
            "gradient_norm": self.gradient_norm,
        }


def _times(samples: list[float], tokens: int) -> dict[str, Any]:
    times = report.times_of(samples)
    return times | {"samples_ms": samples, "tokens_per_second": 1e3 * tokens / times["ms"]}


# The step


def make_optimiser() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.98, weight_decay=0.01))


def make_model(name: str, options: argparse.Namespace) -> Decoder:
    """The model of a variant; of a tuned one, `PLATFORM, heuristics` or `PLATFORM, tuned`."""
    sizes = (options.embed_dim, options.num_layers, options.num_heads, options.num_kv_heads)
    config = train_lm.Architecture(*sizes, mixer=options.mixer).config()
    config = dataclasses.replace(config, vocab_size=options.vocabulary)
    if options.hidden_dim is not None:
        layers = [dataclasses.replace(x, mlp=MLPConfig(options.hidden_dim)) for x in config.layers]
        config = dataclasses.replace(config, layers=tuple(layers))
    platform, kind = name.split(", ") if ", " in name else (options.platform, "")
    more: dict[str, Any] = {"platform": None if platform == "default" else platform, **VARIANTS.get(name, {})}
    make = lambda: Decoder(config, **more, key=jax.random.key(0))
    if name == "float8":
        return ejx.with_float8_training(make())
    if not kind:
        return make()
    with ejx.policy_override("heuristic" if kind == "heuristics" else "cached"):
        model = make()
    if kind == "heuristics":
        return model
    start = time.perf_counter()
    tokens = jax.ShapeDtypeStruct((options.batch, options.seq), jnp.int32)
    call = lambda model, tokens: train_lm.cast(model, options.dtype)(tokens)
    effort = ejx.TuneOptions(time_budget=options.budget)
    model = ejx.tune(model, tokens, call=call, options=effort, force=True)
    print(f"{platform}: tuned in {time.perf_counter() - start:.0f} s\n{ejx.explain(model)}", flush=True)
    return model


def make_state(options: argparse.Namespace) -> Any:
    """The weights, as a list that all variants share, and the optimiser's state."""
    parameters = jax.tree.leaves(eqx.filter(make_model("scan", options), eqx.is_inexact_array))
    return parameters, make_optimiser().init(parameters)


def compiled(name: str, options: argparse.Namespace) -> Variant:
    """The variant for states and tokens of these sizes."""
    state = jax.eval_shape(lambda: make_state(options))
    tokens = jax.ShapeDtypeStruct((options.batch, options.seq + 1), jnp.int32)
    if name.endswith(", tuned"):  # which is not possible inside a trace
        model = eqx.filter_eval_shape(lambda model: model, make_model(name, options))
    else:
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
    program = jax.jit(step, donate_argnums=0).lower(state, tokens).compile(ejx.models.compiler_options())
    return Variant(name, program, time.perf_counter() - start)


def check(variants: Sequence[Variant], state: Any, tokens: Array) -> None:
    """Compares loss and gradient norm of every variant with those of the first one."""
    for variant in variants:
        _, (loss, norm) = variant.program(jax.tree.map(jnp.copy, state), tokens)
        variant.loss, variant.gradient_norm = float(loss), float(norm)
        loss_error = abs(variant.loss / variants[0].loss - 1)
        norm_error = abs(variant.gradient_norm / variants[0].gradient_norm - 1)
        if not (loss_error <= LOSS_BOUND and norm_error <= NORM_BOUND):
            raise SystemExit(
                f"{variant.name}: loss off by {loss_error:.2g} (allowed {LOSS_BOUND}), the gradient's norm by "
                f"{norm_error:.2g} (allowed {NORM_BOUND}); nothing is timed"
            )


def time_steps(variant: Variant, state: Any, batches: Sequence[Array], count: int) -> tuple[Any, float]:
    """Every variant continues with the weights of the previous one: the new state, and milliseconds a step."""
    jax.block_until_ready(state)
    start = time.perf_counter()
    for tokens in itertools.islice(itertools.cycle(batches), count):
        state, _ = variant.program(state, tokens)
    jax.block_until_ready(state)
    return state, 1e3 * (time.perf_counter() - start) / count


# PyTorch


class PeerFailed(RuntimeError):
    """The process of a peer ended early."""


class Torch:
    """The process that times PyTorch's steps."""

    def __init__(self, options: argparse.Namespace, *more: str, turn: pathlib.Path):
        pipe, environment = subprocess.PIPE, {**peers_environment(), processes.VARIABLE: str(turn)}
        self._process = subprocess.Popen(
            command_of(options, *more), stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.ready: dict[str, Any] = {}

    def wait(self) -> None:
        """Until it has compiled."""
        self.ready = self.ready or self._answer()

    def begin(self) -> None:
        """Builds the model, and tunes its kernels, for which it has the device for itself."""
        self.ready |= self._asked("begin")

    def run(self, steps: int) -> dict[str, Any]:
        return self._asked(str(steps))

    def _asked(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"train_step_torch.py ended with {self._process.wait()}; its output says why")
        return json.loads(line)

    def end(self) -> None:
        self._process.communicate()


def peers_environment() -> dict[str, str]:
    """The environment of a peer. Where PyTorch's compiler runs, Triton's kernels would else be looked for in a folder of its own."""
    from triton import knobs

    return {"TRITON_CACHE_DIR": knobs.cache.dir, **os.environ}


def command_of(options: argparse.Namespace, *more: str) -> list[str]:
    names = ("embed_dim", "num_layers", "num_heads", "vocabulary", "batch", "seq", "mixer")
    sizes = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return [sys.executable, "-m", "benchmarks.train_step_torch", *sizes, *more]


def start_peers(problems: Sequence[argparse.Namespace], turn: pathlib.Path) -> list[Torch]:
    """PyTorch's processes, after the kernels of recurrent mixers, which would be compiled one after the other, were compiled on all cores."""
    # Kernels are the same for all these shapes.
    if hybrids := [one for one in problems if one.mixer != "attention"]:
        every = argparse.Namespace(**vars(hybrids[0]) | {"mixer": ",".join(one.mixer for one in hybrids)})
        processes.compile_apart(command_of(every), os.cpu_count() or 1, peers_environment())
    more = lambda one: () if one.kernels is None else (f"--kernels={one.kernels / name_of(one)}.torch",)
    return [Torch(one, *more(one), turn=turn) for one in problems]


def name_of(options: argparse.Namespace) -> str:
    hybrid = "" if options.mixer == "attention" else "_" + options.mixer.split(",")[0]
    return f"B{options.batch}_T{options.seq}_V{options.vocabulary}{hybrid}"


# Measuring


def measure(
    options: argparse.Namespace, variants: Sequence[Variant], torch: Torch | None
) -> list[dict[str, Any]]:
    """A row for each variant, and one for PyTorch."""
    if torch is not None:
        torch.wait()
        torch.begin()
    state, random = make_state(options), np.random.default_rng(0)
    shape = (4, options.batch, options.seq + 1)
    batches = [*jnp.asarray(random.integers(0, options.vocabulary, shape, np.int32))]
    check(variants, state, batches[0])
    if torch is not None:
        if abs(torch.ready["loss"] - variants[0].loss) > peer_bound(options.batch * options.seq):
            raise SystemExit(
                f"{name_of(options)}: first loss {variants[0].loss:.3f}, PyTorch's {torch.ready['loss']:.3f}"
            )
        if (count := sum(x.size for x in state[0])) != torch.ready["parameters"]:
            raise SystemExit(f"{name_of(options)}: {count} parameters, PyTorch's {torch.ready['parameters']}")
        torch.run(1)
    for variant in variants:
        state, _ = time_steps(variant, state, batches, 1)
    peer: list[dict[str, Any]] = []
    for _ in range(options.samples):
        for variant in variants:
            state, ms = time_steps(variant, state, batches, options.steps)
            variant.step_ms.append(ms)
        peer += [] if torch is None else [torch.run(options.steps)]
    rows = [variant.row(options.batch * options.seq) for variant in variants]
    if torch is not None:
        rows.append(
            {"variant": "torch.compile", **_times([x["ms"] for x in peer], options.batch * options.seq)}
            | {"bytes": max(answer["bytes"] for answer in peer), "first_loss": torch.ready["loss"]}
            | {name: torch.ready[name] for name in ("compile_seconds", "graph")}
        )
        for row in rows:
            row["time_of_torch"] = row["ms"] / rows[-1]["ms"]
            if row["bytes"] and rows[-1]["bytes"]:  # which PyTorch counts on GPUs alone
                row["bytes_of_torch"] = row["bytes"] / rows[-1]["bytes"]
    for before, after in itertools.pairwise(rows):
        if after["variant"].endswith(", tuned"):
            after["speed_over_heuristics"] = before["ms"] / after["ms"]
    for variant in variants if options.kernels is not None else ():
        path = options.kernels / f"{name_of(options)}.{variant.name}"
        state = write_kernels(path, variant, state, batches[0])
    return rows


def write_kernels(path: pathlib.Path, variant: Variant, state: Any, tokens: Any) -> Any:
    """The device's time by kernel in a step, longest first; returns the new state."""

    def run() -> Any:
        nonlocal state
        state, (loss, _) = variant.program(state, tokens)
        return loss

    times = kernel_times(run, 3)
    kinds = [f"{ms:9.3f} ms        {kind}" for kind, ms in by_kind(times).items()]
    each = [f"{ms:9.3f} ms {count:5d} {name}" for name, (ms, count) in times.items()]
    path.write_text("\n".join([*kinds, "", *each, ""]), encoding="utf-8")
    return state


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `problems` become the options of each."""
    parser = report.parser("train-step", __doc__, vocabulary=VOCABULARY)
    variants = f"comma-separated, of {', '.join(VARIANTS)} (default: all; unrolled with --peers)"
    parser.add_argument("--variants", help=variants)
    options = parser.parse_args(arguments)
    usual = "unrolled" if options.peers else ",".join(name for name in VARIANTS if name != "float8")
    options.variants = (options.variants or usual).split(",")
    if unknown := sorted(set(options.variants) - set(VARIANTS)):
        parser.error(f"--variants: expected some of {', '.join(VARIANTS)}, received {', '.join(unknown)}")
    if options.tuned:
        options.variants = [f"{name}, {kind}" for name in options.platforms.split(",") for kind in TUNED]
    size = "quick" if options.quick else options.size
    vars(options).update({"hidden_dim": None} | SIZES[size])
    options.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    of = lambda one, **changes: argparse.Namespace(**vars(one) | changes)
    if not options.peers:
        (batch, seq), *_ = SHAPES[size]
        options.problems = [of(options, batch=batch, seq=seq)]
        return options
    options.num_kv_heads = options.num_heads  # as in the PyTorch model
    sizes = [
        of(options, batch=batch, seq=seq, vocabulary=vocabulary)
        for batch, seq in SHAPES[size]
        for vocabulary in VOCABULARIES[size]
    ]
    hybrids = [mixer for name, mixer in HYBRIDS.items() if options.no_torch or _has_peer(name)]
    hybrids = [] if options.quick else hybrids  # it has too few layers
    every = sizes + [of(one, mixer=mixer) for one in sizes for mixer in hybrids]
    names = list(map(name_of, every))
    wanted = options.problems.split(",") if options.problems else names[: len(sizes) + len(hybrids)]
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--problems: expected some of {', '.join(names)}, received {unknown[0]}")
    options.problems = [one for one in every if name_of(one) in wanted]
    return options


def _has_peer(mixer: str) -> bool:
    return not is_missing("fla") and not (mixer == "mamba2" and is_missing("mamba_ssm"))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.kernels is not None:
        options.kernels.mkdir(parents=True, exist_ok=True)
    problems, variants = options.problems, []
    peers: list[Torch | None] = [None for _ in problems]
    with tempfile.TemporaryDirectory() as folder, futures.ThreadPoolExecutor(1) as aside:
        turn, beside = pathlib.Path(folder) / "turn", options.peers and not options.no_torch
        started = aside.submit(start_peers, problems, turn) if beside else None
        for one in problems:
            variants.append([compiled(name, one) for name in one.variants])
            seconds = ", ".join(f"{x.name} {x.compile_seconds:.1f} s" for x in variants[-1])
            print(f"{name_of(one)}: compiled, {seconds}", flush=True)
        for i, torch in enumerate(started.result() if started is not None else ()):
            try:  # none uses the device while others are timed
                torch.wait()
                peers[i] = torch
                print(f"{name_of(problems[i])}: PyTorch is ready, {json.dumps(torch.ready)}", flush=True)
            except PeerFailed as error:
                print(f"{name_of(problems[i])}: without PyTorch; {error}", flush=True)
    rows: list[dict[str, Any]] = []
    for one, mine, torch in zip(problems, variants, peers, strict=True):
        rows += [{"problem": name_of(one)} | row for row in measure(one, mine, torch)]
        print(text_of(rows), flush=True)
        size = {name: getattr(one, name) for name in SIZES["8b"]}
        report.save(options, dtype=options.dtype, size=size, rows=rows)
        if torch is not None:
            torch.end()
    return 0


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    shown = [row | {"gb": (row["bytes"] or 0) / 1e9} for row in rows]
    return report.table_of("train-step", shown)
