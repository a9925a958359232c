"""Numbers of Hopper's forward kernels without a Hopper: their own code, with threads for its warps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention import hopper_forward_emulation
from tests.attention.cases import Case, make, poison
from tests.attention.hopper_forward_emulation import assert_agrees
from tests.attention.test_hopper import call, CAUSAL, configured, launches, needs_gluon, tile_sizes, triton
from tests.attention.test_xla import cotangents, run_reference

# Two programs, so that each has several tiles of queries.
TILE, WIDE, TALL = (
    triton.TileConfig(*size, 0, 2) for size in ((128, 128, 4, 2), (128, 64, 4, 2), (192, 128, 4, 2))
)


def odd(**more: Any) -> Case:
    sizes = dict[str, Any](B=1, T=330, S=330, H=2, K=1, D=128, V=128, dtype="bfloat16")
    return Case(**{**sizes, **more})


def emulated(arrays: Any, spec: Any, tile: Any = None) -> Any:
    run = hopper_forward_emulation.Device().run
    tile = tile or (TILE if arrays.q.shape[-1] <= 128 else WIDE)
    return triton.forward(arrays, spec, configured(tile), execute=run)


CASES = {
    "causal": odd(right=0),
    "segments and sinks": odd(B=2, T=300, S=300, segments=True, sinks="BH"),
    "window": odd(T=400, S=520, left=140, right=20, offset=120),
    "causal 64": odd(T=330, S=420, D=64, V=64, right=0, offset=90),
    "without a mask": odd(T=256, S=384),
    "causal 256": odd(T=200, S=300, D=256, V=256, right=0, offset=100),
    "keys past the end": odd(T=300, S=290),
    "one key": odd(S=1),
    "soft cap": odd(right=0, soft_cap=3.0),
    "soft cap, window": odd(left=100, right=0, soft_cap=20.0, dtype="float16"),
    "soft cap, sinks": odd(right=0, soft_cap=20.0, sinks="1H"),
    "queries without keys": odd(T=400, S=100, left=20, right=0, offset=-100),
    "lengths 80": odd(B=3, T=200, S=300, D=80, V=72, rows="lengths"),
    "packed": odd(T=400, S=400, rows="packed"),
    "packed, float16": odd(T=400, S=400, rows="packed", dtype="float16"),
    "packed, soft cap": odd(T=400, S=400, rows="packed", soft_cap=20.0),
    "scattered": odd(T=300, rows="scattered"),
    "segments, window 64": odd(S=390, D=64, V=64, B=2, segments=True, left=200, right=0, offset=60),
    "segments, scattered ranges": odd(T=260, S=300, segments=True, rows="scattered", H=1),
}


@needs_gluon
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if i < 1 else pytest.mark.slow)
        for i, (name, case) in enumerate(CASES.items())
    ],
)
def test_results(case):
    """NaN in what is hidden changes nothing."""
    arrays, spec = make(case)
    expected = run_reference(arrays, *cotangents(case), spec)
    found = emulated(arrays, spec)
    assert_agrees(found, expected, case.dtype)
    if case.segments or case.rows:
        for a, b in zip(found, emulated(poison(case, arrays), spec), strict=True):
            np.testing.assert_array_equal(a, b)


@needs_gluon
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"right": 0, "sinks": "1H"}, {"left": 150, "right": 30}], ids=str)
def test_three_consumers(options):
    """Of tiles of 192 queries."""
    case = odd(T=500, S=420, D=40, V=64, **options)
    arrays, spec = make(case)
    expected = run_reference(arrays, *cotangents(case), spec)
    assert_agrees(emulated(arrays, spec, TALL), expected, case.dtype)


@needs_gluon
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "growth", [pytest.param(0.2, marks=pytest.mark.slow), 7.0, pytest.param(30.0, marks=pytest.mark.slow)]
)
def test_maxima_that_grow(growth, dtype):
    """Scores grow from tile to tile of keys, from the last to the first, by so many units of log2: less than sums wait for, about it, more."""
    case = odd(T=128, S=640, H=1, dtype=dtype, right=640)  # hides nothing
    arrays, spec = make(case)
    assert tile_sizes.patience(case.D, None, True) == 8
    step = growth * np.log(2) / 128 / spec.scale / 4
    rising = jnp.asarray(-step * np.arange(case.S), dtype)[None, :, None]
    arrays = arrays._replace(q=arrays.q.at[..., :4].set(1.0), k=arrays.k.at[..., :4].set(rising[..., None]))
    expected = run_reference(arrays, *cotangents(case), spec)
    assert_agrees(emulated(arrays, spec), expected, dtype)


@needs_gluon
@pytest.mark.parametrize(
    "of, patience",
    [
        (call(**CAUSAL), 8),
        (call(), 0),
        (call(with_=("segments",)), 8),
        (call(96, left=100), 8),
        (call(logits_soft_cap=30.0, **CAUSAL), 0),
        (call(64, **CAUSAL), 0),
        (call(256), 8),
        (call(256, **CAUSAL), 8),
    ],
)
def test_where_sums_wait(of: Any, patience: int):
    """Where it was measured to pay."""
    tile = TILE if of[0].q.shape[-1] <= 128 else WIDE
    *_, launch = launches(of[0], of[1], configured(tile))
    assert launch.constants["PATIENCE"] == patience
