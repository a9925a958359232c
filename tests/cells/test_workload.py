"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel_eqx.cells.core import problem_of
from ejkernel_eqx.cells.workload import example_problem, make_arrays, spec_of
from ejkernel_eqx.cells.xla import XlaConfig
from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry
from ejkernel_eqx.launch import compile_ahead
from tests.compiled import DEVICES
from tests.workloads import assert_agrees, refusals

OPERATION = "recurrent"


def problem(dtype="float32", flags=None, **dims):
    return example_problem(OPERATION, dict(B=2, T=9, H=6) | dims, dtype, flags or {})


KINDS = {
    "lstm": problem(),
    "gru": problem("bfloat16", dict(cell="gru", initial_state=True)),
    "rnn": problem("float16", dict(cell="rnn", activation="relu", packed="marks")),
    "offsets": problem(flags=dict(packed="offsets", initial_state=True), B=1, S=3),
    "hard": problem(flags=dict(cell="gru", bias=False, gate_activation="hard_sigmoid", packed="marks")),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    arrays = make_arrays(wanted, 0)
    found = problem_of(OPERATION, arrays, spec_of(wanted))
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, 1).x) != np.asarray(arrays.x)).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_platforms_agree_with_the_reference(name, platform):
    config = XlaConfig(4) if platform == "xla" else None
    assert_agrees(OPERATION, platform, KINDS[name], config)


def test_costs():
    work = kernel_registry.get(OPERATION, "xla").make_workload(problem(B=3, T=5, H=8))
    assert work is not None
    assert work.costs[FORWARD].flops == 2 * 3 * 5 * 4 * 8 * 8
    assert work.costs[BOTH].bytes > 2 * work.costs[FORWARD].bytes


test_words_that_do_not_fit = refusals(
    OPERATION,
    example_problem,
    [
        (dict(T=8), {}, ["T, H", "missing ['H']"]),
        (dict(T=8, H=4, D=2), {}, ["unknown ['D']"]),
        (dict(T=8, H=4), dict(cell="mgu"), ["cell=lstm", "'mgu'"]),
        (dict(T=8, H=4), dict(gate="sigmoid"), ["received gate"]),
        (dict(T=8, H=4), dict(packed="segments"), ["packed=offsets", "'segments'"]),
    ],
)


# Configurations


@pytest.fixture
def triton():
    return pytest.importorskip("ejkernel_eqx.cells.triton.compiled")


def candidates(of, target):
    return kernel_registry.get(OPERATION, "triton").load().candidates(of, DEVICES[target])


def launches_of(of, config):
    work = kernel_registry.get(OPERATION, "triton").make_workload(of)
    assert work is not None and work.launches is not None
    return work.launches(config)


def forms(config):
    return config.forward.form, config.backward.form


def test_which_form_is_preferred(triton):
    """A weight that all multiprocessors hold together stays there. Else small ones are streamed by every program, and the columns of large ones
    are distributed, a launch for each step."""
    for target, H, form in (
        ("sm_90", 256, "persistent"),
        ("sm_90", 1024, "persistent"),
        ("sm_90", 2048, "per_step"),
        ("sm_80", 128, "whole"),
        ("sm_80", 256, "whole"),
        ("sm_80", 512, "per_step"),
    ):
        found = [forms(config) for config in candidates(problem("bfloat16", B=64, T=512, H=H), target)]
        assert found[0] == (form, form), (target, H)
        assert {("whole",) * 2, ("per_step",) * 2} <= set(found)


@pytest.mark.slow
def test_programs_that_wait_for_each_other_run_at_the_same_time(triton):
    device = DEVICES["sm_90"]
    for B, H in ((64, 1024), (256, 256), (1024, 128), (1, 512), (2000, 512)):
        of = problem("bfloat16", B=B, T=512, H=H)
        for config in candidates(of, "sm_90"):
            assert triton.config_unsupported(config, of, device) is None
            for launch in launches_of(of, config):
                if launch.constants.get("GRID_BARRIER"):
                    assert launch.grid[0] <= device.num_multiprocessors


def test_more_programs_than_run_at_the_same_time(triton):
    """They are refused; and without being asked, each step is a launch, without waiting."""
    config = candidates(problem("bfloat16", B=64, T=512, H=1024), "sm_90")[0]
    larger = problem("bfloat16", B=96, T=512, H=1024)
    for wrong, of, words in (
        (config, larger, "192 programs"),
        (dataclasses.replace(config, concurrent_programs=100), problem("bfloat16", B=64, H=1024), "is 100"),
        (config, problem("float32", B=64, H=1024), "bytes of shared memory"),
    ):
        reason = triton.config_unsupported(wrong, of, DEVICES["sm_90"])
        assert reason is not None and words in reason
    reason = triton.config_unsupported(config, problem("bfloat16", B=64, H=1024), DEVICES["sm_80"])
    assert reason is not None and "9.x" in reason
    waits = {
        launch.function.fn.__name__: launch.constants["GRID_BARRIER"]
        for launch in launches_of(larger, config)
    }
    assert waits == {"persistent_forward_kernel": False, "persistent_backward_kernel": False}


