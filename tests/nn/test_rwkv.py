"""RWKV-7's residual of values: layers after the first mix their values with those of the first, whatever way the tokens come in."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import nn, RaggedBatch
from tests.nn import published_recurrent as published
from tests.nn.checks import refuses
from tests.nn.recurrent_layers import build, inputs, LAYERS, parameters
from tests.tolerances import assert_close

KEY = jax.random.key(0)
TOKENS, WIDTH = 7, 12


@eqx.filter_jit
def run(layers, x, states=None, **tokens) -> Any:
    """Both layers on the same tokens, and their states."""
    states = (None, None) if states is None else states
    first, second = layers
    found = first(x, states[0], return_values=True, **tokens)
    (one, values), *left = found if states[0] is not None else (found,)
    other = second(x, states[1], v_first=values, **tokens)
    return ((one, other), None) if not left else ((one, other[0]), (left[0], other[1]))


def layers_of(dtype=jnp.float32):
    return build("rwkv7", dtype), build("rwkv7 residual", dtype, seed=1)


def starts(layers, rows):
    return tuple(layer.init_state(rows) for layer in layers)


def test_values_of_the_first_layer(enable_x64):
    layers, x = layers_of(jnp.float64), inputs(2, TOKENS, jnp.float64)
    found, _ = run(layers, x)
    renamed = LAYERS["rwkv7"].renamed
    first, second = ({renamed.get(n, n): np.asarray(v) for n, v in parameters(m).items()} for m in layers)
    for row, one, other in zip(np.asarray(x), *found):
        values = published.linear(first, "v_proj", row + published.shifted(row) * first["x_mix"][3])
        assert_close(one, published.rwkv7(first, row, heads=2, eps=1e-4)[0])
        assert_close(other, published.rwkv7(second, row, heads=2, eps=1e-4, v_first=values)[0])


@pytest.mark.slow
def test_pieces_and_padding():
    """In two pieces, the second token by token; beside padding of NaN."""
    layers, x = layers_of(), inputs(2, TOKENS)
    whole, last = run(layers, x, starts(layers, 2))
    before, states = run(layers, x[:, :5], starts(layers, 2))
    pieces = [before]
    for t in range(5, TOKENS):
        now, states = run(layers, x[:, t : t + 1], states)
        pieces.append(now)
    for found, expected in zip(zip(*pieces), whole):
        assert_close(jnp.concatenate(found, 1), expected)
    jax.tree.map(assert_close, states, last)

    real = np.array([[True] * TOKENS, [False, False] + [True] * (TOKENS - 2)])
    moved = x.at[1].set(jnp.concatenate([jnp.full((2, x.shape[-1]), jnp.nan), x[1, :-2]]))
    padded, _ = run(layers, moved, padding_mask=jnp.asarray(real))
    for found, expected in zip(padded, whole):
        assert_close(found[0], expected[0])
        assert_close(found[1, 2:], expected[1, :-2])


@pytest.mark.slow
def test_a_server():
    """New tokens of several sequences in one row, then one of each."""
    layers, x = layers_of(), inputs(2, TOKENS)
    whole, last = run(layers, x, starts(layers, 2))
    pages: Any = {"page_table": [[0], [1]], "page_size": 16, "state_indices": [2, 0]}
    batch = RaggedBatch.build([TOKENS - 1] * 2, [TOKENS - 1] * 2, **pages)
    packed = x[:, :-1].reshape(-1, x.shape[-1])
    packed = jnp.pad(packed, ((0, batch.num_tokens - len(packed)), (0, 0)), constant_values=jnp.nan)
    before, pools = run(layers, packed, starts(layers, 3), batch=batch)
    batch = RaggedBatch.build([1, 1], [TOKENS] * 2, **pages)
    now = jnp.pad(x[:, -1], ((0, batch.num_tokens - 2), (0, 0)), constant_values=jnp.nan)
    after, pools = run(layers, now, pools, batch=batch)
    for old, new, expected in zip(before, after, whole):
        assert_close(old[: 2 * (TOKENS - 1)].reshape(2, TOKENS - 1, -1), expected[:, :-1])
        assert_close(new[:2], expected[:, -1])
    for pool, state in zip(pools, last):
        assert_close(pool.recurrent[jnp.asarray([2, 0])], state.recurrent)
    empty = RaggedBatch.build([], [], page_table=np.zeros((0, 1), int), page_size=16, state_indices=[])
    first: Any = layers[0]
    (y, values), _ = first(x[0, :0], layers[0].init_state(3), batch=empty, return_values=True)
    assert y.shape == (0, x.shape[-1]) and values.shape == (0, WIDTH)


@pytest.mark.slow
def test_gradients_beside_padding():
    """Those of both layers are those without padding, whose values are NaN too."""
    layers, x = layers_of(), inputs(1, TOKENS)
    learned, rest = eqx.partition(layers, eqx.is_inexact_array)

    def loss(learned, x, real=None):
        ys, _ = run(eqx.combine(learned, rest), x, padding_mask=real)
        return sum(jnp.sum(jnp.sin(y if real is None else y[:, 2:])) for y in ys)

    padded = jnp.concatenate([jnp.full((1, 2, x.shape[-1]), jnp.nan), x], 1)
    real = jnp.asarray([[False, False] + [True] * TOKENS])
    found, expected = jax.grad(loss)(learned, padded, real), jax.grad(loss)(learned, x)
    jax.tree.map(lambda a, b: assert_close(a, b, kind="gradient"), found, expected)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(expected))


def _small(residual=True, **arrays):
    make = lambda: nn.RWKV7TimeMix(8, head_dim=4, value_residual=residual, key=KEY)
    return eqx.filter_eval_shape(lambda: make()(jnp.zeros((2, 3, 8)), **arrays))


ERRORS = {
    r"v_first: expected \(2, 3, 8\) for this layer and x, received None": lambda: _small(),
    r"v_first: expected None for this layer and x, received \(2, 3, 8\)": lambda: _small(False, v_first=jnp.zeros((2, 3, 8))),
    r"v_first: expected \(2, 3, 8\) for this layer and x, received \(2, 4, 8\)": lambda: _small(v_first=jnp.zeros((2, 4, 8))),
}  # fmt: skip


test_errors = refuses(ERRORS)
