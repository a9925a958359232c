"""SSD's single pass on Hopper: forms of it, in one process.

    python ssd.py            # check, then time
    python ssd.py check      # checks alone

`former`: main's. `A`: write strengths by head, columns in pairs. `B`: A, and decays taken apart (a branch a chunk). `C`: B, and products of shared queries
and keys given: the branch's head. `D`: A and the products, nothing taken apart. `E`: C with a higher bound for what is taken apart.
With $JOB set, makes $JOB/ready.ssd when all is compiled and waits for $JOB/go.ssd before it times. Writes $D/ssd.json."""

import collections
import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from benchmarks.measure import JaxWork, time_in_turn
from ejkernel_eqx.dispatch import facts_of_calls
from ejkernel_eqx.launch import run as run_launch
from ejkernel_eqx.launch.sizes import padded
from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.spec import CONSTANT, RecurrenceArrays, RecurrenceSpec, SCALAR
from ejkernel_eqx.recurrence.triton import compiled as triton
from ejkernel_eqx.recurrence.triton.hopper import call as hopper_call
from ejkernel_eqx.recurrence.triton.hopper import tile_sizes
from ejkernel_eqx.recurrence.triton.tile_sizes import Tile
from tests.recurrence.cases import Case, cotangents, make, run_reference

HERE = pathlib.Path(__file__).resolve().parent
OUT = pathlib.Path(os.environ.get("D", HERE))
PACKAGE = "ejkernel_eqx.recurrence.triton.hopper"
START = time.time()


def say(*words):
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


class guarded:
    """Ends the process if what is inside takes longer: a kernel may wait for ever."""

    def __init__(self, what, seconds=25):
        self.timer = threading.Timer(seconds, self.give_up, [what])

    def give_up(self, what):
        say("HANGS", what)
        os._exit(3)

    def __enter__(self):
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_):
        self.timer.cancel()


