"""The Triton kernels of the family as tests run them: interpreted, and as they would be launched."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compiled import executed
from tests.recurrence import cases
from tests.recurrence.cases import problem_of, RecurrenceArrays, RecurrenceSpec

pytest.importorskip("triton")
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable, Launch, run
from ejkernel_eqx.recurrence.triton import compiled
from ejkernel_eqx.recurrence.triton.compiled import interpreted
from ejkernel_eqx.recurrence.triton.hopper import tile_sizes
from ejkernel_eqx.recurrence.triton.tile_sizes import Tile, TritonConfig

__all__ = ["gluon_unavailable"]
hopper = tile_sizes
CHUNK = 16
_interpret = functools.partial(run, interpret=True)
# What a device is given, interpreted: float16 operands meet as on it.
ON_DEVICE = types.SimpleNamespace(
    forward=executed(compiled.forward, _interpret),
    backward=executed(compiled.backward, _interpret),
)


def config(chunk: int = CHUNK, block_k: int = 16, block_v: int = 16) -> TritonConfig:
    return TritonConfig(chunk, *[Tile(block_k, block_v, 4, 1)] * 6, float32_dot="ieee")


def check(case: cases.Case, config: TritonConfig) -> None:
    cases.check(case, interpreted, config)


def default_config(arrays: RecurrenceArrays, spec: RecurrenceSpec, device: Any) -> TritonConfig:
    return compiled.default_config(problem_of("linear_attention", arrays, spec), device)


def launches_of(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: Any, backward: bool = True
) -> dict[str, Launch]:
    """What forward and backward would launch, in order, by the kernels' names; nothing is run."""
    found = {}

    def record(launch, inputs):
        found[launch.label.rpartition(".")[2]] = launch
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def both(arrays):
        results = dict(compiled.forward(arrays, spec, config))
        out, final = results.pop("out"), results.pop("final_state")
        given = {"out": out, "final_state": final}
        return compiled.backward(arrays, spec, config, results, given) if backward else out

    jax.eval_shape(executed(both, record), arrays)
    return found


def report_of(launch: Launch, target: str) -> Any:
    """What the compiler says of a kernel that fits the target."""
    report = compile_ahead(launch, target)
    assert report.fits, (launch.label, report)
    return report
