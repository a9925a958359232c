"""Softmax attention on a TPU: the compiled Pallas kernels against the reference in float32, every option, every candidate.

Nothing here has run yet: its authors have no TPU. `python -m pytest -m tpu -n 0` is what an owner of one runs first."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.pallas import compiled
from ejkernel_eqx.dispatch import device_facts
from tests.attention.cases import Case, EVERYTHING, make, PAIRWISE
from tests.attention.kernels import check_kernels

if jax.default_backend() != "tpu":
    pytest.skip("needs a TPU", allow_module_level=True)

pytestmark = pytest.mark.tpu


def default_of(arrays, spec) -> Any:
    return compiled.default_config(problem_of("flash_attention", arrays, spec), device_facts())


def run(arrays, dout, dlse, spec, config=None):
    config = config or default_of(arrays, spec)

    def both(arrays, dout, dlse):
        out, lse = compiled.forward(arrays, spec, config)
        return out, lse, compiled.backward(arrays, spec, config, out, lse, dout, dlse)

    return jax.jit(both)(arrays, dout, dlse)


def typed(case: Case) -> Case:
    return dataclasses.replace(case, dtype="bfloat16" if case.dtype == "float16" else case.dtype)


@pytest.mark.parametrize(
    "case", [typed(case) for case in (*PAIRWISE, EVERYTHING)], ids=lambda case: case.name
)
def test_agrees_with_reference(case):
    """Output, lse and gradients; the same bits again with NaN in what is hidden."""
    check_kernels(case, run)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_tiles(dims, dtype):
    check_kernels(Case(B=1, T=3000, S=3000, H=2, K=1, D=dims[0], V=dims[1], right=0, dtype=dtype), run)


def test_every_candidate():
    case = Case(B=1, T=2048, S=2048, H=2, K=1, D=128, V=128, right=0, dtype="bfloat16")
    arrays, spec = make(case)
    for config in compiled.candidates(problem_of("flash_attention", arrays, spec), device_facts()):
        check_kernels(case, functools.partial(run, config=config))
