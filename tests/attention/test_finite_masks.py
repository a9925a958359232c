"""A bias is a number: only minus infinity and masks hide a key, however low a finite bias is."""

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.tolerances import assert_close

PLATFORMS = ["xla", "triton-interpret", "pallas-interpret"]


@pytest.fixture(params=PLATFORMS)
def platform(request):
    if request.param == "triton-interpret":
        pytest.importorskip("triton")
    return request.param


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_the_lowest_number(platform, dtype):
    """As masks are written that are added to scores. Query 2 sees nothing else; query 4 sees keys 3 and 4, query 5 none."""
    lowest = float(jnp.finfo(dtype).min)
    bias = np.zeros((6, 6))
    bias[2], bias[4, :3], bias[5] = lowest, lowest, -np.inf
    q, k, v = (normal(i, 1, 6, 2, 16) for i in range(3))
    out, lse = ejx.flash_attention(
        q, k, v, bias=jnp.asarray(bias, dtype)[None, None], causal=True, return_lse=True, platform=platform
    )
    expected = np.asarray(v, np.float64)[0]
    assert_close(out[0, 2], expected[:3].mean(0))
    scores = np.einsum("hd,jhd->hj", np.asarray(q, np.float64)[0, 4], np.asarray(k, np.float64)[0, 3:5]) / 4
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert_close(out[0, 4], np.einsum("hj,jhd->hd", weights, expected[3:5]))
    assert np.all(np.asarray(out[0, 5]) == 0) and np.all(np.isneginf(lse[0, 5]))
    assert np.all(np.isfinite(lse[0, :5])) and np.all(np.asarray(lse[0, 2]) < -1e38)


def test_a_highest_number_takes_all(platform):
    bias = jnp.zeros((1, 1, 3, 3)).at[..., 1, 0].set(float(jnp.finfo(jnp.float32).max))
    q, k, v = (normal(i, 1, 3, 2, 16) for i in range(3))
    out = ejx.flash_attention(q, k, v, bias=bias, causal=True, platform=platform)
    assert_close(out[0, 1], v[0, 0])
