"""An operation of no use, `y = 2 x` with `loss = sum(w y)`, whose configurations go wrong in every way that a tuner must see.

Importable by another process, which tunes it there.
"""

import dataclasses
import itertools
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel_eqx import Backend, Platform, Problem
from tests.tuning.parts import Implementation, measure, Part, TOLERANCES, Workload

OPERATION = "tests.planted"
SIZE = 256
SETTINGS_VARIABLE = "TESTS_TOY_SETTINGS"
"""The environment variable that says, if it is set, under which settings of JAX inputs may be made."""
_calls = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Tile:
    block: int
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """`loops` is how much needless work a run does; `fault` what goes wrong with it."""

    loops: int = 1
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class PartedConfig:
    forward: Tile
    backward: Tile


class FatalMemoryError(RuntimeError):
    """Says what XLA says when the memory of a device is used up."""


def problem(size: int = SIZE, **flags: Any) -> Problem:
    return Problem.make(OPERATION, dims={"N": size}, dtypes={"x": "float32"}, flags=flags, lengths={"N"})


def waste(x: Array, loops: int) -> Array:
    """Takes time, and gives zeros that no compiler can see to be zeros."""
    y = jax.lax.fori_loop(0, loops, lambda _, y: jnp.sin(y) + 1e-3, jnp.full((256,), 0.5) + 0 * x[0])
    return jnp.where(jnp.max(y) > 9.0, 1.0, 0.0).astype(x.dtype)


