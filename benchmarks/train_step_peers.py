"""A training step of `examples/train_lm.py` beside the same model in PyTorch, compiled with `torch.compile`.

    python benchmarks/train_step_peers.py --json out.json                # 350M parameters, bf16; needs a GPU with PyTorch
    python benchmarks/train_step_peers.py --problems B8_T2048_V256       # one of the four problems
    python benchmarks/train_step_peers.py --quick --no-torch             # a tiny model, anywhere

PyTorch runs in a process of its own (`train_step_torch.py`), one for each problem, which compiles while this one does; then steps are timed in
turn. Both must report the same first loss, as they initialise in the same way. Memory is what a step needs in all, with parameters, the
optimiser's state, gradients and activations: for PyTorch the most that was allocated, for JAX what the compiled program reserves.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_times, report, train_step, turns
from benchmarks.comparison import is_installed
from benchmarks.tuned_model import SIZES

PROBLEMS = {"full": ((8, 2048), (2, 8192)), "quick": ((2, 64),)}
VOCABULARIES = {"full": (256, 50304), "quick": (256,)}
HYBRIDS = {name: ",".join([name] * 3 + ["attention"]) for name in ("gated_deltanet", "kda", "mamba2")}
"""Mixers of the layers in turn, by the name in a problem, where their peer is installed; by default for the first shape and vocabulary."""
LOSS_BOUND = 0.05  # of the first losses, which differ by the random weights and tokens


class PeerFailed(RuntimeError):
    """The process of a peer ended early."""


class Torch:
    """The process that times PyTorch's steps."""

    def __init__(self, options: argparse.Namespace, *more: str, turn: pathlib.Path):
        pipe, environment = subprocess.PIPE, {**peers_environment(), turns.VARIABLE: str(turn)}
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
    """Where PyTorch's compiler runs, Triton's kernels would else be looked for in a folder of its own."""
    from triton import knobs

    return {"TRITON_CACHE_DIR": knobs.cache.dir, **os.environ}


def command_of(options: argparse.Namespace, *more: str) -> list[str]:
    names = ("embed_dim", "num_layers", "num_heads", "vocabulary", "batch", "seq", "mixer")
    sizes = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return [sys.executable, str(pathlib.Path(__file__).with_name("train_step_torch.py")), *sizes, *more]


def start_peers(options: argparse.Namespace, turn: pathlib.Path) -> list[Torch]:
    """PyTorch's processes, after the kernels of recurrent mixers, which would be compiled one after the other, were compiled on all cores."""
    hybrids = [one for one in options.problems if one.mixer != "attention"]
    if hybrids:  # kernels are the same for all these shapes
        start = time.perf_counter()
        all_mixers = options_of(hybrids[0], mixer=",".join(one.mixer for one in hybrids))
        count = os.cpu_count() or 1
        workers = [
            subprocess.Popen(
                command_of(all_mixers, f"--process={i}", f"--processes={count}"), env=peers_environment()
            )
            for i in range(count)
        ]
        codes = [worker.wait() for worker in workers]
        print(
            f"peers' kernels: {time.perf_counter() - start:.1f} s, {sum(map(bool, codes))} failed", flush=True
        )
    more = lambda one: (
        () if options.kernels is None else (f"--kernels={options.kernels / name_of(one)}.torch",)
    )
    return [Torch(one, *more(one), turn=turn) for one in options.problems]


def options_of(options: argparse.Namespace, **own: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | own)


def name_of(options: argparse.Namespace) -> str:
    hybrid = "" if options.mixer == "attention" else "_" + options.mixer.split(",")[0]
    return f"B{options.batch}_T{options.seq}_V{options.vocabulary}{hybrid}"


def measure(
    options: argparse.Namespace, variants: Sequence[train_step.Variant], torch: Torch | None
) -> list[dict[str, Any]]:
    """A row for each variant, and one for PyTorch."""
    if torch is not None:
        torch.wait()
        torch.begin()
    state, random = train_step.make_state(options), np.random.default_rng(0)
    shape = (4, options.batch, options.seq + 1)
    batches = [*jnp.asarray(random.integers(0, options.vocabulary, shape, np.int32))]
    train_step.check(variants, state, batches[0])
    peer: list[dict[str, Any]] = []
    if torch is not None:
        if abs(torch.ready["loss"] - variants[0].loss) > LOSS_BOUND:
            raise SystemExit(
                f"{name_of(options)}: first loss {variants[0].loss:.3f}, PyTorch's {torch.ready['loss']:.3f}"
            )
        if (count := sum(x.size for x in state[0])) != torch.ready["parameters"]:
            raise SystemExit(f"{name_of(options)}: {count} parameters, PyTorch's {torch.ready['parameters']}")
        torch.run(1)
    once = argparse.Namespace(samples=1, steps=options.steps)
    for _ in range(options.samples):
        state = train_step.time_in_turn(variants, state, batches, once)
        peer += [] if torch is None else [torch.run(options.steps)]
    tokens = options.batch * options.seq
    rows = [variant.row(tokens) for variant in variants]
    for row, variant in zip(rows, variants, strict=True):
        row["bytes"] = bytes_of(variant.program)
    if torch is not None:
        samples = [answer["ms"] for answer in peer]
        ms = statistics.median(samples)
        rows.append(
            {"variant": "torch.compile", "ms": ms, "spread": (max(samples) - min(samples)) / ms}
            | {"samples_ms": samples, "tokens_per_second": 1e3 * tokens / ms}
            | {"bytes": max(answer["bytes"] for answer in peer), "first_loss": torch.ready["loss"]}
            | {"compile_seconds": torch.ready["compile_seconds"], "graph": torch.ready["graph"]}
        )
        for row in rows:
            row["time_of_torch"], row["bytes_of_torch"] = row["ms"] / ms, row["bytes"] / rows[-1]["bytes"]
    if options.kernels is not None:
        for variant in variants:
            state = write_kernels(
                options.kernels / f"{name_of(options)}.{variant.name}", variant, state, batches[0]
            )
    return rows


