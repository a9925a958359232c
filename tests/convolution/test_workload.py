"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import jax
import numpy as np
import pytest

from ejkernel_eqx.convolution.core import problem_of
from ejkernel_eqx.convolution.workload import example_problem, make_arrays, make_inputs, spec_of
from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry
from tests.compiled import DEVICES, launches_of
from tests.workloads import assert_agrees

OPERATION = "causal_conv1d"
KINDS = {
    "plain": example_problem(OPERATION, dict(B=2, T=40, C=6), "float32", {}),
    "state": example_problem(
        OPERATION, dict(T=9, C=6, W=3), "bfloat16", dict(initial_state=True, bias=False)
    ),
    "segments": example_problem(
        OPERATION, dict(B=2, T=40, C=6), "float32", dict(packed=True, activation=None)
    ),
    "offsets": example_problem(
        OPERATION, dict(T=40, C=6, N=4), "float16", dict(packed=True, initial_state=True)
    ),
    "heads": example_problem(OPERATION, dict(B=2, T=20, C=64), "float32", dict(norm_size=32)),
    "packed heads": example_problem(
        OPERATION, dict(B=2, T=40, C=64), "bfloat16", dict(norm_size=64, packed=True)
    ),
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
    work, reference = assert_agrees(OPERATION, platform, KINDS[name])
    assert set(reference) == set(work.tolerances)
    assert all(np.asarray(x).any() for x in reference.values())


def test_costs_are_the_arrays_once():
    work = kernel_registry.get(OPERATION, "xla").make_workload(KINDS["plain"])
    assert work is not None
    x, weight, bias, state = 4 * 2 * 40 * 6, 4 * 6 * 4, 4 * 6, 4 * 2 * 3 * 6
    assert work.costs[FORWARD].bytes == 2 * x + weight + bias + state
    assert work.costs[BOTH].bytes == 2 * work.costs[FORWARD].bytes + x + weight + bias


@pytest.mark.parametrize(
    "dims, flags, word",
    [
        (dict(T=4), {}, "C"),
        (dict(T=4, C=4, D=2), {}, "D"),
        (dict(T=4, C=0), {}, "C=0"),
        (dict(T=4, C=4), dict(activation="gelu"), "gelu"),
        (dict(T=4, C=4), dict(packed=1), "packed"),
        (dict(T=4, C=4), dict(causal=True), "causal"),
        (dict(T=4, C=64), dict(norm_size=6), "norm_size"),
        (dict(T=4, C=48), dict(norm_size=32), "norm_size=32"),
    ],
)
def test_words_that_do_not_fit(dims, flags, word):
    with pytest.raises(ValueError, match=word):
        example_problem(OPERATION, dims, "float32", flags)


TARGETS = {
    "sm_80": (dict(T=1000, C=4096), "bfloat16", {}),
    "sm_90": (dict(T=50, C=100, W=3), "float32", dict(initial_state=True)),
    "sm_90 heads": (dict(B=8, T=2048, C=1024), "bfloat16", dict(norm_size=64, bias=False)),
    "sm_100": (dict(B=4, T=4096, C=4096), "bfloat16", dict(packed=True)),
    "gfx942": (dict(T=300, C=40, W=2, N=2), "float16", dict(packed=True, initial_state=True)),
}


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=() if t.startswith("sm_90") else pytest.mark.slow) for t in TARGETS]
)
def test_defaults_fit(target):
    pytest.importorskip("triton")
    from ejkernel_eqx.convolution.triton import compiled as triton
    from ejkernel_eqx.launch import compile_ahead

    sizes, dtype, flags = TARGETS[target]
    target = target.split()[0]
    problem, device = example_problem(OPERATION, sizes, dtype, flags), DEVICES[target]
    assert triton.unsupported(problem, device) is None
    configs = triton.candidates(problem, device)
    assert configs[0] == triton.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    assert configs[0].fast_sigmoid == (target != "gfx942")
    spec = spec_of(problem)
    arrays, cotangents = jax.eval_shape(lambda: make_inputs(problem, spec, 0))

    def both(arrays, cotangents, execute):
        triton.forward(arrays, spec, configs[0], execute=execute)
        return triton.backward(arrays, spec, configs[0], {}, cotangents, execute=execute)

    launches = launches_of(both, arrays, cotangents)
    assert set(launches) == {"forward_kernel", "backward_kernel"}
    for name, launch in launches.items():
        report = compile_ahead(launch, target)
        assert report.fits and report.spills == 0, (name, report)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    from ejkernel_eqx.convolution.triton import compiled as triton

    reason = triton.unsupported(
        example_problem(OPERATION, dict(T=9, C=4, W=9), "float32", {}), DEVICES["sm_90"]
    )
    assert reason is not None and "up to 8, not 9" in reason
    with pytest.raises(ValueError, match="power of two"):
        triton.ConvTile(6, 2, 4, 64, 4)
    with pytest.raises(ValueError, match="unroll <= steps"):
        triton.ConvTile(4, 8, 4, 64, 4)
