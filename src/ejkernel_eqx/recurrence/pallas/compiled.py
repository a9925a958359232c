"""Platform `pallas` on TPU: support, configurations, and both directions of a call."""

import jax
import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...core.platforms import InterpretedPallas
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from .. import xla
from ..spec import FLOATS, heads_of, RecurrenceArrays, RecurrenceSpec, StepArrays, VALUE
from .call import make_call, run_backward, run_forward
from .tile_sizes import candidates as candidates
from .tile_sizes import chunk_of, heads_of_step, PallasConfig
from .tile_sizes import config_unsupported as config_unsupported

OPAQUE = True
PARTS = {"chunk_size": BOTH, "forward_heads": FORWARD, "backward_heads": BOTH}
"""The fields of a configuration that are tuned one after the other, and what decides."""
MAX_HEAD_DIM = 256
config_type = PallasConfig


def default_config(problem: Problem, device: DeviceFacts) -> PallasConfig:
    return candidates(problem, device)[0]


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    for dtype in ("float64", "float16"):
        if dtype in (problem.dtype("qkv"), problem.dtype("state")):
            return f"takes float32 and bfloat16, not {dtype}"
    if problem.flag("step"):
        return None
    if problem.flag("rank_one"):
        return "does not support transitions of rank one, a and b"
    if problem.flag("before"):
        return "does not support outputs that read the state before their token"
    if problem.flag("decay") == VALUE:
        return "does not support a decay per value channel"
    if problem.flag("delta") and problem.flag("skip"):
        return "does not support a skip with delta rules"
    largest = max(problem.dim("D"), problem.dim("V"))
    if largest > MAX_HEAD_DIM:
        return f"takes key and value dims up to {MAX_HEAD_DIM}, not {largest}"
    return None


def remark(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str:
    """Names what runs in plain XLA."""
    return "steps run in plain XLA, which reads and writes each state once" if problem.flag("step") else ""


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The states at the starts of chunks, in the dtype of the operands."""
    return {"states": ("chunks", f"H{heads_of(arrays, spec).state}", "D", "V")}


def forward(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: PallasConfig, *, save: bool = True
) -> Named:
    """`out`, `final_state` and, with `save`, the residual, from arrays with one leading axis."""
    call = make_call(arrays, spec, chunk_of(config, arrays.q.shape[1]))
    initial = arrays.initial_state
    if call.is_empty:
        out, final = xla.apply(arrays, spec, xla.XlaConfig(config.chunk_size))
        states = jnp.zeros((arrays.q.shape[0], call.chunks.count, *call.sizes), arrays.q.dtype)
        return {"out": out, "final_state": final} | ({"states": states} if save else {})
    outputs = run_forward(call, heads_of_step(config.forward_heads, call.chunks.heads), save)
    out = call.chunks.give(outputs["out"])
    if arrays.skip is not None:
        out = (out + _skipped(arrays.v, arrays.skip)).astype(arrays.v.dtype)
    results = {"out": out, "final_state": call.of_sequences(outputs["final"], initial)}
    return results | ({"states": outputs["states"]} if save else {})


def backward(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: PallasConfig, saved: Named, cotangents: Named
) -> Named:
    """Gradients of all float arrays of the call; every sum has a fixed order."""
    call = make_call(arrays, spec, chunk_of(config, arrays.q.shape[1]))
    dout, dfinal, initial = cotangents["out"], cotangents["final_state"], arrays.initial_state
    if call.is_empty:
        grads = {name: jnp.zeros_like(x) for name in FLOATS if (x := getattr(arrays, name)) is not None}
        return grads | ({} if initial is None else {"initial_state": dfinal})
    heads = heads_of_step(config.backward_heads, call.chunks.heads)
    outputs = run_backward(call, heads, saved["states"], dout, dfinal)
    operands, pull = jax.vjp(call.operands, call.learned())
    (grads,) = pull({name: outputs[f"d{name}"] for name in operands})
    if arrays.skip is not None:
        _, pull = jax.vjp(_skipped, arrays.v, arrays.skip)
        dv, grads["skip"] = pull(dout.astype(jnp.float32))
        grads["v"] = grads["v"].astype(jnp.float32) + dv.astype(jnp.float32)
    if initial is not None:
        grads["initial_state"] = call.of_sequences(outputs["dinitial"], dfinal.astype(jnp.float32))
    return grads


def step(arrays: StepArrays, spec: RecurrenceSpec, config: PallasConfig) -> tuple[Array, Array]:
    """Processes one token per row, in plain XLA."""
    return xla.step(arrays, spec, xla.XlaConfig(config.chunk_size))


def _skipped(v: Array, skip: Array) -> Array:
    """Computes what values add to the outputs, `[B, T, HS, V]` in float32."""
    return skip.astype(jnp.float32)[:, None] * v.astype(jnp.float32)


interpreted = InterpretedPallas(__name__, PallasConfig(16, 2, 2))
"""The same kernels, simulated on the host with small tiles: platform `pallas-interpret`."""
