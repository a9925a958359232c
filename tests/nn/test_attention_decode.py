"""Caches and padding: whatever way the tokens come in, each gets what the whole sequence at once gives it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import LinearScaling, MultiHeadAttention, RotaryEmbedding, YarnScaling
from tests.arrays import normal
from tests.nn.checks import in_pieces
from tests.tolerances import assert_close

EMBED, TOKENS, ROWS = 24, 14, 3
YARN = RotaryEmbedding(8, scaling=YarnScaling(32.0, 4096, truncate=False))
BIASES = {"use_qkv_bias": True, "use_output_bias": True}
OPTIONS = {
    "plain": {},
    "mha, no rope": {"num_kv_heads": 4, "rope": None},
    "mqa, interleaved": {"num_kv_heads": 1, "rope": RotaryEmbedding(8, interleaved=True, rotary_dim=4)},
    "window": {"sliding_window": 4, "rope": RotaryEmbedding(8, scaling=LinearScaling(2.0))},
    "cap and norm": {"logits_soft_cap": 2.0, "qk_norm": True},
    "sinks, biases, yarn": {"sinks": True, "sliding_window": 6, "rope": YARN, **BIASES},
    "gate, V != D": {"output_gate": True, "v_head_dim": 6},
    "alibi": {"alibi": True, "rope": None},
    "norm of all heads": {"qk_norm": "all", "num_kv_heads": 1},
}


def _layer(name, **changes):
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": RotaryEmbedding(8)}
    layer = MultiHeadAttention(EMBED, **(options | OPTIONS[name] | changes), key=jax.random.key(0))
    if layer.sinks is None:
        return layer
    return eqx.tree_at(lambda m: m.sinks, layer, jnp.array([0.5, -1.0, 2.0, 0.0]))


def _x(tokens=TOKENS, rows=ROWS):
    return normal(1, (rows, tokens, EMBED))


@eqx.filter_jit
def _call(layer, x, cache=None, **arrays):
    return layer(x, cache, **arrays)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_and_steps_equal_the_full_pass(name):
    layer, x = _layer(name), _x()
    # A prompt, a chunk on top of a filled cache, then token by token.
    y, cache = in_pieces(layer, x, (5, 4, *[1] * 5), layer.init_cache(ROWS, 20))
    assert cache.lengths.tolist() == [TOKENS] * ROWS
    assert_close(y, _call(layer, x), name=name)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("plain", "left"),
        ("sinks, biases, yarn", "right"),
        ("window", "both"),
        ("gate, V != D", "both"),
        ("alibi", "left"),
    ],
)
def test_padded_prompts_then_rows_at_different_positions(name, side):
    layer, x = _layer(name), _x()
    lengths, width = [7, 1, 4], 8
    before = {"left": [width - n for n in lengths], "right": [0, 0, 0], "both": [1, 3, 2]}[side]
    prompt = np.full((ROWS, width, EMBED), np.nan, np.float32)
    real = np.zeros((ROWS, width), bool)
    for row, (start, n) in enumerate(zip(before, lengths)):
        prompt[row, start : start + n] = x[row, :n]
        real[row, start : start + n] = True
    full = _call(layer, x)
    prompt, real = jnp.asarray(prompt), jnp.asarray(real)
    y, cache = _call(layer, prompt, layer.init_cache(ROWS, 16), padding_mask=real)
    at_once = _call(layer, prompt, padding_mask=real)
    for row, (start, n) in enumerate(zip(before, lengths)):
        assert_close(y[row, start : start + n], full[row, :n], name=f"{name}, cached, row {row}")
        assert_close(at_once[row, start : start + n], full[row, :n], name=f"{name}, row {row}")
    for step in range(6):
        # The second row pauses in the third step: an empty chunk leaves it where it is.
        active = np.array([True, step != 2, True])
        at = [n + step - (1 if row == 1 and step > 2 else 0) for row, n in enumerate(lengths)]
        token = jnp.stack([x[row, at[row]] for row in range(ROWS)])[:, None]
        y, cache = _call(layer, token, cache, padding_mask=jnp.asarray(active)[:, None])
        for row in np.flatnonzero(active):
            assert_close(y[row, 0], full[row, at[row]], name=f"{name}, step {step}, row {row}")
    assert cache.lengths.tolist() == [13, 6, 10]


def test_mask_and_bias_with_a_cache_span_its_slots():
    layer, x = _layer("plain"), _x()
    bias = normal(4, (4, TOKENS, TOKENS))
    mask = jax.random.bernoulli(jax.random.key(5), 0.7, (TOKENS, TOKENS)) | jnp.eye(TOKENS, dtype=bool)
    cache, pieces = layer.init_cache(ROWS, TOKENS), []
    for t in range(0, TOKENS, 2):
        y, cache = _call(layer, x[:, t : t + 2], cache, bias=bias[None, :, t : t + 2], mask=mask[t : t + 2])
        pieces.append(y)
    assert_close(jnp.concatenate(pieces, axis=1), _call(layer, x, bias=bias[None], mask=mask))


def test_bfloat16_cache_keeps_the_layers_dtype():
    layer, x = _layer("plain"), _x()
    y, cache = _call(layer, x, layer.init_cache(ROWS, TOKENS, dtype=jnp.bfloat16))
    assert y.dtype == jnp.float32 and cache.v.dtype == jnp.bfloat16
    assert_close(y, _call(layer, x), jnp.bfloat16)


# Of a layer that is not causal, only one whose window ends with the query's own key takes a cache.
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"causal": False, "sliding_window": (None, 0)}])
def test_slots_not_yet_written_are_never_read(options):
    layer, x = _layer("plain", **options), _x()
    cache = layer.init_cache(ROWS, TOKENS)
    real = jnp.arange(8)[None] < jnp.array([8, 3, 5])[:, None]
    _, cache = _call(layer, x[:, :8], cache, padding_mask=real)
    unused = (jnp.arange(TOKENS)[None] >= cache.lengths[:, None])[..., None, None]
    spoiled = [jnp.where(unused, jnp.nan, stored) for stored in (cache.k, cache.v)]
    poisoned = eqx.tree_at(lambda c: [c.k, c.v], cache, spoiled)
    y, _ = _call(layer, x[:, 8:9], poisoned)
    for row, n in enumerate([8, 3, 5]):
        alone = jnp.concatenate([x[row, :n], x[row, 8:9]])
        assert_close(y[row, 0], _call(layer, alone)[-1], name=f"row {row}")
