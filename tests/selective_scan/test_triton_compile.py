"""Every Triton kernel, compiled ahead of time for devices that need not be there: its configuration must fit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.dispatch import Backend, DeviceFacts, kernel_registry
from ejkernel_eqx.dispatch.device import shared_memory_limit
from ejkernel_eqx.launch import compile_ahead, TARGETS
from ejkernel_eqx.selective_scan.example import example_problem
from ejkernel_eqx.selective_scan.samples import make_step_inputs, spec_of

pytest.importorskip("triton")
from ejkernel_eqx.selective_scan.triton import compiled as triton

OPERATION = "state_space_v1"
DEVICES = {
    "sm_80": DeviceFacts(Backend.GPU, "A100", "nvidia", "8.0", 108, shared_memory_limit("nvidia", "8.0")),
    "sm_90": DeviceFacts(Backend.GPU, "H100", "nvidia", "9.0", 132, shared_memory_limit("nvidia", "9.0")),
    "sm_100": DeviceFacts(Backend.GPU, "B200", "nvidia", "10.0", 148, shared_memory_limit("nvidia", "10.0")),
    "gfx942": DeviceFacts(Backend.GPU, "MI300X", "amd", "9.4.2", 304, shared_memory_limit("amd", "gfx942")),
}
KINDS = {
    "plain": (dict(T=4096, I=2048, B=4), {}),
    "few states": (dict(T=4096, I=2048, B=4, N=4), {}),
    "segments": (dict(T=1000, I=1000, N=7), dict(packed="segments", initial_state=True)),
    "offsets": (dict(T=1024, I=64, G=2, S=3, N=33), dict(packed="offsets", z=False, D=False, softplus=False)),
}
QUICK = {
    ("sm_90", "few states", "bfloat16"),
    ("gfx942", "offsets", "float32"),
}
GRID = [
    (target, kind, dtype)
    for target in DEVICES
    for kind in KINDS
    for dtype in ("bfloat16", "float16", "float32")
]


def launches_of(target, kind, dtype, **changes):
    """Of the default configuration, with changes to its tiles."""
    dims, flags = KINDS[kind]
    problem = example_problem(OPERATION, dims, dtype, flags)
    implementation = next(i for i in kernel_registry.ordered(OPERATION) if i.platform.value == "triton")
    work = implementation.make_workload(problem)
    assert work is not None and work.launches is not None
    config = triton.default_config(problem, DEVICES[target])
    tiles = {name: dataclasses.replace(getattr(config, name), **changes) for name in ("forward", "backward")}
    return work.launches(dataclasses.replace(config, **tiles))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "target, kind, dtype",
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in GRID],
)
def test_defaults_fit(target, kind, dtype):
    launches = launches_of(target, kind, dtype)
    assert {"forward_kernel", "backward_kernel"} <= {launch.label.rpartition(".")[2] for launch in launches}
    for launch in launches:
        report = compile_ahead(launch, target)
        assert report.fits, report
        if target == "sm_90":
            # A thread's tokens must stay in its registers; shared memory would mean that lanes exchange them.
            # Where registers are limited some of what is loaded ahead is put aside.
            spills = 128 if launch.max_registers else 64
            assert report.spills <= spills and report.shared <= 1024, (launch.label, report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, kind",
    [
        ("sm_90", "few states"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("sm_90", "plain"), ("gfx942", "offsets"))),
    ],
)
def test_prefetch_fits(target, kind):
    """What is brought near takes few registers and no shared memory."""
    for launch in launches_of(target, kind, "bfloat16", unroll=16, summary_registers=144, prefetch=2):
        report = compile_ahead(launch, target)
        assert report.fits and report.spills <= 128 and report.shared <= 1024, (launch.label, report)


@pytest.mark.slow
def test_limited_registers_fit():
    """The forward that jax-triton 0.4 and later is given."""
    every = launches_of("sm_90", "few states", "bfloat16", max_registers=168, unroll=16)
    forward = [launch for launch in every if "backward" not in launch.label]
    assert len(forward) >= 2 and len(forward) < len(every)
    for launch in forward:
        report = compile_ahead(launch, "sm_90")
        assert report.fits and report.spills <= 128 and report.shared <= 1024, (launch.label, report)


@pytest.mark.parametrize("target", [*TARGETS][1:2])
def test_step_fits(target):
    problem = example_problem(OPERATION, dict(I=100, N=5, B=3), "bfloat16", dict(step=True, slots=True))
    found = []

    def record(launch, inputs):
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    arrays = jax.tree.map(
        lambda x: x[None] if x.ndim != 1 or x.dtype == jnp.int32 else x, make_step_inputs(problem, 0)
    )
    config = triton.default_config(problem, DEVICES[target])
    triton.step(arrays._replace(A=arrays.A[0]), spec_of(problem), config, execute=record)
    assert compile_ahead(found[0], target).fits and len(found) == 1
