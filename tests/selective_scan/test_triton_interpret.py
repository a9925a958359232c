"""The Triton kernels, interpreted: a part of the cases, with chunks, splits and blocks that the lengths and channels cross."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.selective_scan import cases

pytest.importorskip("triton")
from ejkernel_eqx.selective_scan.triton.compiled import interpreted as triton_interpret
from ejkernel_eqx.selective_scan.triton.compiled import ScanTile, TritonConfig
from ejkernel_eqx.selective_scan.triton.step_kernel import StepTile


def config(chunk=8, block=8, splits=3, unroll=2, prefetch=0) -> TritonConfig:
    tile = ScanTile(block, 1, splits * 8, unroll, prefetch=prefetch)
    return TritonConfig(chunk, tile, tile, StepTile(4, 1))


def run(case: cases.Case, config: TritonConfig, save: bool = True) -> cases.Result:
    arrays, spec = cases.make(case)
    dout, dstate = cases.cotangents(case)
    arrays = cases.padded(case, arrays)
    results = triton_interpret.forward(arrays, spec, config)
    without = triton_interpret.forward(arrays, spec, config, save=False)
    seen = cases.in_sequence(case, arrays)
    for name, counts in (("out", seen), ("final_state", True)):
        first, second = (np.asarray(r[name]).astype(np.float32) for r in (results, without))
        np.testing.assert_array_equal(np.where(counts, first, 0), np.where(counts, second, 0))
    grads = triton_interpret.backward(arrays, spec, config, results, {"out": dout, "final_state": dstate})
    grads = {name: x.sum(0) if name in cases.SHARED else x for name, x in grads.items()}
    grads = {name: x.astype(getattr(arrays, name).dtype) for name, x in grads.items()}
    return cases.Result(results["out"], results["final_state"], grads)


@cases.over(cases.CASES, "plain", "segments")
def test_agrees_with_reference(case):
    case = dataclasses.replace(case, B=1, T=min(case.T, 21), N=min(case.N, 3))
    cases.assert_agrees(case, run(case, config()))


@cases.over(cases.named("everything", "segments", "offsets", "groups of packed", "one state"))
def test_states_that_stay_in_registers(case):
    """Three states in tiles of four, splits that the length does not fill, and as many states as the tile has."""
    case = dataclasses.replace(case, B=1, T=min(case.T, 21), N=min(case.N, 3))
    cases.assert_agrees(case, run(case, config(unroll=4, prefetch=2)))
    full = dataclasses.replace(case, N=4)
    cases.assert_agrees(full, run(full, config(unroll=4, prefetch=1)))


@cases.over(cases.lengths(8), "T9")
def test_lengths(case):
    cases.assert_agrees(case, run(case, config(prefetch=2)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk, block, splits", [(4, 8, 1), (16, 64, 2)])
def test_tiles(chunk, block, splits):
    """Rows and lanes in any proportion; cases.lengths that fill the chunks, and channels the blocks, without a mask."""
    case = cases.Case(B=1, T=16, I=16, N=2, z=True)
    cases.assert_agrees(case, run(case, config(chunk, block, splits, unroll=1, prefetch=2)))


def test_repeats_bit_for_bit():
    """Also where the next chunk is brought near meanwhile."""
    case = cases.Case(B=1, packing="segments", T=19, I=3, N=2, z=True)
    first, second = run(case, config()), run(case, config(prefetch=2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("field, value", [("prefetch", 3), ("summary_registers", -1), ("unroll", 0)])
def test_tile_refuses(field, value):
    with pytest.raises(ValueError, match=field):
        ScanTile(32, 1, 1, **{field: value})
