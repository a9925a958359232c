"""Positions along several axes: images and videos."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import MultiHeadAttention, RotaryEmbedding
from tests.arrays import normal
from tests.nn import published
from tests.nn.checks import refuses
from tests.tolerances import assert_close

POSITIONS = np.array([[0, 1, 1, 1, 2], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]])
# Which axis each pair turns by, as `Qwen2VLRotaryEmbedding` and `Qwen3VLTextRotaryEmbedding` of `transformers` have it.
AXES = {
    "blocks": ((2, 3, 3), False, [0, 0, 1, 1, 1, 2, 2, 2]),
    "by turns": ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
}


@pytest.mark.parametrize("name, interleaved", [("blocks", False), ("by turns", True)])
def test_each_pair_turns_by_its_axis(enable_x64, name, interleaved):
    section, turns, axes = AXES[name]
    sections: Any = {"mrope_section": section, "mrope_interleaved": turns}
    rope = RotaryEmbedding(20, rotary_dim=16, **sections, interleaved=interleaved)
    x = normal(0, (5, 2, 20), jnp.float64)
    rotate = published.rotate_neighbours if interleaved else published.rotate_halves
    frequencies = published.inverse_frequencies(16, 10000.0)
    along = [rotate(x[..., :16], frequencies, positions) for positions in POSITIONS]
    pairs = np.repeat(axes, 2) if interleaved else np.tile(axes, 2)
    is_its = [jnp.broadcast_to(pairs == axis, (5, 2, 16)) for axis in range(3)]
    expected = jnp.select(is_its, along)
    actual = rope(x, jnp.asarray(POSITIONS))
    assert_close(actual[..., :16], expected, name=name)
    assert np.array_equal(actual[..., 16:], x[..., 16:])


def test_text_and_rows():
    rope, plain = RotaryEmbedding(16, mrope_section=(2, 3, 3)), RotaryEmbedding(16)
    x = normal(0, (3, 5, 2, 16))
    assert np.array_equal(rope(x, offset=7), plain(x, offset=7))
    assert np.array_equal(rope(x, jnp.arange(5)), plain(x))
    rows = jnp.asarray(POSITIONS[:, None] + np.array([[0], [10], [20]]))  # [3, B, T]
    expected = jnp.stack([rope(x[i], rows[:, i]) for i in range(3)])
    assert np.array_equal(rope(x, rows), expected)
    assert np.array_equal(rope(x, jnp.asarray(POSITIONS)[:, None])[1], rope(x[1], jnp.asarray(POSITIONS)))
    assert_close(jax.jit(jax.vmap(rope, (0, 1)))(x, rows), expected)


@pytest.mark.slow
def test_in_the_layer():
    rope = RotaryEmbedding(8, mrope_section=(2, 1, 1))
    layer = MultiHeadAttention(16, num_heads=2, rope=rope, key=jax.random.key(0))
    x = normal(1, (2, 5, 16))
    positions = jnp.asarray(POSITIONS[:, None] + np.array([[0], [3]]))
    y = layer(x, positions=positions)
    assert_close(y[1], layer(x[1], positions=positions[:, 1]))
    assert not np.allclose(y, layer(x))
    _, cache = layer(x[:, :3], layer.init_cache(2, 5), positions=positions[..., :3])
    later, _ = layer(x[:, 3:], cache, positions=positions[..., 3:])
    assert_close(later, y[:, 3:])
    with pytest.raises(ValueError, match=r"positions: expected \[3, ..., T\], a position .* \(2, 5\)"):
        layer(x, positions=positions[0])


WIDE = (jnp.zeros((4, 1, 16)), jnp.zeros((3, 3), int))
ERRORS = {
    "mrope_section: expected two or more .* = 8": lambda: RotaryEmbedding(16, mrope_section=(2, 3)),
    r"received \(8,\)": lambda: RotaryEmbedding(16, mrope_section=(8,)),
    r"received \(10, -2\)": lambda: RotaryEmbedding(16, mrope_section=(10, -2)),
    "mrope_interleaved: expected False": lambda: RotaryEmbedding(16, mrope_interleaved=True),
    "no axis with more pairs than the first": lambda: RotaryEmbedding(16, mrope_section=(2, 3, 3), mrope_interleaved=True),
    r"positions: expected \[3, ..., T\] .* \(3, 4\), received shape \(3, 3\)": lambda: RotaryEmbedding(16, mrope_section=(2, 3, 3))(*WIDE),
}  # fmt: skip


test_errors = refuses(ERRORS)
