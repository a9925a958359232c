"""The TPU's kernels, interpreted with races detected and memory poisoned, against the reference: few queries, many, and both in one call."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.paged.cases import assert_agrees, Case, make, with_leading_axis
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

platform = ejx.kernel_registry.get("paged_attention", "pallas-interpret").load()
CONFIG = platform.config_type(decode_queries=4, decode_keys=16, block_q=16, block_k=16)
forward = quick(platform.forward, static_argnums=(1, 2))
ONE = Case((1, 1, 1, 1), (37, 5, 0, 80), p=16, tail=1)
FEW = Case((3, 1, 0, 2), (33, 16, 9, 70), p=16, first=1, tail=2)
LATENT: dict[str, Any] = dict(K=1, D=32, V=32, rope=16)

MIXED = Case((20, 1, 0, 17, 3), (52, 9, 4, 90, 70), p=16, first=1, tail=2)
OPTIONS: dict[str, Any] = dict(cap=2.0, sinks=True)
HOLES = ((0, 1), (3, 0))

CASES = {
    "one query": dataclasses.replace(ONE, kv_start=(3, 0, 0, 40), batch=2),
    "one query, every option": dataclasses.replace(ONE, left=20, slopes=True, missing=HOLES, **OPTIONS),
    "one query, many key heads": dataclasses.replace(ONE, dtype="bfloat16", H=12, K=6, D=32, V=16),
    "one query, latent": dataclasses.replace(ONE, **LATENT, dtype="bfloat16", left=33),
    "few queries, one key head": dataclasses.replace(FEW, K=1, H=6, kv_dtype="bfloat16"),
    "few queries, every option": dataclasses.replace(
        FEW, qq_bias=4, left=19, slopes=True, tail=0, missing=HOLES, **OPTIONS
    ),
    "few queries, latent": dataclasses.replace(FEW, **LATENT, qq_bias=3, batch=2),
    "mixed, every option": dataclasses.replace(
        MIXED, left=17, slopes=True, missing=((0, 2), (4, 1)), kv_start=(3, 0, 0, 0, 20), **OPTIONS
    ),
    "mixed, bfloat16": dataclasses.replace(MIXED, dtype="bfloat16", H=6, D=32, V=16),
    "mixed, four key heads": dataclasses.replace(MIXED, H=4, K=4, p=8, left=40, missing=((3, 2),)),
    "mixed, latent": dataclasses.replace(MIXED, **LATENT, missing=((3, 1),)),
    "few tokens": Case((7,), (7,), p=8, K=1),
    "int8": dataclasses.replace(FEW, kv_dtype="int8", scales="token", left=40, missing=((0, 1),)),
    "float8, one query": dataclasses.replace(ONE, kv_dtype="float8_e5m2", scales="head", dtype="bfloat16"),
    "int8 values": dataclasses.replace(FEW, v_dtype="int8", scales="token"),
    "latent, int8 rope": dataclasses.replace(FEW, **LATENT, v_dtype="int8", scales="head"),
    "mixed, float8": dataclasses.replace(
        MIXED, kv_dtype="float8_e4m3fn", scales="head", dtype="bfloat16", left=30, missing=((3, 1),)
    ),
    "mixed, latent int8": dataclasses.replace(MIXED, **LATENT, kv_dtype="int8", scales="token"),
}


def attend(case: Case, config: Any = CONFIG, **changes: Any) -> dict[str, Any]:
    arrays, spec = make(case)
    arrays = arrays if case.batch else with_leading_axis(arrays)
    return forward(arrays._replace(**changes), spec, config)


@pytest.mark.usefixtures("no_races")
@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_agrees(name):
    assert_agrees(CASES[name], attend(CASES[name]))


@pytest.mark.usefixtures("no_races")
@pytest.mark.few(1)
@pytest.mark.parametrize("keys, cores", ((64, 1), (32, 2)))
def test_any_block_and_number_of_cores_agrees(keys, cores):
    config = dataclasses.replace(CONFIG, decode_keys=keys, cores=cores)
    assert_agrees(FEW, attend(FEW, config))


TABLE, LENGTHS = jnp.array([[5, 2, 7], [4, -1, -1], [-1, -1, -1]]), jnp.array([19, 8, 0])


def cache_of(scale: int = 1, page_size: int = 8) -> ejx.PagedKVCache:
    k, v = (scale * normal(seed, 8, page_size, 2, 16) for seed in (1, 2))
    return ejx.PagedKVCache(k, v).bind(TABLE, LENGTHS // (8 // page_size + 1))


def on_both(call: Any, *given: Any) -> None:
    """`call(platform, *given)` on this platform and on XLA."""
    names = ("pallas-interpret", "xla")
    got, want = (quick(functools.partial(call, name))(*given) for name in names)
    jax.tree.map(assert_close, got, want)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow
@pytest.mark.parametrize("over", ["queries", "pages"])
def test_mapped(over):
    q, caches = normal(0, 2, 3, 4, 16), jax.tree.map(lambda *x: jnp.stack(x), cache_of(), cache_of(-1))
    call = lambda name, q, cache: ejx.PagedAttention(platform=name)(q, cache, return_lse=True)
    axes, given = ((0, None), (q, cache_of())) if over == "queries" else ((None, 0), (q[0], caches))
    on_both(lambda name, *given: jax.vmap(functools.partial(call, name), axes)(*given), *given)


@pytest.mark.usefixtures("no_races")
def test_dense_rows():
    """One page per sequence, of keys that the kernel reads in parts of a page's size."""
    q, k, v = normal(0, 2, 4, 16), normal(1, 2, 272, 2, 16), normal(2, 2, 272, 2, 16)
    call = lambda name, *given: ejx.RaggedDecodeAttention(platform=name)(*given)
    on_both(call, q, k, v, jnp.array([3, 200]), jnp.array([20, 271]))


def test_what_it_refuses():
    decode, q = ejx.PagedAttention(platform="pallas-interpret"), normal(0, 3, 4, 16)
    with pytest.raises(ejx.UnsupportedError, match="float16"):
        decode(q.astype(jnp.float16), cache_of())
    with pytest.raises(ejx.UnsupportedError, match="multiple of 8, the rows of a tile"):
        decode(q, cache_of(page_size=5))