def module_from(path, name):
    """A file as a module of the package beside the present ones."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


module_from(HERE / "former_single_kernel.py", "former_single_kernel")
former_call = module_from(HERE / "former_call.py", "former_call")
NEVER = 10**9
PATCHES = {
    "former": [(hopper_call, "single", former_call.single)],
    "A": [(tile_sizes, "GENTLE", 0.0), (tile_sizes, "LEAST_SHARED", NEVER)],
    "B": [(tile_sizes, "LEAST_SHARED", NEVER), (hopper_call, "_taken_apart", lambda call, products: call.spec.decay == SCALAR)],
    "C": [],
    "D": [(tile_sizes, "GENTLE", 0.0)],
    "E": [(tile_sizes, "GENTLE", 60.0)],  # twice as much is still a power of two that float32 has
}


class patched:
    def __init__(self, name):
        self.changes = PATCHES[name]

    def __enter__(self):
        self.before = [(where, what, getattr(where, what)) for where, what, _ in self.changes]
        for where, what, value in self.changes:
            setattr(where, what, value)

    def __exit__(self, *_):
        for where, what, value in self.before:
            setattr(where, what, value)


def lowered(name, arrays, spec, config, operation=None):
    """The forward pass in one form, and which single pass it has."""
    found = []

    def execute(launch, inputs):
        if launch.is_gluon:
            found.append(f"{launch.function.fn.__module__.rpartition('.')[2]} GENTLE={launch.constants['GENTLE']} PRODUCTS={launch.constants.get('PRODUCTS')}")
        return run_launch(launch, inputs)

    def forward(arrays):
        results = triton.forward(arrays, spec, config, execute=execute)
        return {"out": results["out"], "final": results["final_state"]}

    jax.clear_caches()
    with patched(name):
        work = jax.jit(forward if operation is None else operation).lower(arrays)
    return work, found


def odd(**more):
    sizes = dict(B=2, T=1024, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, D=64, V=64, dtype="bfloat16")
    return Case(**(sizes | more))


CHECKS = [
    (odd(decay=SCALAR, beta=1.0, Hv=8, Hg=8, Hb=8, D=128, skip=True, keys="normal"), 128, 3, 1),
    (odd(decay=SCALAR, beta=1.0, Hv=8, Hg=8, Hb=8, D=128, skip=True, log_decays="mixed", initial_state=True), 128, 3, 2),
    (odd(decay=SCALAR, beta=1.0, Hv=4, Hg=4, Hb=4, log_decays="closed"), 128, 2, 1),
    (odd(decay=SCALAR, beta=1.0, Hv=4, Hg=4, Hb=4, log_decays=-1.6), 64, 2, 4),
    (odd(decay=SCALAR, beta=1.0, Hv=4, Hg=4, Hb=4, log_decays=-0.9), 128, 3, 1),
    (odd(decay=SCALAR, beta=1.0, Hv=2, Hg=2, initial_state=True), 64, 4, 2),
    (odd(decay=SCALAR, Hg=2, Hb=2, beta=1.0, V=128, D=128), 128, 3, 1),
    (odd(decay=SCALAR, Hv=2, Hg=2, log_decays="mixed"), 64, 3, 1),
    (odd(decay=CONSTANT, beta=1.0, Hv=4, Hg=4, Hb=4), 128, 3, 1),
]


def configured(problem, block_v, stages, splits):
    config = dataclasses.replace(triton.default_config(problem, facts_of_calls()), splits=splits)
    return dataclasses.replace(config, single=True, out=Tile(padded(problem.dim("D")), block_v, 4, stages, True))


def same(a, b):
    return all(bool(jnp.array_equal(x, y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def relative(x, exact):
    x = np.asarray(x.astype(jnp.float32), np.float64)
    return float(np.sqrt(((x - exact) ** 2).mean() / max((exact**2).mean(), 1e-30)))


def check():
    good = True
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = []
        for case, block_v, stages, splits in CHECKS:
            arrays, spec = make(case)
            exact = run_reference(arrays, *cotangents(case), spec)
            config = configured(problem_of("linear_attention", arrays, spec), block_v, stages, splits)
            for name in PATCHES:
                work, found = lowered(name, arrays, spec, config)
                jobs.append((case, name, arrays, exact, found, pool.submit(work.compile)))
        for case, name, arrays, exact, found, job in jobs:
            run = job.result()
            label = f"{case.decay} {case.log_decays} beta={case.beta} H{case.Hv} D{case.D} V{case.V}", name, *found
            with guarded(label):
                first = jax.block_until_ready(run(arrays))
                repeats = all(same(first, run(arrays)) for _ in range(3))
            errors = {"out": relative(first["out"], exact.out), "final": relative(first["final"], exact.final_state)}
            ok = repeats and all(error < 8e-3 for error in errors.values())
            good &= ok
            say("check", *label, {x: f"{e:.1e}" for x, e in errors.items()}, "ok" if ok else "WRONG", "" if repeats else "DIFFERS WHEN REPEATED")
    say("checks", "all ok" if good else "WRONG SOMEWHERE")
    return good


def large(kind, B, T):
    """Inputs as in new layers. `fast`: some chunks of all heads decay much more."""
    keys = jax.random.split(jax.random.key(1), 8)
    normal = lambda n, *shape: jax.random.normal(keys[n], shape, jnp.float32)
    if kind == "scalar":
        q, k, v = (normal(n, B, T, 16, 128).astype("bfloat16") for n in range(3))
        return RecurrenceArrays(q, k, v, jax.nn.log_sigmoid(normal(3, B, T, 16))), RecurrenceSpec(128**-0.5, SCALAR), "linear_attention"
    H, V, N = 64, 64, 128
    x, b, c = normal(0, B, T, H, V).astype("bfloat16"), normal(1, B, T, 1, N).astype("bfloat16"), normal(2, B, T, 1, N).astype("bfloat16")
    A = -1 - 15 * jax.random.uniform(keys[3], (H,))
    dt = jax.nn.softplus(normal(4, B, T, H) + normal(5, H) - 4)
    if kind == "fast":
        dt = dt * jnp.exp(3 * normal(7, B, T // 64, 1, 1)).repeat(64, 1).reshape(B, T, 1)
    skip = jnp.broadcast_to(normal(6, H, 1), (B, H, V))
    return RecurrenceArrays(c, b, x, dt * A, dt, skip), RecurrenceSpec(1.0, SCALAR), "state_space_v2"


def operation_inputs(B, T):
    """What `StateSpaceV2` takes, with time steps before their softplus."""
    keys = jax.random.split(jax.random.key(1), 8)
    normal = lambda n, *shape: jax.random.normal(keys[n], shape, jnp.float32)
    H, V, N = 64, 64, 128
    return dict(
        x=normal(0, B, T, H, V).astype("bfloat16"), B=normal(1, B, T, 1, N).astype("bfloat16"), C=normal(2, B, T, 1, N).astype("bfloat16"),
        A=-1 - 15 * jax.random.uniform(keys[3], (H,)), dt=normal(4, B, T, H).astype("bfloat16"), dt_bias=normal(5, H) - 4, D=normal(6, H),
    )  # fmt: skip


def operation(inputs):
    out, final = ejx.StateSpaceV2(dt_softplus=True, platform="triton")(**inputs)
    return {"out": out, "final": final}


ALL = tuple(PATCHES)
#         kind, B, T, splits (None: the default), forms
TIMED = [
    ("SSD", 4, 16384, None, ALL),
    ("SSD", 1, 65536, None, ALL),
    ("SSD", 4, 4096, None, ALL),
    ("SSD", 16, 4096, None, ALL),  # more programs than multiprocessors
    ("fast", 4, 16384, None, ALL),
    ("SSD", 4, 16384, 4, ("former", "A", "C", "D")),
    ("SSD", 1, 65536, 16, ("former", "A", "C", "D")),
    ("scalar", 4, 16384, None, ("former", "C")),
    ("scalar", 1, 65536, None, ("former", "C")),
    ("operation", 4, 16384, None, ("former", "A", "C", "D")),
    ("operation", 1, 65536, None, ("former", "A", "C", "D")),
]


def inputs_of(kind, B, T):
    if kind == "operation":
        return operation_inputs(B, T), None, None
    arrays, spec, name = large(kind, B, T)
    return arrays, spec, problem_of(name, arrays, spec)


def prepared():
    found = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for kind, B, T, splits, forms in TIMED:
            arrays, spec, problem = inputs_of(kind, B, T)
            config = None
            if problem is not None:
                config = triton.default_config(problem, facts_of_calls())
                if splits is not None:
                    config = dataclasses.replace(config, splits=splits)
                say("config", kind, f"B{B} T{T}", "splits", config.splits, config.out)
            jobs = {}
            for name in forms:
                work, which = lowered(name, arrays, spec, config, operation if kind == "operation" else None)
                jobs[name] = which, pool.submit(work.compile)
            found[kind, B, T, splits] = jobs
            del arrays
        for key, jobs in found.items():
            for name, (which, job) in list(jobs.items()):
                try:
                    jobs[name] = which, job.result()
                except Exception as error:
                    del jobs[name]
                    say("FAILED to compile", key, name, str(error)[:200])
    return found


@jax.jit
def apart(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((x - y) ** 2) / jnp.mean(y**2))


def times(found):
    results, order = {}, random.Random(0)
    for key, jobs in found.items():
        arrays = inputs_of(*key[:3])[0]
        label = f"{key[0]} B{key[1]} T{key[2]}" + (f" splits {key[3]}" if key[3] else "")
        first = {}
        for name, (_, run) in jobs.items():
            with guarded((label, name)):
                first[name] = jax.block_until_ready(run(arrays))
        for name, (which, run) in jobs.items():
            differs = {x: f"{float(apart(first[name][x], first['former'][x])):.1e}" for x in first[name]}
            say("large", label, name, *which, differs, "" if all(same(first[name], run(arrays)) for _ in range(2)) else "DIFFERS WHEN REPEATED")
        del first
        names = list(jobs)
        samples = {name: [] for name in names}
        for _ in range(4):
            order.shuffle(names)
            for name, timing in time_in_turn({name: JaxWork(jobs[name][1], [(arrays,)]) for name in names}, 3, 25.0).items():
                samples[name] += timing.samples
        medians = {name: 1e3 * float(np.median(x)) for name, x in samples.items()}
        by_kernel = {name: kernel_us(run, arrays) for name, (_, run) in jobs.items()}
        results[label] = {"us": medians, "kernels": by_kernel, "samples": samples}
        say("time", label, *(f"{name} {medians[name]:.1f} us ({1e3 * min(samples[name]):.1f}-{1e3 * max(samples[name]):.1f})" for name in sorted(names)))
        for name in sorted(by_kernel):
            say("   kernels", name, "; ".join(f"{n.rpartition('.')[2]} {t:.1f}" for n, t in by_kernel[name].items() if t > 2))
        (OUT / "ssd.json").write_text(json.dumps(results))
        del arrays
    return results


def kernel_us(run, arrays, runs=5):
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([run(arrays) for _ in range(runs)])
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            data = jax.profiler.ProfileData.from_file(str(path))
        found = collections.defaultdict(float)
        for plane in data.planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            found[event.name] += event.duration_ns / 1e3 / runs
        return dict(sorted(found.items(), key=lambda x: -x[1]))
    except Exception as error:
        say("no trace", str(error)[:100])
        return {}


if __name__ == "__main__":
    say(jax.devices()[0].device_kind)
    good = check()
    if "check" in sys.argv[1:] or not good:
        sys.exit(0 if good else 1)
    found = prepared()
    say("compiled")
    if job := os.environ.get("JOB"):
        pathlib.Path(job, "ready.ssd").touch()
        while not pathlib.Path(job, "go.ssd").exists():
            time.sleep(0.2)
    times(found)
