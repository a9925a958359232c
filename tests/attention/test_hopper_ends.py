"""How tiles of queries follow one another in Hopper's forward kernel, and sums that are scaled late: numbers by emulation, and what compiles."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.launch import compile_ahead
from tests.attention import hopper_forward_emulation
from tests.attention.cases import Case, make, poison
from tests.attention.test_hopper import (
    _waits,
    call,
    CAUSAL,
    configured,
    EVERYTHING,
    HOPPER,
    launches,
    needs_gluon,
    problem,
    sass,
    triton,
)
from tests.attention.test_xla import cotangents, run_reference
from tests.tolerances import assert_close

# Two programs, so that each has several tiles of queries.
APART = triton.TileConfig(128, 128, 4, 2, 0, 2)
JOINED = dataclasses.replace(APART, hopper_ends="joined")
BY_WARP = dataclasses.replace(APART, hopper_ends="joined_by_warp")
ONE_LOOP = dataclasses.replace(APART, hopper_ends="one_loop")
PATIENT = dataclasses.replace(JOINED, hopper_patience=8)
TILES = {
    "apart": APART,
    "joined": JOINED,
    "by warp": BY_WARP,
    "one loop": ONE_LOOP,
    "joined, patient": PATIENT,
}


def odd(**more: Any) -> Case:
    return Case(**{**dict[str, Any](B=1, T=330, S=330, H=2, K=1, D=128, V=128), **more})


def emulated(arrays: Any, spec: Any, tile: Any, at_once: int = 1) -> Any:
    run = hopper_forward_emulation.Device(at_once).run
    return triton.forward(arrays, spec, configured(tile), execute=run)


EMULATED = {
    "causal": odd(right=0),
    "segments and sinks": odd(B=2, T=300, S=300, segments=True, sinks="BH"),
    "window": odd(T=400, S=520, left=140, right=20, offset=120),
    "causal 64": odd(T=330, S=420, D=64, V=64, right=0, offset=90),
    "without a mask": odd(T=256, S=384),
    "keys past the end": odd(T=300, S=290),
    "one key": odd(S=1),
    "soft cap": odd(right=0, soft_cap=3.0),
    "soft cap, window": odd(left=100, right=0, soft_cap=20.0, dtype="float16"),
    "soft cap, sinks": odd(right=0, soft_cap=20.0, sinks="1H"),
    "queries without keys": odd(T=400, S=100, left=20, right=0, offset=-100),
    "lengths 80": odd(B=3, T=200, S=300, D=80, V=72, rows="lengths"),
    "packed": odd(T=400, S=400, rows="packed"),
    "packed, soft cap": odd(T=400, S=400, rows="packed", soft_cap=20.0),
    "scattered": odd(T=300, rows="scattered"),
    "segments, window 64": odd(S=390, D=64, V=64, B=2, segments=True, left=200, right=0, offset=60),
    "segments, scattered ranges": odd(T=260, S=300, segments=True, rows="scattered", H=1),
}


@needs_gluon
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if i < 2 else pytest.mark.slow)
        for i, (name, case) in enumerate(EMULATED.items())
    ],
)
def test_results(case, tile):
    """The kernels' own code, with threads for its warps; NaN in what is hidden changes nothing."""
    if TILES[tile].hopper_patience and case.soft_cap:
        pytest.skip("refused")
    case = dataclasses.replace(case, dtype="bfloat16" if case.dtype == "float32" else case.dtype)
    arrays, spec = make(case)
    expected = run_reference(arrays, *cotangents(case), spec)
    out, lse = emulated(arrays, spec, TILES[tile])
    assert_close(out, expected.out, case.dtype, name="out")
    assert_close(lse, expected.lse, case.dtype, name="lse")
    if case.segments or case.rows:
        poisoned = emulated(poison(case, arrays), spec, TILES[tile])
        for a, b in zip((out, lse), poisoned, strict=True):
            np.testing.assert_array_equal(a, b)


