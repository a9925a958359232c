"""Every layer as people use it in Equinox: leading axes, `vmap`, stacks in a scan, gradients beside padding, saving."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.nn import recurrent_layers
from tests.nn.layers import build, LAYERS, stacked
from tests.nn.recurrent_layers import inputs
from tests.tolerances import assert_close

SPANS = [(0, 4), (2, 6)]
REAL = np.array([[a <= t < b for t in range(7)] for a, b in SPANS])
DEFAULT = ("attention", "lightning")
by_layer = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in LAYERS]
)


def _agree(found, expected, kind: Any = "forward"):
    name = jax.tree_util.keystr
    close = lambda path, x, y: assert_close(x, y, kind=kind, name=name(path))
    jax.tree_util.tree_map_with_path(close, found, expected)


@by_layer
def test_leading_axes_vmap_and_scan(name):
    """Two layers, one behind the other and side by side: over any leading axes, mapped, and stacked in a scan with their states or caches."""
    arrays, static = eqx.partition(stacked(name, 2), eqx.is_array)
    x = inputs(6, 5).reshape(2, 3, 5, -1)

    @jax.jit
    def everything(arrays, x):
        first, second = (eqx.combine(jax.tree.map(lambda a: a[i], arrays), static) for i in range(2))  # noqa: B023
        both = lambda x: second(first(x))
        body = lambda x, own: eqx.combine(own[0], static)(x, own[1])
        start, caches = jax.lax.scan(body, x[..., :4, :], (arrays, first.init_cache((2, 2, 3), 5)))
        end, caches = jax.lax.scan(body, x[..., 4:, :], (arrays, caches))
        side_by_side = jax.vmap(lambda arrays, x: eqx.combine(arrays, static)(x))(arrays, x)
        found = jnp.concatenate([start, end], -2), jax.vmap(jax.vmap(both))(x), both(x[1, 2]), side_by_side
        whole = both(x)
        return found, (whole, whole, whole[1, 2], jnp.stack([first(x[0]), second(x[1])]))

    _agree(*everything(arrays, x))


@by_layer
def test_gradients_of_padded_and_of_mapped_rows(name):
    """Those of the rows alone, of every parameter; with NaN for padding."""
    x = inputs(2, 7)
    alone = jnp.stack([row[a:b] for row, (a, b) in zip(x, SPANS)])
    learned, rest = eqx.partition(build(name), eqx.is_inexact_array)

    @jax.jit
    def everything(learned, x, alone):
        def loss(learned, x, real=None, mapped=False):
            layer = eqx.combine(learned, rest)
            y = jax.vmap(layer)(x) if mapped else layer(x, padding_mask=real)
            return jnp.sum(jnp.sin(y if real is None else jnp.where(real[..., None], y, 0)))

        gradient = jax.grad(loss)
        return [gradient(learned, x, REAL), gradient(learned, alone, mapped=True)], gradient(learned, alone)

    found, expected = everything(learned, jnp.where(REAL[..., None], x, jnp.nan), alone)
    for gradient in found:
        _agree(gradient, expected, "gradient")
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(expected))


@by_layer
def test_serialises(name):
    layer, file = build(name), io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    other = lambda: jax.tree.map(lambda a: a + 1 if eqx.is_inexact_array(a) else a, build(name))
    for like in (other(), eqx.filter_eval_shape(other)):
        file.seek(0)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, like), layer)


@pytest.mark.parametrize("name", LAYERS)
def test_static_fields_and_platforms(name):
    """Static fields hold no arrays, and the platform reaches every kernel."""
    layer = eqx.filter_eval_shape(lambda: LAYERS[name](platform="xla", key=jax.random.key(0)))
    hash(jax.tree.structure(layer))
    is_kernel = lambda node: isinstance(node, ejx.Kernel)
    kernels = [node for node in jax.tree.leaves(layer, is_leaf=is_kernel) if is_kernel(node)]
    assert kernels and all(str(kernel.plan.snapshot.requested) == "xla" for kernel in kernels)


def test_layers_of_a_stack_know_their_place():
    """Each lightning layer has its own slopes, though they are stacked; its place is no parameter."""
    sizes: Any = {"num_heads": 4, "num_layers": 3, "key": jax.random.key(0)}
    make = lambda i: ejx.nn.LightningAttention(24, layer_index=i, **sizes)
    slopes = [ejx.lightning_slopes("minimax", 4, index, 3) for index in range(3)]
    layers = eqx.filter_jit(eqx.filter_vmap(make))(jnp.arange(3))
    np.testing.assert_allclose(eqx.filter_vmap(lambda layer: layer.slopes())(layers), slopes, rtol=1e-6)
    assert "layer_index" not in recurrent_layers.parameters(layers)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, layers)
    assert half.layer_index.dtype == jnp.int32
