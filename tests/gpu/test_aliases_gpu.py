"""Caches and states made inside the compiled function, where XLA sees that they are equal: each keeps a buffer of its own through several
layers and tokens, and none is copied for it."""

import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import PagedLatentCache, RaggedBatch
from ejkernel_eqx.nn import CacheState, MultiHeadAttention, RotaryEmbedding
from tests.nn import recurrent_layers
from tests.nn.recurrent_layers import EMBED
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu
NEEDS = "ragged_paged_attention"
PLATFORM: ejx.PlatformLike = "triton"
ROWS, TOKENS, LAYERS, PAGE = 3, 5, 2, 4
COUNT = -(-TOKENS // PAGE)
TABLE = np.random.default_rng(0).permutation(ROWS * COUNT).reshape(ROWS, COUNT).astype(np.int32)


# What the layers keep


class Latent(eqx.Module):
    """Latent attention in its absorbed form: one key for all heads, whose first channels are the value too."""

    into: jax.Array  # [E, H * (R + Dr) + R + Dr]
    back: jax.Array  # [H * R, E]
    attend: ejx.RaggedPagedAttention
    heads: ClassVar[int] = 4
    sizes: ClassVar[tuple[int, int]] = (32, 16)

    def __init__(self, key):
        keys, channels = jax.random.split(key), sum(self.sizes)
        self.into = jax.random.normal(keys[0], (EMBED, (self.heads + 1) * channels)) / EMBED**0.5
        self.back = jax.random.normal(keys[1], (self.heads * self.sizes[0], EMBED)) / EMBED**0.5
        self.attend = ejx.RaggedPagedAttention(softmax_scale=0.2, append=True, platform=PLATFORM)

    def init_paged_cache(self, num_pages, page_size, *, batch_shape=(), dtype=None, scales=None):
        dtype = jnp.float32 if dtype is None else dtype
        return PagedLatentCache.init(
            num_pages, page_size, *self.sizes, batch_shape=batch_shape, dtype=dtype, scales=scales
        )

    def queries_and_keys(self, x):
        q, k = jnp.split(x @ self.into, [self.heads * sum(self.sizes)], axis=-1)
        return q.reshape(*x.shape[:-1], self.heads, sum(self.sizes)), k

    def __call__(self, x, cache=None, *, batch=None):
        (q, k), (width, _) = self.queries_and_keys(x), self.sizes
        if cache is None or batch is None:
            k = k[..., None, :]
            attend = ejx.FlashAttention(causal=True, softmax_scale=0.2, platform="xla")
            out = attend(q, k, k[..., :width])
        else:
            offsets = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
            out, cache = self.attend(q, cache.bind(batch), k[..., :width], k[..., width:], **offsets)
            cache = cache.unbind()
        y = out.reshape(*out.shape[:-2], self.heads * width) @ self.back
        return y if cache is None else (y, cache)


def attention(key):
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "rope": RotaryEmbedding(32)}
    return MultiHeadAttention(EMBED, **heads, platform=PLATFORM, key=key)


class Kind(NamedTuple):
    build: Callable[..., Any]
    options: Mapping[str, Any] = MappingProxyType({})
    pooled: bool = True
    """Pages and slots that a batch names; or a state for each row."""

    @property
    def is_exact(self) -> bool:
        return "dtype" not in self.options


def recurrent(name):
    return lambda key: recurrent_layers.LAYERS[name].build(platform=PLATFORM, key=key)


_INT8 = {"dtype": jnp.int8}
KINDS = {
    "pages": Kind(attention),
    "bfloat16 pages": Kind(attention, {"dtype": jnp.bfloat16}),
    "int8 pages": Kind(attention, _INT8),
    "int8 pages, a scale a head": Kind(attention, _INT8 | {"scales": "head"}),
    "latent pages": Kind(Latent),
    "int8 latent pages": Kind(Latent, _INT8),
    **{f"{name}, slots": Kind(recurrent(name)) for name in recurrent_layers.LAYERS},
    **{f"{name}, rows": Kind(recurrent(name), pooled=False) for name in recurrent_layers.LAYERS},
}
# How the tokens are gone through, and the layers.
LOOPS = [
    "unrolled, unrolled",
    "scanned, unrolled",
    "unrolled, scanned",
    "scanned, scanned",
    "scanned, carried",
]


