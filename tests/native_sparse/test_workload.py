"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.native_sparse.native_pages import core as pages
from ejkernel_eqx.native_sparse.native_pages.workload import spec_of as spec_of_pages
from tests.compiled import DEVICES
from tests.native_sparse import problems
from tests.native_sparse.problems import names_of, OPERATION, over_pages, PAGES, platform_of, problem, STEP
from tests.workloads import assert_agrees, work_of

SMALL = dict(T=40, H=4, K=2, D=16, n=3)
FLAGS = dict(block=4, window=6)
KINDS = {
    "plain": problem(SMALL | dict(B=2), "float32", FLAGS | dict(given=True)),
    "packed": problem(SMALL | dict(N=3), "float32", FLAGS | dict(given=True, packed=True, span=4, stride=2)),
    "placed": problem(SMALL | dict(T=8, S=40, B=2), "bfloat16", FLAGS | dict(given=True, placed=True)),
    "packed, chosen": problem(SMALL | dict(N=3), "float32", FLAGS | dict(packed=True)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    spec = problems.spec_of(wanted)
    arrays = problems.make_arrays(wanted, spec, 0)
    found = problems.problem_of(OPERATION, arrays, spec)
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(problems.make_arrays(wanted, spec, 1).q) != np.asarray(arrays.q)).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("platform, name", [("xla", "placed"), *(("triton-interpret", n) for n in KINDS)])
def test_agrees_with_the_reference(platform, name):
    run = assert_agrees(OPERATION, platform, KINDS[name], whole=False)
    assert all(np.asarray(run.reference[result]).any() for result in run.work.tolerances)


@pytest.mark.few(1)
@pytest.mark.parametrize("platform, flags", [("xla", dict(given=True)), ("triton-interpret", {})])
def test_pages_agree_with_the_reference(platform, flags):
    dims = dict(N=3, T=12, Q=6, S=80, H=4, K=2, D=16, n=3, p=8)
    of = over_pages(dims, "float32", FLAGS | dict(span=4, stride=2) | flags)
    run = assert_agrees(PAGES, platform, of, whole=False)
    assert pages.problem_of(PAGES, run.work.make_inputs(3), spec_of_pages(of)).key() == of.key()


LONG = dict(N=4, S=65536, H=64, K=1, D=128)
PAGED = {
    "decoding": (LONG | dict(K=4, p=64), "bfloat16", dict(span=32, stride=16)),
    "many queries": (LONG | dict(N=64, K=4), "bfloat16", {}),
    "mixed": (dict(N=8, T=512, S=8192, H=8, K=2, D=100, V=64, p=48), "float16", dict(block=16, span=16)),
    "float32": (LONG | dict(H=64, K=2, D=64, V=60), "float32", {}),
}


@pytest.mark.parametrize(
    "target, name",
    [
        pytest.param(target, name, marks=[] if (target, name) == ("sm_90", "mixed") else pytest.mark.slow)
        for name, targets in {
            "decoding": DEVICES,
            "mixed": DEVICES,
            "many queries": ("sm_80", "sm_90"),
            "float32": ("sm_80", "gfx942"),
        }.items()
        for target in targets
    ],
)
def test_defaults_for_pages_fit(target, name):
    """And the kernels of each branch, where a step of decoding is one of the candidates; those of other rooms are theirs."""
    pytest.importorskip("triton")
    of, device, platform = over_pages(*PAGED[name]), DEVICES[target], platform_of(PAGES)
    work = work_of(PAGES, "triton", of)
    assert platform.unsupported(of, device) is None and work.launches is not None
    config, *others = platform.candidates(of, device)
    assert config == platform.default_config(of, device) and others and config not in others
    found = list(work.launches(config))
    if name != "mixed":
        # One program for each of many queries occupies the newer devices less evenly.
        whole = name == "many queries" and target in ("sm_90", "sm_100")
        assert names_of(found) == (["whole_step_kernel"] if whole else STEP)
        assert_fit(found, target)
    if name == "decoding":
        found = work.launches(problems.with_step(config, **problems.BY_BRANCH))
    assert_fit([launch for launch in found if ".paged_native_sparse." in launch.label], target)


def assert_fit(launches, target, spills=lambda launch: 0):
    for launch in launches:
        report = ejx.launch.compile_ahead(launch, target)
        assert report.fits and report.spills <= spills(launch), (launch.label, report)


@pytest.mark.parametrize(
    "dims, flags, word",
    [
        (dict(T=4, H=2), {}, "D"),
        (dict(T=4, H=3, K=2, D=8), {}, "multiple of K"),
        (dict(T=4, H=2, D=8, N=2), {}, "packed=true"),
        (dict(T=4, H=2, D=8), dict(block=0), "block"),
        (dict(T=4, H=2, D=8), dict(causal=True), "causal"),
    ],
)
def test_words_that_do_not_fit(dims, flags, word):
    with pytest.raises(ValueError, match=word):
        problem(dims, "float32", flags)


COMPILED = {
    "float32": (dict(T=4096, H=8, K=2, D=64), "float32", {}),
    "packed": (dict(T=4096, H=8, K=2, D=100, V=64, N=4), "float16", dict(packed=True, span=32, stride=16)),
    "decoding": (dict(B=4, T=1, S=65536, H=64, K=4, D=128), "bfloat16", dict(placed=True)),
}


@pytest.mark.parametrize(
    "target, name",
    [
        pytest.param(target, name, marks=[] if (target, name) == ("sm_90", "packed") else pytest.mark.slow)
        for name, targets in {
            "float32": DEVICES,
            "packed": DEVICES,
            "decoding": ("sm_90", "gfx942"),
        }.items()
        for target in targets
    ],
)
def test_defaults_fit(target, name):
    """Without spills, but for float32 on older devices, and for the gradient of keys on Hopper, whose fewer warps are faster nevertheless."""
    pytest.importorskip("triton")
    of, device, triton = problem(*COMPILED[name]), DEVICES[target], platform_of(OPERATION)
    assert triton.unsupported(of, device) is None
    config, *others = triton.candidates(of, device)
    assert config == triton.default_config(of, device) and others and config not in others
    # Without a gradient, one kernel also sums the branches.
    found = problems.launches(of, config)
    found += [x for x in problems.launches(of, config, save=False) if x.constants.get("GATED")]

    def spills(launch):
        of_keys = target == "sm_90" and launch.function.fn.__name__ == "key_gradient_kernel"
        return 10**6 if name == "float32" else 32 if of_keys else 0

    own = [launch for launch in found if ".native_sparse." in launch.label]
    assert {"query_gradient_kernel", "key_gradient_kernel"} < {*names_of(own)}
    assert_fit(own, target, spills)


@pytest.mark.parametrize(
    "word, dims, dtype, flags",
    [
        ("not float64", dict(T=9, H=2, D=8), "float64", {}),
        ("head dims", dict(T=9, H=2, D=300), "float32", {}),
        ("heads a key head", dict(T=9, H=256, K=1, D=8), "float32", {}),
        ("blocks of up to", dict(T=9, H=2, D=8), "float32", dict(block=512)),
    ],
)
def test_what_triton_does_not_take(word, dims, dtype, flags):
    pytest.importorskip("triton")
    of = problem(dims, dtype, flags)
    assert word in str(platform_of(OPERATION).unsupported(of, DEVICES["sm_90"]))
