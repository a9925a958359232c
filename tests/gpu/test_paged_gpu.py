"""Attention over pages on a GPU: the Triton kernels against the float64 reference, and what only a GPU can show.

    python -m pytest tests/gpu/test_paged_gpu.py -n 8

The last tests need about 40 GB of the device's memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.launch import run
from ejkernel_eqx.paged.cache import write as xla_write
from ejkernel_eqx.paged.cache.quantise import LARGEST
from ejkernel_eqx.paged.core import problem_of
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec, PAGES, SCALES, WriteArrays
from tests.gpu import host
from tests.gpu.host import example_problem
from tests.paged.cases import assert_agrees, Case, CASES, make, with_leading_axis
from tests.paged.test_triton_bytes import assert_converted, launch
from tests.paged.test_triton_bytes import DTYPES as BYTES
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATION = "unified_attention"  # the kernels are those of every operation of the family
NEEDS = OPERATION
TRITON = kernel_registry.get(OPERATION, "triton")
REPEATS = 4
DTYPES = ("bfloat16", "float16", "float32")


@functools.partial(jax.jit, static_argnums=(1, 2))
def run_triton(arrays: PagedArrays, spec: PagedSpec, config: Any) -> dict[str, Any]:
    return TRITON.load().forward(arrays, spec, config)


def made(case: Case) -> tuple[PagedArrays, PagedSpec]:
    """With one leading axis, as the kernels are given them."""
    arrays, spec = make(case)
    return arrays if case.batch else with_leading_axis(arrays), spec


def default_config(arrays: PagedArrays, spec: PagedSpec) -> Any:
    return host.default_config(OPERATION, problem_of(OPERATION, arrays, spec))


def assert_same(first: Any, second: Any) -> None:
    """Bit for bit; compared on the device, as some results are large."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.shape == b.shape and bool(jnp.array_equal(a, b, equal_nan=True))


def check(case: Case, config: Any = None) -> None:
    """Both results, the same bit for bit when run again."""
    arrays, spec = made(case)
    config = default_config(arrays, spec) if config is None else config
    results = run_triton(arrays, spec, config)
    with jax.default_device(jax.devices("cpu")[0]):
        assert_agrees(case, jax.tree.map(np.asarray, results))
    for _ in range(REPEATS - 1):
        assert_same(results, run_triton(arrays, spec, config))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_triton(name, dtype):
    check(dataclasses.replace(CASES[name], dtype=dtype))


# Long enough for several splits and tiles, of heads as models have them.
OPTIONS: dict[str, Any] = dict(cap=2.0, sinks=True, slopes=True)
LONG = {
    "decode": Case((1, 1, 1), (700, 1, 1300), p=16, H=8, K=2, D=64, V=64),
    "decode, options": Case((1, 1, 1), (700, 1, 1300), p=16, H=8, K=2, D=128, V=128, left=900, **OPTIONS),
    "speculative": Case((4, 3, 4), (900, 77, 1025), p=32, H=14, K=2, D=64, V=64, qq_bias=4, tail=1),
    "prefill": Case((150, 129), (150, 700), p=16, H=8, K=2, D=128, V=128, tail=5),
    "mixed": Case((1, 200, 0, 17, 1), (900, 300, 9, 17, 513), p=16, H=8, K=2, D=64, V=64, sinks=True),
    "mixed, options": Case((1, 90, 33), (700, 300, 40), p=24, H=8, K=2, D=80, V=80, left=100, **OPTIONS),
    "int8": Case((1, 70, 1), (700, 130, 33), p=16, H=8, K=2, D=64, V=64, kv_dtype="int8", scales="token"),
    "float8": Case(
        (1, 70, 1), (700, 130, 33), p=16, H=8, K=2, D=64, V=64, kv_dtype="float8_e4m3fn", scales="head"
    ),
    "float8_e5m2": Case(
        (1, 70, 1), (700, 130, 33), p=16, H=8, K=2, D=64, V=64, kv_dtype="float8_e5m2", scales="token"
    ),
    "bfloat16 keys, int8 values": Case(
        (1, 70, 1),
        (700, 130, 33),
        p=16,
        H=8,
        K=2,
        D=64,
        V=64,
        kv_dtype="bfloat16",
        v_dtype="int8",
        scales="token",
    ),
    "latent": Case((1, 70, 1), (700, 130, 33), p=64, H=16, K=1, D=128, rope=64),
    "latent int8, 128 heads": Case(
        (1, 2, 1), (700, 130, 33), p=64, H=128, K=1, D=512, rope=64, kv_dtype="int8", scales="token"
    ),
    "latent float8, 128 heads": Case(
        (1, 1),
        (700, 33),
        p=64,
        H=128,
        K=1,
        D=512,
        rope=64,
        kv_dtype="float8_e4m3fn",
        scales="head",
        sinks=True,
    ),
    "latent float8, rotary keys of 16 bits": Case(
        (1, 1),
        (700, 33),
        p=64,
        H=128,
        K=1,
        D=512,
        rope=64,
        kv_dtype="float8_e5m2",
        v_dtype="bfloat16",
        scales="token",
    ),
    "latent int8, 16 heads": Case(
        (1, 2, 1), (700, 130, 33), p=64, H=16, K=1, D=512, rope=64, kv_dtype="int8", scales="token"
    ),
}


