"""Two projections as one product give what each gives alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.models.config import MLPConfig
from ejkernel_eqx.models.layer import MLP
from ejkernel_eqx.nn import projection
from tests.tolerances import assert_close


@pytest.mark.parametrize("use_bias", [False, True])
def test_gate_and_up_at_once(use_bias, monkeypatch):
    mlp = MLP(8, MLPConfig(12, use_bias=use_bias), key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))

    def products(mlp, x):
        text = str(jax.make_jaxpr(jax.grad(lambda x: mlp(x).sum()))(x))
        return eqx.filter_value_and_grad(lambda both: (both[0](both[1]) ** 2).sum())((mlp, x)), text.count(
            "dot_general["
        )

    (value, grads), apart = products(mlp, x)
    monkeypatch.setattr(projection, "MANY_TOKENS", 6)
    (found, others), together = products(mlp, x)
    assert together == (apart if use_bias else apart - 2)
    assert_close(found, value)
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        assert_close(a, b, kind="gradient")
    assert jnp.isfinite(value)
