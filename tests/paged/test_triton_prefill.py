"""The prefill kernel, interpreted, against the reference: every case, tiles, holes, what is another kernel's; and compiled for devices
that are not here."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.launch import compile_ahead, run
from ejkernel_eqx.paged import reference
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec
from tests.compiled import launches_of
from tests.paged.cases import assert_agrees, Case, CASES, make, run_reference, with_leading_axis
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

pytest.importorskip("triton")
from ejkernel_eqx.paged.triton import compiled as triton
from ejkernel_eqx.paged.triton import prefill_kernel as triton_prefill
from ejkernel_eqx.paged.triton.call import folded, PagedTile, TritonConfig

interpret = functools.partial(run, interpret=True)
SIDES = (
    "float8 with infinities", "bfloat16 keys, int8 values", "int8 keys, float32 values, head scales", "float16 keys, int8 values",
    "float32 queries, bfloat16 keys, int8 values", "latent float8, bfloat16 rope", "latent float32, int8 rope, head scales",
)  # fmt: skip
# What is not held by others too.
NAMES = (
    "prefill", "prefill behind keys", "mixed, all options", "speculative", "empty sequences", "no keys", "nobody", "left out",
    "page of 1", "page of 16", "missing pages", "freed behind a window", "D 40, V 24", "latent, options", "latent int8",
    "float8", "float8, head scales", "bfloat16", "bfloat16 pages", "two rows, all options", *SIDES,
)  # fmt: skip
LONG = Case((21, 1, 14), (75, 20, 46), p=8, first=1, tail=2)
OPTIONS: dict[str, Any] = dict(cap=2.0, sinks=True, slopes=True)


def config_of(*sizes: int) -> TritonConfig:
    tile = PagedTile(*sizes, num_warps=4, num_stages=1)
    return TritonConfig(tile, tile, fast_tanh=False, fast_bytes=False, float32_dot="ieee")


def attend(
    case: Case, block_m: int = 16, block_k: int = 16, *, least: int = 0, fill: float | None = None
) -> dict[str, Any]:
    """By this kernel alone the sequences with more than `least` queries, in buffers as they come or full of a number."""
    arrays, spec = make(case)
    config = config_of(block_m, block_k)
    return prefill(arrays if case.batch else with_leading_axis(arrays), spec, config, least, fill)


def prefill(
    arrays: PagedArrays, spec: PagedSpec, config: TritonConfig, least: int = 0, fill: float | None = None
) -> dict[str, Any]:
    def run(arrays: PagedArrays) -> dict[str, Any]:
        call = folded(arrays, spec, config, interpret)
        shape = (*call.arrays.q.shape[:2], call.values)
        before = {
            "out": jnp.full(shape, 0 if fill is None else fill, arrays.q.dtype),
            "lse": jnp.full(shape[:2], -jnp.inf if fill is None else fill, jnp.float32),
        }
        results = triton_prefill.prefill(call, before, least)
        return {name: x.reshape(*arrays.q.shape[:2], *x.shape[1:]) for name, x in results.items()}

    return quick(run)(arrays)


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("out", "lse"):
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_agrees(name):
    assert_agrees(CASES[name], attend(CASES[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case, block_m, block_k",
    [
        (dataclasses.replace(LONG, H=8), 16, 32),
        (
            dataclasses.replace(LONG, H=6, left=25, **OPTIONS),
            32,
            16,
        ),  # groups of 3: tiles begin within a query
        (dataclasses.replace(LONG, H=16, K=1, qq_bias=24, kv_start=(21, 19, 0)), 64, 16),
        (dataclasses.replace(LONG, p=16, missing=((0, 1), (2, 0), (2, 2))), 16, 16),
        (dataclasses.replace(LONG, p=64, left=16, missing=((0, 0),)), 32, 32),
        (dataclasses.replace(LONG, K=1, H=32, D=24, rope=8, kv_dtype="int8", scales="token"), 16, 32),
        (dataclasses.replace(LONG, K=4, p=5, dtype="bfloat16"), 16, 16),
    ],
    ids=(
        "groups of 4",
        "window",
        "bias, kv_start",
        "holes",
        "freed page",
        "latent, groups of 32",
        "groups of 1",
    ),
)
def test_tiles_of_any_size(case, block_m, block_k):
    """From half a query's heads to 16 queries a tile; tiles of keys that all see, before and behind those that some see."""
    assert_agrees(case, attend(case, block_m, block_k))


