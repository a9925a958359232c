"""Attention's backward for head dims up to 64: the kernel of this tree beside the former one, in one process.

    python d64.py            # check, then time
    python d64.py check      # checks alone

`former` is main's kernel, from the file beside this one. `shared` is this tree's with keys from shared memory: what the transposed store alone gives.
With $JOB set, makes $JOB/ready.d64 when all is compiled and waits for $JOB/go.d64 before it times (job.sh does that). Writes $D/d64.json."""

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

from benchmarks.measure import JaxWork, time_in_turn
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.reference import visibility
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec, RowRanges
from ejkernel_eqx.attention.triton import compiled as triton
from ejkernel_eqx.attention.triton.hopper import backward_tiles, narrow_backward_kernel
from ejkernel_eqx.dispatch import device_facts

HERE = pathlib.Path(__file__).resolve().parent
OUT = pathlib.Path(os.environ.get("D", HERE))
PACKAGE = "ejkernel_eqx.attention.triton.hopper"
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


def kernel_from(path, name):
    """The kernel of a file, as a module of the package beside the present one."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.hopper_narrow_backward_kernel


def kernels():
    text = pathlib.Path(narrow_backward_kernel.__file__).read_text()
    assert text.count(".load(keys_layout)  # [D, 64]") == 2
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "shared_narrow.py").write_text(text.replace(".load(keys_layout)  # [D, 64]", "  # [D, 64]"))
    return {
        "former": kernel_from(HERE / "former_narrow.py", "former_narrow"),
        "new": narrow_backward_kernel.hopper_narrow_backward_kernel,
        "shared": kernel_from(folder / "shared_narrow.py", "shared_narrow"),
    }


KERNELS = kernels()


@dataclasses.dataclass(frozen=True)
class Problem:
    B: int
    T: int
    S: int
    H: int
    K: int
    D: int = 64
    V: int = 64
    dtype: str = "bfloat16"
    spec: tuple = (("right", 0),)
    kind: str = ""  # "documents", "rows"

    @property
    def name(self):
        more = " ".join([*(f"{k}={v}" for k, v in self.spec), self.kind])
        return f"B{self.B} T{self.T} S{self.S} H{self.H} KV{self.K} D{self.D} {self.dtype[:5]} {more}"


C = (("right", 0),)
CHECKS = [
    Problem(1, 300, 300, 2, 1),
    Problem(2, 777, 777, 4, 2),
    Problem(1, 330, 420, 2, 1, spec=(("right", 0), ("offset", 90))),
    Problem(1, 100, 420, 2, 2),  # keys that no query sees
    Problem(1, 140, 300, 2, 2, spec=()),
    Problem(2, 1024, 1024, 8, 2, spec=()),
    Problem(2, 1000, 1000, 8, 1),
    Problem(1, 300, 700, 2, 1, spec=(("left", 70), ("right", 20), ("offset", 400))),
    Problem(2, 500, 500, 2, 2, spec=(("right", 0), ("logits_soft_cap", 3.0))),
    Problem(2, 777, 777, 4, 2, kind="documents"),
    Problem(1, 400, 700, 4, 2, D=40, spec=(), kind="rows"),
    Problem(1, 777, 777, 4, 4, dtype="float16"),
]
TIMED = [
    Problem(2, 8192, 8192, 16, 16),
    Problem(8, 2048, 2048, 16, 16),
    Problem(16, 1024, 1024, 32, 32),
    Problem(4, 4096, 4096, 32, 32, spec=()),
    Problem(4, 4096, 4096, 32, 8),
    Problem(4, 4096, 4096, 32, 32),
    Problem(4, 4096, 4096, 16, 16, spec=(("right", 0), ("logits_soft_cap", 30.0))),
    Problem(4, 4096, 4096, 16, 16, kind="documents"),
]


def make(p, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = lambda n, *shape: jax.random.normal(keys[n], shape, jnp.float32).astype(p.dtype)
    more = {}
    if p.kind == "documents":  # of three documents, and padding
        ids = lambda length: jnp.where(jnp.arange(length) < length - length // 8, 3 * jnp.arange(length) // length, -1)
        more = {"q_segments": jnp.tile(ids(p.T)[None], (p.B, 1)).astype(jnp.int32), "kv_segments": jnp.tile(ids(p.S)[None], (p.B, 1)).astype(jnp.int32)}
    if p.kind == "rows":
        rng = np.random.default_rng(1)
        start = rng.integers(1, p.S, (p.B, p.T))
        end = np.minimum(rng.integers(0, p.S, (p.B, p.T)) + p.S // 3, p.S - 1)
        more = {"rows": RowRanges(*(jnp.asarray(x, jnp.int32) for x in (start, end, start)))}
    arrays = AttentionArrays(normal(0, p.B, p.T, p.H, p.D), normal(1, p.B, p.S, p.K, p.D), normal(2, p.B, p.S, p.K, p.V), **more)
    spec = AttentionSpec(**({"scale": p.D**-0.5} | dict(p.spec)))
    return arrays, spec, normal(3, p.B, p.T, p.H, p.V), jax.random.normal(keys[4], (p.B, p.H, p.T), jnp.float32)


def reference(arrays, spec, dout, dlse):
    """Output, log-sums and gradients in float64, one head at a time."""
    q, k, v, do = (np.asarray(x.astype(jnp.float32), np.float64) for x in (arrays.q, arrays.k, arrays.v, dout))
    dlse = np.asarray(dlse, np.float64)
    (B, T, H, _), K = q.shape, k.shape[2]
    seen = np.broadcast_to(np.asarray(visibility(arrays, spec)), (B, H, T, k.shape[1]))
    out, lse = np.zeros_like(do), np.full((B, H, T), -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    cap = spec.logits_soft_cap
    with np.errstate(invalid="ignore", divide="ignore"):
        for b in range(B):
            for h in range(H):
                g = h // (H // K)
                s = q[b, :, h] @ k[b, :, g].T * spec.scale
                slope = 1.0
                if cap:
                    t = np.tanh(s / cap)
                    s, slope = cap * t, 1 - t * t
                s = np.where(seen[b, h], s, -np.inf)
                most = np.maximum(s.max(1, keepdims=True), -1e300)
                p = np.exp(s - most)
                total = p.sum(1, keepdims=True)
                lse[b, h] = (np.log(total) + most)[:, 0]
                p = np.where(total > 0, p / total, 0)
                out[b, :, h] = p @ v[b, :, g]
                delta = (do[b, :, h] * out[b, :, h]).sum(1) - np.where(total[:, 0] > 0, dlse[b, h], 0)
                ds = p * (do[b, :, h] @ v[b, :, g].T - delta[:, None]) * slope
                dq[b, :, h] = ds @ k[b, :, g] * spec.scale
                dk[b, :, g] += ds.T @ q[b, :, h] * spec.scale
                dv[b, :, g] += p.T @ do[b, :, h]
    return out, lse, {"q": dq, "k": dk, "v": dv}


def config_of(arrays, spec):
    problem, device = problem_of("flash_attention", arrays, spec), device_facts()
    usual = triton.default_config(problem, device)
    tile = backward_tiles.tiles(problem, device)
    assert tile, backward_tiles.unfit(problem, device)
    return dataclasses.replace(usual, key_gradient=triton.TileConfig(*tile[0]))


def lowered(name, arguments, spec, config):
    """The backward pass with one of the kernels, traced with it in the other's place."""
    present = narrow_backward_kernel.hopper_narrow_backward_kernel

    def backward(arrays, out, lse, dout, dlse):
        grads = triton.backward(arrays, spec, config, out, lse, dout, dlse)
        return {"q": grads.q, "k": grads.k, "v": grads.v}

    narrow_backward_kernel.hopper_narrow_backward_kernel = KERNELS[name]
    try:
        return jax.jit(backward).lower(*arguments)
    finally:
        narrow_backward_kernel.hopper_narrow_backward_kernel = present


