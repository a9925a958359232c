"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import dataclasses

import numpy as np
import pytest

from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry
from ejkernel_eqx.matmul.core import problem_of
from ejkernel_eqx.matmul.workload import example_problem, make_arrays, spec_of
from tests.compiled import DEVICES
from tests.workloads import assert_agrees, launches

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


def test_groups_are_of_different_sizes_and_all_hit():
    many, few = (
        make_arrays(p := example_problem(OPERATION, SMALL | size, "float32", {}), spec_of(p), 0).sizes
        for size in (dict(M=4096, E=8), dict(M=16, E=16))
    )
    assert len(set(many[0].tolist())) > 4 and many.sum() == 4096
    assert (few == 1).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_reference(platform, name):
    work, reference = assert_agrees(OPERATION, platform, KINDS[name])
    assert set(reference) == set(work.tolerances)
    assert work.costs[BOTH].bytes > work.costs[FORWARD].bytes > 0


def test_costs_are_the_arrays_once():
    work = kernel_registry.get(OPERATION, "xla").make_workload(KINDS["plain"])
    lhs, rhs, out, sizes = 20 * 12 * 4, 3 * 12 * 8 * 4, 20 * 8 * 4, 3 * 4
    assert work is not None and work.costs[FORWARD].flops == 2 * 20 * 12 * 8
    assert work.costs[FORWARD].bytes == lhs + rhs + out + sizes
    assert work.costs[BOTH].bytes == 3 * (lhs + rhs) + 2 * (out + sizes)


@pytest.mark.parametrize(
    "dims, flags, word",
    [
        (dict(M=4, K=4, N=4), {}, "missing"),
        (SMALL | dict(X=2), {}, "X"),
        (SMALL | dict(M=0), {}, "M=0"),
        (SMALL, dict(stored="int4"), "stored"),
        (SMALL, dict(clipped=True), "gated"),
        (SMALL | dict(L=4), {}, "gathered"),
    ],
)
def test_words_that_do_not_fit(dims, flags, word):
    with pytest.raises(ValueError, match=word):
        example_problem(OPERATION, dims, "float32", flags)


MANY, DECODE = dict(M=16384, K=4096, N=14336, E=8), dict(M=64, K=2048, N=1408, E=64)
COMPILED = [
    ("sm_90", DECODE, "bfloat16", {}, ("forward",)),
    ("sm_90", MANY, "bfloat16", {}, ("forward", "left", "right")),
    ("sm_90", MANY, "bfloat16", dict(gated="pair", activation="silu"), ("forward", "left")),
    ("sm_90", DECODE, "bfloat16", dict(stored="float8_e4m3fn"), ("forward",)),
    ("sm_80", MANY, "bfloat16", dict(gathered=True), ("forward", "left", "right", "collect")),
    ("sm_80", DECODE, "float16", dict(gated="interleaved", activation="silu", bias=True), ("forward",)),
    ("sm_90", MANY, "float32", {}, ("forward", "left", "right")),
    ("sm_90", MANY, "bfloat16", dict(stored="int8", bias=True), ("forward", "left", "right")),
    ("sm_100", MANY, "bfloat16", dict(gated="halves", activation="silu"), ("forward", "left", "right")),
    ("gfx942", MANY, "bfloat16", dict(gated="halves", activation="silu"), ("forward", "left", "right")),
    ("gfx942", DECODE, "bfloat16", {}, ("forward",)),
]


@pytest.mark.parametrize(
    "target, sizes, dtype, flags, kernels",
    [
        pytest.param(*case, marks=() if i == 0 else pytest.mark.slow, id=f"{i} {case[0]}")
        for i, case in enumerate(COMPILED)
    ],
)
def test_defaults_fit(target, sizes, dtype, flags, kernels):
    """The default tiles compile, fit in shared memory, and do not spill to speak of."""
    pytest.importorskip("triton")
    from ejkernel_eqx.launch import compile_ahead
    from ejkernel_eqx.matmul.triton import compiled as triton

    problem, device = example_problem(OPERATION, sizes, dtype, flags), DEVICES[target]
    assert triton.unsupported(problem, device) is None
    configs = triton.candidates(problem, device)
    assert configs[0] == triton.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    assert all(triton.config_unsupported(config, problem, device) is None for config in configs)
    assert configs[0].fast_sigmoid == (target != "gfx942")
    for launch in launches(OPERATION, problem, configs[0]):
        if launch.label.rpartition(".")[2].removesuffix("_kernel") in kernels:
            report = compile_ahead(launch, target)
            assert report.fits and (target == "gfx942" or report.spills <= 128), (launch.label, report)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    from ejkernel_eqx.matmul.triton import compiled as triton

    many = example_problem(OPERATION, SMALL | dict(E=2000), "bfloat16", {})
    reason = triton.unsupported(many, DEVICES["sm_90"])
    assert reason is not None and "1023" in reason
    stored = example_problem(OPERATION, SMALL, "bfloat16", dict(stored="float8_e4m3fn"))
    reason = triton.unsupported(stored, DEVICES["sm_80"])
    assert reason is not None and "float8_e4m3fn" in reason
    assert triton.unsupported(stored, DEVICES["sm_90"]) is None
    with pytest.raises(ValueError, match="power of two"):
        triton.GroupedTile(48, 64, 64, 4, 2)
    huge = triton.GroupedTile(256, 256, 256, 8, 4)
    config = dataclasses.replace(triton.default_config(many, DEVICES["sm_90"]), lhs=huge)
    reason = triton.config_unsupported(config, many, DEVICES["sm_90"])
    assert reason is not None and "shared memory" in reason