@pytest.mark.parametrize("dtype", BYTES)
def test_every_code_of_8_bit_pages(dtype):
    """By the device's instructions, as exactly as on the host."""
    if dtype == "float8_e4m3fn" and device_facts().capability < (8, 9):
        pytest.skip("float8_e4m3fn needs compute capability 8.9")
    launched, inputs = launch(dtype, fast=device_facts().vendor == "nvidia")
    assert_converted(dtype, jax.jit(functools.partial(run, launched))(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_long(name, dtype):
    check(dataclasses.replace(LONG[name], dtype=dtype))


@pytest.mark.parametrize("splits", [2, 5, 64])
@pytest.mark.parametrize("name", LONG)
def test_the_last_program_merges(name, splits):
    default = default_config(*made(LONG[name]))
    config = dataclasses.replace(default, split_k=splits, chunk_size=default.decode.block_k, together=True)
    check(LONG[name], config)


@pytest.mark.parametrize("n", range(12))
@pytest.mark.parametrize("name", LONG)
def test_candidates(name, n):
    """Every configuration that the tuner may choose."""
    case = dataclasses.replace(LONG[name], dtype="bfloat16")
    arrays, spec = made(case)
    default_config(arrays, spec)  # skips what this device does not support
    candidates = host.candidates(OPERATION, problem_of(OPERATION, arrays, spec))
    if n >= len(candidates):
        pytest.skip(f"there are {len(candidates)}")
    check(case, candidates[n])


LAYERS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "decode": ("paged_attention", dict(N=16, S=4096, H=32, K=8, D=128, p=16), {}),
    "one long": ("paged_attention", dict(N=1, S=65536, H=32, K=8, D=128, p=16), {}),
    "window and sinks": (
        "paged_attention",
        dict(N=16, S=4096, H=64, K=8, D=64, p=16),
        {"window": True, "sinks": True},
    ),
    "int8": ("paged_attention", dict(N=16, S=4096, H=32, K=8, D=128, p=16), {"scales": "token"}),
    "float8": (
        "paged_attention",
        dict(N=16, S=4096, H=32, K=8, D=128, p=64),
        {"scales": "head", "kv": "float8_e4m3fn"},
    ),
    "float8_e5m2": (
        "paged_attention",
        dict(N=16, S=4096, H=32, K=8, D=128, p=16),
        {"scales": "token", "kv": "float8_e5m2"},
    ),
    "int8 values": (
        "paged_attention",
        dict(N=16, S=4096, H=32, K=8, D=128, p=16),
        {"scales": "token", "kv": "bfloat16", "v": "int8"},
    ),
    "dense": ("ragged_decode_attention", dict(B=16, S=2048, H=32, K=8, D=128), {}),
    "latent": ("paged_attention", dict(N=16, S=2048, H=128, D=576, V=512, p=64), {"latent": True}),
    "latent, 16 heads": ("paged_attention", dict(N=16, S=2048, H=16, D=576, V=512, p=64), {"latent": True}),
    "latent int8, 16 heads": (
        "paged_attention",
        dict(N=16, S=2048, H=16, D=576, V=512, p=64),
        {"latent": True, "scales": "token"},
    ),
    "latent float8": (
        "paged_attention",
        dict(N=16, S=2048, H=128, D=576, V=512, p=64),
        {"latent": True, "scales": "token", "kv": "float8_e4m3fn"},
    ),
    "latent int8": (
        "paged_attention",
        dict(N=16, S=2048, H=128, D=576, V=512, p=64),
        {"latent": True, "scales": "token"},
    ),
    "latent prefill": (
        "prefill_paged_attention",
        dict(N=2, T=600, S=900, H=32, D=576, V=512, p=64),
        {"latent": True},
    ),
    "prefill": ("prefill_paged_attention", dict(N=2, T=3000, S=4096, H=32, K=8, D=128, p=16), {}),
    "mixed": ("ragged_paged_attention", dict(N=32, T=1024, S=2048, H=32, K=8, D=128, p=16), {}),
    "drafts": (
        "unified_attention",
        dict(N=32, T=128, Q=4, S=2048, H=32, K=8, D=128, p=16),
        {"qq_bias": True},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_at_their_size(name, dtype):
    """Sizes and configurations as in a model, against the plain mathematics in float32; repeated on a full device."""
    operation, dims, flags = LAYERS[name]
    problem = example_problem(operation, dims, dtype, flags)
    config, work = host.default_config(operation, problem), host.work_of(operation, problem)
    inputs = work.make_inputs(1)
    run = jax.jit(work.run, static_argnums=1)
    with jax.default_matmul_precision("highest"):
        exact = work.reference(inputs)
    actual = run(inputs, config)
    for result in work.tolerances:
        assert_close(actual[result], exact[result], dtype, name=result)
    for _ in range(REPEATS - 1):
        assert_same(actual, run(inputs, config))


# Pages


@pytest.mark.parametrize("name", LONG)
def test_what_nobody_sees_changes_nothing(name):
    """The cases hold NaN there: zeros, or pages that no table names, give the same bits."""
    arrays, spec = made(dataclasses.replace(LONG[name], dtype="bfloat16"))
    config = default_config(arrays, spec)
    given = {n: x for n in (*PAGES, *SCALES) if (x := getattr(arrays, n)) is not None}
    poisoned = [x for x in given.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    assert any(bool(jnp.isnan(x.astype(jnp.float32)).any()) for x in poisoned)
    clean = {n: jnp.where(x != x, jnp.zeros((), x.dtype), x) for n, x in given.items()}
    expected = run_triton(arrays, spec, config)
    assert_same(expected, run_triton(arrays._replace(**clean), spec, config))
    # `k` has three axes behind that of the pages, a scale a token two.
    more = {
        n: jnp.concatenate([x, jnp.full_like(x[:3], jnp.nan if x.dtype != jnp.int8 else 99)])
        for n, x in given.items()
        if x.ndim > 1
    }
    table = jnp.where(arrays.page_table < arrays.k.shape[0], arrays.page_table, -1)
    assert_same(expected, run_triton(arrays._replace(**more, page_table=table), spec, config))


@pytest.mark.parametrize("name", LONG)
def test_the_order_of_pages_changes_nothing(name):
    arrays, spec = made(dataclasses.replace(LONG[name], dtype="bfloat16"))
    config, count = default_config(arrays, spec), arrays.k.shape[0]
    order = np.random.default_rng(5).permutation(count)
    new = np.argsort(order).astype(np.int32)  # page `n` is now at `new[n]`
    table = np.asarray(arrays.page_table)
    table = np.where((table >= 0) & (table < count), new[np.clip(table, 0, count - 1)], -1)
    given = {n: x for n in (*PAGES, *SCALES) if (x := getattr(arrays, n)) is not None and x.ndim > 1}
    moved = arrays._replace(**{n: x[order] for n, x in given.items()}, page_table=jnp.asarray(table))
    assert_same(run_triton(arrays, spec, config), run_triton(moved, spec, config))


@pytest.mark.parametrize("name", ["decode", "speculative", "mixed", "latent"])
def test_a_sequence_does_not_depend_on_the_others(name):
    case = dataclasses.replace(LONG[name], dtype="bfloat16", qq_bias=None)
    arrays, spec = made(case)
    config = default_config(arrays, spec)
    together = run_triton(arrays, spec, config)
    for n, first in enumerate(np.cumsum((0, *case.q_lens[:-1]))):
        tokens = slice(int(first), int(first) + case.q_lens[n])
        alone = arrays._replace(
            q=arrays.q[:, tokens],
            q_start=jnp.zeros((1, 1), jnp.int32),
            **{field: getattr(arrays, field)[:, n : n + 1] for field in ("page_table", "q_len", "kv_len")},
        )
        if case.q_lens[n]:
            results = run_triton(alone, spec, config)
            assert_same(results, {field: x[:, tokens] for field, x in together.items()})


# Writing


def writing(dtype: str, scales: str | None, pages: int = 512, tokens: int = 700) -> WriteArrays:
    """Some tokens go nowhere."""
    rng = np.random.default_rng(0)
    p, heads, dim = 16, 8, 128
    slots = rng.permutation(pages * p)[:tokens].astype(np.int32)
    slots[::7] = rng.choice([-1, -5, pages * p, 2**31 - 1], len(slots[::7]))
    keys = jax.random.split(jax.random.key(0), 4)
    held = [8 * jax.random.normal(key, (pages, p, heads, dim)) for key in keys[:2]]
    new = [jax.random.normal(key, (tokens, heads, dim), jnp.bfloat16) for key in keys[2:]]
    arrays = {name: x.astype(dtype) for name, x in zip("kv", held)}
    if scales:
        shape = (pages, p, heads) if scales == "token" else (heads,)
        arrays |= {f"{name}_scale": jnp.full(shape, 0.03) for name in "kv"}
    return WriteArrays(arrays, dict(zip("kv", new)), jnp.asarray(slots))


@pytest.mark.parametrize("scales", [None, "token", "head"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_writing_in_place(dtype, scales):
    """As XLA's scatter, in the memory of donated pages."""
    if (dtype in LARGEST) != (scales is not None):
        pytest.skip("scales are for 8-bit pages")
    if dtype == "float8_e4m3fn" and device_facts().capability < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    arrays = writing(dtype, scales)
    expected = jax.jit(xla_write.write)(arrays)
    kernels = TRITON.load()

    def run(pages, new, slots):
        return kernels.write(WriteArrays(pages, new, slots))

    write = jax.jit(run, donate_argnums=0)
    compiled = write.lower(*arrays).compile()
    analysis, size = compiled.memory_analysis(), sum(x.nbytes for x in arrays.pages.values())
    assert analysis is not None
    moved = size if scales != "head" else size - 2 * arrays.pages["k_scale"].nbytes
    assert analysis.alias_size_in_bytes >= moved and analysis.temp_size_in_bytes < size // 8
    written = compiled(jax.tree.map(jnp.copy, arrays.pages), arrays.new, arrays.slots)
    for name, x in expected.items():
        if not scales:
            assert_same(written[name], x)
        elif name.endswith("_scale"):
            np.testing.assert_allclose(written[name], x, rtol=3e-7)
        else:  # a quotient may be rounded to the next number
            got, want = np.asarray(written[name], np.float32), np.asarray(x, np.float32)
            relative, absolute = (2.0**-2, 2.0**-16) if dtype == "float8_e5m2" else (2.0**-3, 2.0**-9)
            step = 1 if dtype == "int8" else np.maximum(relative * np.abs(want), absolute)
            assert (np.abs(got - want) <= step).all() and (got != want).mean() < 0.01


def test_an_appending_call_writes_in_place():
    pages = 2048
    cache = ejx.PagedKVCache.init(pages, 16, 8, 128, dtype=jnp.bfloat16)
    table = jnp.asarray(np.random.default_rng(0).permutation(pages)[: 8 * 64].reshape(8, 64), jnp.int32)
    cache = cache.bind(table, jnp.arange(100, 900, 100, dtype=jnp.int32))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (8, h, 128), jnp.bfloat16) for key, h in zip(keys, (32, 8, 8)))
    attend = ejx.RaggedPagedAttention(append=True, platform="triton")
    starts = jnp.arange(9, dtype=jnp.int32)

    def run(cache, q, k, v):
        return attend(q, cache, k, v, query_start_loc=starts, max_query_len=1)

    compiled = jax.jit(run, donate_argnums=0).lower(cache, q, k, v).compile()
    analysis, size = compiled.memory_analysis(), cache.k.nbytes + cache.v.nbytes
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= size and analysis.temp_size_in_bytes < size // 8
    expected = jax.jit(run)(cache, q, k, v)
    assert_same(compiled(jax.tree.map(jnp.copy, cache), q, k, v), expected)


# The public operations


@pytest.mark.parametrize("latent", [False, True])
def test_the_public_operation_and_vmap(latent):
    rows, count, heads = 3, 4, 16
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    if latent:
        cache, dim = ejx.PagedLatentCache(normal(40, 16, 128), normal(40, 16, 64)), 192
    else:
        cache, dim = ejx.PagedKVCache(normal(40, 16, 2, 64), normal(40, 16, 2, 64)), 64
    table = jnp.asarray(np.random.default_rng(0).integers(0, 40, (rows, count, 7)), jnp.int32)
    lengths = jnp.asarray([[1, 112, 50, 16]] * rows, jnp.int32)
    q = normal(rows, count, heads, dim)

    def attend(platform, q, cache):
        return ejx.PagedAttention(softmax_scale=0.1, platform=platform)(q, cache, return_lse=True)

    bound = cache.bind(table, lengths)
    together = jax.jit(functools.partial(attend, "triton"))(q, bound)
    one = lambda q, table, lengths: attend("triton", q, cache.bind(table, lengths))
    assert_same(together, jax.jit(jax.vmap(one))(q, table, lengths))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, bound)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(attend, "xla"))(q.astype(jnp.float32), wide)
    for a, b in zip(together, exact, strict=True):
        assert_close(a, b, "bfloat16")


# Offsets past 2^31 elements, and grids past 65535 sequences. What repeats has a small call as its oracle.


def few(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **sizes: Any) -> tuple[PagedArrays, PagedSpec]:
    return made(
        Case(q_lens, kv_lens, **{"p": 16, "H": 32, "K": 8, "D": 128, "V": 128, **sizes}, dtype="bfloat16")
    )


@pytest.mark.memory(25)
@pytest.mark.parametrize("queries", [1, 40])
def test_pages_past_two_to_the_31_elements(queries):
    """The sequences lie in the last pages, then partly in the first ones too."""
    arrays, spec = few((queries, queries), (900, 333))
    assert arrays.v is not None
    config, count, a_page = default_config(arrays, spec), arrays.k.shape[0], arrays.k[0].size
    copies = 2**31 // (count * a_page) + 2
    expected = run_triton(arrays, spec, config)
    large = [jnp.tile(x, (copies, 1, 1, 1)) for x in (arrays.k, arrays.v)]
    assert large[0].size > 2**31
    last = (copies - 1) * count
    table = arrays.page_table
    there = (table >= 0) & (table < count)
    for odd in (0, 1):
        every = jnp.broadcast_to(jnp.arange(table.shape[-1], dtype=jnp.int32) % 2 >= odd, table.shape)
        moved = jnp.where(there, table + last * every.astype(jnp.int32), -1)
        given = arrays._replace(k=large[0], v=large[1], page_table=moved)
        assert_same(expected, run_triton(given, spec, config))


@pytest.mark.memory(25)
def test_writing_past_two_to_the_31_elements():
    heads, dim, p = 8, 128, 16
    pages = 2**31 // (p * heads * dim) + 64
    keys = jax.random.split(jax.random.key(0), 2)
    new = {name: jax.random.normal(key, (100, heads, dim), jnp.bfloat16) for name, key in zip("kv", keys)}
    slots = pages * p - 1 - 3 * jnp.arange(100, dtype=jnp.int32)
    empty = {name: jnp.zeros((pages, p, heads, dim), jnp.bfloat16) for name in "kv"}
    kernels = TRITON.load()
    run = lambda pages, new: kernels.write(WriteArrays(pages, new, slots))
    written = jax.jit(run, donate_argnums=0)(empty, new)
    for name in "kv":
        flat = written[name].reshape(-1, heads, dim)
        assert written[name].size > 2**31
        assert_same(flat[-400:][399 - 3 * jnp.arange(100)], new[name])
        assert int(jnp.count_nonzero(jnp.any(flat != 0, (1, 2)))) == 100


def tiled(arrays: PagedArrays, times: int) -> PagedArrays:
    """The same sequences again and again, on the same pages."""
    own = {name: getattr(arrays, name) for name in ("q", "page_table", "q_len", "kv_len")}
    many = {name: jnp.tile(x, (1, times, *(1,) * (x.ndim - 2))) for name, x in own.items()}
    starts = jnp.arange(times, dtype=jnp.int32)[:, None] * arrays.q.shape[1] + arrays.q_start
    return arrays._replace(**many, q_start=starts.reshape(1, -1))


@pytest.mark.memory(25)
@pytest.mark.parametrize(
    "q_lens, sizes",
    [
        ((1,) * 70, {}),
        ((1,) * 69 + (20,), {}),
        ((1,) * 70, dict(H=256, K=2)),  # queries and results past 2^31 elements
        ((1,) * 69 + (20,), dict(H=256, K=2)),
    ],
    ids=("decode", "mixed", "decode, large", "mixed, large"),
)
def test_very_many_sequences(q_lens, sizes):
    times = 1000
    arrays, spec = few(q_lens, tuple(20 + n % 13 for n in range(70)), **sizes)
    config = default_config(arrays, spec)
    small, large = run_triton(arrays, spec, config), run_triton(tiled(arrays, times), spec, config)
    assert times * len(q_lens) > 65535
    assert not sizes or large["out"].size > 2**31
    tokens = arrays.q.shape[1]
    for name, x in small.items():
        for n in (0, times // 2, times - 1):
            assert_same(x, large[name][:, n * tokens : (n + 1) * tokens])
