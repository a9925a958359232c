"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import dataclasses

import pytest

from ejkernel_eqx.launch import compile_ahead
from ejkernel_eqx.losses.spec import DIVERGENCES
from ejkernel_eqx.losses.workload import example_problem
from tests.compiled import DEVICES
from tests.workloads import assert_agrees, configs_of, launches

pytest.importorskip("triton")
from ejkernel_eqx.losses.triton import compiled as triton

OPERATION, DIVERGENCE = "linear_cross_entropy", "linear_divergence"
ALL = dict(soft_cap=True, temperature=True, label_smoothing=True, z_loss=True, statistics=True, bias=True)
KINDS = {
    "sum": example_problem(OPERATION, dict(N=9, E=16, V=20), "bfloat16", dict(z_loss=True)),
    "of each token": example_problem(
        OPERATION, dict(M=2, N=5, E=8, V=150), "float32", ALL | dict(reduction="none")
    ),
    "of a teacher": example_problem(DIVERGENCE, dict(N=7, E=16, V=150, F=8), "bfloat16", {}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_agrees_with_the_reference(platform, name):
    assert_agrees(KINDS[name].operation, platform, KINDS[name])


HEAD = dict(N=8192, E=4096, V=128256)
COMPILED = {
    "sum": (dict(N=16384, E=1024, V=50304), "bfloat16", {}),
    "one chunk": (HEAD, "bfloat16", dict(bias=True)),
    "of each token": (dict(N=4096, E=2048, V=50257), "float16", ALL | dict(reduction="none")),
    "float32": (dict(N=4096, E=1000, V=32003), "float32", ALL),
    **{name: (HEAD, "bfloat16", dict(divergence=name)) for name in DIVERGENCES},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("name", COMPILED)
def test_defaults_fit(target, name):
    """Without spills."""
    operation = DIVERGENCE if name in DIVERGENCES else OPERATION
    problem = example_problem(operation, *COMPILED[name])
    for launch in launches(operation, problem, configs_of(operation, problem, target)[0]):
        report = compile_ahead(launch, target)
        assert report.fits and report.spills == 0, (launch.label, report)


def test_what_triton_does_not_take():
    wide = example_problem(OPERATION, dict(N=9, E=4, V=8), "float64", {})
    assert "not float64" in str(triton.unsupported(wide, DEVICES["sm_90"]))


def test_one_chunk_where_its_logits_take_no_more_than_a_sum():
    """Of 16 bits, in the place of the sum of the weight's gradients in float32; only where all tokens fit. Else as many tokens as features."""
    size_of = lambda dims, dtype="bfloat16": dataclasses.astuple(
        triton.default_config(example_problem(OPERATION, dims, dtype, {}), DEVICES["sm_90"])
    )[:2]
    model = dict(E=4096, V=128256)
    assert size_of(model | dict(N=8192)) == (1536, 1536 + 2 * 4096)
    assert size_of(model | dict(N=16384)) == size_of(model | dict(N=8193), "float16") == (1536, 4096)
    # Never two chunks.
    assert size_of(model | dict(N=8192), "float16") == (1536, 2048)
    assert size_of(dict(N=16384, E=1024, V=50304)) == (3968, 3968)
    assert size_of(dict(N=5, E=64, V=50), "float32") == (2_000_000, 2_000_000)


def test_float16_is_taken_by_name_only():
    """Its largest number is less than logits may be."""
    reasons = {
        dtype: triton.by_request(
            example_problem(OPERATION, dict(N=9, E=16, V=20), dtype, {}), DEVICES["sm_90"]
        )
        for dtype in ("float16", "bfloat16", "float32")
    }
    assert reasons["bfloat16"] is reasons["float32"] is None and "65,504" in str(reasons["float16"])
