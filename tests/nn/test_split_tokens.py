"""Recurrent layers over tokens that are split over a mesh axis: the numbers of one device, gradients of weights included."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET, normal
from tests.nn.checks import needs_triton
from tests.tolerances import assert_close

AXIS = "sequence"
DIMS: Any = {"head_dim": 4, "v_head_dim": 4}
LAYERS: dict[str, Any] = {
    "gla": functools.partial(ejx.nn.GatedLinearAttention, 8, num_heads=2, use_short_conv=True),
    "lightning": functools.partial(ejx.nn.LightningAttention, 8, num_heads=2, head_dim=4),
    "kimi": functools.partial(ejx.nn.KimiDeltaAttention, 8, num_heads=2, head_dim=4),
    "gated delta": functools.partial(ejx.nn.GatedDeltaNet, 8, num_k_heads=1, num_v_heads=2, **DIMS),
    "mamba1": functools.partial(ejx.nn.Mamba1Mixer, 8, state_size=4),
    "mamba2": functools.partial(ejx.nn.Mamba2Mixer, 8, state_size=4, head_dim=4),
    "rwkv6": functools.partial(ejx.nn.RWKV6TimeMix, 8, num_heads=2),
    "mamba3": functools.partial(ejx.nn.Mamba3Mixer, 8, state_size=4, head_dim=4, mimo_rank=2),
    "rwkv7": functools.partial(ejx.nn.RWKV7TimeMix, 8, head_dim=4, value_residual=False),
    "rwkv7 channels": functools.partial(ejx.nn.RWKV7ChannelMix, 8),
}


# Every layer, by turns on interpreted Triton, which stands for the kernels of GPUs.
CASES = [(name, INTERPRET if n % 2 else "xla") for n, name in enumerate(LAYERS)]


@pytest.mark.parametrize(
    ("name", "platform"),
    [pytest.param(*c, marks=() if c[0] == "lightning" else pytest.mark.slow) for c in CASES],
)
def test_numbers_of_one_device(name, platform):
    """Four devices with three tokens each, fewer than the convolutions reach back in a row that is mostly padding."""
    needs_triton(platform)
    key, tokens = jax.random.key(0), P(None, AXIS)
    mesh = jax.make_mesh((4,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:4])
    x, weight = normal(1, 2, 12, 8), normal(2, 2, 12, 8)
    mask = jnp.stack([jnp.arange(12) % 5 == 3, jnp.arange(12) < 10])
    x = jnp.where(mask[..., None], x, jnp.nan)

    def loss(layer: Any, x: Any, split: bool) -> Any:
        arrays, rest = eqx.partition(layer, eqx.is_array)

        def call(arrays: Any, x: Any, mask: Any) -> Any:
            layer = eqx.combine(arrays, rest)
            return layer(x, layer.init_state(2), padding_mask=mask)

        if split:
            call = jax.shard_map(call, mesh=mesh, in_specs=(P(), tokens, tokens), out_specs=(tokens, P()))
        y, state = call(arrays, x, mask)
        y = jnp.where(mask[..., None], y, 0)
        return jnp.sum(y * weight) + sum(jnp.sum(x) for x in jax.tree.leaves(state.recurrent)), (y, state)

    results = []
    for axis in (None, AXIS):
        layer = LAYERS[name](sequence_axis=axis, platform="xla" if axis is None else platform, key=key)
        gradient = eqx.filter_jit(
            eqx.filter_value_and_grad(functools.partial(loss, split=axis is not None), has_aux=True)
        )
        results.append(gradient(layer, x))
    (one, one_grads), (over, over_grads) = results
    for expected, found in zip(jax.tree.leaves(one[1]), jax.tree.leaves(over[1]), strict=True):
        assert_close(found, expected)
    expected, found = (jax.tree_util.tree_leaves_with_path(grads) for grads in (one_grads, over_grads))
    for (path, a), (_, b) in zip(found, expected, strict=True):
        assert_close(a, b, kind="gradient", name=str(path))
