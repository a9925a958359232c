"""`nn.NativeSparseAttention`: its formula and gradients, every way to decode, padding, packed sequences, and what it refuses."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import NativeSparseAttention, RotaryEmbedding, YarnScaling
from tests.attention.dense import INTERPRET
from tests.nn.checks import exact, in_pieces, needs_triton, refuses
from tests.nn.paged_layers import advance, inputs, PAGE, PAGES, poisoned, SEQUENCES, serve, TOKENS, unwritten
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "block_size": 2, "num_blocks": 3}
SIZES |= {"sliding_window": 2, "compression_size": 4, "compression_stride": 2}
ROPE = RotaryEmbedding(4)
PARTIAL = RotaryEmbedding(4, rotary_dim=2, scaling=YarnScaling(4.0, 4))
LAYERS: dict[str, dict[str, Any]] = {
    "mlp": {"rope": ROPE},
    "linear, yarn, partial, biases": {"compression": "linear", "rope": PARTIAL, "use_qkv_bias": True},
    "mean": {"compression": "mean", "rope": ROPE, "compression_stride": 2, "compression_size": 2},
}


@functools.cache
def build(name="mlp", **changes):
    layer = NativeSparseAttention(EMBED, **(SIZES | LAYERS[name] | changes), key=jax.random.key(1))
    # Places that matter, scores that choose, gates that differ.
    louder = lambda leaf: leaf * 3
    layer = eqx.tree_at(lambda m: [m.q_proj.weight, m.g_proj.weight], layer, replace_fn=louder)
    if layer.k_compression is None:
        return layer
    places = lambda m: [m.k_compression.positions, m.v_compression.positions]
    return eqx.tree_at(places, layer, replace_fn=lambda leaf: leaf * 20)


@functools.cache
def alone(name="mlp"):
    return quick(lambda layer, x: layer(x))(build(name), inputs())


def softmax(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(scores):
        return np.zeros(v.shape[-1]), scores
    p = np.exp(scores - scores.max())
    return p / p.sum() @ v, p / p.sum()


def compressed(layer: Any, part: Any, x: np.ndarray) -> np.ndarray:
    """One head at a time: the keys or values of whole blocks `[C, K, D]` from `[T, K, D]`."""
    options = layer.attention.options
    size, stride = options.compression_size, options.compression_stride
    found = []
    for c in range(max(0, (len(x) - size) // stride + 1)):
        tokens = x[c * stride : c * stride + size]
        if part is None:
            found.append(tokens.mean(0))
            continue
        rows = []
        for h in range(x.shape[1]):
            row = (tokens[:, h] + part.positions[h]).reshape(-1) @ part.weight[h]
            if part.bias is not None:
                row = np.maximum(row + part.bias[h], 0) @ part.out_weight[h] + part.out_bias[h]
            rows.append(row)
        found.append(np.stack(rows))
    return np.stack(found) if found else np.zeros((0, *x.shape[1:]))


def by_hand(layer: Any, x: np.ndarray) -> np.ndarray:
    """One sequence `[T, E]`, query by query and head by head, in the dtype of the layer's arrays."""
    apply = lambda linear, x: x @ linear.weight.T + (0 if linear.bias is None else linear.bias)
    length, heads, kv_heads, options = len(x), layer.num_heads, layer.num_kv_heads, layer.attention.options
    theta, scaling = layer.rope.frequencies(), layer.rope.scaling
    turned, magnitude = 2 * len(theta), 1 if scaling is None else scaling.magnitude

    def turn(x: np.ndarray, positions: Any) -> np.ndarray:
        phase = magnitude * np.exp(1j * np.asarray(positions)[:, None] * theta)
        y = (x[..., : turned // 2] + 1j * x[..., turned // 2 : turned]) * phase[:, None]
        return np.concatenate([y.real, y.imag, x[..., turned:]], -1)

    q = turn(apply(layer.q_proj, x).reshape(length, heads, -1), range(length))
    raw = apply(layer.k_proj, x).reshape(length, kv_heads, -1)
    k, v = turn(raw, range(length)), apply(layer.v_proj, x).reshape(length, kv_heads, -1)
    gates = 1 / (1 + np.exp(-apply(layer.g_proj, x).reshape(length, heads, 3)))
    ck, cv = compressed(layer, layer.k_compression, raw), compressed(layer, layer.v_compression, v)
    stride, size, block = options.compression_stride, options.compression_size, options.block_size
    ck = turn(ck, np.arange(len(ck)) * stride)
    if layer.k_compression is None:
        ck = compressed(layer, None, k)
    scale, out = q.shape[-1] ** -0.5, np.zeros_like(q)
    for t in range(length):
        whole = max(0, (t + 1 - size) // stride + 1)
        for group in range(kv_heads):
            own = range(group * heads // kv_heads, (group + 1) * heads // kv_heads)
            weights = np.zeros(whole)
            for h in own:
                o, p = softmax(q[t, h] @ ck[:whole, group].T * scale, cv[:whole, group])
                out[t, h] += gates[t, h, 0] * o
                weights += p
            # Strides of key c in block m.
            share = lambda c, m: sum((c * stride + n) // block == m for n in range(0, size, stride))
            scores = [sum(w * share(c, m) for c, w in enumerate(weights)) for m in range(t // block + 1)]
            rest = sorted(range(1, t // block), key=lambda m: (-scores[m], m))
            chosen = list(dict.fromkeys([t // block, 0, *rest]))[: options.num_blocks]
            keys = [j for j in range(t + 1) if j // block in chosen]
            near = range(max(0, t + 1 - options.sliding_window), t + 1)
            for h in own:
                for n, seen in ((1, keys), (2, list(near))):
                    o, _ = softmax(q[t, h] @ k[seen, group].T * scale, v[seen, group])
                    out[t, h] += gates[t, h, n] * o
    return apply(layer.o_proj, out.reshape(length, -1))


@pytest.mark.parametrize("name", LAYERS)
def test_the_formula(name):
    layer = exact(build(name))
    for row, y in zip(inputs(), alone(name)):
        assert_close(y, by_hand(layer, exact(row)), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_gradient(name):
    """Beside differences of the formula along random directions, and along the gradient itself."""
    layer, x = build(name), jnp.asarray(inputs()[0])
    cotangent = np.random.default_rng(0).standard_normal(x.shape)
    loss = lambda both: jnp.sum(both[0](both[1]) * jnp.asarray(cotangent, x.dtype))
    gradients = exact(quick(lambda layer, x: eqx.filter_grad(loss)((layer, x)))(layer, x))
    rest = exact((layer, x))
    leaves, where = jax.tree.flatten(eqx.filter(gradients, eqx.is_array))
    arrays, static = eqx.partition(rest, lambda a: isinstance(a, np.ndarray))
    values = jax.tree.leaves(arrays)
    assert len(values) == len(leaves)

    def at(index: int, step: np.ndarray) -> float:
        moved = [a + step if n == index else a for n, a in enumerate(values)]
        layer, x = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), moved), static)
        return float((by_hand(layer, x) * cotangent).sum())

    random = np.random.default_rng(1)
    for index, gradient in enumerate(leaves):
        length = np.linalg.norm(gradient)
        assert length > 0, where
        for direction in (gradient / length, *random.standard_normal((3, *gradient.shape))):
            step = 1e-6 * direction / np.linalg.norm(direction)
            found = (at(index, step) - at(index, -step)) / 2e-6
            wanted = (gradient * direction).sum() / np.linalg.norm(direction)
            assert abs(found - wanted) < 1e-4 * length, (index, gradient.shape, found, wanted)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name, chunks", [*zip(LAYERS, [(1,) * TOKENS, (TOKENS,), (4, 1, 5)])])
def test_decoding_is_the_whole(name, chunks):
    """A prompt at once, in chunks and token by token; what is not written yet is NaN."""
    layer, x = build(name), inputs()
    y, _ = in_pieces(layer, x, chunks, unwritten(layer, TOKENS + 2))
    assert_close(y, alone(name), "float32")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "mean"])
def test_rows_of_different_lengths(name):
    """Chunks padded on either side, of rows that are at different places; padding and unwritten slots are NaN."""
    layer, x = build(name), np.asarray(inputs())
    cache = unwritten(layer, TOKENS)
    step = quick(lambda x, cache, mask: layer(x, cache, padding_mask=mask))
    done = [0] * SEQUENCES
    counts_of = ((5, 3, 0), (1, 4, 3), (4, 3, 5), (0, 0, 2))
    for counts, first in zip(counts_of, ((0, 1, 0), (3, 0, 1), (1, 2, 0), (0, 0, 3))):
        chunk, real = np.full((SEQUENCES, 5, EMBED), np.nan, np.float32), np.zeros((SEQUENCES, 5), bool)
        for n, (count, start) in enumerate(zip(counts, first)):
            chunk[n, start : start + count] = x[n, done[n] : done[n] + count]
            real[n, start : start + count] = True
        y, cache = step(jnp.asarray(chunk), cache, jnp.asarray(real))
        for n, count in enumerate(counts):
            assert_close(y[n, real[n]], alone(name)[n, done[n] : done[n] + count], "float32")
            done[n] += count
    np.testing.assert_array_equal(cache.lengths, done)


# Where sequences lie among NaN, each the first tokens of a row of `inputs()`: left and right of padding and beside a row of nothing else;
# packed, with an empty sequence among others, and one of a token; and as runs of ids, of which the padding mask takes the last token.
PLACES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "padding": ((3, 9), [(0, slice(3, 9)), (1, slice(0, 8))]),
    "packed": ((21,), [slice(0, 7), slice(7, 8), slice(8, 18)]),
    "segments": ((2, 10), [(0, slice(1, 4)), (0, slice(4, 9)), (1, slice(0, 6))]),
}


def rows_of(kind: str) -> tuple[jax.Array, dict[str, Any], list[tuple[Any, Any]]]:
    """An input, the arguments that say where its sequences are, and their places in it and in `inputs()`."""
    lead, places = PLACES[kind]
    x = np.full((*lead, EMBED), np.nan, np.float32)
    real, ids, found = np.zeros(lead, bool), np.full(lead, -1, np.int32), []
    for number, place in enumerate(places):
        count = ids[place].size
        x[place], real[place], ids[place] = inputs()[number, :count], True, 3 - number
        found.append((place, (number, slice(0, count))))
    if kind == "padding":
        return jnp.asarray(x), {"padding_mask": jnp.asarray(real)}, found
    if kind == "packed":
        return jnp.asarray(x), {"cu_seqlens": jnp.array([0, 7, 7, 8, 18])}, found
    ids[0, 9] = ids[0, 8]
    mask = np.arange(10) < np.array([[9], [9]])
    return jnp.asarray(x), {"segment_ids": jnp.asarray(ids), "padding_mask": jnp.asarray(mask)}, found


@functools.cache
def gradients_of(name: str) -> Any:
    """Those of the layer and of its input `[n, T, E]`, of a sum over the tokens that have a weight."""
    loss = lambda both, weight: jnp.sum(jnp.sin(both[0](both[1])) * weight[..., None])
    return quick(lambda layer, x, weight: eqx.filter_grad(loss)((layer, x), weight))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind, name", [*zip(PLACES, LAYERS)])
def test_sequences_in_rows(kind, name):
    """Each gives what it gives alone, whatever is beside it, and so do its gradients. No token sees a later one."""
    x, how, places = rows_of(kind)
    layer = build(name, **({"max_segments": 2} if kind == "segments" else {}))

    @quick
    def results(layer, x):
        def loss(both):
            y = both[0](both[1], **how)
            return sum(jnp.sin(y[place]).sum() for place, _ in places), y

        return eqx.filter_grad(loss, has_aux=True)((layer, x))

    found, y = results(layer, x)
    weight = np.zeros((SEQUENCES, TOKENS), np.float32)
    for place, own in places:
        assert_close(y[place], alone(name)[own], "float32")
        weight[own] = 1
    wanted = gradients_of(name)(build(name), jnp.asarray(inputs()), weight)
    close = functools.partial(assert_close, dtype="float32", kind="gradient")
    jax.tree.map(close, *map(jax.tree.leaves, (found[0], wanted[0])))
    for place, own in places:
        close(found[1][place], wanted[1][own])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "platform"), [("mean", 3, None), ("linear, yarn, partial, biases", 6, INTERPRET)]
)
def test_pages(name, size, platform):
    """Chunks and decodes of several sequences in one batch, from shuffled pages; the rest of them is NaN. Longer blocks lie in two pages."""
    needs_triton(platform)
    sizes = {"block_size": PAGE, "compression_size": size, "compression_stride": PAGE}
    layer = build(name, **sizes, platform=platform)
    found = serve(advance(layer), poisoned(layer.init_paged_cache(PAGES, PAGE)), inputs())[0]
    assert_close(found, quick(lambda x: layer(x))(inputs()), "float32")


@pytest.mark.slow
def test_half_precision():
    """Keys that are rotated back out of a cache of 16 bits give what keys that never were in one give, within their rounding."""
    layer = build(compute_dtype="bfloat16")
    whole = quick(lambda x: layer(x))(inputs())
    y, cache = quick(lambda x: layer(x, layer.init_cache(SEQUENCES, TOKENS)))(inputs())
    assert y.dtype == whole.dtype == cache.compressed_k.dtype == jnp.bfloat16
    for found in (whole, y):
        error = np.linalg.norm(np.asarray(found, np.float64) - alone()) / np.linalg.norm(alone())
        assert error < 0.03


def test_published_weights():
    """Named as in flash-linear-attention."""
    source = build("mean")
    state = {f"attn.{n}_proj.weight": np.asarray(getattr(source, f"{n}_proj").weight) for n in "qkvgo"}
    layer = NativeSparseAttention(EMBED, **(SIZES | LAYERS["mean"]), key=jax.random.key(9))
    layer = ejx.load_published(layer, state, prefix="attn")
    np.testing.assert_array_equal(layer(inputs()), source(inputs()))


make: Any = lambda **options: NativeSparseAttention(EMBED, **(SIZES | options), key=jax.random.key(0))
narrow_pages = lambda: make(compression_stride=1).init_paged_cache(2, 4)
batch_of_one = lambda: ejx.RaggedBatch.build([1], [1], [[1]], page_size=4)
DYNAMIC = ejx.nn.DynamicScaling(2.0, 8)
WRONG = {
    "cache: expected a SparseKVCache": lambda l, x: l(x, ejx.nn.KVCache.init(SEQUENCES, 4, 2, 4)),
    "batch: expected a RaggedBatch": lambda l, x: l(x, l.init_paged_cache(2, 4)),
    "cache: expected a PagedSparseCache": lambda l, x: l(x[0, :1], l.init_cache(1, 4), batch=batch_of_one()),
    r"with \(K, D\) and stride = \(2, 4, 2\)": lambda l, x: l(x[0, :1], narrow_pages(), batch=batch_of_one()),
    "compression_stride: expected a divisor": lambda l, x: l.init_paged_cache(2, 3),
    "dtype: expected a floating dtype": lambda l, x: l.init_paged_cache(2, 4, dtype="int8"),
    "scales: expected None": lambda l, x: l.init_paged_cache(2, 4, scales="token"),
    "cache: expected the batch shape": lambda l, x: l(x, l.init_cache(1, 4)),
    "expected at most max_length=4": lambda l, x: l(x, l.init_cache(SEQUENCES, 4)),
    "x: expected": lambda l, x: l(x[..., 1:]),
    "cu_seqlens: expected offsets": lambda l, x: l(x, cu_seqlens=jnp.array([0, 4])),
    "num_kv_heads: expected a divisor": lambda l, x: make(num_kv_heads=3),
    "expected a multiple of compression_stride=3": lambda l, x: make(compression_stride=3),
    "compression: expected 'mlp'": lambda l, x: make(compression="max"),
    "compression_hidden_dim: expected None": lambda l, x: make(compression="mean", compression_hidden_dim=3),
    "rope: expected a RotaryEmbedding of one axis": lambda l, x: make(
        rope=RotaryEmbedding(4, scaling=DYNAMIC)
    ),
    "rope: expected a RotaryEmbedding of head_dim=4": lambda l, x: make(rope=RotaryEmbedding(8)),
    r"x: expected \[..., T, K, D\] with K = 2": lambda l, x: l.k_compression(jnp.zeros((4, 3, 4))),
}


test_wrong_arguments = refuses(WRONG, lambda wrong: wrong(build(), inputs()))
