"""Numbers of Hopper's forward kernels without a Hopper: their own code, with threads for its warps."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Mask
from tests.attention.cases import Case, make, poison
from tests.attention.hopper import call, CAUSAL, configured, launches, needs_gluon, triton
from tests.attention.hopper_emulation import Device
from tests.attention.inner import MaskInputs, resolve, ScoreInputs, ScoreOptions
from tests.attention.kernels import assert_same, cotangents, run_reference
from tests.attention.tritons import tile_sizes
from tests.compiled import executed
from tests.tolerances import assert_close


def tile(block_q: int = 128, block_k: int = 128, stages: int = 2) -> Any:
    """Of two programs, so that each has several tiles of queries."""
    return triton.TileConfig(block_q, block_k, 4, stages, 0, 2)


def odd(**more: Any) -> Case:
    sizes = dict[str, Any](B=1, T=330, S=330, H=2, K=1, D=128, V=128, dtype="bfloat16")
    return Case(**{**sizes, **more})


def emulated(arrays: Any, spec: Any, tile: Any) -> Any:
    pytest.importorskip("ejkernel_eqx.attention.triton.hopper.forward_kernel", exc_type=ImportError)
    return executed(triton.forward, Device().run)(arrays, spec, configured(tile))


def assert_agrees(found: Any, expected: Any, dtype: Any) -> None:
    """Output and log-sums."""
    for name, x in zip(("out", "lse"), found, strict=True):
        assert_close(x, getattr(expected, name), dtype, name=name)


CASES = {
    "causal": (odd(right=0), tile()),
    "segments and sinks, one stage": (odd(B=2, T=300, S=300, segments=True, sinks="BH"), tile(stages=1)),
    "window, four stages": (odd(T=400, S=520, left=140, right=20, offset=120), tile(128, 64, 4)),
    "causal 256": (odd(T=200, S=300, D=256, V=256, right=0, offset=100), tile(128, 64)),
    "one key": (odd(S=1), tile()),
    "soft cap, window, queries without keys": (
        odd(S=100, left=100, right=0, offset=-100, soft_cap=20.0, dtype="float16"),
        tile(),
    ),
    "lengths 80": (odd(B=3, T=200, S=300, D=80, V=72, rows="lengths"), tile()),
    "packed": (odd(T=400, S=400, rows="packed"), tile()),
    "segments, scattered ranges": (odd(T=260, S=300, segments=True, rows="scattered", H=1), tile()),
    # Keys in two parts, and values in two.
    "keys of 192": (odd(T=200, S=300, D=192, V=128, right=0, offset=100), tile()),
    "segments, keys of 144": (odd(T=260, S=300, D=144, V=104, H=1, segments=True), tile(128, 64, 4)),
    "heads of 512": (odd(T=200, S=150, D=512, V=512), tile(128, 64, 1)),
    "packed, heads of 320": (odd(T=200, S=200, D=320, V=264, rows="packed"), tile(128, 32)),
    # Three consumers.
    "wide tiles": (odd(T=500, S=420, D=40, V=64, right=0, sinks="1H"), tile(192)),
    "wide tiles, window": (odd(T=500, S=390, D=64, V=64, left=150, right=30), tile(192, stages=3)),
}
QUICK = ("causal", "wide tiles", "keys of 192")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_results(name):
    """NaN in what is hidden changes nothing."""
    case, tile = CASES[name]
    arrays, spec = make(case)
    found = emulated(arrays, spec, tile)
    assert_agrees(found, run_reference(arrays, *cotangents(case), spec), case.dtype)
    if case.segments or case.rows:
        assert_same(found, emulated(poison(case, arrays), spec, tile))


@pytest.mark.few(1)
@pytest.mark.parametrize("growth, dtype", [(0.2, "float16"), (7.0, "bfloat16"), (30.0, "bfloat16")])
def test_maxima_that_grow(growth, dtype):
    """Scores grow from tile to tile of keys, from the last to the first, by so many units of log2: less than sums wait for, about it, more."""
    case = odd(T=128, S=640, H=1, dtype=dtype, right=640)  # hides nothing
    arrays, spec = make(case)
    assert tile_sizes.rescale_threshold(case.D, None, True) == 8
    step = growth * np.log(2) / 128 / spec.scale / 4
    rising = jnp.asarray(-step * np.arange(case.S), dtype)[None, :, None]
    arrays = arrays._replace(q=arrays.q.at[..., :4].set(1.0), k=arrays.k.at[..., :4].set(rising[..., None]))
    expected = run_reference(arrays, *cotangents(case), spec)
    assert_agrees(emulated(arrays, spec, tile()), expected, dtype)


@needs_gluon
@pytest.mark.parametrize(
    "of, threshold",
    [
        (call(**CAUSAL), 8),
        (call(), 0),
        (call(with_=("segments",)), 8),
        (call(logits_soft_cap=30.0, **CAUSAL), 0),
        (call(64, **CAUSAL), 0),
        (call(256), 8),
    ],
)
def test_where_sums_wait(of: Any, threshold: int):
    """Where it was measured to pay."""
    *_, launch = launches(of[0], of[1], configured(tile(128, 128 if of[0].q.shape[-1] <= 128 else 64)))
    assert launch.constants["RESCALE_THRESHOLD"] == threshold


# Lists of tiles


SOME = np.array(
    [[True, False, True, False], [False] * 4, [True, True, True, True], [False, True, False, False]]
)
BLOCKS = Mask.from_blocks(SOME, 128)
DETAILS = Mask.causal() & (Mask.sliding_window(100) | Mask.global_tokens(30))


@dataclasses.dataclass(frozen=True)
class Listed:
    mask: Any
    queries: int = 400
    keys: int = 400
    dim: int = 128
    dtype: str = "bfloat16"
    soft_cap: float | None = None
    sinks: tuple[float, ...] | None = None
    growth: float = 0.0
    """By how many units of log2 scores grow from a tile of keys to the next."""


def arrays_of(case: Listed) -> Any:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((2, length, heads, case.dim))
        for length, heads in ((case.queries, 2), (case.keys, 1), (case.keys, 1))
    )
    if case.growth:
        q[..., :4] = 1.0
        steps = case.growth * np.log(2) / 128 * case.dim**0.5 / 4 * np.arange(case.keys)
        k[..., :4] = steps[None, :, None, None]
    q, k, v = (jnp.asarray(x, case.dtype) for x in (q, k, v))
    sinks = None if case.sinks is None else jnp.asarray(case.sinks)
    scoring = ScoreInputs(sinks=sinks, return_lse=True)
    return resolve(q, k, v, ScoreOptions(logits_soft_cap=case.soft_cap), MaskInputs(case.mask), scoring)


LISTED = {
    "details, sinks": Listed(DETAILS, sinks=(0.5, 4.0)),
    # A tile of queries sees no key.
    "blocks, sinks": Listed(BLOCKS, 510, 500, sinks=(-80.0, 6.0), dtype="float16"),
    "details, soft cap, 64": Listed(DETAILS, dim=64, soft_cap=20.0),
    "less than sums wait for": Listed(BLOCKS, 512, 512, growth=3.0),
    "more": Listed(BLOCKS, 512, 512, growth=30.0),
}
STAGES = {"blocks, sinks": (64, 1), "more": (64, 4)}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LISTED)
def test_results_of_lists(name):
    arrays, spec = arrays_of(LISTED[name])
    assert spec.listed
    out, lse = emulated(arrays, spec, tile(128, *STAGES.get(name, (128, 2))))
    expected = run_reference(arrays, jnp.zeros_like(out), jnp.zeros_like(lse), spec)
    assert_agrees((out, lse), expected, LISTED[name].dtype)
