"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx._explain import example_problem_of
from ejkernel_eqx.attention.native_sparse.problems import problem_of, spec_of
from ejkernel_eqx.attention.native_sparse.workload import example_problem, make_arrays, make_inputs
from ejkernel_eqx.dispatch import kernel_registry
from ejkernel_eqx.paged.native_pages.core import problem_of as pages_problem_of
from ejkernel_eqx.paged.native_pages.workload import spec_of as spec_of_pages
from tests.compiled import DEVICES
from tests.tolerances import errors
from tests.workloads import assert_agrees

OPERATION, PAGES = "native_sparse_attention", "paged_native_sparse_attention"
STEP = [f"{name}_step_kernel" for name in ("compressed", "sliding", "selected", "combine")]
SMALL = dict(T=40, H=4, K=2, D=16, n=3)
FLAGS = dict(block=4, window=6, given=True)
KINDS = {
    "plain": example_problem(OPERATION, SMALL | dict(B=2), "float32", FLAGS),
    "packed": example_problem(
        OPERATION, SMALL | dict(N=3), "float32", FLAGS | dict(packed=True, span=4, stride=2)
    ),
    "placed": example_problem(OPERATION, SMALL | dict(T=8, S=40, B=2), "bfloat16", FLAGS | dict(placed=True)),
    "chosen": example_problem(OPERATION, SMALL | dict(B=2), "bfloat16", FLAGS | dict(given=False)),
    "packed, chosen": example_problem(
        OPERATION, SMALL | dict(N=3), "float32", FLAGS | dict(packed=True, given=False)
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
    assert (np.asarray(make_arrays(wanted, spec, 1).q) != np.asarray(arrays.q)).any()
    if arrays.indices is None:
        return
    indices = np.asarray(arrays.indices)
    assert len(np.unique(indices)) > 6 and (indices >= -1).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_reference(platform, name):
    run = assert_agrees(OPERATION, platform, KINDS[name])
    for result in run.work.tolerances:
        assert np.asarray(run.reference[result]).any(), result


@pytest.mark.slow
def test_references_agree(monkeypatch):
    """That of long rows and the dense one."""
    from ejkernel_eqx.attention.native_sparse import workload

    of, implementation = KINDS["packed, chosen"], kernel_registry.get(OPERATION, "xla")
    dense = implementation.make_workload(of)
    monkeypatch.setattr(workload, "_MOST_SCORES", 0)
    sparse = implementation.make_workload(of)
    assert dense is not None and sparse is not None
    inputs = dense.make_inputs(0)
    expected, found = dense.reference(inputs), sparse.reference(inputs)
    for name, allowed in dense.tolerances.items():
        measured = errors(found[name], expected[name])
        assert measured.rms <= allowed.rms and measured.peak <= allowed.peak, (name, measured)


@pytest.mark.parametrize("platform", ["xla", pytest.param("triton-interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize("flags", [dict(given=True), pytest.param({}, marks=pytest.mark.slow)])
def test_pages_agree_with_the_reference(platform, flags):
    dims = dict(N=3, T=12, Q=6, S=80, H=4, K=2, D=16, n=3, p=8)
    of = example_problem_of(PAGES)(PAGES, dims, "float32", dict(block=4, window=6, span=4, stride=2) | flags)
    run = assert_agrees(PAGES, platform, of)
    assert pages_problem_of(PAGES, run.work.make_inputs(3), spec_of_pages(of)).key() == of.key()


PAGED = {
    "decoding": (dict(N=8, S=65536, H=64, K=4, D=128, p=64), "bfloat16", dict(span=32, stride=16)),
    "mixed": (dict(N=8, T=512, S=8192, H=8, K=2, D=100, V=64, p=48), "float16", dict(block=16, span=16)),
    "float32": (dict(N=2, S=4096, H=8, K=1, D=64, p=16), "float32", dict(block=32, span=16)),
}


@pytest.mark.parametrize(
    "target, name",
    [
        pytest.param(t, n, marks=[] if (t, n) == ("sm_90", "mixed") else pytest.mark.slow)
        for t in DEVICES
        for n in PAGED
    ],
)
def test_defaults_for_pages_fit(target, name):
    """Without spills, but for float32 on older devices; that of the other kernels is theirs."""
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.native_sparse.triton.steps import BY_BRANCH

    problem, device = example_problem_of(PAGES)(PAGES, *PAGED[name]), DEVICES[target]
    implementation = kernel_registry.get(PAGES, "triton")
    platform, work = implementation.load(), implementation.make_workload(problem)
    assert platform.unsupported(problem, device) is None and work is not None and work.launches is not None
    configs = platform.candidates(problem, device)
    assert configs[0] == platform.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    found = work.launches(configs[0])
    if name != "mixed":
        assert [launch.function.fn.__name__ for launch in found] == STEP
        assert_fit(found, target, name)
        found = work.launches(dataclasses.replace(configs[0], step=BY_BRANCH))
    own = [launch for launch in found if ".paged_native_sparse." in launch.label]
    kernels = [launch.function.fn.__name__ for launch in own]
    split = [] if name == "mixed" or target == "gfx942" else ["merge_blocks_kernel"]
    choose = (
        "choose_one_kernel" if name == "mixed" else "choose_kernel"
    )  # among more than 512 blocks, of one key each
    assert kernels == ["page_importance_kernel", choose, "page_forward_kernel", *split]
    assert_fit(own, target, name)


def assert_fit(launches, target, name):
    from ejkernel_eqx.launch import compile_ahead

    for launch in launches:
        report = compile_ahead(launch, target)
        assert report.fits and (report.spills == 0 or name == "float32"), (launch.label, report)


STEPS = {
    "groups of 64": (dict(N=4, S=65536, H=64, K=1, D=128), "bfloat16", {}),
    "wide": (dict(N=2, S=16384, H=32, K=1, D=256), "float16", dict(block=256, span=64)),
    "float32": (dict(N=2, S=65536, H=64, K=2, D=64, V=60), "float32", {}),
    "many queries": (dict(N=64, S=65536, H=64, K=4, D=128), "bfloat16", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("name", STEPS)
def test_steps_fit(target, name):
    """Without spills, on every device."""
    pytest.importorskip("triton")
    problem = example_problem_of(PAGES)(PAGES, *STEPS[name])
    implementation = kernel_registry.get(PAGES, "triton")
    work = implementation.make_workload(problem)
    assert work is not None and work.launches is not None
    found = work.launches(implementation.load().default_config(problem, DEVICES[target]))
    alone = name == "many queries" and target in (
        "sm_90",
        "sm_100",
    )  # one program each occupies the others less evenly
    kernels = ["whole_step_kernel"] if alone else STEP
    assert [launch.function.fn.__name__ for launch in found] == kernels
    assert_fit(found, target, "")


@pytest.mark.slow
def test_step_candidates_fit():
    """Over pages and over rows."""
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.native_sparse.triton import compiled as triton

    of_pages = example_problem_of(PAGES)(PAGES, *PAGED["decoding"])
    implementation = kernel_registry.get(PAGES, "triton")
    work = implementation.make_workload(of_pages)
    assert work is not None and work.launches is not None
    for config in implementation.load().candidates(of_pages, DEVICES["sm_90"])[:4]:
        assert config.step.block_k
        assert_fit(work.launches(config), "sm_90", "")
    rows, found = example_problem(OPERATION, *COMPILED["decoding"]), []

    def record(launch, inputs):
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    config, spec = triton.default_config(rows, DEVICES["sm_90"]), spec_of(rows)
    forward = lambda: triton.forward(make_arrays(rows, spec, 0), spec, config, save=False, execute=record)
    jax.eval_shape(forward)
    assert [launch.function.fn.__name__ for launch in found] == STEP
    assert_fit(found, "sm_90", "")


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
        example_problem(OPERATION, dims, "float32", flags)


COMPILED = {
    "plain": (dict(T=8192, H=64, K=4, D=128), "bfloat16", {}),
    "float32": (dict(T=4096, H=8, K=2, D=64), "float32", {}),
    "packed": (dict(T=4096, H=8, K=2, D=100, V=64, N=4), "float16", dict(packed=True, span=32, stride=16)),
    "decoding": (dict(B=4, T=1, S=65536, H=64, K=4, D=128), "bfloat16", dict(placed=True)),
}


@pytest.mark.parametrize(
    "target, name",
    [
        pytest.param(t, n, marks=[] if (t, n) == ("sm_90", "packed") else pytest.mark.slow)
        for t in DEVICES
        for n in COMPILED
    ],
)
def test_defaults_fit(target, name):
    """Without spills, but for float32 on older devices, and for the gradient of keys on Hopper, whose fewer warps are faster nevertheless."""
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.native_sparse.triton import compiled as triton
    from ejkernel_eqx.launch import compile_ahead

    problem, device = example_problem(OPERATION, *COMPILED[name]), DEVICES[target]
    assert triton.unsupported(problem, device) is None
    configs = triton.candidates(problem, device)
    assert configs[0] == triton.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    found = launches(problem, configs[0])
    own = [launch for launch in found if ".native_sparse." in launch.label]
    kernels = [launch.function.fn.__name__ for launch in own]
    # By blocks, by queries, and by queries whose blocks are split over programs.
    by_blocks = name in ("plain", "packed") and target != "gfx942"
    forward = ["block_forward_kernel", "merge_blocks_kernel"] if by_blocks else ["forward_kernel"]
    forward += ["merge_blocks_kernel"] if name == "decoding" and target != "gfx942" else []
    importance = "page_importance_kernel" if name == "decoding" else "importance_kernel"
    choose = "choose_one_kernel" if name == "decoding" else "choose_kernel"  # among 1024 blocks
    assert kernels == [
        importance, choose, *forward, "query_gradient_kernel", "key_gradient_kernel", *["combine_kernel"] * 2
    ]  # fmt: skip
    others = [launch.label for launch in found if launch not in own]
    few = sum(".paged." in label for label in others)  # the forward of two branches, in parts that are merged
    assert (len(others) - few, few) == ((2 * 2, 4) if name == "decoding" else (2 * 3, 0))
    if by_blocks:  # without a gradient, with the sum of the branches
        plain = launches(problem, configs[0], save=False)
        gated = [launch for launch in plain if launch.constants.get("GATED")]
        assert gated
        own += gated[:1]
    for launch in own:
        report = compile_ahead(launch, target)
        most = 32 if target == "sm_90" and launch.function.fn.__name__ == "key_gradient_kernel" else 0
        assert report.fits and (report.spills <= most or name == "float32"), (launch.label, report)


def launches(problem, config, save=True):
    """What forward and backward launch, in order; without `save` what the forward does."""
    from ejkernel_eqx.attention.native_sparse.triton import compiled as triton

    spec, found = spec_of(problem), []

    def record(launch, inputs):
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def both(arrays, cotangents):
        saved = triton.forward(arrays, spec, config, save=save, execute=record)
        saved.pop("out")
        if not save:
            return saved
        return triton.backward(arrays, spec, config, saved, cotangents, execute=record)

    jax.eval_shape(both, *jax.eval_shape(lambda: tuple(make_inputs(problem, spec, 0))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_candidates_fit(name):
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.native_sparse.triton import compiled as triton
    from ejkernel_eqx.launch import compile_ahead

    problem = example_problem(OPERATION, *COMPILED[name])
    for config in triton.candidates(problem, DEVICES["sm_90"]):
        own = [launch for launch in launches(problem, config) if ".native_sparse." in launch.label]
        assert all(compile_ahead(launch, "sm_90").fits for launch in own)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.native_sparse.triton import compiled as triton

    device = DEVICES["sm_90"]
    refused = {
        "not float64": (dict(T=9, H=2, D=8), "float64", {}),
        "head dims": (dict(T=9, H=2, D=300), "float32", {}),
        "heads a key head": (dict(T=9, H=256, K=1, D=8), "float32", {}),
        "blocks of up to": (dict(T=9, H=2, D=8), "float32", dict(block=512)),
    }
    for word, problem in refused.items():
        assert word in str(triton.unsupported(example_problem(OPERATION, *problem), device))