def model(kind: Kind) -> Any:
    return eqx.filter_vmap(kind.build)(jax.random.split(jax.random.key(0), LAYERS))


def inputs() -> jax.Array:
    return recurrent_layers.inputs(ROWS, TOKENS)


def one(stack: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, stack)


def new_caches(kind: Kind, stack: Any, lead: tuple[int, ...] = ()) -> Any:
    layer = one(stack, 0)
    if not kind.pooled:
        return layer.init_state((*lead, ROWS))
    sizes: dict[str, Any] = {"num_pages": TABLE.size, "page_size": PAGE, "num_slots": ROWS + 1}
    return CacheState.init([layer], **sizes, batch_shape=lead, **kind.options)


def batch_at(position: Any) -> RaggedBatch:
    """One token of every row, at this position."""
    return RaggedBatch(
        jnp.arange(ROWS + 1, dtype=jnp.int32),
        jnp.full(ROWS, position + 1, jnp.int32),
        jnp.asarray(TABLE),
        jnp.arange(ROWS, 0, -1, dtype=jnp.int32),
        page_size=PAGE,
        max_query_len=1,
        num_tokens=ROWS,
    )


def block(kind: Kind, layer: Any, x: Any, cache: Any, batch: Any) -> tuple[Any, Any]:
    if kind.pooled:
        y, cache = layer(x, cache, batch=batch)
    else:
        y, cache = layer(x[:, None], cache)
        y = y[:, 0]
    return x + y, cache


def step(kind: Kind, stack: Any, x: Any, caches: Any, position: Any, layers: str) -> tuple[Any, Any]:
    """One token of every row `[B, E]` through all layers."""
    batch, pooled = batch_at(position), kind.pooled
    if layers == "unrolled":  # a list of caches
        new = []
        for index, cache in enumerate(caches):
            x, own = block(kind, one(stack, index), x, cache.layers[0] if pooled else cache, batch)
            new.append(cache.with_layers([own]) if pooled else own)
        return x, new
    arrays, static = eqx.partition(stack, eqx.is_array)
    if layers == "scanned":
        each = lambda x, own: block(kind, eqx.combine(own[0], static), x, own[1], batch)
        x, new = jax.lax.scan(each, x, (arrays, caches.layers[0] if pooled else caches))
        return x, caches.with_layers([new]) if pooled else new

    def body(carry, own):
        x, caches = carry
        (cache,), numbered = caches.of_layer(own[1], batch)
        x, cache = block(kind, eqx.combine(own[0], static), x, cache, numbered)
        return (x, caches.with_layers([cache])), None

    return jax.lax.scan(body, (x, caches), (arrays, jnp.arange(LAYERS)))[0]


def generate(kind: Kind, stack: Any, x: Any, loops: str) -> Any:
    """What every token gives `[T, B, E]`, and the caches after all, which are made here."""
    tokens, layers = loops.split(", ")
    if layers == "unrolled":
        caches: Any = [new_caches(kind, stack) for _ in range(LAYERS)]
    else:
        caches = new_caches(kind, stack, (LAYERS,))
    x = jnp.swapaxes(x, 0, 1)

    def body(caches, own):
        y, caches = step(kind, stack, own[0], caches, own[1], layers)
        return caches, y

    if tokens == "scanned":
        return jax.lax.scan(body, caches, (x, jnp.arange(TOKENS)))
    outs = []
    for t in range(TOKENS):
        caches, y = body(caches, (x[t], t))
        outs.append(y)
    return caches, jnp.stack(outs)


