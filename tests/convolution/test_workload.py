"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import numpy as np
import pytest

from ejkernel_eqx.convolution.core import problem_of
from ejkernel_eqx.convolution.workload import example_problem, make_arrays, spec_of
from tests.compiled import DEVICES
from tests.workloads import (
    assert_agrees,
    assert_defaults_fit,
    BOTH,
    FORWARD,
    kernel_registry,
    refusals,
    work_of,
)

OPERATION = "causal_conv1d"
KINDS = {
    name: example_problem(OPERATION, sizes, dtype, flags)
    for name, (sizes, dtype, flags) in {
        "plain": (dict(B=2, T=40, C=6), "float32", {}),
        "segments": (dict(B=2, T=40, C=6), "float32", dict(packed=True, activation=None)),
        "offsets": (dict(T=40, C=6, N=4), "float16", dict(packed=True, initial_state=True)),
        "heads": (dict(B=2, T=20, C=64), "float32", dict(norm_size=32)),
        "packed heads": (dict(B=2, T=40, C=64), "bfloat16", dict(norm_size=64, packed=True)),
    }.items()
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    arrays = make_arrays(wanted, 0)
    found = problem_of(OPERATION, arrays, spec_of(wanted))
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, 1).x) != np.asarray(arrays.x)).any()
    if arrays.first is not None:
        first = np.asarray(arrays.first)
        assert (first[:, -2:] == -1).all() and len(np.unique(first)) > 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "platform, name",
    [("xla", "plain"), ("xla", "segments"), ("triton-interpret", "offsets"), ("triton-interpret", "heads")],
)
def test_agrees_with_the_reference(platform, name):
    _, reference = assert_agrees(OPERATION, platform, KINDS[name])
    assert all(np.asarray(x).any() for x in reference.values())


def test_costs_are_the_arrays_once():
    work = work_of(OPERATION, "xla", KINDS["plain"])
    x, weight, bias, state = 4 * 2 * 40 * 6, 4 * 6 * 4, 4 * 6, 4 * 2 * 3 * 6
    assert work.costs[FORWARD].bytes == 2 * x + weight + bias + state
    assert work.costs[BOTH].bytes == 2 * work.costs[FORWARD].bytes + x + weight + bias


test_words_that_do_not_fit = refusals(
    OPERATION,
    example_problem,
    [
        (dict(T=4), {}, "C"),
        (dict(T=4, C=0), {}, "C=0"),
        (dict(T=4, C=4), dict(packed=1), "packed"),
        (dict(T=4, C=4), dict(causal=True), "causal"),
        (dict(T=4, C=48), dict(norm_size=32), "norm_size=32"),
    ],
)


TARGETS = {
    "sm_80": (dict(T=1000, C=4096), "bfloat16", {}),
    "sm_90": (dict(T=50, C=100, W=3), "float32", dict(initial_state=True)),
    "sm_90 heads": (dict(B=8, T=2048, C=1024), "bfloat16", dict(norm_size=64, bias=False)),
    "sm_100": (dict(B=4, T=4096, C=4096), "bfloat16", dict(packed=True)),
    "gfx942": (dict(T=300, C=40, W=2, N=2), "float16", dict(packed=True, initial_state=True)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TARGETS)
def test_defaults_fit(name):
    sizes, dtype, flags = TARGETS[name]
    problem = example_problem(OPERATION, sizes, dtype, flags)
    assert not any(report.spills for report in assert_defaults_fit(OPERATION, problem, name.split()[0]))


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    triton = kernel_registry.get(OPERATION, "triton").load()
    wide = example_problem(OPERATION, dict(T=9, C=4, W=9), "float32", {})
    assert "up to 8, not 9" in (triton.unsupported(wide, DEVICES["sm_90"]) or "")
    for device, fast in (("sm_90", True), ("gfx942", False)):
        assert triton.default_config(KINDS["plain"], DEVICES[device]).fast_sigmoid == fast
    with pytest.raises(ValueError, match="power of two"):
        triton.ConvTile(6, 2, 4, 64, 4)
    with pytest.raises(ValueError, match="unroll <= steps"):
        triton.ConvTile(4, 8, 4, 64, 4)
