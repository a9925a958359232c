"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import dataclasses

import numpy as np
import pytest

from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry
from ejkernel_eqx.launch import compile_ahead
from ejkernel_eqx.matmul.core import problem_of
from tests.compiled import DEVICES
from tests.matmul.cases import example_problem, make_arrays, spec_of
from tests.workloads import assert_agrees, configs_of, launches, refusals

pytest.importorskip("triton")
from ejkernel_eqx.matmul.triton import compiled as triton

OPERATION = "grouped_matmul"
SMALL = dict(M=20, K=12, N=8, E=3)
KINDS = {
    "plain": example_problem(OPERATION, SMALL, "float32", {}),
    "gate and up": example_problem(
        OPERATION,
        dict(B=2, M=9, K=16, N=8, E=4),
        "bfloat16",
        dict(activation="silu", gated="pair", clipped=True, bias=True, transpose_rhs=True),
    ),
    "gathered": example_problem(
        OPERATION, SMALL | dict(L=7), "float16", dict(gathered=True, gated="halves", activation="gelu")
    ),
    "stored": example_problem(OPERATION, SMALL, "bfloat16", dict(stored="int8", bias=True)),
    "int4": example_problem(
        OPERATION,
        dict(M=3, K=128, N=24, E=4),
        "bfloat16",
        dict(quantised="int4", gated="pair", activation="silu", transpose_rhs=True),
    ),
    "nvfp4": example_problem(
        OPERATION,
        dict(M=20, K=48, N=24, E=3),
        "float16",
        dict(quantised="nvfp4", bias=True, transpose_rhs=True),
    ),
    "float8": example_problem(
        OPERATION, SMALL, "float16", dict(stored="float8_e5m2", gated="interleaved", activation="relu")
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    arrays = make_arrays(wanted, spec_of(wanted), 0)
    found = problem_of(OPERATION, arrays, spec_of(wanted))
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, spec_of(wanted), 1).lhs) != np.asarray(arrays.lhs)).any()
    assert (arrays.sizes.sum(-1) == wanted.dim("M")).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_reference(platform, name):
    work, _ = assert_agrees(OPERATION, platform, KINDS[name])
    assert work.costs[BOTH].bytes > work.costs[FORWARD].bytes > 0


def test_costs_are_the_arrays_once():
    work = kernel_registry.get(OPERATION, "xla").make_workload(KINDS["plain"])
    lhs, rhs, out, sizes = 20 * 12 * 4, 3 * 12 * 8 * 4, 20 * 8 * 4, 3 * 4
    assert work is not None and work.costs[FORWARD].flops == 2 * 20 * 12 * 8
    assert work.costs[FORWARD].bytes == lhs + rhs + out + sizes
    assert work.costs[BOTH].bytes == 3 * (lhs + rhs) + 2 * (out + sizes)


test_words_that_do_not_fit = refusals(
    OPERATION,
    example_problem,
    [
        (dict(M=4, K=4, N=4), {}, "missing"),
        (SMALL | dict(X=2), {}, "X"),
        (SMALL, dict(stored="int4"), "stored"),
        (SMALL, dict(clipped=True), "gated"),
        (SMALL | dict(L=4), {}, "gathered"),
    ],
)


MANY, DECODE = dict(M=16384, K=4096, N=14336, E=8), dict(M=64, K=2048, N=1408, E=64)


FORWARD_ONLY, ALL = ("forward",), ("forward", "left", "right")
EVERYTHING = dict(gated="pair", activation="silu", clipped=True, bias=True, transpose_rhs=True)
COMPILED = [
    ("sm_90", DECODE, "bfloat16", {}, FORWARD_ONLY),
    ("sm_90", MANY, "float32", {}, ALL),
    ("sm_90", MANY, "bfloat16", dict(stored="int8", bias=True), ALL),
    ("sm_80", MANY, "bfloat16", dict(gathered=True), (*ALL, "collect")),
    ("sm_100", MANY, "bfloat16", EVERYTHING, ALL),
    ("gfx942", MANY, "bfloat16", dict(gated="halves", activation="silu"), ALL),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: f"{case[0]} {case[3]}")
def test_defaults_fit(case):
    """The default tiles compile, fit in shared memory, and do not spill to speak of."""
    target, sizes, dtype, flags, kernels = case
    problem, device = example_problem(OPERATION, sizes, dtype, flags), DEVICES[target]
    configs = configs_of(OPERATION, problem, target)
    assert all(triton.config_unsupported(config, problem, device) is None for config in configs)
    assert configs[0].fast_sigmoid == (target != "gfx942")
    for launch in launches(OPERATION, problem, configs[0]):
        if launch.label.rpartition(".")[2].removesuffix("_kernel") in kernels:
            report = compile_ahead(launch, target)
            assert report.fits and (target == "gfx942" or report.spills <= 128), (launch.label, report)


def test_what_triton_does_not_take():
    many = example_problem(OPERATION, SMALL | dict(E=2000), "bfloat16", {})
    assert "1023" in str(triton.unsupported(many, DEVICES["sm_90"]))
    stored = example_problem(OPERATION, SMALL, "bfloat16", dict(stored="float8_e4m3fn"))
    assert "float8_e4m3fn" in str(triton.unsupported(stored, DEVICES["sm_80"]))
    assert triton.unsupported(stored, DEVICES["sm_90"]) is None
    huge = triton.GroupedTile(256, 256, 256, 8, 4)
    config = dataclasses.replace(triton.default_config(many, DEVICES["sm_90"]), lhs=huge)
    assert "shared memory" in str(triton.config_unsupported(config, many, DEVICES["sm_90"]))
