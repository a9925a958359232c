"""A family that the package does not know, with residuals, a shared array, a step and interpreted Triton kernels: `h_t = a h_{t-1} + x_t`."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx._kernel import make_plan
from ejkernel_eqx.core import Kind, StepKind
from ejkernel_eqx.core.platforms import Interpreted, Plain
from ejkernel_eqx.core.workload import Inputs, random_cotangents, workload_of
from ejkernel_eqx.dispatch import Backend, Implementation, kernel_registry, Platform, Problem
from ejkernel_eqx.launch import Launch, run
from tests.core import leaky_kernels

OPERATION = "tests.leaky_integrator"


class Arrays(NamedTuple):
    x: Array  # [*, T, C]
    decay: Array  # float32 [C]
    initial: Array  # float32 [*, C]


class StepArrays(NamedTuple):
    x: Array  # [*, B, C]
    decay: Array  # float32 [C]
    state: Array  # float32 [*, B, C]


def reference(arrays: Arrays, spec: None = None) -> tuple[Array, Array]:
    wide = jnp.float64 if arrays.x.dtype == jnp.float64 else jnp.float32
    decay = arrays.decay.astype(wide)[(None,) * (arrays.initial.ndim - 1)]

    def token(h: Array, x: Array) -> tuple[Array, Array]:
        h = decay * h + x.astype(wide)
        return h, h

    final, out = jax.lax.scan(token, arrays.initial.astype(wide), jnp.moveaxis(arrays.x, -2, 0))
    return jnp.moveaxis(out, 0, -2), final


def step(arrays: StepArrays, spec: None = None) -> tuple[Array, Array]:
    decay = arrays.decay[(None,) * (arrays.state.ndim - 1)]
    new = decay * arrays.state + arrays.x.astype(arrays.state.dtype)
    return new, new


def problem_of(operation: str, arrays: Any, spec: None) -> Problem:
    is_step = isinstance(arrays, StepArrays)
    *lead, length, channels = arrays.x.shape
    dims = {"B": math.prod(lead) * (length if is_step else 1), "T": 1 if is_step else length, "C": channels}
    return Problem.make(
        operation, dims=dims, dtypes={"x": arrays.x.dtype}, flags={"step": is_step}, lengths={"B", "T"}
    )


def axes_of(arrays: Any, spec: None) -> dict[str, tuple[str, ...]]:
    channels, rows = f"H{arrays.x.shape[-1]}", "b" if isinstance(arrays, StepArrays) else "T"
    state = ("b", channels) if rows == "b" else (channels,)
    return {
        **dict.fromkeys(("x", "out"), (rows, channels)),
        **dict.fromkeys(("initial", "final", "state"), state),
        "decay": (channels,),
    }


CALL = Kind(
    make=Arrays,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference,
    results=("out", "final"),
    learned=Arrays._fields,
    shared=frozenset({"decay"}),
    saved_of=lambda platform, arrays, spec: {"states": ("T", f"H{arrays.x.shape[-1]}")},
)
STEP = StepKind(
    make=StepArrays,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=step,
    results=("out", "state"),
    learned=StepArrays._fields,
    shared=frozenset({"decay"}),
)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    block: int = 4


class _Triton:
    config_type = TritonConfig

    def unsupported(self, problem: Problem, device: Any) -> str | None:
        return "takes no float64" if problem.dtype("x") == "float64" else None

    def forward(
        self, arrays: Arrays, spec: None, config: TritonConfig, *, save: bool = True, execute: Any = run
    ) -> dict[str, Array]:
        shape = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
        states = shape(arrays.x if save else arrays.initial, jnp.float32)
        outputs = {
            "out": shape(arrays.x, arrays.x.dtype),
            "states": states,
            "final": shape(arrays.initial, jnp.float32),
        }
        results = self._launch(
            leaky_kernels.forward_kernel, arrays._asdict(), outputs, config, execute, SAVE=save
        )
        return results if save else {name: results[name] for name in ("out", "final")}

    def backward(self, arrays: Arrays, spec: None, config: Any, saved: Any, cotangents: Any, *, execute: Any):
        inputs = {"decay": arrays.decay, "states": saved["states"], "dout": cotangents["out"]}
        rows = jax.ShapeDtypeStruct(arrays.initial.shape, jnp.float32)
        outputs = {
            "dx": jax.ShapeDtypeStruct(arrays.x.shape, arrays.x.dtype),
            "ddecay": rows,
            "dinitial": rows,
        }
        inputs["dfinal"] = cotangents["final"]
        grads = self._launch(leaky_kernels.backward_kernel, inputs, outputs, config, execute)
        return {name.removeprefix("d"): x for name, x in grads.items()}

    def step(self, arrays: StepArrays, spec: None, config: Any, *, execute: Any = run) -> Any:
        flat = lambda x: x.reshape((-1, x.shape[-1]))
        sequence = Arrays(flat(arrays.x)[:, None], arrays.decay, flat(arrays.state))
        results = self.forward(sequence, spec, config, save=False, execute=execute)
        return results["out"].reshape(arrays.x.shape), results["final"].reshape(arrays.state.shape)

    def _launch(self, kernel: Any, inputs: Any, outputs: Any, config: Any, execute: Any, **constants: Any):
        batch, length, channels = outputs["out" if "out" in outputs else "dx"].shape
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()}
        constants |= {"C": channels, "BLOCK": config.block}
        grid = (batch, -(-channels // config.block))
        return execute(Launch(kernel, shapes, outputs, {"T": length}, constants, grid), inputs)


def workload(implementation: Implementation, problem: Problem) -> Any:
    make = functools.partial(make_inputs, problem)
    flops = 2.0 * problem.dim("B") * problem.dim("T") * problem.dim("C")
    return workload_of(CALL, implementation, None, make, flops=flops)


def make_inputs(problem: Problem, seed: int) -> Inputs:
    keys, (batch, length, channels) = jax.random.split(jax.random.key(seed), 3), map(problem.dim, "BTC")
    x = jax.random.normal(keys[0], (batch, length, channels), jnp.float32).astype(problem.dtype("x"))
    decay = jax.random.uniform(keys[1], (channels,), jnp.float32)
    arrays = Arrays(x, decay, jax.random.normal(keys[2], (batch, channels), jnp.float32))
    return Inputs(arrays, random_cotangents(CALL, arrays, None, seed))


class _Xla(Plain):
    def step(self, arrays: StepArrays, spec: None, config: Any) -> Any:
        out, state = step(arrays)
        return out.astype(arrays.x.dtype), state


def _apply(arrays: Arrays, spec: None) -> dict[str, Array]:
    out, final = reference(arrays)
    return {"out": out.astype(arrays.x.dtype), "final": final}


for platform, priority, target in (
    (Platform.XLA, 10, _Xla(_apply)),
    (Platform.TRITON_INTERPRET, -10, Interpreted(_Triton(), TritonConfig())),
):
    kernel_registry.add(Implementation(OPERATION, platform, Backend.ANY, priority, "tests", target, workload))


class LeakyIntegrator(ejx.Kernel):
    """`h_t = a h_{t-1} + x_t`, all of them and the last."""

    operation: ClassVar[str] = OPERATION
    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, platform: str | None = None):
        self.plan = make_plan(OPERATION, platform=platform)

    def __call__(self, x: Array, decay: Array, initial: Array) -> tuple[Array, Array]:
        results = CALL.call(self.plan, OPERATION, Arrays(x, decay, initial), None)
        return results["out"], results["final"]

    def step(self, x: Array, decay: Array, state: Array) -> tuple[Array, Array]:
        results = STEP.call(self.plan, OPERATION, StepArrays(x, decay, state), None)
        return results["out"], results["state"]
