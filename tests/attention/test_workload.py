"""What the tuner is given: inputs that are of their very problem, results that agree with the plain mathematics, and their cost."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.attention.dense import quick
from tests.attention.inner import (
    BOTH,
    example_problem,
    FORWARD,
    kernel_registry,
    Platform,
    Problem,
    problem_of,
    samples,
    visibility,
    Workload,
    workload,
    XlaConfig,
    XlaTile,
)  # fmt: skip
from tests.tolerances import errors

OPERATION = "flash_attention"


def problem(dtype: str = "float32", flags: dict[str, Any] | None = None, **dims: int) -> Problem:
    return example_problem(OPERATION, dict(B=2, T=40, H=4, K=2, D=16) | dims, dtype, flags or {})


def work(of: Problem, platform: str = "xla") -> Workload:
    implementations = {i.platform.value: i for i in kernel_registry.ordered(of.operation)}
    made = implementations[platform].make_workload(of)
    assert made is not None
    return made


def check(work: Workload, config: Any, expected: set[str]) -> None:
    """Every result within its tolerance of the reference, and not by being empty."""
    inputs = work.make_inputs(3)
    actual, reference = quick(work.run, static_argnums=1)(inputs, config), work.reference(inputs)
    assert set(actual) == set(reference) == set(work.tolerances) == expected
    for name, allowed in work.tolerances.items():
        measured = errors(actual[name], reference[name])
        assert measured.rms <= allowed.rms and measured.peak <= allowed.peak, (name, measured)
        assert np.isfinite(np.asarray(reference[name])).any() and np.asarray(reference[name]).any(), name


EVERYTHING = dict(
    bias="HTS",
    mask="1TS",
    sinks=True,
    alibi_slopes=True,
    dropout=True,
    soft_cap=True,
    lse=True,
    segments=True,
)
KINDS = {
    "windowed": problem(flags=dict(window=9, sinks=True), S=64),
    "documents": problem(flags=dict(segments=True, bias="H11")),
    "packed": problem("float16", dict(rows=True, bias="1T1", lse=True), B=1, V=24),
    "cached keys": problem("bfloat16", dict(rows=True, alibi_slopes=True), T=8, S=64),
    "everything": problem("bfloat16", EVERYTHING, S=56),
    "pattern": problem(flags=dict(tiles="1/2", causal=False), T=256, S=384),
    "map": problem(flags=dict(block_size="64,32", causal=False, sinks=True), T=128),
}
LEARNED = ("bias", "sinks", "alibi_slopes")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    arrays, spec = samples.make_inputs(wanted, 0).arrays, samples.spec_of(wanted)
    found = problem_of(OPERATION, arrays, spec)
    assert (found, found.key()) == (wanted, wanted.key())
    # A dense mask hides, but no kernel can pass over what it hides.
    seen = quick(visibility, static_argnums=1)(arrays._replace(mask=None), spec)[:, 0]
    assert samples.visible_scores(wanted) == seen.sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["packed", "everything"])
def test_xla_agrees_with_the_reference(name):
    of = KINDS[name]
    learned = {"q", "k", "v", *(flag for flag in LEARNED if of.flag(flag))}
    forward = {"out", "lse"} if of.flag("lse") else {"out"}
    tuned = work(of)
    assert set(tuned.forward) == forward
    assert [part.field for part in tuned.parts] == ["forward", "backward"]
    assert set(tuned.parts[1].results) == learned
    check(tuned, XlaConfig(XlaTile(32, 16), XlaTile(16, 32)), forward | learned)


def test_the_triton_kernels_agree_with_the_reference():
    from tests.attention.tritons import TileConfig, TritonConfig

    of = problem(flags=dict(bias="HTS", sinks=True, segments=True, lse=True), B=1, T=32, H=2, K=1)
    tuned = work(of, "triton-interpret")
    assert {part.field: part.results for part in tuned.parts} == {
        "forward": ("out", "lse"),
        "key_gradient": ("q", "k", "v"),
        "query_gradient": ("q", "bias", "sinks"),
    }
    forward, keys, queries = (TileConfig(*sizes, 4, 1) for sizes in ((32, 16), (16, 32), (16, 16)))
    check(tuned, TritonConfig(forward, keys, queries), {"out", "lse", "q", "k", "v", "bias", "sinks"})


def test_the_reference_never_holds_all_scores():
    tuned = work(problem(B=2, T=512, H=8, K=4))
    lowered = jax.jit(tuned.reference).lower(jax.eval_shape(lambda: tuned.make_inputs(0)))
    analysis = lowered.compile().memory_analysis()
    scores = 4 * 512 * 512
    # Of two query heads at once a handful of matrices, not those of sixteen rows of batch and heads.
    assert analysis is not None and analysis.temp_size_in_bytes < 2 * 7 * scores + 8 * 2**20 < 16 * 2 * scores


def test_launches_are_those_of_the_configuration():
    from tests.attention.tritons import TileConfig, TritonConfig

    config = TritonConfig(TileConfig(64, 32, 4, 2), TileConfig(32, 128, 8, 3), TileConfig(128, 16, 4, 1))
    launches = work(problem("bfloat16", dict(bias="HTS"), T=100), "triton").launches
    assert launches is not None
    found = {launch.label.rpartition(".")[2].removesuffix("_kernel"): launch for launch in launches(config)}
    assert set(found) == {"forward", "key_gradient", "query_gradient", "bias_gradient"}
    for name, launch in found.items():
        tile = getattr(config, name.replace("bias", "query"))
        used = (launch.constants["BQ"], launch.constants["BK"], launch.num_warps, launch.num_stages)
        assert used == (tile.block_q, tile.block_k, tile.num_warps, tile.num_stages)
    assert work(problem(), "xla").launches is None


def test_costs():
    costs = work(problem("bfloat16", T=64, K=4)).costs
    scores, heads = 2 * 64 * 65 // 2, 4
    assert costs[FORWARD].flops == 4 * scores * heads * 16 and costs[BOTH].flops == 3.5 * costs[FORWARD].flops
    one = 2 * 64 * heads * 16 * 2  # bytes of q, k, v, out or a cotangent of one
    lse = 2 * 64 * heads * 4
    assert costs[FORWARD].bytes == 4 * one + lse and costs[BOTH].bytes == 8 * one + 2 * lse


def test_nothing_to_tune():
    for operation, platform in (("attention", Platform.XLA), (OPERATION, Platform.CUDA)):
        implementation = next(i for i in kernel_registry.ordered(operation) if i.platform is platform)
        assert implementation.make_workload(problem()) is None


# A problem from a few words


def test_defaults_and_words():
    plain = example_problem(OPERATION, dict(T=64, H=8, D=32), "bfloat16", {})
    assert dict(plain.dims) == dict(B=1, T=64, S=64, H=8, K=8, D=32, V=32) and plain.flag("causal") is True
    assert {name for name, value in plain.flags if value} == {"causal", "top_left", "window"}
    windowed = example_problem(
        OPERATION, dict(T=64, H=8, D=32), "bfloat16", dict(window="9,4", causal=False, bias=True)
    )
    assert windowed.flag("window") == (9, 4) and windowed.flag("bias") == "HTS"
    assert example_problem(OPERATION, dict(T=8, S=64, H=8, D=32), "float32", {}).flag("top_left") is False
    aligned = example_problem("scaled_dot_product_attention", dict(T=8, S=64, H=8, D=32), "float32", {})
    assert aligned.flag("top_left") is True and aligned.flag("unseen") is True


@pytest.mark.parametrize(
    "dims, flags, words",
    [
        (dict(T=8, H=2), {}, ["T, H, D", "missing ['D']"]),
        (dict(T=8, H=2, D=16, X=3), {}, ["unknown ['X']"]),
        (dict(T=8, H=3, K=2, D=16), {}, ["H to be a multiple of K", "K=2"]),
        (dict(T=8, H=2, D=16), dict(casual=True), ["bias, block_size, causal", "received casual"]),
        (dict(T=8, H=2, D=16), dict(bias="TH"), ["'HTS'", "for bias", "'TH'"]),
        (dict(T=8, H=2, D=16), dict(tiles="1/3"), ["1/2, 1/4", "'1/3'"]),
        (dict(T=8, H=2, D=16), dict(block_size="64,0"), ["'queries,keys'", "'64,0'"]),
    ],
)
def test_words_that_do_not_fit(dims, flags, words):
    with pytest.raises(ValueError) as caught:
        workload.example_problem(OPERATION, dims, "float32", flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)
