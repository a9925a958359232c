"""Operations on the TPU's kernels, interpreted: chosen by name, mapped, split over a mesh, beside JAX's own kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.paged.pallas.call import PallasConfig
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("no_races")
LENGTHS = (19, 8, 0)
TABLE = jnp.array([[5, 2, 7], [4, -1, -1], [-1, -1, -1]])
H, K, D, SIZE = 4, 2, 16, 8
CONFIG = PallasConfig(decode_queries=2, decode_keys=16, block_q=16, block_k=16)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def cache_of(kv_heads: int = K, dim: int = D) -> ejx.PagedKVCache:
    k, v = (normal(seed, 8, SIZE, kv_heads, dim) for seed in (1, 2))
    return ejx.PagedKVCache(k, v).bind(TABLE, jnp.array(LENGTHS))


def decoded(platform: Any, q: jax.Array, cache: Any) -> Any:
    return ejx.PagedAttention(platform=platform)(q, cache, return_lse=True)


def test_mapped_over_queries():
    q, cache = normal(0, 2, 3, H, D), cache_of()
    got, want = (
        quick(jax.vmap(functools.partial(decoded, platform), in_axes=(0, None)))(q, cache)
        for platform in ("pallas-interpret", "xla")
    )
    jax.tree.map(assert_close, got, want)


@pytest.mark.slow
def test_mapped_over_pages():
    caches = [cache_of(), jax.tree.map(lambda x: x if x.dtype == jnp.int32 else -x, cache_of())]
    cache, q = jax.tree.map(lambda *x: jnp.stack(x), *caches), normal(0, 3, H, D)
    got, want = (
        quick(jax.vmap(functools.partial(decoded, platform), in_axes=(None, 0)))(q, cache)
        for platform in ("pallas-interpret", "xla")
    )
    jax.tree.map(assert_close, got, want)


def test_dense_rows():
    """One page per sequence, of keys that the kernel reads in parts of a page's size."""
    q, k, v = normal(0, 2, H, D), normal(1, 2, 272, K, D), normal(2, 2, 272, K, D)
    got, want = (
        quick(ejx.RaggedDecodeAttention(platform=platform))(
            q, k, v, jnp.array([3, 200]), jnp.array([20, 271])
        )
        for platform in ("pallas-interpret", "xla")
    )
    assert_close(got, want)


@pytest.mark.slow
def test_appended():
    """New tokens are written before anything is read; the last one here is of no sequence."""
    q, k, v = normal(0, 5, H, D), normal(3, 5, K, D), normal(4, 5, K, D)
    results = {}
    for platform in ("pallas-interpret", "xla"):
        op = ejx.RaggedPagedAttention(append=True, platform=platform)
        call = functools.partial(op, query_start_loc=jnp.array([0, 3, 4, 4]), max_query_len=3)
        results[platform] = quick(call)(q, cache_of(), k, v)
    (got, cache), (want, written) = results.values()
    assert_close(got, want)
    assert (cache.k == written.k).all() and (cache.v == written.v).all()


@pytest.mark.slow
def test_on_an_explicit_mesh():
    """Heads are split over devices; each reads its own key heads."""
    q, cache = normal(0, 3, 8, D), cache_of(kv_heads=4)
    want = decoded("xla", q, cache)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, P(*axes)))
    pages = ejx.PagedKVCache(place(cache.k, None, None, "tp"), place(cache.v, None, None, "tp"))
    cache = pages.bind(place(TABLE), place(jnp.array(LENGTHS)))
    with jax.set_mesh(mesh):
        out, lse = quick(functools.partial(decoded, "pallas-interpret"))(place(q, None, "tp"), cache)
    assert out.sharding.spec[1] == "tp"
    jax.tree.map(lambda x, y: assert_close(np.asarray(x), np.asarray(y)), (out, lse), want)


@pytest.mark.slow
def test_inside_shard_map():
    q, cache = normal(0, 3, 8, D), cache_of(kv_heads=4)
    want = decoded("xla", q, cache)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))

    def own(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return decoded("pallas-interpret", q, ejx.PagedKVCache(k, v).bind(TABLE, jnp.array(LENGTHS)))

    heads, pages = P(None, "tp"), P(None, None, "tp")
    call = jax.shard_map(own, mesh=mesh, in_specs=(heads, pages, pages), out_specs=(heads, heads))
    jax.tree.map(
        lambda x, y: assert_close(np.asarray(x), np.asarray(y)), quick(call)(q, cache.k, cache.v), want
    )


def test_what_it_refuses():
    with pytest.raises(ejx.UnsupportedError, match="float16"):
        decoded("pallas-interpret", normal(0, 3, H, D).astype(jnp.float16), cache_of())
    k = normal(1, 8, 5, 1, D)
    cache = ejx.PagedKVCache(k, k).bind(TABLE, jnp.array([3, 2, 0]))
    with pytest.raises(ejx.UnsupportedError, match="multiple of 8, the rows of a tile"):
        decoded("pallas-interpret", normal(0, 3, H, D), cache)


# JAX's own kernels on the same inputs, interpreted as well


@pytest.mark.slow
def test_as_jax_decodes():
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    lengths, dim = np.array([19, 8, 24]), 128
    table = jnp.array([[5, 2, 7, 0], [4, 0, 0, 0], [1, 3, 6, 0]])
    q, k, v = normal(0, 3, H, dim), normal(1, 8, SIZE, K, dim), normal(2, 8, SIZE, K, dim)
    cache = ejx.PagedKVCache(k, v).bind(table, jnp.asarray(lengths))
    got = ejx.PagedAttention(softmax_scale=1.0, platform="pallas-interpret")(q, cache)
    theirs = [jnp.moveaxis(x, 2, 0) for x in (k, v)]
    with pltpu.force_tpu_interpret_mode(), jax.numpy_dtype_promotion("standard"):
        want = paged_attention(q, *theirs, jnp.asarray(lengths, jnp.int32), table, pages_per_compute_block=2)
    # It multiplies in bfloat16.
    assert_close(got, want, "bfloat16")


@pytest.mark.slow
def test_as_jax_mixes():
    """Its kernel reshapes references that it copies from, which JAX's interpreter does not know; this is the reference that JAX has beside it."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    dim, window = 128, 9
    table = jnp.array([[5, 2, 7], [4, 0, 0], [1, 3, 6]])
    lengths, offsets = jnp.array([19, 8, 24]), jnp.array([0, 5, 6, 8])
    q, k, v = normal(0, 8, 8, dim), normal(1, 8, SIZE, 4, dim), normal(2, 8, SIZE, 4, dim)
    cache = ejx.PagedKVCache(k, v).bind(table, lengths)
    op = ejx.RaggedPagedAttention(sliding_window=window, config=CONFIG, platform="pallas-interpret")
    got = op(q, cache, query_start_loc=offsets, max_query_len=5)
    both = jnp.stack([k, v], 3).reshape(8, SIZE, 8, dim)
    options: dict[str, Any] = dict(sm_scale=dim**-0.5, sliding_window=window)
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        want = ref_ragged_paged_attention(q, both, lengths, table, offsets, jnp.array([3]), **options)
    assert_close(got, want)
