"""Latent attention's expanded form on a TPU: the interpreted cases and larger ones by the compiled kernels, and every candidate.

Nothing here has run yet: its authors have no TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.latent.workload import example_problem
from tests.attention.dense import causal, cotangents, lse_of, normal, with_gradients
from tests.latent.cases import exact_expanded
from tests.latent.test_pallas import CASES
from tests.tolerances import assert_close, errors

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


def test_every_candidate():
    operation = "multi_head_latent_attention"
    problem = example_problem(operation, dict(B=1, T=2048, H=4, D=192, V=128, Dr=64), "bfloat16", {})
    implementation = kernel_registry.get(operation, "pallas")
    work = implementation.make_workload(problem)
    assert work is not None
    inputs = work.make_inputs(5)
    reference = work.reference(inputs)
    for config in implementation.load().candidates(problem, device_facts()):
        actual = jax.jit(work.run, static_argnums=1)(inputs, config)
        for name, allowed in work.tolerances.items():
            measured = errors(actual[name], reference[name])
            assert measured.rms <= allowed.rms and measured.peak <= allowed.peak, (config, name, measured)
