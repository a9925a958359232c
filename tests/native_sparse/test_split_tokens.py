"""Tokens that an explicit mesh splits: every device has all of them, and the results are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET, normal
from tests.tolerances import assert_close

T = 50  # blocks that no device has whole


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize("stride", [None, 8])
def test_as_on_one_device(platform, stride):
    mesh = jax.make_mesh((2,), ("tokens",))
    op = ejx.NativeSparseAttention(16, 2, 16, compression_stride=stride, platform=platform)
    q, k, v = (normal(n, 1, T, heads, 16) for n, heads in enumerate((4, 2, 2)))
    given = q, k, v, jax.nn.sigmoid(normal(3, 1, T, 4, 3)), jnp.asarray(np.arange(T) // 30)[None]
    loss = lambda q, k, v, gates, ids: jnp.sum(jnp.sin(op(q, k, v, gates, segment_ids=ids)))
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    expected = both(*given)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec(None, "tokens"))
        found = both(*(jax.device_put(x, split) for x in given))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(jax.device_get(a), b, kind="gradient")
