"""What numpy is asked in the place of XLA (`tests/shortcuts.py`) is what JAX itself gives, bit for bit, and it is not asked where programs are
counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compilations import compilations
from tests.shortcuts import no_shortcuts

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
HALF = jnp.bfloat16
SMALL = {
    "array": lambda: jnp.asarray(X),
    "integers of 64 bits": lambda: jnp.asarray(np.arange(5)),
    "zeros": lambda: jnp.zeros((2, 3), jnp.bfloat16),
    "a weak number": lambda: jnp.full((2, 3), 2.0),
    "count": lambda: jnp.arange(7),
    "rounded": lambda: jnp.asarray(X).astype(jnp.bfloat16),
    "cut off": lambda: jnp.asarray(X).astype(jnp.int8),
    "shorter integers": lambda: jnp.arange(250, 260).astype(jnp.int8),
    "last": lambda: jnp.asarray(X)[-1, ..., 1:],
    "steps": lambda: jnp.asarray(X)[:, ::2, None],
    "turned": lambda: jnp.asarray(X).T.reshape(6, 4),
    "joined": lambda: jnp.concatenate([jnp.asarray(X), jnp.ones((2, 1, 4), jnp.float32)], axis=1),
    "pieces": lambda: jnp.split(jnp.asarray(X), 2)[1],
    "a product that is rounded": lambda: jnp.asarray(X, HALF) * jnp.asarray(X + 1, HALF),
    "a sum too large for its integers": lambda: jnp.arange(3).astype(jnp.int8) + jnp.int8(126),
    "a number of Python": lambda: 1 - 3 * jnp.asarray(X),
    "chosen": lambda: jnp.where(jnp.asarray(X) > 1, jnp.asarray(X), 0.5),
    "clipped": lambda: jnp.clip(jnp.asarray(X), 1.0, 2.0),
    "compared": lambda: ~((jnp.asarray(X) > 1) & (jnp.asarray(X) != 2)),
    "largest, with NaN": lambda: jnp.max(jnp.asarray(X).at[0, 0, 0].set(jnp.nan), axis=(0, 2)),
    "largest of nothing": lambda: jnp.max(jnp.zeros((2, 0)), initial=-jnp.inf),
    "how many": lambda: jnp.sum(jnp.asarray(X) > 1, axis=1),
    "a sum of floats": lambda: jnp.sum(jnp.asarray(X)),
    "a weak result": lambda: 2 * jnp.asarray(3.0),
    "a program": lambda: jax.jit(lambda x: (x + 1, x[0]))(jnp.asarray(X))[1],
    "mapped": lambda: jax.vmap(lambda x: jnp.broadcast_to(x[0], (5, 4)))(jnp.asarray(X)),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_as_by_jax(name, wide):
    with jax.enable_x64(wide):
        found = SMALL[name]()
        with no_shortcuts():
            expected = SMALL[name]()
    assert found.aval == expected.aval and found.weak_type == expected.weak_type
    assert found.sharding == expected.sharding and found.committed == expected.committed
    np.testing.assert_array_equal(found, expected)


def test_programs_are_counted():
    with compilations() as found:
        jax.block_until_ready(jnp.zeros((3, 1, 5, 1, 2, 7)) + 1)
    assert len(found) == 2


def test_results_may_be_donated():
    x = jnp.zeros(5000)
    place = x.unsafe_buffer_pointer()
    assert jax.jit(lambda x: jnp.sin(x) + 1, donate_argnums=0)(x).unsafe_buffer_pointer() == place


def test_nothing_is_taken_from_where_it_was_placed():
    """Numpy's results are on no mesh, and on the default device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = jax.device_put(X, jax.NamedSharding(mesh, jax.P("x")))
    assert placed.reshape(2, 12).sharding.spec == jax.P("x", None)
    second = jax.device_put(X, jax.devices()[1])
    assert second[0].devices() == {jax.devices()[1]}


def test_numbers_drawn_are_even():
    drawn = np.asarray(jax.random.bits(jax.random.key(0), (64, 1000)))
    ones = np.unpackbits(drawn.view(np.uint8), axis=None).mean()
    assert abs(ones - 0.5) < 0.005 and len(np.unique(drawn)) > 0.9999 * drawn.size
    keys = jax.random.split(jax.random.key(1), 200)
    rows = np.asarray(jax.vmap(lambda key: jax.random.normal(key, (100,)))(keys), np.float64)
    assert abs(rows.mean()) < 0.03 and abs(rows.std() - 1) < 0.03
    for related in (np.corrcoef(rows), np.corrcoef(rows.T)):
        assert np.abs(related - np.eye(len(np.atleast_1d(related)))).max() < 0.6