def _host(x: Array, function: Any) -> Array:
    """`function` of `x` on the host, each time anew."""
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _killed(x: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _orphaned(x: Any) -> Any:
    """Dies and leaves a process behind, which holds open all that this one had open."""
    if os.fork() == 0:
        time.sleep(1000.0)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _hung(x: Any) -> Any:
    time.sleep(1000.0)


def _drifting(x: Any) -> Any:
    """Right within the tolerance, but never the same twice."""
    return np.asarray(x) * np.float32(1 + next(_calls) * 2.0**-23)


def _forward(x: Array, fault: str) -> Array:
    if fault == "raises":
        raise ZeroDivisionError("tile of size 0\nwith more to say")
    if fault == "memory":
        raise FatalMemoryError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")
    if fault == "zeros":
        return 0 * x
    if fault == "nan":
        return 2 * x / jnp.where(x == x[0], 0 * x, 1)
    on_the_host = {"killed": _killed, "orphans": _orphaned, "hangs": _hung, "drifts": _drifting}
    if fault in on_the_host:
        x = _host(x, on_the_host[fault])
    return 2 * x


def _backward(weights: Array, fault: str) -> Array:
    return 2 * weights if fault != "backward" else 2.001 * weights


def settings() -> str:
    """Those of this thread, as text."""
    names = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_default_matmul_precision")
    return " ".join(
        str(value) for value in (*(getattr(jax.config, name) for name in names), jax.device_count())
    )


def inputs(problem: Problem, seed: int) -> tuple[Array, Array]:
    expected = os.environ.get(SETTINGS_VARIABLE)
    if expected is not None and settings() != expected:
        raise ValueError(f"expected the settings {expected!r}, found {settings()!r}")
    keys = jax.random.split(jax.random.key(seed))
    size = (problem.dim("N"),)
    return jax.random.normal(keys[0], size), jax.random.normal(keys[1], size)


def run(given: tuple[Array, Array], config: ToyConfig) -> dict[str, Any]:
    x, weights = given
    zeros = waste(x, config.loops)
    y = _forward(x, config.fault) + zeros
    if config.fault == "seed":  # right on the first inputs only
        y = jnp.where(x[0] == inputs(problem(x.shape[0]), 0)[0][0], y, -y)
    return {"y": y, "dx": (_backward(weights, config.fault) + waste(weights, config.loops),)}


def run_parted(given: tuple[Array, Array], config: PartedConfig) -> dict[str, Any]:
    x, weights = given
    return {
        "y": _forward(x, config.forward.fault) + waste(x, config.forward.block),
        "dx": (_backward(weights, config.backward.fault) + waste(weights, config.backward.block),),
    }


def reference(given: tuple[Array, Array]) -> dict[str, Any]:
    x, weights = given
    return {"y": 2 * x, "dx": (2 * weights,)}


def launches(config: ToyConfig) -> list[Any]:
    """The fault `"shared"` asks for more shared memory than any GPU has."""
    if config.fault not in ("shared", "spills"):
        return []
    from tests.launch.test_compile import matmul

    if config.fault == "spills":
        return [matmul(64, 128, 32, num_warps=1)]
    return [matmul(128, 128, 128, num_stages=5, num_warps=8)]


def workload(implementation: Implementation, problem: Problem) -> Workload:
    parted = implementation.load().config_type is PartedConfig
    return Workload(
        make_inputs=lambda seed: inputs(problem, seed),
        run=run_parted if parted else run,
        reference=reference,
        tolerances={"y": TOLERANCES["float32"]["forward"], "dx": TOLERANCES["float32"]["gradient"]},
        forward=("y",),
        parts=(Part("forward", ("y",)), Part("backward", ("dx",))) if parted else (),
        launches=None if parted else launches,
    )


class Planted:
    """The heuristic is slow; of the others only one is fast and right."""

    config_type = ToyConfig
    faults: tuple[str, ...] = ()

    @staticmethod
    def unsupported(problem: Any, device: Any) -> str | None:
        return None

    @staticmethod
    def default_config(problem: Any, device: Any) -> Any:
        return ToyConfig(loops=20_000)

    @staticmethod
    def config_unsupported(config: Any, problem: Any, device: Any) -> str | None:
        return "takes no such tile" if getattr(config, "fault", "") == "unsupported" else None

    @staticmethod
    def candidates(problem: Any, device: Any) -> list[Any]:
        faults = (problem.flag("faults") or "").split()
        return [ToyConfig(20_000), *(ToyConfig(1, fault) for fault in faults), ToyConfig(2)]


class Parted(Planted):
    config_type = PartedConfig

    @staticmethod
    def default_config(problem: Any, device: Any) -> Any:
        return PartedConfig(Tile(300), Tile(1))

    @staticmethod
    def candidates(problem: Any, device: Any) -> list[Any]:
        return [
            PartedConfig(Tile(300), Tile(1)),
            PartedConfig(Tile(1, "zeros"), Tile(1, "backward")),
            PartedConfig(Tile(2), Tile(300)),
        ]


PLANTED = Implementation(OPERATION, Platform.XLA, Backend.ANY, 0, "tests.toy", Planted, workload)
PARTED = dataclasses.replace(PLANTED, operation="tests.parted", target=Parted)


def fake_clock(monkeypatch: Any) -> list[Any]:
    """A configuration takes as many milliseconds as it has loops, and does not do them. Gives the list of what is timed."""
    seen: list[Any] = []

    def time_in_turn(works: Any, samples: int = 5, sample_ms: float = 30.0) -> dict[Any, measure.Timing]:
        found = {}
        for key, work in works.items():
            ms = 1e-4  # an empty launch
            if not isinstance(work, measure.JaxWork):
                work.sample(1)
                seen.append(work.candidate.value)
                ms = float(_loops(work.candidate.value))
            found[key] = measure.Timing(ms, 0.0, (ms,) * samples, 1)
        return found

    monkeypatch.setattr(measure, "time_in_turn", time_in_turn)
    monkeypatch.setattr(sys.modules[__name__], "waste", lambda x, loops: 0 * x)
    return seen


def _loops(value: Any) -> int:
    if isinstance(value, ToyConfig):
        return value.loops
    return value.block if isinstance(value, Tile) else value.forward.block + value.backward.block
