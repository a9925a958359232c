"""Plain XLA against the reference: every case, tiles that fit and that do not, transformations, and what its loops pass over."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.paged import xla
from tests.paged.cases import assert_agrees, Case, CASES, make
from tests.recurrence.quick import quick

platform, XlaConfig = xla, xla.XlaConfig
# Every option, and pairs of them; interpreted Triton has all cases.
COVERING = (
    "decode, all options", "empty sequences", "no keys", "nobody", "left out", "freed behind a window", "window of own key", "latent, options",
    "int8, head scales", "float8", "bfloat16 keys, int8 values", "float16", "two rows, all options"
)  # fmt: skip
SMALL = XlaConfig(block_q=4, block_k=8, decode_queries=2)
forward = quick(platform.forward, static_argnums=(1, 2))


@pytest.mark.parametrize("name", COVERING)
def test_agrees(name):
    assert_agrees(CASES[name], forward(*make(CASES[name]), SMALL))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [XlaConfig(), XlaConfig(1, 1, 1), XlaConfig(5, 7, 3), XlaConfig(16, 4, 16)],
    ids=lambda config: f"{config.block_q} {config.block_k} {config.decode_queries}",
)
def test_any_tiles(config):
    case = CASES["mixed, all options"]
    assert_agrees(case, forward(*make(case), config))
    large = Case((1, 3), (33, 20), p=24, left=30)
    assert_agrees(large, forward(*make(large), config))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mixed, all options", "latent, options"])
def test_float64(name, enable_x64):
    case = dataclasses.replace(CASES[name], dtype="float64")
    assert_agrees(case, forward(*make(case), SMALL))


def test_loops_pass_over_what_is_seen_alone():
    case = Case((1, 1, 1), (100, 40, 7), left=9)
    call = xla.Call(*make(case), XlaConfig(block_q=4, block_k=8))
    index = jnp.zeros((3, 1), jnp.int32)
    queries = xla.Queries(jnp.arange(3), index, index == 0, jnp.zeros(()))
    span = xla.span_of(call, queries)
    np.testing.assert_array_equal(span.begin, [88, 28, 0])
    assert span.blocks == 2  # 12 keys from the page on where the window begins
    nobody = xla.span_of(call, queries._replace(real=index > 0))
    assert nobody.blocks == 0
    beyond = call.arrays._replace(kv_len=call.arrays.kv_len.at[0].set(10**9))
    call.arrays = beyond
    assert xla.span_of(call, queries).blocks == 2


def test_decodes_compile_one_loop():
    loops = lambda name: len(re.findall(r"stablehlo.while", _lowered(CASES[name]).as_text()))
    assert loops("decode, all options") == 1
    assert loops("speculative") == 1
    assert loops("mixed") > 2


def _lowered(case, **sizes):
    arrays, spec = make(case)
    return jax.jit(platform.forward, static_argnums=(1, 2)).lower(arrays, spec, XlaConfig(**sizes))


@pytest.mark.slow
def test_memory_is_linear(optimised):
    """Four times the tokens, so sixteen times the scores."""

    def temporary(tokens: int) -> int:
        case = Case((tokens, 1), (tokens, 5), p=16, H=2, K=1)
        compiled = optimised(_lowered(case, block_q=32, block_k=32))
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary(2048) < 5 * temporary(512)
    assert temporary(2048) < 2048 * 2048


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 256])
def test_pages_are_not_copied(page_size, optimised):
    """Of a large pool only the pages that are seen are touched, with every number of queries."""
    count = 2**14 // page_size
    cache = ejx.PagedKVCache.init(count, page_size, 2, 64)
    cache = cache.bind(jnp.zeros((2, 4), jnp.int32), jnp.full(2, 3))
    queries = jnp.ones((8, 4, 64))
    for new in ((1, 1), (6, 2)):
        call = functools.partial(ejx.RaggedPagedAttention(platform="xla"), max_query_len=max(new))
        call = functools.partial(call, query_start_loc=jnp.array([0, new[0], sum(new)]))
        memory = optimised(jax.jit(call).lower(queries[: sum(new)], cache)).memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < cache.k.nbytes / 4


@pytest.mark.slow
def test_inside_shard_map_and_scan():
    case = CASES["mixed"]
    arrays, spec = make(case)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    axes = {"q": P(None, "heads"), "k": P(None, None, "heads"), "v": P(None, None, "heads")}
    given = {name: x for name, x in arrays._asdict().items() if x is not None}

    def local(given):
        scanned = lambda _, given: (None, platform.forward(arrays._replace(**given), spec, SMALL))
        return jax.tree.map(
            lambda x: x[0], jax.lax.scan(scanned, None, jax.tree.map(lambda x: x[None], given))[1]
        )

    specs = ({name: axes.get(name, P()) for name in given},)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "heads"))
    assert_agrees(case, quick(mapped)(given))
