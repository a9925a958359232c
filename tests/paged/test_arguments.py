"""What users get wrong: an error that names the argument, what was expected and what came."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.paged.arguments import packed, PagedOptions, read_queries, resolve, Scoring
from ejkernel_eqx.paged.xla import XlaConfig

pytestmark = pytest.mark.usefixtures("unchecked")

zeros = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
ints = functools.partial(zeros, dtype=jnp.int32)
Q, LENGTHS, LOC = zeros(2, 4, 16), ints(2), ints(3)


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


decode, ragged = ejx.PagedAttention(), ejx.RaggedPagedAttention()
append, unified, dense = (
    ejx.RaggedPagedAttention(append=True),
    ejx.UnifiedAttention(),
    ejx.RaggedDecodeAttention(),
)
K2 = zeros(2, 7, 2, 16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: decode((Q,), cache()), "q: expected an array"),  # pyright: ignore[reportArgumentType]
        (lambda: call(decode, zeros(2, 4, 16, dtype=jnp.int32), cache()), "q: expected dtype"),
        (lambda: call(decode, zeros(2, 4), cache()), "q: expected rank 3"),
        (lambda: call(decode, Q, (zeros(2),)), "cache: expected a PagedKVCache"),
        (lambda: call(decode, Q, cache(bound=False)), r"cache.bind\(batch\)"),
        (lambda: call(decode, Q, cache(lead=(3,))), r"batch_shape \(3,\).*one layer"),
        (
            lambda: call(decode, zeros(6, 2, 4, 16), cache(rows=(3, 2))),
            "page_table: .*6",
        ),
        (lambda: call(decode, zeros(2, 4, 12), cache()), "head_dim of the cache, 16, received 12"),
        (lambda: call(decode, zeros(2, 3, 16), cache()), "multiple of the 2 key heads, received 3"),
        (lambda: call(decode, zeros(3, 4, 16), cache()), "one query for each of the 2 sequences"),
        (lambda: call(decode, zeros(2, 4, 32), latent()), "softmax_scale: expected a number"),
        (lambda: call(decode, Q, latent()), r"latent_dim \+ rope_dim of the cache, 32"),
        (lambda: call(ragged, Q, cache(), query_start_loc=ints(2)), r"query_start_loc: expected ints \[3\]"),
        (lambda: call(ragged, Q, cache(), query_start_loc=zeros(3)), "query_start_loc: expected ints"),
        (
            lambda: call(ragged, Q, cache(), query_start_loc=LOC, max_query_len=0),
            "max_query_len: .*received 0",
        ),
        (
            lambda: call(ragged, Q, cache(), query_start_loc=LOC, max_query_len=1.5),
            "max_query_len: .*static int",
        ),
        (lambda: call(ragged, Q, cache(), Q, Q, query_start_loc=LOC), "append=False"),
        (lambda: call(append, Q, cache(), query_start_loc=LOC), "append=True"),
        (lambda: call(append, zeros(1, 2, 4, 16), cache(), Q, Q, query_start_loc=LOC), "jax.vmap"),
        (lambda: call(append, Q, cache(), Q, Q, query_start_loc=LOC), r"k: expected"),
        (lambda: call(decode, Q, cache(), sinks=zeros(2)), r"sinks: expected floats \[4\] or \[4, n\]"),
        (lambda: call(decode, Q, cache(), sinks=ints(4)), "sinks: expected floats"),
        (
            lambda: call(unified, Q, cache(), query_start_loc=LOC, alibi_slopes=zeros(2)),
            "alibi_slopes: expected",
        ),
        (
            lambda: call(unified, Q, cache(), query_start_loc=LOC, qq_bias=zeros(1, 1)),
            "at least max_query_len=2",
        ),
        (
            lambda: call(unified, Q, cache(), query_start_loc=LOC, qq_bias=zeros(3, 4)),
            r"qq_bias: expected \[Q, Q\]",
        ),
        (lambda: call(dense, Q, zeros(3, 7, 2, 16), K2, LENGTHS, LENGTHS), "k: expected"),
        (lambda: call(dense, Q, K2, zeros(2, 6, 2, 16), LENGTHS, LENGTHS), "v: expected"),
        (
            lambda: call(dense, Q, zeros(2, 0, 2, 16), zeros(2, 0, 2, 16), LENGTHS, LENGTHS),
            "at least one key",
        ),
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


def test_windows():
    left = lambda window: PagedOptions.read(window, None, None).left
    assert [left(None), left(1), left(8), left((8, 3)), left((None, 0))] == [None, 0, 7, 8, None]


def test_resolves():
    bound = ejx.PagedKVCache.init(5, 4, 2, 16, dtype=jnp.bfloat16).bind(
        np.zeros((2, 3), int), np.array([4, 9])
    )
    q = read_queries(jnp.zeros((3, 6, 4, 16), jnp.float16), bound, "T H D")
    tokens = packed(q, bound, jnp.array([0, 1, 5]), 64)
    scoring = Scoring(jnp.zeros((4, 2), jnp.bfloat16), jnp.ones(4), jnp.zeros((64, 64)))
    arrays, spec = resolve(q, bound, PagedOptions.read(3, 2, None), tokens, scoring, return_lse=True)
    assert spec.max_query_len == 6 and spec.left == 2 and spec.scale == 0.25 and spec.scales is None
    assert isinstance(spec.logits_soft_cap, float) and spec.return_lse and not spec.latent
    np.testing.assert_array_equal(arrays.q_len, [[1, 4]] * 3)
    np.testing.assert_array_equal(arrays.q_start, [[0, 1]] * 3)
    np.testing.assert_array_equal(arrays.kv_len, [[4, 9]] * 3)
    assert arrays.page_table.shape == (3, 2, 3) and arrays.k.shape == (5, 4, 2, 16)
    assert arrays.sinks is not None and arrays.slopes is not None and arrays.qq_bias is not None
    np.testing.assert_allclose(arrays.sinks, np.log(2), rtol=1e-6)
    assert arrays.sinks.dtype == arrays.slopes.dtype == arrays.qq_bias.dtype == jnp.float32
    assert dataclasses.replace(spec, max_query_len=1) != spec


def test_results_have_the_shapes_that_are_said():
    out, lse = call(ejx.PagedAttention(), Q, cache(dtype=jnp.int8), return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 16), (2, 4), "float32")
    given = dict(query_start_loc=LOC, max_query_len=5)
    assert call(ragged, zeros(0, 4, 16), cache(), **given).shape == (0, 4, 16)
    none = cache(rows=(0,))
    assert call(ragged, Q, none, query_start_loc=ints(1)).shape == (2, 4, 16)
    no_pages = jax.eval_shape(
        lambda: ejx.PagedKVCache.init(5, 4, 2, 16).bind(jnp.zeros((2, 0), int), jnp.zeros(2, int))
    )
    assert call(decode, Q, no_pages).shape == (2, 4, 16)
    out, new = call(append, Q, cache(), zeros(2, 2, 16), zeros(2, 2, 16), query_start_loc=LOC)
    assert new.is_bound and new.k.shape == (5, 4, 2, 16) and out.dtype == "float32"
    latents = ejx.RaggedPagedAttention(softmax_scale=1.0, append=True)
    out, lse, _ = call(
        latents, zeros(2, 4, 32), latent(), zeros(2, 24), zeros(2, 8), query_start_loc=LOC, return_lse=True
    )
    assert out.shape == (2, 4, 24) and lse.shape == (2, 4)
