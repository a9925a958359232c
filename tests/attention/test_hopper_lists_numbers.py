"""Numbers of Hopper's forward kernel over lists of tiles without a Hopper: its own code, with threads for its warps."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Mask
from ejkernel_eqx.attention.arguments import MaskInputs, resolve, ScoreInputs, ScoreOptions
from tests.attention import hopper_forward_emulation
from tests.attention.hopper_forward_emulation import assert_agrees
from tests.attention.test_hopper import configured, needs_gluon, triton
from tests.attention.test_xla import run_reference

TILE = triton.TileConfig(128, 128, 4, 2, 0, 2)  # two programs, each with several tiles of queries
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
    scores = ScoreOptions(logits_soft_cap=case.soft_cap), ScoreInputs(sinks=sinks)
    return resolve(q, k, v, scores[0], case.mask, MaskInputs(), scores[1], return_lse=True)


CASES = {
    "details, sinks": Listed(DETAILS, sinks=(0.5, 4.0)),
    "blocks": Listed(BLOCKS),  # a tile of queries sees no key
    "blocks, sinks": Listed(BLOCKS, 510, 500, sinks=(-80.0, 6.0), dtype="float16"),
    "details, float16": Listed(DETAILS, dtype="float16"),
    "details 64": Listed(DETAILS, dim=64),
    "soft cap": Listed(DETAILS, soft_cap=20.0),
    "soft cap, float16": Listed(BLOCKS, 510, 500, soft_cap=20.0, dtype="float16"),
    "less than sums wait for": Listed(BLOCKS, 512, 512, growth=3.0),
    "about as much": Listed(BLOCKS, 512, 512, growth=7.0, dtype="float16"),
    "more": Listed(BLOCKS, 512, 512, growth=30.0),
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
    arrays, spec = arrays_of(case)
    assert spec.listed
    run = hopper_forward_emulation.Device().run
    out, lse = triton.forward(arrays, spec, configured(TILE), execute=run)
    expected = run_reference(arrays, jnp.zeros_like(out), jnp.zeros_like(lse), spec)
    assert_agrees((out, lse), expected, case.dtype)
