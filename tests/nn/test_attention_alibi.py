"""Linear biases, and the log-sum-exp of the scores."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import RaggedBatch
from ejkernel_eqx.nn import alibi_slopes, MultiHeadAttention
from tests.arrays import normal
from tests.nn import published
from tests.nn.checks import needs_triton, refuses
from tests.tolerances import assert_close

EMBED, TOKENS = 24, 11


def _layer(heads=3, **changes):
    options = {"num_heads": heads, "head_dim": 8, "alibi": True}
    return MultiHeadAttention(EMBED, **(options | changes), key=jax.random.key(0))


@eqx.filter_jit
def _call(layer, x, cache=None, **given):
    return layer(x, cache, **given)


def _x(*shape, dtype=jnp.float32):
    return normal(1, shape, dtype)


def _expected(layer, x, slopes):
    """One row, dense: `(y, lse [T, H])`."""
    weights = {f"{name}_proj.weight": getattr(layer, f"{name}_proj").weight for name in "qkvo"}
    q, k, v = (published.heads(weights, f"{name}_proj", x, layer.num_heads) for name in "qkv")
    distance = jnp.asarray(np.arange(len(x))[None] - np.arange(len(x))[:, None], x.dtype)
    biases = jnp.asarray(slopes, x.dtype)[:, None, None] * distance[None]
    scores = jnp.einsum("ihd,jhd->hij", q, k) / math.sqrt(8) + biases
    scores = jnp.where(distance[None] > 0, -jnp.inf, scores)
    out = jnp.einsum("hij,jhd->ihd", jax.nn.softmax(scores), v).reshape(len(x), -1)
    return published.output(weights, out), jax.nn.logsumexp(scores, axis=-1).T


def test_slopes_are_the_published_ones():
    # `build_alibi_tensor` of `transformers` 5.23 (BLOOM) for the same numbers of heads.
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-h for h in range(1, 9)], rtol=1e-12)
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8], rtol=1e-12)
    np.testing.assert_allclose(alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2], rtol=1e-12)
    twelve = [*(2.0**-h for h in range(1, 9)), *(2.0**-h for h in (0.5, 1.5, 2.5, 3.5))]
    np.testing.assert_allclose(alibi_slopes(12), twelve, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("slopes", [None, (0.5, 0.25, -1.0)])
def test_scores_and_lse(enable_x64, slopes):
    layer = _layer(alibi=True if slopes is None else slopes, dtype=jnp.float64)
    x = _x(2, TOKENS, EMBED, dtype=jnp.float64)
    slopes = alibi_slopes(3) if slopes is None else slopes
    expected, expected_lse = jax.vmap(lambda x: _expected(layer, x, slopes))(x)
    y, lse = jax.jit(lambda x: layer(x, return_lse=True))(x)
    assert_close(y, expected)
    assert_close(lse, expected_lse)
    assert_close(jax.vmap(layer)(x), expected)
    loss = lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)
    assert_close(loss(layer), loss(jax.vmap(lambda x: _expected(layer, x, slopes)[0])), kind="gradient")


@pytest.mark.slow
def test_lse_with_a_cache():
    layer, x = _layer(), _x(2, TOKENS, EMBED)
    _, expected = _call(layer, x, return_lse=True)
    _, cache, first = _call(layer, x[:, :4], layer.init_cache(2, 16), return_lse=True)
    _, _, second = _call(layer, x[:, 4:], cache, return_lse=True)
    assert_close(jnp.concatenate([first, second], 1), expected)


@pytest.mark.parametrize(
    "alibi, platform", [(True, "xla"), pytest.param(False, "triton-interpret", marks=pytest.mark.slow)]
)
def test_pages(alibi, platform):
    needs_triton(platform)
    layer, x = _layer(alibi=alibi, platform=platform), _x(TOKENS, EMBED)
    lens = [7, 3]
    batch = RaggedBatch.build(lens, lens, [[5, 2], [0]], page_size=4)
    packed = jnp.concatenate([x[:7], x[:3]])
    y, cache, lse = _call(layer, packed, layer.init_paged_cache(8, 4), batch=batch, return_lse=True)
    expected, expected_lse = _call(_layer(alibi=alibi), x, return_lse=True)
    assert_close(y, jnp.concatenate([expected[:7], expected[:3]]))
    assert_close(lse, jnp.concatenate([expected_lse[:7], expected_lse[:3]]))
    decode = RaggedBatch.build([1, 1], [8, 4], [[5, 2], [0]], page_size=4)
    y, cache = _call(layer, x[jnp.asarray([7, 3])], cache, batch=decode)
    assert_close(y, expected[jnp.asarray([7, 3])])
    none = RaggedBatch.build([], [], [], page_size=4)
    y, cache, lse = _call(layer, x[:0], cache, batch=none, return_lse=True)
    assert y.shape == (0, EMBED) and lse.shape == (0, 3)


ERRORS = {
    "alibi: expected False in a layer with causal=False": {"causal": False},
    "alibi: expected True, False or 3 slopes": {"alibi": (0.5, 0.5)},
    r"alibi\[1\]: expected a finite number": {"alibi": (0.5, math.nan, 0.5)},
}


test_errors = refuses(ERRORS, lambda wrong: _layer(**wrong))