@needs_gluon
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ends", ["joined", "joined_by_warp", "one_loop"])
def test_however_many_programs_stages_and_keys(ends, seed):
    """Bit for bit what tiles apart give."""
    rng = np.random.default_rng(seed)
    queries, keys = (int(x) for x in rng.integers(128, 700, 2))
    left, right = (None if x < 0 else int(x) for x in rng.choice([-1, 0, 200], 2))
    case = odd(
        B=2, T=queries, S=keys, D=64, V=64, dtype="bfloat16", left=left, right=right, offset=keys - queries,
        segments=bool(rng.random() < 0.4),
    )  # fmt: skip
    arrays, spec = make(case)
    programs, at_once = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    tile = dataclasses.replace(
        APART,
        block_k=int(rng.choice([64, 128])),
        num_stages=int(rng.integers(1, 5)),
        hopper_programs=programs,
    )
    expected = emulated(arrays, spec, tile)
    actual = emulated(arrays, spec, dataclasses.replace(tile, hopper_ends=ends), at_once)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_gluon
@pytest.mark.parametrize("growth", [0.2, 7.0, 30.0])
def test_patience_with_maxima_that_grow(growth):
    """Scores grow from tile to tile of keys, from the last to the first, by so many units of log2: less than the patience, about it, more."""
    case = odd(T=128, S=640, D=64, V=64, H=1, dtype="bfloat16")
    arrays, spec = make(case)
    step = growth * np.log(2) / 128 / spec.scale / 4
    rising = jnp.asarray(-step * np.arange(case.S), jnp.bfloat16)[None, :, None]
    arrays = arrays._replace(q=arrays.q.at[..., :4].set(1.0), k=arrays.k.at[..., :4].set(rising[..., None]))
    expected = run_reference(arrays, *cotangents(case), spec)
    out, lse = emulated(arrays, spec, PATIENT)
    assert_close(out, expected.out, "bfloat16", name="out")
    assert_close(lse, expected.lse, "bfloat16", name="lse")


@needs_gluon
@pytest.mark.parametrize(
    "of, expected",
    [
        (
            problem(**CAUSAL),
            {("apart", 0), ("joined", 0), ("joined_by_warp", 0), ("joined", 8), ("apart", 8)},
        ),
        (
            problem(64, with_=("segments",)),
            {("apart", 0), ("joined", 0), ("joined_by_warp", 0), ("joined", 8), ("apart", 8)},
        ),
        (problem(logits_soft_cap=30.0), {("apart", 0), ("joined", 0), ("joined_by_warp", 0)}),
        (problem(256), {("apart", 0), ("apart", 8)}),
        (problem(block_size=(128, 128)), {("apart", 0)}),
        (problem(with_=("bias",)), {("apart", 0)}),
    ],
)
def test_what_is_timed(of, expected):
    """All that fits; the default is none of it, since it was not measured."""
    configs = triton.candidates(of, HOPPER)
    assert {(c.forward.hopper_ends, c.forward.hopper_patience) for c in configs} == expected
    assert configs[0].forward.hopper_ends == "apart" and not configs[0].forward.hopper_patience
    assert all(triton.config_unsupported(config, of, HOPPER) is None for config in configs)


@pytest.mark.parametrize(
    "of, tile, words",
    [
        (call(256), dataclasses.replace(JOINED, block_k=64), "hopper_ends='apart' at head dims of 256"),
        (call(64), dataclasses.replace(JOINED, block_q=192), "tiles of 192 queries"),
        (call(64), dataclasses.replace(BY_WARP, num_stages=5), "up to 4 stages"),
        (call(logits_soft_cap=3.0), PATIENT, "hopper_patience=0 beside a soft cap"),
        (call(block_size=(128, 128)), JOINED, "one loop for lists"),
    ],
)
def test_what_is_refused(of: Any, tile, words):
    with pytest.raises(ValueError, match=words):
        launches(of[0], of[1], configured(tile))


def test_other_kernels_have_no_such_ends():
    with pytest.raises(ValueError, match="hopper_ends='apart' and hopper_patience=0 without hopper_programs"):
        triton.TileConfig(64, 64, 4, 2, hopper_ends="joined")
    with pytest.raises(
        ValueError,
        match=r"TileConfig\.hopper_ends: expected 'apart', 'joined', 'joined_by_warp' or 'one_loop'",
    ):
        dataclasses.replace(APART, hopper_ends="together")
    backward = triton.TileConfig(64, 128, 4, 2, 0, 1, "joined")
    config = dataclasses.replace(configured(), key_gradient=backward)
    reason = triton.config_unsupported(config, problem(), HOPPER)
    assert reason is not None and "hopper_ends='apart'" in reason