def test_scores_below_all_numbers():
    """A tile that all rows see whole, of scores past the end of float32, before those with others."""
    arrays, spec = make(Case((8,), (64,), p=16, H=2, K=1))
    arrays = arrays._replace(
        q=jnp.ones_like(arrays.q), k=arrays.k.at[arrays.page_table[0, 0]].set(jnp.float32(-1e38))
    )
    expected = reference.attend(arrays, spec)
    results = prefill(with_leading_axis(arrays), spec, config_of(16, 16))
    for name in ("out", "lse"):
        assert np.isfinite(expected[name]).all()
        assert_close(results[name][0], expected[name])


def test_bitwise_repeatable_and_no_matter_which_pages():
    case = dataclasses.replace(LONG, left=30, **OPTIONS)
    first = attend(case)
    assert_same(first, attend(case))
    arrays, spec = make(case)
    places = np.random.default_rng(1).permutation(arrays.k.shape[0])
    table = np.asarray(arrays.page_table)
    known = (table >= 0) & (table < len(places))
    moved = np.where(known, np.argsort(places)[np.where(known, table, 0)], -1).astype(np.int32)
    assert arrays.v is not None
    moved_arrays = arrays._replace(k=arrays.k[places], v=arrays.v[places], page_table=jnp.asarray(moved))
    assert_same(first, forward(moved_arrays, spec))


def forward(arrays: PagedArrays, spec: PagedSpec) -> dict[str, Any]:
    return prefill(with_leading_axis(arrays), spec, config_of(16, 16))


def test_a_sequence_does_not_depend_on_the_others():
    case = Case((9, 1, 5), (20, 12, 5), p=8, sinks=True)
    arrays, spec = make(case)
    together = forward(arrays, spec)
    for n, first in enumerate(np.cumsum((0, *case.q_lens[:-1]))):
        tokens = slice(first, first + case.q_lens[n])
        own = {name: getattr(arrays, name)[n : n + 1] for name in ("page_table", "q_len", "kv_len")}
        alone = arrays._replace(q=arrays.q[tokens], q_start=jnp.zeros(1, jnp.int32), **own)
        assert_same(forward(alone, spec), {name: x[:, tokens] for name, x in together.items()})


def test_sequences_with_few_queries_are_left_alone():
    case = Case((1, 6, 2, 9, 3), (8, 6, 7, 21, 30), H=6, K=2, first=1, tail=2, sinks=True)
    results, expected = attend(case, least=3, fill=7.0), run_reference(case)
    taken = np.r_[2:8, 10:19]
    for name, x in results.items():
        own = np.asarray(x)[0]
        assert (np.delete(own, taken, 0) == 7).all()
        np.testing.assert_allclose(own[taken], expected[name][taken], rtol=1e-4, atol=1e-5)
    assert_same(attend(case, least=9, fill=7.0), attend(case, least=50, fill=7.0))


def test_beside_the_decode_kernel():
    """Decodes and chunks in one call, each sequence by one of the two kernels."""
    case = Case((1, 17, 2, 18, 3), (8, 20, 7, 30, 3), K=1, tail=2, **OPTIONS)
    two = dataclasses.replace(case, q_lens=(1, 17), kv_lens=(5, 20), batch=2)
    for one in (case, two):
        arrays, spec = make(one)
        call = functools.partial(triton.forward, spec=spec, config=config_of(16, 16), execute=interpret)
        assert_agrees(one, quick(call)(arrays if one.batch else with_leading_axis(arrays)))


def test_lengths_that_do_not_fit():
    """More keys than the table has, and more queries than there are tokens: nothing is read or written outside."""
    case = dataclasses.replace(LONG, first=0, tail=0)
    arrays, spec = make(case)
    wrong = arrays._replace(kv_len=arrays.kv_len + 200, q_len=arrays.q_len + 9)
    forward(wrong, spec)


def test_no_sequences_and_no_tokens():
    arrays, spec = make(LONG)
    lengths = {name: getattr(arrays, name)[:0] for name in ("page_table", "q_start", "q_len", "kv_len")}
    assert not np.asarray(forward(arrays._replace(**lengths), spec)["out"]).any()
    assert forward(arrays._replace(q=arrays.q[:0], q_len=arrays.q_len * 0), spec)["out"].shape[1] == 0


def test_sequences_anywhere_among_the_tokens():
    """Tokens of no sequence between them, and sequences that begin where the next one does."""
    case = Case((3, 9, 0, 6), (5, 20, 4, 6), p=4)
    arrays, spec = make(dataclasses.replace(case, tail=6))
    start = np.array((2, 5, 16, 16), np.int32)
    order = np.concatenate([start[n] + np.arange(q) for n, q in enumerate(case.q_lens)])
    spread = jnp.zeros_like(arrays.q).at[order].set(arrays.q[: len(order)])
    results = forward(arrays._replace(q=spread, q_start=jnp.asarray(start)), spec)
    together = forward(arrays, spec)
    for name, x in results.items():
        np.testing.assert_array_equal(np.asarray(x)[0, order], np.asarray(together[name])[0, : len(order)])