def small(p, programs):
    """Arguments and exact gradients of a problem."""
    arrays, spec, dout, dlse = make(p)
    out, lse, grads = reference(arrays, spec, dout, dlse)
    return (arrays, jnp.asarray(out, p.dtype), jnp.asarray(lse, jnp.float32), dout, dlse), spec, grads


def relative(x, exact):
    x = np.asarray(x.astype(jnp.float32), np.float64)
    return float(np.sqrt(((x - exact) ** 2).mean() / max((exact**2).mean(), 1e-30)))


@jax.jit
def apart(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((x - y) ** 2) / jnp.mean(y**2))


def same(a, b):
    return all(bool(jnp.array_equal(x, y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def check():
    """Every kernel on small problems, with as many programs as the device has and with two, against float64."""
    good = True
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = []
        for p in CHECKS:
            arguments, spec, exact = small(p, None)
            config = config_of(arguments[0], spec)
            for programs in (132, 2):
                usual, backward_tiles.PROGRAMS = backward_tiles.PROGRAMS, programs
                try:
                    for name in KERNELS:
                        jobs.append((p, programs, name, arguments, exact, pool.submit(lowered(name, arguments, spec, config).compile)))
                finally:
                    backward_tiles.PROGRAMS = usual
        for p, programs, name, arguments, exact, job in jobs:
            run = job.result()
            with guarded(("check", p.name, programs, name)):
                first = jax.block_until_ready(run(*arguments))
                repeats = all(same(first, run(*arguments)) for _ in range(5))
            errors = {x: relative(first[x], exact[x]) for x in "qkv"}
            limit = 8e-3 if p.dtype == "bfloat16" else 2e-3
            ok = repeats and all(error < limit for error in errors.values())
            good &= ok or name == "shared"
            say("check", p.name, f"programs {programs}", name, {x: f"{e:.1e}" for x, e in errors.items()}, "ok" if ok else "WRONG", "" if repeats else "DIFFERS WHEN REPEATED")
    say("checks", "all ok" if good else "WRONG SOMEWHERE")
    return good


def prepared():
    """Per problem the arguments and compiled kernels, compared with one another."""
    found = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {}
        for p in TIMED:
            arrays, spec, dout, dlse = make(p)
            config = config_of(arrays, spec)
            shapes = jax.eval_shape(lambda a: triton.forward(a, spec, config), arrays)
            arguments = (arrays, *shapes, dout, dlse)
            forward = jax.jit(lambda a, spec=spec, config=config: triton.forward(a, spec, config)).lower(arrays)
            jobs[p] = pool.submit(forward.compile), {name: pool.submit(lowered(name, arguments, spec, config).compile) for name in KERNELS}
            del arrays, dout, dlse, arguments
        for p, (forward, ours) in jobs.items():
            found[p] = forward.result(), {}
            for name, job in ours.items():
                try:
                    found[p][1][name] = job.result()
                except Exception as error:
                    say("FAILED to compile", p.name, name, str(error)[:200])
    return found


def arguments_of(p, forward):
    arrays, _, dout, dlse = make(p)
    return arrays, *forward(arrays), dout, dlse


def times(found):
    results, order = {}, random.Random(0)
    for p, (forward, runs) in found.items():
        arguments = arguments_of(p, forward)
        first = {}
        for name, run in runs.items():
            with guarded(("large", p.name, name)):
                first[name] = jax.block_until_ready(run(*arguments))
        for name in runs:
            differs = {x: float(apart(first[name][x], first["former"][x])) for x in "qkv"}
            equal = {x: bool(jnp.array_equal(first[name][x], first["former"][x])) for x in "qkv"}
            repeats = all(same(first[name], runs[name](*arguments)) for _ in range(3))
            say("large", p.name, name, {x: f"{d:.1e}" for x, d in differs.items()}, "equal" if all(equal.values()) else equal, "" if repeats else "DIFFERS WHEN REPEATED")
        del first
        names = list(runs)
        samples = {name: [] for name in names}
        for _ in range(4):
            order.shuffle(names)
            for name, timing in time_in_turn({name: JaxWork(runs[name], [arguments]) for name in names}, 3, 40.0).items():
                samples[name] += timing.samples
        medians = {name: float(np.median(x)) for name, x in samples.items()}
        alone = {name: kernel_ms(runs[name], arguments) for name in names}
        results[p.name] = {"ms": medians, "kernel_ms": alone, "samples": samples}
        say("time", p.name, *(f"{name} {medians[name]:.4f} ms (kernel {alone[name]:.4f}, samples {min(samples[name]):.4f}-{max(samples[name]):.4f})" for name in sorted(names)), f"new/former {medians['new'] / medians['former']:.3f}")
        (OUT / "d64.json").write_text(json.dumps(results))
        del arguments
    return results


def kernel_ms(run, arguments, runs=6):
    """Milliseconds of the backward kernel alone, by the profiler."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([run(*arguments) for _ in range(runs)])
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            data = jax.profiler.ProfileData.from_file(str(path))
        found = [e.duration_ns for plane in data.planes if plane.name.startswith("/device:GPU") for line in plane.lines if line.name.startswith("Stream") for e in line.events if "backward" in e.name]
        return float(np.median(found)) / 1e6 if found else float("nan")
    except Exception as error:
        say("no trace", str(error)[:100])
        return float("nan")


if __name__ == "__main__":
    say(jax.devices()[0].device_kind, {name: kernel.fn.__module__ for name, kernel in KERNELS.items()})
    good = check()
    if "check" in sys.argv[1:] or not good:
        sys.exit(0 if good else 1)
    found = prepared()
    say("compiled")
    if job := os.environ.get("JOB"):
        pathlib.Path(job, "ready.d64").touch()
        while not pathlib.Path(job, "go.d64").exists():
            time.sleep(0.2)
    times(found)
