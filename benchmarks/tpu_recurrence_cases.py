"""The kernels of the linear-time family for `tpu_static.py`. JAX has none to put beside them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.tpu_static import Case, Program
from ejkernel_eqx.launch.tpu_ahead import facts_of
from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.pallas import compiled
from ejkernel_eqx.recurrence.spec import RecurrenceArrays, RecurrenceSpec

_TOKENS, _DIM = 4096, 128
_UNIT = 64
_MEMBERS = {
    "linear": dict(decay="none"),
    "lightning, scalar decay": dict(decay="scalar"),
    "SSD": dict(decay="scalar", beta=True, heads=64, shared=True, width=64),
    "GLA": dict(decay="key"),
    "gated delta rule": dict(decay="scalar", beta=True, delta=True),
    "KDA": dict(decay="key", beta=True, delta=True),
}


def cases(generation: str) -> list[Case]:
    return [case for name, member in _MEMBERS.items() for case in _kernels(generation, name, **member)]


def _kernels(
    generation: str,
    name: str,
    decay: str,
    beta: bool = False,
    delta: bool = False,
    heads: int = 16,
    shared: bool = False,
    width: int = _DIM,
) -> list[Case]:
    """Both directions with the heuristic's chunks, for 64 tokens of one head."""
    shape: Any = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, _TOKENS, *sizes), dtype)
    keys = shape(1 if shared else heads, _DIM)
    logs = {
        "none": None,
        "scalar": shape(heads, dtype=jnp.float32),
        "key": shape(heads, _DIM, dtype=jnp.float32),
    }
    strength = shape(heads, dtype=jnp.float32) if beta else None
    arrays = RecurrenceArrays(keys, keys, shape(heads, width), logs[decay], strength)
    spec = RecurrenceSpec(_DIM**-0.5, decay, delta)
    config = compiled.default_config(problem_of("linear_attention", arrays, spec), facts_of(generation))
    found = jax.eval_shape(functools.partial(_forward, spec, config), arrays)
    given = {
        "forward": (functools.partial(_forward, spec, config), (arrays,)),
        "backward": (functools.partial(_backward, spec, config), (arrays, found)),
    }
    cases = []
    for kernel, (function, shapes) in given.items():
        many, chunk = getattr(config, f"{kernel}_heads"), config.chunk_size
        once = 2 if kernel == "forward" else 6
        operands = 2 * (2 * _DIM + 2 * width) + 4 * (_DIM if decay == "key" else 1)
        cases.append(
            Case(
                f"{kernel} {name}",
                "64 tokens of a head",
                Program(function, shapes, f"recurrence.{kernel}", many * chunk / _UNIT),
                flops=once * _UNIT * (2 * _DIM * width + chunk * (_DIM + width)),
                bytes=_UNIT * operands * (1 if kernel == "forward" else 2) + 2 * _DIM * width * _UNIT / chunk,
                tiles=f"{many}x{chunk}",
            )
        )
    return cases


def _forward(spec: RecurrenceSpec, config: Any, arrays: RecurrenceArrays) -> Any:
    return compiled.forward(arrays, spec, config)


def _backward(spec: RecurrenceSpec, config: Any, arrays: RecurrenceArrays, found: Any) -> Any:
    results = {"out": found["out"], "final_state": found["final_state"]}
    return compiled.backward(arrays, spec, config, {"states": found["states"]}, results)