COMPILED: dict[str, Any] = {
    "causal 128": (call(**CAUSAL), "joined", 0, 0),
    "causal 128, by warp": (call(**CAUSAL), "joined_by_warp", 0, 0),
    "segments 128, by warp": (call(with_=("segments",), **CAUSAL), "joined_by_warp", 0, 32),
    "causal 128, one loop": (call(**CAUSAL), "one_loop", 0, 0),
    "causal 128, patient": (call(**CAUSAL), "joined", 8, 0),
    "window 128, patient, apart": (call(left=255, **CAUSAL), "apart", 8, 0),
    "window 128": (call(left=255, **CAUSAL), "joined", 0, 0),
    "segments 128": (call(with_=("segments",), **CAUSAL), "joined", 0, 32),
    "segments 128, one loop": (call(with_=("segments",), **CAUSAL), "one_loop", 0, 0),
    "soft cap 128": (call(logits_soft_cap=30.0, **CAUSAL), "joined", 0, 32),
    "everything 128": (call(**EVERYTHING), "joined", 0, 48),
    "full 128": (call(queries=1024, keys=1024), "joined", 0, 0),
    "causal 64": (call(64, **CAUSAL), "joined", 0, 0),
    "segments 64": (call(64, with_=("segments",), **CAUSAL), "joined", 8, 0),
    "everything 64": (call(64, **EVERYTHING), "joined", 0, 0),
    "rows 96": (call(96, "float16", with_=("rows",)), "joined", 0, 40),
}


@needs_gluon
@pytest.mark.parametrize(
    "of, ends, patience, spills",
    [
        pytest.param(*of, id=name, marks=() if i < 1 else pytest.mark.slow)
        for i, (name, of) in enumerate(COMPILED.items())
    ],
)
def test_what_compiles(of: Any, ends: str, patience: int, spills: int):
    """Products run beside each other, and softmaxes under them: none of it behind the wait for the product before. What is spilled are addresses and
    numbers of tiles, none of the loop over keys' scores or sums."""
    stages = 4 if of[0].q.shape[-1] == 64 else 2
    tile = triton.TileConfig(128, 128, 4, stages, 0, 132, ends, patience)
    *_, launch = launches(of[0], of[1], configured(tile))
    report = compile_ahead(launch, "sm_90")
    assert report.fits and report.spills <= spills and report.registers <= 168, report
    assert not _waits(launch)
    text = sass(launch)
    # Of each product of scores: the powers of two up to the wait for the product of weights beside it, and from there up to the next products.
    found = [
        (under.count("MUFU.EX2"), behind.count("MUFU.EX2"))
        for under, behind in re.findall(r"gsb0, 0x1 ;(.*?)gsb0, 0x0 ;(.*?)(?=HGMMA|$)", text, re.DOTALL)
    ]
    # Of each consumer, the first tile of keys and the others; in one loop there is no difference.
    assert len(found) == (2 if ends == "one_loop" or ends == "apart" else 4)
    constants = launch.constants
    plain = not constants["GUARD"] or (constants["BLOCK_V"] == 64 and constants["RIGHT"] == 0 and constants["LEFT"] < 0)  # fmt: skip
    option = constants["SEGMENTS"] or constants["ROWS"] or constants["CAP"] > 0
    hidden = found if not plain or option else found[::2]
    assert all(under >= 64 and behind <= 2 for under, behind in hidden)


@needs_gluon
@pytest.mark.slow
def test_the_estimate_of_shared_memory():
    for dim, stages in ((64, 4), (128, 2)):
        for ends in ("joined", "one_loop"):
            of = call(dim, with_=("segments",), **CAUSAL)
            tile = triton.TileConfig(128, 128, 4, stages, 0, 132, ends)
            report = compile_ahead(launches(of[0], of[1], configured(tile))[-1], "sm_90")
            assert report.shared <= triton.hopper.shared_memory(tile, problem_of("flash_attention", *of))
