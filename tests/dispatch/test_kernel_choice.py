"""What kernels are compiled for: not for each length, and in float32 not for products of less than its precision."""

import dataclasses
import json

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import dispatch, Platform, Problem
from tests.compiled import DEVICES
from tests.dispatch.test_conformance import devices, loaded, OURS, problems

TRITON = [i for i in OURS if i.platform is Platform.TRITON]
ONE_PER_CORE = list({i.core: i for i in reversed(TRITON)}.values())


def _named(implementations: list[dispatch.Implementation]) -> list[object]:
    return [pytest.param(i, id=i.operation) for i in implementations]


def _shorter(problem: Problem, by: int) -> Problem:
    """The problem with every length reduced, so that it stays in its bucket."""
    dims = {n: size - by if n in problem.lengths and size > 16 else size for n, size in problem.dims}
    return dataclasses.replace(problem, dims=tuple(sorted(dims.items())))


@pytest.mark.few(5)
@pytest.mark.parametrize("implementation", _named(ONE_PER_CORE))
def test_neighbouring_lengths_share_kernels(implementation):
    """They are told apart by whether tiles are full, and by nothing else."""
    hooks, device = loaded(implementation), DEVICES["sm_90"]
    problem = problems(implementation)[0]
    config = hooks.default_config(problem, device)
    kernels = []
    for by in (3, 5):
        work = implementation.make_workload(_shorter(problem, by))
        assert work is not None and work.launches is not None
        kernels.append([(launch.function, launch.constants) for launch in work.launches(config)])
    assert kernels[0] and kernels[0] == kernels[1]


@pytest.mark.parametrize("implementation", _named(TRITON))
def test_products_of_float32_are_not_rounded_to_tf32(implementation):
    """Neither by default nor in any configuration that a tuner may choose."""
    hooks = loaded(implementation)
    for device in devices(implementation):
        for problem in problems(implementation, "float32"):
            for config in hooks.candidates(problem, device):
                assert '"tf32"' not in json.dumps(ejx.to_json(config)), (device.kind, config)
