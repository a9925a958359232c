"""Steps of `ejkernel_eqx.serving` beside the device's time for them, and how long a server takes to start.

    python -m benchmarks serving-steps --json out.json         # 12 layers of 768, bf16, 64 and 256 texts at once; needs a GPU
    python -m benchmarks serving-steps --quick                 # a tiny model, anywhere

A step is timed while all texts decode. The device's time is that of the same compiled program, launched many times in a row with the same
inputs, so that the host has nothing to do between the launches. A start is that of a process of its own, until its first token, with empty
and with full compilation caches (`JAX_COMPILATION_CACHE_DIR`, `TRITON_CACHE_DIR`), and how far it had come when.
"""

import argparse
import concurrent.futures
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

if "--start" in sys.argv:  # as in `serve_lm.py`
    concurrent.futures.ThreadPoolExecutor(1).submit(jax.devices)

import equinox as eqx
import numpy as np

from benchmarks import report
from benchmarks.measure import host_ms
from benchmarks.processes import this_command
from examples import train_lm  # also puts the folder of the examples on the path

SIZES = {
    "full": {"embed_dim": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4, "steps": 200},
    "quick": {"embed_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "steps": 8},
}
BATCHES = {"full": (64, 256), "quick": (4,)}
PROMPT, PAGE = 100, 16
VOCABULARY = 256  # bytes
PHASES = ("imports", "device", "model", "programs", "token")


def make_engine(options: argparse.Namespace, batch: int) -> Any:
    from ejkernel_eqx.serving import Engine

    names = ("embed_dim", "num_layers", "num_heads", "num_kv_heads")
    arch = train_lm.Architecture(*(getattr(options, name) for name in names))
    # One program, where a call of the class runs one for every array.
    make = lambda key: train_lm.cast(train_lm.make_model(arch, options.platform, key=key), options.dtype)
    model = eqx.filter_jit(make)(jax.random.key(0))
    length = PROMPT + 4 * options.steps
    pages = batch * -(-length // PAGE)
    sizes = {"num_pages": pages, "page_size": PAGE, "max_batch": batch, "max_length": length}
    return Engine(model, **sizes, step_tokens=max(512, batch))


def fill(engine: Any, options: argparse.Namespace) -> None:
    """Fills the engine with texts, all past their prompts."""
    from ejkernel_eqx.models import Sampling

    rng = np.random.default_rng(0)
    for seed in range(engine.max_batch):
        prompt = rng.integers(0, VOCABULARY, rng.integers(PROMPT // 2, PROMPT + 1))
        sampling = Sampling(options.temperature, seed=seed)
        engine.submit(prompt.tolist(), 4 * options.steps, sampling=sampling, stop=())
    while engine.num_waiting or any(
        request.ready - request.computed > 1 for request in engine.scheduler.running
    ):
        engine.step()


def time_steps(engine: Any, steps: int) -> list[float]:
    """Milliseconds per step of each of four groups of steps."""

    def step() -> None:
        assert len(engine.step()) == engine.max_batch

    return [host_ms(step, steps // 4) for _ in range(4)]


def time_device(engine: Any, steps: int) -> list[float]:
    """Times the same program with the same inputs, again and again."""
    engine._wait()
    plan = dict.fromkeys(engine.scheduler.running, 1)
    sizes, program = engine.programs[engine._program(plan)]
    data = jax.device_put(sizes.pack(engine._batch(plan), engine.scheduler.sampling))

    def step() -> Any:
        _, engine._state = program(engine._weights, engine._state, data)
        return engine._state

    jax.block_until_ready(engine._state)
    return [host_ms(step, steps // 4) for _ in range(5)][1:]


def measure(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    engine = make_engine(options, batch)
    fill(engine, options)
    time_steps(engine, 8)  # compiles
    steps = time_steps(engine, options.steps)
    engine.overlap = False
    engine.step()  # takes the tokens of two steps
    waiting = time_steps(engine, options.steps)
    device = time_device(engine, options.steps)
    step_ms, device_ms = statistics.median(steps), statistics.median(device)
    return {
        "batch": batch,
        "step_ms": step_ms,
        "device_ms": device_ms,
        "ratio": step_ms / device_ms,
        "step_ms_without_overlap": statistics.median(waiting),
        "tokens_per_second": 1e3 * batch / step_ms,
        "programs": len(engine.compiled),
        "samples_ms": steps,
        "device_samples_ms": device,
    }


def serve_once(options: argparse.Namespace) -> None:
    """Starts a server of the first batch size, and prints a line for each of `PHASES`."""
    phases = iter(PHASES)
    tell = lambda: print(next(phases), flush=True)
    tell()
    options.dtype = dtype_here()
    tell()
    engine = make_engine(options, options.batches[0])
    jax.block_until_ready(engine._weights + engine._state)
    tell()
    engine.warm_up("prompts", "decode and draw" if options.temperature > 0 else "decode")
    jax.block_until_ready(engine._state)
    tell()
    engine.submit([1, 2, 3], 2, stop=())
    next(engine.run())
    tell()


def time_starts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A start with empty caches, and two with full ones: seconds from the start of the process to the end of each phase."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"JAX_COMPILATION_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        settings |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = this_command("serving-steps", "--start", *(["--quick"] if options.quick else []))
        for caches in ("empty", "full", "full"):
            start = time.perf_counter()
            process = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            seconds = {line.strip(): time.perf_counter() - start for line in process.stdout}
            if process.wait() or tuple(seconds) != PHASES:
                raise SystemExit(f"a start with {caches} caches failed; its output says why")
            rows.append({"caches": caches, "seconds": seconds})
            print(describe_start(rows[-1]), flush=True)
    return rows


def describe_start(row: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["seconds"].items())
    return f"start, {row['caches']} caches, seconds: {phases}"


def dtype_here() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = report.parser("serving-steps", __doc__).parse_args(arguments)
    size = "quick" if options.quick else "full"
    vars(options).update(SIZES[size])
    options.batches = BATCHES[size]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.start:
        serve_once(options)
        return 0
    starts = [] if options.no_starts else time_starts(options)  # before this process takes the device
    options.dtype = dtype_here()
    rows = [measure(options, batch) for batch in options.batches]
    print(report.table_of("serving-steps", rows))
    bars = report.data("tables")["bars"]["serving-steps"]
    size = {name: getattr(options, name) for name in SIZES["full"]}
    report.save(options, size=size, dtype=options.dtype, bars=bars, rows=rows, starts=starts)
    return 0