def launch_of(dtype: Any, heads: tuple[int, int], dim: int, tile: tuple[int, ...], **options: Any) -> Any:
    """The launch for 4096 tokens of 64 sequences over a large cache."""
    rope, window, pages = options.get("rope"), options.get("left"), options.get("kv_dtype", dtype)
    struct: Any = jax.ShapeDtypeStruct
    scale = struct((8192, 16, heads[1]), jnp.float32) if pages == jnp.int8 else None
    key = struct((8192, 16, heads[1], dim), pages)
    lengths = struct((1, 64), jnp.int32)
    arrays = PagedArrays(
        q=struct((1, options.get("tokens", 4096), heads[0], dim + (rope or 0)), dtype),
        k=key,
        v=None if rope else key,
        page_table=struct((1, 64, 512), jnp.int32),
        q_start=lengths,
        q_len=lengths,
        kv_len=lengths,
        rope=struct((8192, 16, heads[1], rope), pages) if rope else None,
        k_scale=scale,
        v_scale=None if rope else scale,
        rope_scale=scale if rope else None,
    )
    spec = PagedSpec(
        scale=dim**-0.5,
        left=window,
        max_query_len=4096,
        latent=bool(rope),
        scales=None if scale is None else "token",
    )
    both = PagedTile(*tile)
    config = TritonConfig(both, both, fast_tanh=False)
    kernel = lambda arrays, execute: triton.forward(arrays, spec, config, execute=execute)
    return launches_of(kernel, arrays)["prefill_kernel"]


def test_buckets_of_tokens_share_one_kernel():
    size = (HALF, (32, 8), 64, (64, 64, 4, 3))
    assert launch_of(*size).constants == launch_of(*size, tokens=512).constants


HALF, SINGLE = jnp.bfloat16, jnp.float32
COMPILED = {
    "sm_80, D 128": ("sm_80", (HALF, (32, 8), 128, (64, 64, 4, 2)), {}, 64),
    "sm_90, latent": ("sm_90", (HALF, (128, 1), 512, (64, 32, 8, 2)), {"rope": 64}, 256),
    "sm_100, D 128": ("sm_100", (HALF, (32, 8), 128, (128, 64, 8, 2)), {}, 64),
    "gfx942, D 128": ("gfx942", (HALF, (32, 8), 128, (64, 32, 4, 1)), {}, 64),
}
COMPILED_TOO = {
    "sm_80, float32": ("sm_80", (SINGLE, (32, 8), 64, (64, 32, 4, 2)), {}, 256),
    "sm_90, float32": ("sm_90", (SINGLE, (32, 8), 64, (64, 32, 4, 2)), {}, 64),
    "sm_90, D 64, window": ("sm_90", (HALF, (32, 8), 64, (128, 64, 8, 3)), {"left": 1023}, 0),
    "sm_90, D 256": ("sm_90", (HALF, (16, 8), 256, (64, 32, 8, 3)), {}, 0),
    "sm_90, int8": ("sm_90", (HALF, (32, 8), 128, (128, 64, 8, 3)), {"kv_dtype": jnp.int8}, 64),
    "sm_90, latent int8": (
        "sm_90",
        (HALF, (128, 1), 512, (64, 32, 8, 2)),
        {"rope": 64, "kv_dtype": jnp.int8},
        1024,
    ),
    "sm_100, D 64": ("sm_100", (HALF, (32, 8), 64, (128, 64, 8, 3)), {}, 64),
    "sm_100, latent": ("sm_100", (HALF, (128, 1), 512, (64, 32, 8, 2)), {"rope": 64}, 1024),
    "gfx942, D 64": ("gfx942", (HALF, (32, 8), 64, (64, 64, 4, 1)), {}, 128),
}


def assert_compiles(target: str, sizes: tuple[Any, ...], options: dict[str, Any], spills: int) -> None:
    report = compile_ahead(launch_of(*sizes, **options), target)
    assert report.fits and report.spills <= spills, report


@pytest.mark.few(1)
@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name):
    assert_compiles(*COMPILED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED_TOO)
def test_compiles_too(name):
    assert_compiles(*COMPILED_TOO[name])


def test_loops_are_pipelined():
    """Both of them, from the first loads of keys and values on: two stages ahead of the loop and one in it."""
    triton_compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    from ejkernel_eqx.launch.compile import specialisation

    launch = launch_of(HALF, (32, 8), 128, (128, 64, 8, 3))
    signature, constants, attributes = specialisation(launch)
    source = triton_compiler.ASTSource(
        launch.function, signature=signature, constexprs=constants, attrs=attributes
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    compiled = triton_compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["ttgir"].count("async_copy_global_to_local") == 2 * 2 * 3
