"""Latent attention's expanded form on a TPU: the interpreted cases and larger ones by the compiled kernels.

Nothing here has run yet: its authors have no TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import causal, cotangents, lse_of, normal, with_gradients
from tests.latent.cases import exact_expanded
from tests.latent.test_pallas import CASES
from tests.tolerances import assert_close

if jax.default_backend() != "tpu":
    pytest.skip("needs a TPU", allow_module_level=True)

pytestmark = pytest.mark.tpu
attention = functools.partial(ejx.MultiHeadLatentAttention, platform="pallas")


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_numpy(case):
    CASES[case](attention)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(128, 64, 128), (64, 32, 64), (24, 8, 40)], ids=str)
def test_many_tiles(dims, dtype):
    """Results and gradients, and the same bits when run again."""
    nope, rope, values = dims
    shapes = {"q": (5, nope + rope), "k": (5, nope), "k_rope": (rope,), "v": (5, values)}
    given = {
        name: normal(n, 1, 1500, *rest, dtype=jnp.dtype(dtype))
        for n, (name, rest) in enumerate(shapes.items())
    }
    op = lse_of(attention(causal=True))
    run = jax.jit(lambda *args: with_gradients(lambda a: op(**a), *args))
    dout, dlse = cotangents(given)
    found, again = run(given, dout, dlse), run(given, dout, dlse)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    expected, grads = exact_expanded(given, dout, dlse, causal(1500, 1500))
    for x, y in zip(found[0], expected, strict=True):
        assert_close(x, y, dtype)
    for name, x in found[1].items():
        assert_close(x, grads[name], dtype, "gradient", name=name)
