"""Every Triton kernel, compiled ahead of time for devices that need not be there: its configuration must fit."""

import dataclasses

import jax
import pytest

from ejkernel_eqx.launch import compile_ahead
from tests import compiled
from tests.compiled import DEVICES
from tests.selective_scan.cases import example_problem, samples
from tests.workloads import launches

pytest.importorskip("triton")
from ejkernel_eqx.selective_scan.triton import compiled as triton

OPERATION = "state_space_v1"
KINDS = {
    "few states": (dict(T=4096, I=2048, B=4, N=4), {}),
    "segments": (dict(T=1000, I=1000, N=7), dict(packed="segments", initial_state=True)),
    "offsets": (dict(T=1024, I=64, G=2, S=3, N=33), dict(packed="offsets", z=False, D=False, softplus=False)),
}
# All options and none of them, many and few channels, on every device; where spills were measured, the states that layers have, too.
GRID = [(target, *row) for target in DEVICES for row in (("segments", "bfloat16"), ("offsets", "float32"))]
GRID += [("sm_90", "few states", "bfloat16")]


def launches_of(target, kind, dtype, **changes):
    """Of the default configuration, with changes to its tiles."""
    dims, flags = KINDS[kind]
    problem = example_problem(OPERATION, dims, dtype, flags)
    config = triton.default_config(problem, DEVICES[target])
    tiles = {name: dataclasses.replace(getattr(config, name), **changes) for name in ("forward", "backward")}
    return launches(OPERATION, problem, dataclasses.replace(config, **tiles))


@pytest.mark.few(1)
@pytest.mark.parametrize("target, kind, dtype", GRID)
def test_defaults_fit(target, kind, dtype):
    found = launches_of(target, kind, dtype)
    assert {"forward_kernel", "backward_kernel"} <= {launch.label.rpartition(".")[2] for launch in found}
    for launch in found:
        report = compile_ahead(launch, target)
        assert report.fits, report
        if target == "sm_90":
            # A thread's tokens must stay in its registers; shared memory would mean that lanes exchange them.
            # Where registers are limited some of what is loaded ahead is put aside.
            spills = 128 if launch.max_registers else 64
            assert report.spills <= spills and report.shared <= 1024, (launch.label, report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [dict(summary_registers=144, prefetch=2), dict(max_registers=168)], ids=["prefetch", "limited"]
)
def test_other_tiles_fit(changes):
    """What is brought near takes few registers and no shared memory; nor does the forward that jax-triton 0.4 and later is given."""
    found = launches_of("sm_90", "few states", "bfloat16", unroll=16, **changes)
    if "max_registers" in changes:
        found = [launch for launch in found if "backward" not in launch.label]
    assert len(found) >= 2
    for launch in found:
        report = compile_ahead(launch, "sm_90")
        assert report.fits and report.spills <= 128 and report.shared <= 1024, (launch.label, report)


def test_step_fits():
    problem = example_problem(OPERATION, dict(I=100, N=5, B=3), "bfloat16", dict(step=True, slots=True))
    lead = lambda x: x[None] if x.ndim != 1 or x.dtype == "int32" else x
    arrays = jax.tree.map(lead, samples.make_step_inputs(problem, 0))
    arrays = arrays._replace(A=arrays.A[0])
    config = triton.default_config(problem, DEVICES["sm_90"])
    step = lambda arrays: triton.step(arrays, samples.spec_of(problem), config)
    (launch,) = compiled.launches_of(step, arrays).values()
    assert compile_ahead(launch, "sm_90").fits
