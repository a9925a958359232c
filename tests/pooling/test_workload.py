"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import numpy as np
import pytest

from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry
from ejkernel_eqx.launch import compile_ahead
from ejkernel_eqx.pooling.core import problem_of
from ejkernel_eqx.pooling.workload import example_problem, make_arrays, spec_of
from tests.compiled import DEVICES
from tests.workloads import assert_agrees, configs_of, launches, refusals

pytest.importorskip("triton")
from ejkernel_eqx.pooling.triton import compiled as triton

OPERATION = "mean_pooling"
KINDS = {
    "rows": example_problem(OPERATION, dict(B=2, T=40, C=6), "float32", {}),
    "chunks": example_problem(OPERATION, dict(B=2, T=40, C=6, L=8), "bfloat16", dict(normalize=True)),
    "masked": example_problem(
        OPERATION, dict(T=40, C=6, L=9), "float16", dict(masked=True, reduction="last")
    ),
    "packed": example_problem(OPERATION, dict(B=2, T=40, C=6, S=4), "float32", dict(packed=True)),
    "ids": example_problem(
        OPERATION, dict(T=40, C=6, S=9, L=8), "float32", dict(ordered=True, masked=True, reduction="max")
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    spec = spec_of(wanted)
    arrays = make_arrays(wanted, spec, 0)
    found = problem_of(OPERATION, arrays, spec)
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, spec, 1).x) != np.asarray(arrays.x)).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_agrees_with_the_reference(platform, name):
    _, reference = assert_agrees(OPERATION, platform, KINDS[name])
    assert all(np.asarray(x).any() for x in reference.values())


def test_costs_are_the_arrays_once():
    work = kernel_registry.get(OPERATION, "xla").make_workload(KINDS["rows"])
    assert work is not None
    x, out = 4 * 2 * 40 * 6, 4 * 2 * 6
    assert work.costs[FORWARD].bytes == x + out
    assert work.costs[BOTH].bytes == 2 * (x + out) + x


test_words_that_do_not_fit = refusals(
    OPERATION,
    example_problem,
    [
        (dict(T=4, C=4, D=2), {}, "D"),
        (dict(T=4, C=4, S=2), {}, "packed=true"),
        (dict(T=4, C=4), dict(ordered=True), "S segments"),
        (dict(T=4, C=4), dict(reduction="min"), "min"),
    ],
)


READ, COMBINE, WRITE = "read_kernel", "combine_kernel", "write_kernel"
COMPILED = {
    "rows": (dict(B=32, T=512, C=768), "bfloat16", {}, (READ, COMBINE, WRITE)),
    "all flags": (
        dict(T=16384, C=1000, S=32),
        "float32",
        dict(ordered=True, masked=True, normalize=True, reduction="max"),
        (READ, COMBINE, WRITE),
    ),
    "packed chunks": (
        dict(T=16384, C=2048, L=64, S=300),
        "bfloat16",
        dict(packed=True, reduction="max"),
        (READ, WRITE),
    ),
    "short chunks": (dict(B=2, T=4096, C=4096, L=4), "bfloat16", dict(reduction="last"), (WRITE,)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("name", COMPILED)
def test_defaults_fit(target, name):
    """Without spills."""
    *of, expected = COMPILED[name]
    problem = example_problem(OPERATION, *of)
    found = launches(OPERATION, problem, configs_of(OPERATION, problem, target)[0])
    assert [launch.function.fn.__name__ for launch in found] == list(expected)
    for launch in found:
        report = compile_ahead(launch, target)
        assert report.fits and report.spills == 0, (launch.label, report)


def test_what_triton_does_not_take():
    wide = example_problem(OPERATION, dict(T=9, C=4), "float64", {})
    assert "not float64" in str(triton.unsupported(wide, DEVICES["sm_90"]))
    with pytest.raises(ValueError, match="block_t <= span"):
        triton.ReadTile(8, 64, 4, 4)
