"""The decode kernel and its merge, interpreted, against the reference: every case, splits, tiles, what is another kernel's, vmap."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.compiled import DEVICES, executed
from tests.paged import triton_calls as calls
from tests.paged.cases import assert_agrees, Case, CASES, core, make, PagedArrays, PagedSpec, run_reference
from tests.paged.triton_calls import attend, attend_by, compiled, CONFIG, config_of, with_axis
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

TOGETHER = dataclasses.replace(CONFIG, together=True)  # the merge in the launch of the splits
FEW = [name for name, case in CASES.items() if case.longest <= compiled.DECODE_QUERIES]
MERGED = ("decode, all options", "empty sequences", "nobody", "latent, options", "two rows, all options")
FEATURES: dict[str, Any] = dict(cap=2.0, sinks=True, slopes=True)
LONG = Case((1, 4, 2), (70, 97, 33), p=4, left=75, qq_bias=4, tail=1, **FEATURES)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all((np.asarray(first[name]) == np.asarray(second[name])).all() for name in ("out", "lse"))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name, together", [*((name, False) for name in FEW), *((name, True) for name in MERGED)]
)
def test_agrees(name, together):
    assert_agrees(CASES[name], attend(CASES[name], TOGETHER if together else CONFIG))


LACKING = {
    "all": LONG,
    "no queries": dataclasses.replace(LONG, kv_lens=(70, 1, 33), q_lens=(1, 0, 2), tail=3),
    "no keys": dataclasses.replace(LONG, missing=((0, 0), (1, 3)), kv_start=(70, 200, 0), left=None),
    "many blocks": dataclasses.replace(LONG, H=24, K=2),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "splits, together, case",
    [(1, False, "all"), (5, False, "all"), (9, True, "all"), *((3, True, name) for name in LACKING)],
)
def test_any_number_of_splits_agrees_and_repeats(splits, together, case):
    """Whatever a sequence lacks, its result is stored."""
    config = dataclasses.replace(CONFIG, split_k=splits, together=together)
    results = attend(LACKING[case], config)
    assert_agrees(LACKING[case], results)
    assert same(results, attend(LACKING[case], config))


TILES = {
    "page is a tile": (16, 16, dict(p=16, missing=((1, 3), (2, 1)))),
    "page is a large tile": (16, 32, dict(p=32, kv_start=(0, 40, 33), left=None)),
    "page holds tiles": (32, 16, dict(p=64, kv_dtype="int8", scales="token", dtype="float16")),
    "latent, odd pages": (16, 32, dict(p=5, K=1, D=24, rope=8, qq_bias=None, slopes=False)),
    "pages fill a tile": (16, 64, dict(p=16, missing=((0, 2), (2, 0)))),
    "rows of many blocks": (16, 16, dict(q_lens=(12, 3, 1), kv_lens=(20, 19, 17), H=8, qq_bias=None)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TILES)
def test_tiles_of_any_size(name):
    *tile, changes = TILES[name]
    case: Any = dataclasses.replace(LONG, **changes)
    assert_agrees(case, attend(case, config_of(*tile, 4, 2, split_k=2, chunk_size=16)))


@pytest.mark.parametrize("far", (False, True), ids=("near", "far"))
@pytest.mark.parametrize("page", (1, 5, 16, 48))
def test_slots_of_keys(page, far):
    """Wherever pages lie, in tiles that they fill, hold or straddle, and where 32 bits do not count the slots."""
    block, keys, pages = 16, 128, 2**30 if far else 1000
    numbers = np.random.default_rng(page).integers(0, pages, -(-keys // page), dtype=np.int32)
    numbers[-1] = pages - 1
    numbers[:1], numbers[2:3] = -1, pages
    shape, end = jax.ShapeDtypeStruct, keys - 3
    launch = ejx.launch.Launch(
        calls.kernels.slots_kernel,
        {"table": shape(numbers.shape, jnp.int32)},
        {name: shape((keys,), jnp.int32) for name in ("high", "low")},
        {"END": end, "P": pages},
        {"PAGE": page, "BK": block, "FAR": far},
        (keys // block,),
        4,
        1,
    )
    found = calls.interpret(launch, {"table": jnp.asarray(numbers)})
    slots = (np.asarray(found["high"], np.int64) << 32) + np.asarray(found["low"]).view(np.uint32)
    j = np.arange(keys)
    number = numbers[j // page].astype(np.int64)
    there = (number >= 0) & (number < pages) & (j < end)
    np.testing.assert_array_equal(slots, np.where(there, number * page + j % page, -1))


@pytest.mark.parametrize(
    "pages, page, heads, dim, far",
    [
        (2**27 - 1, 16, 1, 16, False),
        (2**27, 16, 1, 16, True),
        (3, 2**20 - 1, 8, 256, False),
        (3, 2**20, 8, 256, True),
    ],
)
def test_what_is_counted_in_64_bits(pages, page, heads, dim, far):
    """Slots of all pages, and numbers of one page, from 2**31 on."""
    shape: Any = jax.ShapeDtypeStruct
    key, one = shape((pages, page, heads, dim), jnp.bfloat16), shape((1, 1), jnp.int32)
    arrays = PagedArrays(
        q=shape((1, 1, heads, dim), jnp.bfloat16), k=key, v=key, page_table=shape((1, 1, 2), jnp.int32), q_start=one, q_len=one, kv_len=one
    )  # fmt: skip
    assert calls.launches(arrays, PagedSpec(1.0), CONFIG)["decode_kernel"].constants["FAR"] == far


@pytest.mark.few(1)
@pytest.mark.parametrize("keys, page", ((48, 16), (100, 100), (512, 256)))
def test_dense_keys(keys, page):
    """A page that is all of its sequence is read as several of few sizes, also where it is missing."""
    lengths = (keys, keys - 9, 5)
    case = Case((1, 1, 1), lengths, p=keys, left=60, kv_start=(0, 3, 2), missing=((1, 0),), **FEATURES)
    results, constants = attend_by(case, page_table=with_axis(case)[0].page_table[..., :1])
    assert_agrees(case, results)
    assert constants["PAGE"] == page


BYTES = Case((1, 4, 2), (33, 50, 17), p=16, H=4, K=2, D=32, V=34, tail=1, dtype="bfloat16")
LATENT = dataclasses.replace(BYTES, K=1, D=34, rope=10)
OPTIONS: dict[str, Any] = dict(FEATURES, left=40, missing=((1, 1),))
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# Those that go in pairs, and keys and values of two dtypes, which do not; latents do whatever their rotary keys are.
OF_BYTES: list[tuple[int, Case]] = [
    (1, dataclasses.replace(BYTES, kv_dtype="int8", scales="token", **OPTIONS)),
    (2, dataclasses.replace(BYTES, kv_dtype=E4M3, scales="head", **OPTIONS)),
    (2, dataclasses.replace(BYTES, kv_dtype=E4M3, scales="token", dtype="float16", D=80, V=48)),
    (3, dataclasses.replace(BYTES, kv_dtype=E5M2, scales="token", **OPTIONS)),
    (1, dataclasses.replace(LATENT, kv_dtype="int8", scales="token", left=40, sinks=True)),
    (1, dataclasses.replace(LATENT, kv_dtype="int8", scales="head", v_dtype="bfloat16", missing=((1, 1),))),
    (2, dataclasses.replace(LATENT, kv_dtype=E4M3, scales="token", v_dtype="bfloat16")),
    (3, dataclasses.replace(LATENT, kv_dtype=E5M2, scales="head", cap=3.0)),
    (0, dataclasses.replace(BYTES, v_dtype="int8", scales="token", **OPTIONS)),
    (0, dataclasses.replace(BYTES, kv_dtype="int8", v_dtype=E5M2, scales="head", **OPTIONS)),
    (0, dataclasses.replace(BYTES, kv_dtype=E5M2, v_dtype="float32", scales="token", **OPTIONS)),
    (0, dataclasses.replace(LATENT, v_dtype="int8", scales="head", D=32, rope=16)),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "pairs, case",
    OF_BYTES,
    ids=lambda x: f"{x.page_dtypes} {x.scales} {x.rope}" if isinstance(x, Case) else None,
)
def test_bytes(pairs, case):
    """Each kind of pages has its scales or none."""
    results, constants = attend_by(case)
    assert constants["PAIRS"] == pairs
    assert_agrees(case, results)


def test_pages_of_infinities_are_not_read_where_nobody_sees_them():
    """Pages of float8_e5m2 hold infinities and NaN, which its instructions keep."""
    case = dataclasses.replace(BYTES, kv_dtype=E5M2, scales="head", missing=((1, 1),))
    arrays, _ = with_axis(case)
    k = arrays.k.astype(jnp.float32)
    assert_agrees(case, attend(case, k=jnp.where(jnp.isnan(k), jnp.inf, k).astype(arrays.k.dtype)))
    assert arrays.v is not None
    seen = attend(case, v=arrays.v.at[0].set(jnp.inf), page_table=jnp.zeros_like(arrays.page_table))["out"]
    assert not np.isfinite(np.asarray(seen, np.float32)[0, : sum(case.q_lens)]).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("size", (2.0**-100, 2.0**100))
@pytest.mark.parametrize("kv_dtype", ("int8", E4M3, E5M2))
def test_bytes_of_any_size(kv_dtype, size):
    """Float16 holds neither such queries nor such scales: rows are divided by a power of two, sums kept in units of the largest scale."""
    case = dataclasses.replace(BYTES, kv_dtype=kv_dtype, scales="token")
    arrays, _ = with_axis(case)
    assert arrays.k_scale is not None and arrays.v_scale is not None
    plain = attend(case)
    results = attend(case, q=arrays.q * size, k_scale=arrays.k_scale / size, v_scale=arrays.v_scale * size)
    wide = lambda x: np.asarray(x, np.float64)
    np.testing.assert_allclose(wide(results["out"]), wide(plain["out"]) * size, rtol=2**-7, atol=2**-8 * size)
    np.testing.assert_allclose(wide(results["lse"]), wide(plain["lse"]), rtol=1e-3, atol=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("scales", ("token", "head"))
@pytest.mark.parametrize("sinks", (False, True))
def test_bytes_behind_a_heavy_key(scales, sinks, splits):
    """A key that takes nearly all weight and has no value, as first tokens do: what the others add is small, but no less exact."""
    keys, page, above, rng = 129, 16, 20.0, np.random.default_rng(0)
    pages = -(-keys // page)
    k = np.zeros((pages, page, 1, 32), np.int8)
    v = rng.integers(32, 128, k.shape).astype(np.int8)
    k[0, 0], v[0, 0] = 127, 0
    shape, one = (pages, page, 1) if scales == "token" else (1,), jnp.ones((1, 1), jnp.int32)
    scale = rng.uniform(0.5, 1.5, shape)
    arrays = PagedArrays(
        q=jnp.ones((1, 1, 2, 32), jnp.bfloat16),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None, None],
        q_start=0 * one,
        q_len=one,
        kv_len=keys * one,
        k_scale=jnp.full(shape, 1 / 127, jnp.float32),
        v_scale=jnp.asarray(scale, jnp.float32),
        sinks=jnp.full((2,), above - 1.0) if sinks else None,
    )
    config = dataclasses.replace(CONFIG, split_k=splits)
    spec = PagedSpec(above / 32, max_query_len=1, scales=scales)
    results = executed(compiled.forward, calls.interpret)(arrays, spec, config)
    weights = np.exp(np.where(np.arange(keys) == 0, above, 0.0))
    total = weights.sum() + (np.exp(above - 1.0) if sinks else 0.0)
    values = (v * np.broadcast_to(scale, (pages, page, 1))[..., None]).reshape(-1, 32)[:keys]
    expected = np.stack([weights @ values / total] * 2)
    assert_close(np.asarray(results["out"])[0, 0], expected, "bfloat16", "forward", name="out")
    np.testing.assert_allclose(np.asarray(results["lse"]), np.log(total), rtol=1e-5)


def test_a_sequence_does_not_depend_on_the_others():
    case = dataclasses.replace(LONG, qq_bias=None, tail=0)
    arrays, _ = with_axis(case)
    together = attend(case)
    for n, first in enumerate(np.cumsum((0, *case.q_lens[:-1]))):
        tokens = slice(first, first + case.q_lens[n])
        own = {name: getattr(arrays, name)[:, n : n + 1] for name in ("page_table", "q_len", "kv_len")}
        alone = attend(case, q=arrays.q[:, tokens], q_start=jnp.zeros((1, 1), jnp.int32), **own)
        assert same(alone, {name: x[:, tokens] for name, x in together.items()})


def test_sequences_with_more_queries_are_left_alone():
    """Of 17 queries or fewer, two fill the smallest tile; tokens of no sequence are filled."""
    case = Case((17, 2, 3, 1), (20, 9, 11, 30), H=16, K=2, sinks=True, first=1, tail=2)
    arrays, spec = with_axis(case)
    call = calls.folded(arrays, spec, CONFIG)
    queries = compiled.decode_queries(spec.max_query_len, call.group)
    assert queries == 2
    results = executed(calls.decode_kernel.decode, calls.interpret)(call, queries)
    expected = run_reference(case)
    taken = np.r_[0, 18:20, 23:26]
    for name, x in results.items():
        others = np.delete(np.asarray(x), taken, 0)
        assert np.isnan(others).all()  # as the interpreter gives what is not written
        np.testing.assert_allclose(np.asarray(x)[taken], expected[name][taken], rtol=1e-4, atol=1e-5)


def test_which_program_is_last_changes_nothing(monkeypatch):
    """Programs run one by one, forwards and backwards, and all at once."""
    case = dataclasses.replace(LONG, q_lens=(1,), kv_lens=(97,), qq_bias=None)
    expected = attend(case, TOGETHER)
    monkeypatch.setattr(calls.interpreter, "_TOGETHER", 1)
    assert same(expected, attend(case, TOGETHER))
    backwards = types.SimpleNamespace(**vars(np))
    backwards.indices = lambda extents: np.indices(extents)[:, ::-1]
    monkeypatch.setattr(calls.interpreter, "np", backwards)
    assert same(expected, attend(case, TOGETHER))


def test_only_what_is_needed_is_launched():
    kernels = lambda case, config: [*calls.launches(*with_axis(case), config)]
    one = dataclasses.replace(CONFIG, split_k=1)
    wide = dataclasses.replace(LONG, max_query_len=17)
    assert kernels(LONG, one) == kernels(LONG, TOGETHER) == ["decode_kernel"]
    assert kernels(LONG, CONFIG) == ["decode_kernel", "merge_kernel"]
    assert kernels(CASES["decode"], dataclasses.replace(CONFIG, chunk_size=256)) == ["decode_kernel"]
    window = dataclasses.replace(LONG, left=3)  # too few keys for a second split
    assert kernels(window, dataclasses.replace(CONFIG, chunk_size=32)) == ["decode_kernel"]
    assert kernels(wide, one) == kernels(wide, TOGETHER) == ["decode_kernel", "prefill_kernel"]


MAPPED = {
    "nothing shared": (Case((1, 3), (6, 9), sinks=True, slopes=True, qq_bias=3), ()),
    "pages shared": (Case((1, 3), (6, 9), sinks=True, slopes=True), ("k", "v", "slopes")),
    "scales of tokens": (Case((1, 3), (6, 9), kv_dtype="int8", scales="token"), ("v", "v_scale")),
    "scales of heads": (Case((1, 3), (6, 9), kv_dtype="int8", scales="head"), ("k", "v", "v_scale")),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name):
    """Arrays that are mapped and those that all calls share."""
    case, shared = MAPPED[name]
    arrays, spec = make(case)
    half = lambda x: x * jnp.asarray(0.5, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    given = {field: x for field, x in arrays._asdict().items() if x is not None}
    stacked = {field: x if field in shared else jnp.stack([x, half(x)]) for field, x in given.items()}
    axes = {field: None if field in shared else 0 for field in given}

    def rows(platform: ejx.PlatformLike) -> Any:
        plan = ejx.PagedAttention(platform=platform).plan
        one = lambda given: core.ATTEND.call(plan, "paged_attention", PagedArrays(**given), spec)
        return quick(jax.vmap(one, (axes,)))(stacked)

    results, expected = rows("triton-interpret"), rows("xla")
    for field in ("out", "lse"):
        np.testing.assert_allclose(results[field], expected[field], rtol=1e-5, atol=1e-5)


LATENT_512 = dataclasses.replace(CASES["latent"], D=512, rope=64)
UNSUPPORTED = {
    "plain": (CASES["decode"], "", ""),
    "wide": (dataclasses.replace(CASES["decode"], D=512), "512", "512"),
    "latent": (dataclasses.replace(LATENT_512, dtype="bfloat16"), "", ""),
    "latent int8": (
        dataclasses.replace(LATENT_512, dtype="float16", kv_dtype="int8", scales="token"),
        "",
        "",
    ),
    "latent float32": (LATENT_512, "128 channels in float32, not 512", "128 channels"),
    "pages of float32": (dataclasses.replace(LATENT_512, dtype="bfloat16", kv_dtype="float32"), "128", "128"),
    "narrow latent float32": (dataclasses.replace(LATENT_512, D=128), "", ""),
    "wider latent": (dataclasses.replace(CASES["latent"], D=513), "513", "513"),
    "float8": (CASES["float8"], "8.9", ""),
    "float8 values": (CASES["int8 keys, float8 values"], "float8_e4m3fn", ""),
    "float8 with infinities": (CASES["float8 with infinities"], "", ""),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name):
    case, *words = UNSUPPORTED[name]
    problem = core.problem_of("paged_attention", *make(case))
    for target, word in zip(("sm_80", "sm_90"), words, strict=True):
        reason = compiled.unsupported(problem, DEVICES[target])
        assert word in str(reason) and (reason is None) == (not word)


@pytest.mark.parametrize(
    "field, value",
    [("split_k", 0), ("chunk_size", -1), ("float32_dot", "fp8"), ("block_k", 48), ("num_warps", 3)],
)
def test_configurations_that_mean_nothing(field, value):
    changed = CONFIG.decode if hasattr(CONFIG.decode, field) else CONFIG
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(changed, **{field: value})