@functools.cache
def one_by_one(name: str) -> Any:
    """The same with a program for each token, whose arguments are the caches, each an array of its own."""
    kind = KINDS[name]
    stack, x = model(kind), inputs()
    caches: Any = [new_caches(kind, stack) for _ in range(LAYERS)]
    run = eqx.filter_jit(lambda x, caches, t: step(kind, stack, x, caches, t, "unrolled"))
    outs = []
    for t in range(TOKENS):
        y, caches = run(x[:, t], caches, jnp.asarray(t, jnp.int32))
        outs.append(np.asarray(y))
    return jax.tree.map(lambda *layers: np.stack(layers), *caches), np.stack(outs)


def whole_pass(kind: Kind, stack: Any, x: jax.Array) -> jax.Array:
    for index in range(LAYERS):
        x = x + one(stack, index)(x)
    return jnp.swapaxes(x, 0, 1)


# What the compiled text says of aliases

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%[\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


def operands_of(rest: str) -> list[str]:
    return re.findall(r"%[\w.\-]+", rest.split(")")[0])


def assert_apart(text: str | None) -> int:
    """No call has an aliased operand twice, nor, where it is fused with others, a slice as an aliased operand or an aliased result that
    becomes a slice: as a fusion the two would be different buffers. How many calls alias."""
    assert text is not None
    found = 0
    for computation in re.split(r"\n\}", text):
        lines = [match.groups() for line in computation.splitlines() if (match := _INSTRUCTION.match(line))]
        made = {name: (opcode, operands_of(rest), rest) for name, opcode, rest in lines}

        def source(name: str, made: dict[str, Any] = made) -> tuple[str, str]:
            """The instruction behind tuples and bitcasts whose buffer this is, and which of its results."""
            opcode, operands, rest = made[name]
            if opcode == "bitcast":
                return source(operands[0])
            if opcode != "get-tuple-element":
                return name, ""
            index, given = re.findall(r"index=(\d+)", rest)[-1], operands[0]
            while made[given][0] == "opt-barrier":
                given = made[given][1][0]
            return source(made[given][1][int(index)]) if made[given][0] == "tuple" else (given, index)

        for name, (opcode, operands, rest) in made.items():
            aliases = re.search(r"output_to_operand_aliasing=\{(.*?\)\})", rest)
            if opcode != "custom-call" or aliases is None:
                continue
            found += 1
            buffers = [source(operand) for operand in operands]
            for out, index in _ALIAS.findall(aliases[1]):
                own = buffers[int(index)]
                assert buffers.count(own) == 1, rest
                header = next(line for line in computation.splitlines() if line.endswith("{"))
                if "fusion" in header.split("(")[0]:
                    assert made[own[0]][0] == "parameter", rest
                    slices = [ops for op, ops, _ in made.values() if op == "dynamic-update-slice"]
                    assert all(source(ops[1]) != (name, out) for ops in slices), rest
    return found


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("name", KINDS)
def test_made_inside(name, loops):
    kind = KINDS[name]
    if not kind.pooled and loops.endswith("carried"):
        pytest.skip("a state for each row is not carried by number")
    stack, x = model(kind), inputs()
    arrays, static = eqx.partition(stack, eqx.is_array)
    with jax.default_matmul_precision("highest"):
        program = jax.jit(lambda arrays, x: generate(kind, eqx.combine(arrays, static), x, loops))
        compiled = program.lower(arrays, x).compile()
        assert assert_apart(compiled.as_text()) > 0
        caches, y = compiled(arrays, x)
        expected_caches, expected = one_by_one(name)
        assert_close(y, expected, name="against a program a token")
        if kind.is_exact:
            whole = jax.jit(lambda x: whole_pass(kind, stack, x))(x)
            assert_close(y, whole, name="against the whole pass")
    if loops.endswith("unrolled"):
        caches = jax.tree.map(lambda *layers: jnp.stack(layers), *caches)
    for ours, theirs in zip(jax.tree.leaves(caches), jax.tree.leaves(expected_caches), strict=True):
        if ours.dtype == jnp.int8:  # a quotient may be rounded to the next number
            assert np.abs(np.asarray(ours, np.int32) - np.asarray(theirs, np.int32)).max() <= 1
        else:
            assert_close(ours, theirs, name="caches")


@pytest.mark.parametrize("name", ["one array twice", "an operand of its own"])
def test_one_array_in_two_places(name):
    """What a caller may give: the same array as keys and values of an empty cache, or as state and as new values."""
    if name == "one array twice":
        same = jnp.zeros((6, PAGE, 2, 32))
        k, v = (jax.random.normal(jax.random.key(seed), (ROWS, 2, 32)) for seed in (0, 1))
        batch = batch_at(0)

        def attend(same, k, v, platform: ejx.PlatformLike = PLATFORM):
            operation = ejx.RaggedPagedAttention(append=True, platform=platform)
            cache = ejx.PagedKVCache(same, same).bind(batch)
            offsets = {"query_start_loc": batch.query_start_loc, "max_query_len": 1}
            return operation(k, cache, k, v, **offsets)

        call, given = attend, (same, k, v)
    else:
        rows, size = 3, 16
        q, k, v = (jax.random.normal(jax.random.key(seed), (rows, 1, size)) for seed in (0, 1, 2))

        def steps(q, k, v, platform: ejx.PlatformLike = PLATFORM):
            rule = ejx.DeltaRule(platform=platform)
            state = jnp.broadcast_to(v[..., None, :] * 0, (rows, 1, size, size))
            outs = []
            for _ in range(2):
                out, state = rule.step(q, k, v, jnp.ones((rows, 1)), state)
                outs.append(out)
            return jnp.stack(outs), state

        call, given = steps, (q, k, v)
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(call).lower(*given).compile()
        assert assert_apart(compiled.as_text()) > 0
        expected = jax.jit(functools.partial(call, platform="xla"))(*given)
    for ours, theirs in zip(jax.tree.leaves(compiled(*given)), jax.tree.leaves(expected), strict=True):
        assert_close(ours.astype(jnp.float32), theirs.astype(jnp.float32))


# No copy where the buffers are donated or carried

_WIDE = {
    "pages": lambda key: MultiHeadAttention(512, num_heads=4, head_dim=128, platform=PLATFORM, key=key),
    "states": lambda key: ejx.nn.Mamba2Mixer(512, platform=PLATFORM, key=key),
}


@pytest.mark.parametrize("loops", ["scanned, unrolled", "scanned, carried"])
@pytest.mark.parametrize("name", _WIDE)
def test_nothing_is_copied_in_a_loop(name, loops):
    kind, tokens = Kind(_WIDE[name]), 4
    stack = model(kind)
    layers = loops.split(", ")[1]
    sizes: dict[str, Any] = {"num_pages": 4096, "page_size": PAGE, "num_slots": 1024}
    lead = () if layers == "unrolled" else (LAYERS,)
    caches: Any = CacheState.init([one(stack, 0)], **sizes, batch_shape=lead)
    if layers == "unrolled":
        caches = [jax.tree.map(jnp.copy, caches) for _ in range(LAYERS)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    arrays, static = eqx.partition(stack, eqx.is_array)

    def call(arrays, caches, x):
        body = lambda carry, t: (step(kind, eqx.combine(arrays, static), carry[0], carry[1], t, layers), None)
        return jax.lax.scan(body, (x, caches), jnp.arange(tokens))[0]

    x = jax.random.normal(jax.random.key(0), (ROWS, 512))
    compiled = jax.jit(call, donate_argnums=1).lower(arrays, caches, x).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and assert_apart(compiled.as_text()) > 0
    assert analysis.alias_size_in_bytes >= size and analysis.temp_size_in_bytes < size // LAYERS // 4
