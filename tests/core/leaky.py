"""A family that the package does not know, with residuals, a shared array, a step and interpreted Triton kernels: `h_t = a h_{t-1} + x_t`."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, kernel_registry, Platform, Problem
from ejkernel_eqx._kernel import make_plan
from ejkernel_eqx.core import Kind, StepKind
from ejkernel_eqx.core.letters import Letters
from ejkernel_eqx.core.platforms import Interpreted, Plain
from ejkernel_eqx.dispatch import Implementation
from tests.core.leaky_kernels import Triton, TritonConfig

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


SEQUENCE = Letters.of({"x": "T C", "out": "T C", "decay": "C", "initial": "C", "final": "C"}, heads="C")
TOKEN = Letters.of({"x": "b C", "out": "b C", "decay": "C", "state": "b C"}, heads="C")


def problem_of(operation: str, arrays: Any, spec: None) -> Problem:
    size = (TOKEN if isinstance(arrays, StepArrays) else SEQUENCE).sizes(arrays)
    dtypes = {"x": arrays.x.dtype}
    dims = {"B": size["B"] * size.get("b", 1), "T": size.get("T", 1), "C": size["C"]}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags={"step": "b" in size}, lengths={"B", "T"})


_shared: dict[str, Any] = dict(problem_of=problem_of, shared=frozenset({"decay"}))
CALL = Kind(
    make=Arrays,
    axes_of=SEQUENCE.axes_of,
    reference=reference,
    results=("out", "final"),
    learned=Arrays._fields,
    saved_of=lambda platform, arrays, spec: {"states": ("T", f"H{arrays.x.shape[-1]}")},
    **_shared,
)
STEP = StepKind(
    make=StepArrays,
    axes_of=TOKEN.axes_of,
    reference=step,
    results=("out", "state"),
    learned=StepArrays._fields,
    **_shared,
)


class _Xla(Plain):
    def step(self, arrays: StepArrays, spec: None, config: Any) -> Any:
        out, state = step(arrays)
        return out.astype(arrays.x.dtype), state


def _apply(arrays: Arrays, spec: None) -> dict[str, Array]:
    out, final = reference(arrays)
    return {"out": out.astype(arrays.x.dtype), "final": final}


for platform, priority, target in (
    (Platform.XLA, 10, _Xla(_apply)),
    (Platform.TRITON_INTERPRET, -10, Interpreted(Triton(), TritonConfig())),
):
    kernel_registry.add(Implementation(OPERATION, platform, Backend.ANY, priority, "tests", target))


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
