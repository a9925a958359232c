"""What users get wrong: an error that names the argument, what was expected and what came."""

import functools

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx

pytestmark = pytest.mark.usefixtures("unchecked")

zeros = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
ints = functools.partial(zeros, dtype=jnp.int32)
Q, LENGTHS = zeros(2, 4, 16), ints(2)
at = {"query_start_loc": ints(3)}


def cache(lead=(), bound=True, d=16, heads=2, dtype=jnp.float32, rows=(2,)):
    """The shapes of one."""

    def make():
        new = ejx.PagedKVCache.init(5, 4, heads, d, batch_shape=lead, dtype=dtype)
        return new.bind(jnp.zeros((*rows, 3), jnp.int32), jnp.zeros(rows, jnp.int32)) if bound else new

    return jax.eval_shape(make)


def latent():
    tables = lambda: (jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    return jax.eval_shape(lambda: ejx.PagedLatentCache.init(5, 4, 24, 8).bind(*tables()))


def call(operation, *args, **kwargs):
    """Traced alone: nothing is computed before the error."""
    static = {name: kwargs.pop(name) for name in ("max_query_len", "return_lse") if name in kwargs}
    return jax.eval_shape(functools.partial(operation, **static), *args, **kwargs)


XlaConfig = ejx.kernel_registry.get("paged_attention", "xla").load().config_type
decode, ragged = ejx.PagedAttention(), ejx.RaggedPagedAttention()
append, unified, dense = (
    ejx.RaggedPagedAttention(append=True),
    ejx.UnifiedAttention(),
    ejx.RaggedDecodeAttention(),
)
K2, NONE = zeros(2, 7, 2, 16), zeros(2, 0, 2, 16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: decode((Q,), cache()), "q: expected an array"),  # pyright: ignore[reportArgumentType]
        (lambda: call(decode, zeros(2, 4, 16, dtype=jnp.int32), cache()), "q: expected dtype"),
        (lambda: call(decode, zeros(2, 4), cache()), "q: expected rank 3"),
        (lambda: call(decode, Q, (zeros(2),)), "cache: expected a PagedKVCache"),
        (lambda: call(decode, Q, cache(bound=False)), r"cache.bind\(batch\)"),
        (lambda: call(decode, Q, cache(lead=(3,))), r"batch_shape \(3,\).*one layer"),
        (lambda: call(decode, zeros(6, 2, 4, 16), cache(rows=(3, 2))), "page_table: .*6"),
        (lambda: call(decode, zeros(2, 4, 12), cache()), "head_dim of the cache, 16, received 12"),
        (lambda: call(decode, zeros(2, 3, 16), cache()), "multiple of the 2 key heads, received 3"),
        (lambda: call(decode, zeros(3, 4, 16), cache()), "one query for each of the 2 sequences"),
        (lambda: call(decode, zeros(2, 4, 32), latent()), "softmax_scale: expected a number"),
        (lambda: call(decode, Q, latent()), r"latent_dim \+ rope_dim of the cache, 32"),
        (lambda: call(ragged, Q, cache(), query_start_loc=ints(2)), r"query_start_loc: expected ints \[3\]"),
        (lambda: call(ragged, Q, cache(), query_start_loc=zeros(3)), "query_start_loc: expected ints"),
        (lambda: call(ragged, Q, cache(), **at, max_query_len=0), "max_query_len"),
        (lambda: call(ragged, Q, cache(), **at, max_query_len=1.5), "max_query_len"),
        (lambda: call(ragged, Q, cache(), Q, Q, **at), "append=False"),
        (lambda: call(append, Q, cache(), **at), "append=True"),
        (lambda: call(append, zeros(1, 2, 4, 16), cache(), Q, Q, **at), "jax.vmap"),
        (lambda: call(append, Q, cache(), Q, Q, **at), r"k: expected"),
        (lambda: call(decode, Q, cache(), sinks=zeros(2)), r"sinks: expected floats \[4\] or \[4, n\]"),
        (lambda: call(decode, Q, cache(), sinks=ints(4)), "sinks: expected floats"),
        (lambda: call(unified, Q, cache(), **at, alibi_slopes=zeros(2)), "alibi_slopes"),
        (lambda: call(unified, Q, cache(), **at, qq_bias=zeros(1, 1)), "qq_bias"),
        (lambda: call(unified, Q, cache(), **at, qq_bias=zeros(3, 4)), "qq_bias"),
        (lambda: call(dense, Q, zeros(3, 7, 2, 16), K2, LENGTHS, LENGTHS), "k: expected"),
        (lambda: call(dense, Q, K2, zeros(2, 6, 2, 16), LENGTHS, LENGTHS), "v: expected"),
        (lambda: call(dense, Q, NONE, NONE, LENGTHS, LENGTHS), "one key"),
        (lambda: call(dense, Q, K2, K2, ints(3), LENGTHS), r"start: expected ints \(2,\)"),
        (lambda: ejx.PagedAttention(sliding_window=0), "sliding_window"),
        (lambda: ejx.PagedAttention(logits_soft_cap=0.0), "logits_soft_cap"),
        (lambda: ejx.PagedAttention(softmax_scale=float("nan")), "softmax_scale"),
        (lambda: XlaConfig(block_k=0), "XlaConfig.block_k"),
    ],
)
def test_says_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_nothing_to_attend():
    """No tokens, no sequences, and no pages."""
    made = lambda pages, rows: ejx.PagedKVCache.init(5, 4, 2, 16).bind(
        jnp.zeros((rows, pages), int), jnp.zeros(rows, int)
    )
    q = jnp.ones((2, 4, 16))
    assert ragged(q[:0], made(3, 2), query_start_loc=jnp.zeros(3, int), max_query_len=5).shape == (0, 4, 16)
    assert not ragged(q, made(3, 0), query_start_loc=jnp.zeros(1, int)).any()
    out, lse = decode(q, made(0, 2), return_lse=True)
    assert not out.any() and (lse == -jnp.inf).all()