def test_a_configuration_of_a_larger_device_does_not_wait(triton, monkeypatch):
    """Given as `config=`, nothing has compared it with the device."""
    of = problem("bfloat16", B=64, T=512, H=1024)
    for count, waits in ((132, True), (114, False), (0, True)):  # on a CPU it is not known
        facts = dataclasses.replace(DEVICES["sm_90"], num_multiprocessors=count)
        monkeypatch.setattr(triton, "device_facts", lambda facts=facts: facts)
        launches = launches_of(of, candidates(of, "sm_90")[0])
        assert [launch.constants["GRID_BARRIER"] for launch in launches] == [waits] * len(launches)


def test_float32_may_have_the_weight_on_the_chip(triton):
    """Not by default; every candidate fits without spills, which the parts of three passes easily cause."""
    of = problem("float32", B=256, T=512, H=256)
    found = candidates(of, "sm_90")
    assert "persistent" not in forms(found[0]) and forms(found[1]) == ("persistent",) * 2
    for launch in launches_of(of, found[1]):
        report = compile_ahead(launch, "sm_90")
        assert launch.constants["GRID_BARRIER"] and report.fits and report.spills == 0, (launch.label, report)


def test_tiles_are_narrowed_to_the_problem(triton):
    for config in candidates(problem("bfloat16", B=3, T=5, H=20), "sm_90"):
        assert config.forward.block_m == 16 and config.forward.block_n <= 32 and config.forward.block_k <= 32


def test_tiles_that_do_not_fit_are_refused(triton):
    CellTile, TritonConfig = triton.CellTile, triton.TritonConfig
    small, large = CellTile(16, 16, 16, 4), CellTile(64, 256, 128, 8, 4)
    of = problem("float32", H=1024)
    reason = triton.config_unsupported(TritonConfig(small, large), of, DEVICES["sm_90"])
    assert reason is not None and "backward" in reason and "64x256x128" in reason
    assert triton.config_unsupported(TritonConfig(small, small), of, DEVICES["sm_90"]) is None
    wrong: Any = (dict(block_m=8), dict(block_n=24), dict(num_warps=3), dict(num_stages=0), dict(form="all"))
    for change in wrong:
        with pytest.raises(ValueError, match=next(iter(change))):
            CellTile(**(dict(block_m=16, block_n=16, block_k=16, num_warps=4) | change))


SIZES = {
    "small": dict(B=256, T=512, H=256),
    "large": dict(B=64, T=512, H=1024),
    "odd": dict(B=3, T=9, H=100),
    "packed": dict(B=1, T=100, H=64, S=5),
}
CELLS = {"small": "lstm", "large": "gru", "odd": "rnn", "packed": "lstm"}
# The smallest and the largest on every target, each cell on one, and float32.
GRID = [
    *((target, CELLS[size], size, "bfloat16") for target in DEVICES for size in ("small", "large")),
    *(("sm_90", CELLS[size], size, "bfloat16") for size in ("odd", "packed")),
    ("sm_90", "lstm", "small", "float32"),
    ("sm_90", "gru", "odd", "bfloat16"),
]
QUICK = {("sm_90", "gru", "odd", "bfloat16")}


@pytest.mark.parametrize(
    "target, cell, size, dtype",
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in GRID],
)
def test_defaults_fit(triton, target, cell, size, dtype):
    """Compiled ahead of time, for devices that need not be there."""
    flags: dict = {"cell": cell, "initial_state": True}
    flags["packed"] = "offsets" if size == "packed" else "marks" if size == "odd" else None
    of = problem(dtype, flags, **SIZES[size])
    launches = launches_of(of, candidates(of, target)[0])
    names = {launch.label.rpartition(".")[2].removeprefix("persistent_") for launch in launches}
    assert names == {"forward_kernel", "backward_kernel"}
    for launch in launches:
        report = compile_ahead(launch, target)
        assert report.fits, report
        if target == "sm_90" and dtype == "bfloat16":
            assert report.spills <= 96, (launch.label, report)


def test_the_gates_of_jax_and_of_the_kernels_are_the_same():
    """On either side of every kink."""
    from ejkernel_eqx.cells.formulas import FUNCTIONS
    from tests.cells.cases import FUNCTIONS as PLAIN

    x = np.array([-9.0, -3.1, -2.9, -1.1, -0.9, -0.2, 0.1, 0.9, 1.1, 2.9, 3.1, 9.0])
    assert set(FUNCTIONS) == set(PLAIN)
    with jax.enable_x64(True):
        for name, function in FUNCTIONS.items():
            np.testing.assert_allclose(function(jax.numpy.asarray(x)), PLAIN[name](x), rtol=1e-12)