def write_kernels(path: pathlib.Path, variant: train_step.Variant, state: Any, tokens: Any) -> Any:
    """The device's time by kernel in a step, longest first; returns the new state."""

    def run() -> Any:
        nonlocal state
        state, (loss, _) = variant.program(state, tokens)
        return loss

    times = kernel_times.kernel_times(run, 3)
    kinds = [f"{ms:9.3f} ms        {kind}" for kind, ms in kernel_times.by_kind(times).items()]
    each = [f"{ms:9.3f} ms {count:5d} {name}" for name, (ms, count) in times.items()]
    path.write_text("\n".join([*kinds, "", *each, ""]), encoding="utf-8")
    return state


def bytes_of(program: Any) -> int | None:
    """What a step needs in all; donated arguments are counted once."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return sizes + memory.temp_size_in_bytes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model")
    add("--problems", help="comma-separated names such as B8_T2048_V256 (default: all)")
    add("--variants", default="unrolled", help="of the decoder, as in train_step.py (default: %(default)s)")
    add("--no-torch", action="store_true", help="without PyTorch")
    add("--platform", help="of the kernels (default: chosen by device)")
    add("--samples", type=int, default=5)
    add("--steps", type=int, default=4, help="steps per sample")
    add(
        "--kernels",
        type=pathlib.Path,
        metavar="FOLDER",
        help="for the device's time by kernel in one step more",
    )
    add("--commit", help="version of the code in the result, outside a checkout")
    add("--json", type=pathlib.Path, metavar="PATH")
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    if unknown := sorted(set(options.variants) - set(train_step.VARIANTS)):
        parser.error(
            f"--variants: expected some of {', '.join(train_step.VARIANTS)}, received {', '.join(unknown)}"
        )
    size = "quick" if options.quick else "full"
    vars(options).update(SIZES[size])
    options.num_kv_heads = options.num_heads  # as in the PyTorch model
    options.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    sizes = [
        options_of(options, batch=batch, seq=seq, vocabulary=vocabulary, mixer="attention")
        for batch, seq in PROBLEMS[size]
        for vocabulary in VOCABULARIES[size]
    ]
    hybrids = [mixer for name, mixer in HYBRIDS.items() if options.no_torch or _has_peer(name)]
    hybrids = [] if options.quick else hybrids  # it has too few layers
    every = sizes + [options_of(one, mixer=mixer) for one in sizes for mixer in hybrids]
    if options.problems is None:
        usual = every[: len(sizes) + len(hybrids)]
        options.problems = [name_of(one) for one in usual]
    else:
        options.problems = options.problems.split(",")
    if unknown := sorted(set(options.problems) - set(map(name_of, every))):
        parser.error(f"--problems: expected some of {', '.join(map(name_of, every))}, received {unknown[0]}")
    options.problems = [one for one in every if name_of(one) in options.problems]
    return options


def _has_peer(mixer: str) -> bool:
    return is_installed("fla") and (mixer != "mamba2" or is_installed("mamba_ssm"))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.kernels is not None:
        options.kernels.mkdir(parents=True, exist_ok=True)
    peers: list[Torch | None] = [None for _ in options.problems]
    variants = []
    with tempfile.TemporaryDirectory() as folder, futures.ThreadPoolExecutor(1) as aside:
        started = (
            None if options.no_torch else aside.submit(start_peers, options, pathlib.Path(folder) / "turn")
        )
        for one in options.problems:
            variants.append([train_step.compiled(name, one) for name in one.variants])
            seconds = sum(variant.compile_seconds for variant in variants[-1])
            print(f"{name_of(one)}: compiled in {seconds:.1f} s", flush=True)
        if started is not None:
            peers = [*started.result()]
        for i, (one, torch) in enumerate(zip(options.problems, peers, strict=True)):
            try:  # none uses the device while others are timed
                if torch is not None:
                    torch.wait()
                    print(f"{name_of(one)}: PyTorch is ready, {json.dumps(torch.ready)}", flush=True)
            except PeerFailed as error:
                print(f"{name_of(one)}: without PyTorch; {error}", flush=True)
                peers[i] = None
    rows: list[dict[str, Any]] = []
    for one, mine, torch in zip(options.problems, variants, peers, strict=True):
        rows += [{"problem": name_of(one)} | row for row in measure(one, mine, torch)]
        print(text_of(rows), flush=True)
        if options.json:
            content = {"environment": report.environment(options.commit), "dtype": options.dtype}
            size = {name: getattr(options, name) for name in ("embed_dim", "num_layers", "num_heads")}
            report.write_json(options.json, content | {"size": size, "rows": rows})
        if torch is not None:
            torch.end()
    return 0


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    ratio = lambda row, name: f"{row[name]:.3f}" if name in row else ""
    cells = [
        [row["problem"], row["variant"], f"{row['ms']:.2f}", f"{100 * row['spread']:.1f}"]
        + [ratio(row, "time_of_torch"), f"{(row['bytes'] or 0) / 1e9:.2f}", ratio(row, "bytes_of_torch")]
        + [f"{row['first_loss']:.4f}"]
        for row in rows
    ]
    header = ["problem", "variant", "ms a step", "spread %", "of torch", "GB", "of torch", "first loss"]
    return report.table(header, cells)


if __name__ == "__main__":
    raise SystemExit(main())
