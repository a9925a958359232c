"""Masks and biases of different ranks together, under JAX's strict settings, which hold in all tests: no promotion between dtypes or ranks.
All are traced with their gradients; nothing is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET, normal, qkv

B, T, H = 2, 12, 4
IDS = jnp.array([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])
LENGTHS = jnp.array([12, 7])
CALLS: dict[str, dict[str, Any]] = {
    "segments of all rows": dict(segment_ids=IDS[0]),
    "prefix": dict(mask=ejx.Mask.prefix(jnp.array([3, 5])) & ejx.Mask.from_lengths(9, LENGTHS)),
    "dense": dict(mask=ejx.Mask.from_dense(np.tri(T, dtype=bool)) & ejx.Mask.from_segments(IDS)),
    "types": dict(mask=ejx.Mask.token_types(IDS) & ejx.Mask.from_segments(IDS[0])),
    "runs of types": dict(
        mask=ejx.Mask.token_types(IDS[0], runs=True) & ejx.Mask.from_lengths(None, LENGTHS)
    ),
    "two segments": dict(mask=ejx.Mask.from_segments(IDS[0]) & ejx.Mask.from_segments(IDS)),
    "bias of rows": dict(bias=normal(3, B, 1, 1, T), sinks=normal(4, H)),
    "bias, sinks, slopes": dict(bias=normal(3, T, T), sinks=normal(4, H, 2), alibi_slopes=normal(5, H)),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize("name", CALLS)
def test_attention(platform, name):
    given = {"mask": None, **CALLS[name]}
    mask = given.pop("mask")
    call = lambda given: ejx.FlashAttention(platform=platform)(**given, mask=mask)
    floats = {k: v for k, v in given.items() if k != "segment_ids"} | qkv(B, t=T, s=T)
    ids = {k: v for k, v in given.items() if k == "segment_ids"}
    jax.eval_shape(jax.grad(lambda floats: jnp.sum(call(floats | ids))), floats)
