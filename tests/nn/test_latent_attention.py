"""`nn.MultiHeadLatentAttention`: its formula, every way to decode, padding, pages, published weights and what it refuses."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import RaggedBatch
from ejkernel_eqx.latent.cost import expands, LatentSizes
from ejkernel_eqx.nn import MultiHeadLatentAttention, RotaryEmbedding, YarnScaling
from tests.attention.dense import INTERPRET
from tests.nn.checks import exact, in_pieces, needs_triton, refuses
from tests.nn.paged_layers import advance, inputs, PAGE, PAGES, poisoned, SEQUENCES, serve, TOKENS, unwritten
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

SIZES: dict[str, Any] = {"num_heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
YARN = YarnScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.7)
ROPE = RotaryEmbedding(4, interleaved=True, scaling=YARN)
LAYERS: dict[str, dict[str, Any]] = {
    "one query projection": {"v_head_dim": 5},
    "query lora, yarn, biases": {"q_lora_rank": 8, "rope": ROPE, "use_bias": True},
}
EXPANDS = "ejkernel_eqx.nn.latent_attention.expands"


@functools.cache
def build(name="one query projection", **changes):
    return MultiHeadLatentAttention(EMBED, **(SIZES | LAYERS[name] | changes), key=jax.random.key(1))


@functools.cache
def alone(name):
    return quick(lambda layer, x: layer(x))(build(name), inputs())


def by_hand(layer: Any, x: Any) -> np.ndarray:
    """One sequence `[T, E]`, in float64, head by head."""
    layer, x = exact((layer, jnp.asarray(x)))
    apply = lambda linear, x: x @ linear.weight.T + (0 if linear.bias is None else linear.bias)
    norm = lambda part, x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * part.weight
    turns = np.arange(len(x))[:, None] * layer.rope.frequencies()
    magnitude = 1.0 if layer.rope.scaling is None else layer.rope.scaling.magnitude
    phase = magnitude * np.exp(1j * turns)

    def turn(x):
        y = (x[:, 0::2] + 1j * x[:, 1::2]) * phase
        return np.stack([y.real, y.imag], -1).reshape(x.shape)

    q = x if layer.q_a_proj is None else norm(layer.q_a_layernorm, apply(layer.q_a_proj, x))
    q = apply(layer.q_proj or layer.q_b_proj, q).reshape(len(x), layer.num_heads, -1)
    both = apply(layer.kv_a_proj_with_mqa, x)
    latent = norm(layer.kv_a_layernorm, both[:, : layer.kv_lora_rank])
    rope = turn(both[:, layer.kv_lora_rank :])
    kv = apply(layer.kv_b_proj, latent).reshape(len(x), layer.num_heads, -1)
    own, outs = layer.qk_nope_head_dim, []
    factor = 1.0 if layer.rope.scaling is None else 0.1 * 0.7 * np.log(4.0) + 1
    for h in range(layer.num_heads):
        scores = q[:, h, :own] @ kv[:, h, :own].T + turn(q[:, h, own:]) @ rope.T
        scores = np.where(np.tri(len(x), dtype=bool), scores * (own + 4) ** -0.5 * factor**2, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(p / p.sum(-1, keepdims=True) @ kv[:, h, own:])
    return apply(layer.o_proj, np.concatenate(outs, -1))


@pytest.mark.parametrize("name", LAYERS)
def test_the_formula(name):
    layer, x = build(name), inputs()
    for row, y in zip(x, alone(name)):
        assert_close(y, by_hand(layer, row), "float32")


def test_keys_and_values_from_weights_apart_or_together(monkeypatch):
    """With many tokens the weights are split, with few what they give; all gradients agree."""
    layer, x = build(), inputs()

    def both(layer, x):
        return eqx.filter_value_and_grad(lambda given: jnp.sum(jnp.sin(given[0](given[1]))))((layer, x))

    found = [quick(both)(layer, x)]
    monkeypatch.setattr("ejkernel_eqx.nn.latent_attention.splits_weights", lambda _: False)
    found.append(quick(lambda layer, x: both(layer, x))(layer, x))
    first, second = (jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in found)
    for a, b in zip(first, second, strict=True):
        assert_close(a, np.asarray(b, np.float64), "float32", "gradient")


ONE, SEVERAL = LAYERS
TOKEN_BY_TOKEN = (1,) * TOKENS


@pytest.mark.parametrize(
    ("name", "chunks", "expands"),
    [
        (ONE, (4, 1, 5), True),
        pytest.param(ONE, TOKEN_BY_TOKEN, False, marks=pytest.mark.slow),
        pytest.param(SEVERAL, TOKEN_BY_TOKEN, True, marks=pytest.mark.slow),
        pytest.param(SEVERAL, (TOKENS,), False, marks=pytest.mark.slow),
    ],
)
def test_decoding_is_the_whole(name, chunks, expands, monkeypatch):
    """A prompt at once, in chunks and token by token, absorbed, and expanded and merged; what is not written yet is NaN."""
    monkeypatch.setattr(EXPANDS, lambda *_: expands)
    layer, x = build(name), inputs()
    y, _ = in_pieces(layer, x, chunks, unwritten(layer, TOKENS + 2))
    assert_close(y, alone(name), "float32")


@pytest.mark.parametrize("expands", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_never_matters(expands, monkeypatch):
    """Left, right and whole rows, filled with NaN, without a cache and into one; then a token for every row."""
    monkeypatch.setattr(EXPANDS, lambda *_: expands)
    layer, x, expected = build(), inputs(), alone("one query projection")
    first, count = np.array([3, 0, 0]), np.array([5, 8, 0])
    place = np.arange(9)
    real = (place >= first[:, None]) & (place < (first + count)[:, None])
    padded = np.full((SEQUENCES, 9, EMBED), np.nan, np.float32)
    for n in range(SEQUENCES):
        padded[n, real[n]] = np.asarray(x)[n, : count[n]]
    following = jnp.stack([x[n, count[n]] for n in range(SEQUENCES)])[:, None]

    @quick
    def call(padded, following):
        y, cache = layer(padded, layer.init_cache(SEQUENCES, 12), padding_mask=real)
        return layer(padded, padding_mask=real), y, cache.lengths, layer(following, cache)[0]

    *outputs, lengths, last = call(jnp.asarray(padded), following)
    np.testing.assert_array_equal(lengths, count)
    for n in range(SEQUENCES):
        assert_close(last[n, 0], expected[n, count[n]], "float32")
        for y in outputs:
            assert_close(y[n, real[n]], expected[n, : count[n]], "float32")


def test_segments_and_packed_sequences():
    layer, x, expected = build(), inputs(), alone("one query projection")
    packed = jnp.concatenate([x[0, :4], x[1, :3], x[2, : TOKENS - 7] * jnp.nan])
    ids, places = jnp.array([0] * 4 + [1] * 3 + [-1] * 3), jnp.array([0, 1, 2, 3, 0, 1, 2, 0, 0, 0])
    by_ids = layer(jnp.where(ids[:, None] < 0, 0, packed), segment_ids=ids, positions=places)
    for y in (layer(packed, cu_seqlens=jnp.array([0, 4, 7])), by_ids):
        assert_close(y[:4], expected[0, :4], "float32")
        assert_close(y[4:7], expected[1, :3], "float32")


@pytest.mark.parametrize(
    ("name", "platform", "expands"),
    [
        (SEVERAL, None, False),
        pytest.param(ONE, INTERPRET, True, marks=pytest.mark.slow),
        pytest.param(SEVERAL, INTERPRET, False, marks=pytest.mark.slow),
    ],
)
def test_pages(name, platform, expands, monkeypatch):
    """Chunks and decodes of several sequences in one batch, from shuffled pages; the rest of them is NaN."""
    needs_triton(platform)
    monkeypatch.setattr(EXPANDS, lambda *_: expands)
    layer = build(name, platform=platform)
    found = serve(advance(layer), poisoned(layer.init_paged_cache(PAGES, PAGE)), inputs())[0]
    assert_close(found, alone(name), "float32")


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_kernels_for_tpu(monkeypatch):
    """Interpreted: the gradients of whole sequences, and a prompt in a chunk and tokens, expanded and absorbed, from a cache and from pages."""
    layer, x, expected = build(platform="pallas-interpret"), inputs(), alone("one query projection")
    gradient = quick(jax.grad(lambda layer, x: (layer(x) ** 2).sum()))
    wanted = jax.tree.leaves(gradient(build(), x))
    for found, plain in zip(jax.tree.leaves(gradient(layer, x)), wanted, strict=True):
        assert_close(found, plain, "float32", "gradient")
    cache, pages, outs = layer.init_cache(SEQUENCES, 16), layer.init_paged_cache(2 * SEQUENCES, 8), []
    tables = np.random.default_rng(0).permutation(2 * SEQUENCES).reshape(SEQUENCES, 2)
    step = quick(lambda x, cache: layer(x, cache))
    over_pages = quick(lambda x, cache, batch: layer(x, cache, batch=batch))
    for first, last in ((0, 8), (8, 9), (9, TOKENS)):
        monkeypatch.setattr(EXPANDS, lambda tokens, queries, sizes: queries > 1)
        y, cache = step(x[:, first:last], cache)
        batch = RaggedBatch.build([last - first] * SEQUENCES, [last] * SEQUENCES, tables, page_size=8)
        packed, pages = over_pages(x[:, first:last].reshape(-1, EMBED), pages, batch)
        outs.append((y, packed[: SEQUENCES * (last - first)].reshape(y.shape)))
    for kept in zip(*outs, strict=True):
        assert_close(jnp.concatenate(kept, 1), expected, "float32")


def test_eight_bit_pages():
    layer = build()
    found = serve(advance(layer), layer.init_paged_cache(PAGES, PAGE, dtype="int8"), inputs())[0]
    expected = alone("one query projection")
    assert float(jnp.abs(found - expected).max() / jnp.abs(expected).max()) < 0.05


def test_a_projection_of_another_kind_is_absorbed_too():
    """Such as a quantised or adapted one: any linear function of one vector."""
    layer, x = build(), inputs()
    weight = layer.kv_b_proj.weight
    other = eqx.tree_at(lambda m: m.kv_b_proj, layer, eqx.nn.Lambda(lambda c: weight @ c))
    y, _ = other(x, other.init_cache(SEQUENCES, TOKENS, "float32"))
    assert_close(y, alone("one query projection"), "float32")


make: Any = lambda **options: MultiHeadLatentAttention(8, **SIZES, **options, key=jax.random.key(0))
IDS = jnp.zeros((SEQUENCES, TOKENS), jnp.int32)
WRONG = {
    "cache: expected a LatentCache": lambda l, x: l(x, ejx.nn.KVCache.init(SEQUENCES, 4, 1, 8)),
    "batch: expected a RaggedBatch": lambda l, x: l(x, l.init_paged_cache(2, 4)),
    "cache: expected the batch shape": lambda l, x: l(x, l.init_cache(1, 4)),
    "segment_ids: expected None with a cache": lambda l, x: l(x, l.init_cache(SEQUENCES, TOKENS), segment_ids=IDS),
    "expected at most max_length=4": lambda l, x: l(x, l.init_cache(SEQUENCES, 4)),
    "x: expected": lambda l, x: l(x[..., 1:]),
    "rope: expected a RotaryEmbedding of qk_rope_head_dim=4": lambda l, x: make(rope=RotaryEmbedding(8)),
    "softmax_scale": lambda l, x: make(softmax_scale="1"),
}  # fmt: skip


test_wrong_arguments = refuses(WRONG, lambda wrong: wrong(build(), inputs()))


def test_sizes_of_numpy(unchecked):
    """As they come from a file or from a shape; static fields hold numbers of Python."""
    sizes: dict[str, Any] = dict(
        num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, q_lora_rank=12
    )
    width: Any = np.int64(EMBED)
    layer = ejx.nn.MultiHeadLatentAttention(width, **jax.tree.map(np.int64, sizes), key=jax.random.key(0))
    same = ejx.nn.MultiHeadLatentAttention(EMBED, **sizes, key=jax.random.key(0))
    assert eqx.tree_equal(layer, same)
    assert all(type(getattr(layer, name)) is int for name in ("embed_dim", *sizes))


def test_which_form_a_chunk_takes():
    """Few tokens are absorbed and many expanded; sequences side by side share the weights that are read."""
    sizes = LatentSizes(128, 128, 64, 128, 512)
    alone, beside = ([expands(count * n, n, sizes) for n in range(1, 1000)] for count in (1, 64))
    assert alone == sorted(alone) and beside == sorted(beside)  # from some length on
    assert 0 < sum(alone) < sum(beside) < 999
