"""The decode kernel and its merge, interpreted, against the reference: every case, splits, tiles, what is another kernel's, vmap."""

import dataclasses
import functools
import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx._kernel import make_plan
from ejkernel_eqx.launch import Launch, run
from ejkernel_eqx.launch.compile import specialisation
from ejkernel_eqx.paged import core
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec
from tests.compiled import DEVICES, launches_of
from tests.paged.cases import assert_agrees, Case, CASES, make, run_reference, with_leading_axis
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

pytest.importorskip("triton")
from ejkernel_eqx.paged.triton import compiled
from ejkernel_eqx.paged.triton import decode_kernel as triton_decode
from ejkernel_eqx.paged.triton.call import folded, PagedTile, TritonConfig
from tests.paged.slots_kernel import slots_kernel

SMALL = PagedTile(16, 16, 4, 1)
CONFIG = TritonConfig(
    SMALL, SMALL, split_k=3, chunk_size=16, fast_tanh=False, fast_bytes=False, float32_dot="ieee"
)
interpret = functools.partial(run, interpret=True)
FEW = [name for name, case in CASES.items() if case.longest <= compiled.DECODE_QUERIES]
FEATURES: dict[str, Any] = dict(cap=2.0, sinks=True, slopes=True)
LONG = Case((1, 4, 2), (70, 97, 33), p=4, left=75, qq_bias=4, tail=1, **FEATURES)


def with_axis(case: Case) -> tuple[PagedArrays, PagedSpec]:
    arrays, spec = make(case)
    return arrays if case.batch else with_leading_axis(arrays), spec


def attend(case: Case, config: TritonConfig = CONFIG) -> dict[str, Any]:
    arrays, spec = with_axis(case)
    return compiled.forward(arrays, spec, config, execute=interpret)


def attend_by(case: Case, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results, with some arrays changed, and the constants of the first kernel."""
    arrays, spec = with_axis(case)
    taken = []

    def execute(launch, inputs):
        taken.append(launch.constants)
        return interpret(launch, inputs)

    return compiled.forward(arrays._replace(**changes), spec, CONFIG, execute=execute), taken[0]


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all((np.asarray(first[name]) == np.asarray(second[name])).all() for name in ("out", "lse"))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FEW)
def test_agrees(name):
    assert_agrees(CASES[name], attend(CASES[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("splits", (1, 2, 5))
def test_any_number_of_splits_agrees_and_repeats(splits):
    config = dataclasses.replace(CONFIG, split_k=splits)
    results = attend(LONG, config)
    assert_agrees(LONG, results)
    assert same(results, attend(LONG, config))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "tile, case",
    (
        ((16, 16), dataclasses.replace(LONG, p=16, missing=((1, 3), (2, 1)))),
        ((16, 32), dataclasses.replace(LONG, p=32, kv_start=(0, 40, 33), left=None)),
        ((32, 16), dataclasses.replace(LONG, p=64, kv_dtype="int8", scales="token", dtype="float16")),
        ((16, 32), dataclasses.replace(LONG, p=5, K=1, D=24, rope=8, qq_bias=None, slopes=False)),
        ((16, 16), dataclasses.replace(LONG, p=48, missing=((1, 1),))),
        ((16, 64), dataclasses.replace(LONG, p=16, missing=((0, 2), (2, 0)))),
    ),
    ids=(
        "page is a tile",
        "page is a large tile",
        "page holds tiles",
        "latent, odd pages",
        "page holds three tiles",
        "pages fill a tile",
    ),
)
def test_tiles_of_any_size(tile, case):
    block_m, block_k = tile
    tile = PagedTile(block_m, block_k, 4, 2)
    assert_agrees(case, attend(case, dataclasses.replace(CONFIG, decode=tile, split_k=2)))


@pytest.mark.parametrize("far", (False, True), ids=("near", "far"))
@pytest.mark.parametrize("page", (1, 4, 5, 8, 16, 48, 64))
def test_slots_of_keys(page, far):
    """Wherever pages lie, in tiles that they fill, hold or straddle, and where 32 bits do not count the slots."""
    block, keys, pages = 16, 128, 2**30 if far else 1000
    numbers = np.random.default_rng(page).integers(0, pages, -(-keys // page), dtype=np.int32)
    numbers[-1] = pages - 1
    numbers[:1], numbers[2:3] = -1, pages
    kinds = {"table": jax.ShapeDtypeStruct(numbers.shape, jnp.int32)}
    half = jax.ShapeDtypeStruct((keys,), jnp.int32)
    constants = {"PAGE": page, "BK": block, "FAR": far}
    end = keys - 3
    launch = Launch(
        slots_kernel,
        kinds,
        {"high": half, "low": half},
        {"END": end, "P": pages},
        constants,
        (keys // block,),
        4,
        1,
    )
    found = interpret(launch, {"table": jnp.asarray(numbers)})
    slots = (np.asarray(found["high"], np.int64) << 32) + np.asarray(found["low"]).view(np.uint32)
    j = np.arange(keys)
    number = numbers[j // page].astype(np.int64)
    there = (number >= 0) & (number < pages) & (j < end)
    np.testing.assert_array_equal(slots, np.where(there, number * page + j % page, -1))


def test_what_is_counted_in_64_bits():
    """Slots of all pages, and numbers of one page, from 2**31 on."""
    struct: Any = jax.ShapeDtypeStruct

    def far(pages: int, page: int, heads: int, dim: int) -> bool:
        key, one = struct((pages, page, heads, dim), jnp.bfloat16), struct((1, 1), jnp.int32)
        arrays = PagedArrays(
            q=struct((1, 1, heads, dim), jnp.bfloat16), k=key, v=key, page_table=struct((1, 1, 2), jnp.int32), q_start=one, q_len=one,
            kv_len=one)  # fmt: skip
        call = lambda arrays, execute: compiled.forward(arrays, PagedSpec(1.0), CONFIG, execute=execute)
        return launches_of(call, arrays)["decode_kernel"].constants["FAR"]

    assert not far(2**27 - 1, 16, 1, 16) and far(2**27, 16, 1, 16)
    assert not far(3, 2**20 - 1, 8, 256) and far(3, 2**20, 8, 256)


@pytest.mark.few(1)
@pytest.mark.parametrize("keys", (16, 48, 80, 100, 512))
def test_dense_keys(keys):
    """A page that is all of its sequence is read as several of few sizes, also where it is missing."""
    case = Case(
        (1, 1, 1), (keys, keys - 9, 5), p=keys, left=60, kv_start=(0, 3, 2), missing=((1, 0),), **FEATURES
    )
    results, constants = attend_by(case, page_table=with_axis(case)[0].page_table[..., :1])
    assert_agrees(case, results)
    assert constants["PAGE"] == {16: 16, 48: 16, 80: 16, 100: 100, 512: 256}[keys]


BYTES = Case((1, 4, 2), (33, 50, 17), p=16, H=4, K=2, D=32, V=34, tail=1)
OPTIONS = dict(FEATURES, left=40, missing=((1, 1),))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    (
        dataclasses.replace(BYTES, kv_dtype="int8", scales="token", dtype="bfloat16", **OPTIONS),
        dataclasses.replace(BYTES, kv_dtype="int8", scales="head", dtype="float16"),
        dataclasses.replace(BYTES, kv_dtype="float8_e4m3fn", scales="token", dtype="float16", D=80, V=48),
        dataclasses.replace(BYTES, kv_dtype="float8_e4m3fn", scales="head", dtype="bfloat16", **OPTIONS),
        dataclasses.replace(BYTES, kv_dtype="float8_e5m2", scales="token", dtype="bfloat16", **OPTIONS),
        dataclasses.replace(BYTES, kv_dtype="float8_e5m2", scales="head", dtype="float16", D=80, V=48),
    ),
    ids=lambda case: f"{case.kv_dtype}, scales of a {case.scales}, {case.dtype}",
)
def test_bytes_in_pairs(case):
    results, constants = attend_by(case)
    assert constants["PAIRS"] == {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}[case.kv_dtype]
    assert_agrees(case, results)


LATENT_BYTES = Case((1, 4, 2), (33, 50, 17), p=16, H=4, K=1, D=34, rope=10, tail=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("rope", (None, "bfloat16"))
@pytest.mark.parametrize(
    "case",
    (
        dataclasses.replace(LATENT_BYTES, kv_dtype="int8", scales="token", left=40, sinks=True),
        dataclasses.replace(LATENT_BYTES, kv_dtype="int8", scales="head", missing=((1, 1),)),
        dataclasses.replace(LATENT_BYTES, kv_dtype="float8_e4m3fn", scales="token", missing=((1, 1),)),
        dataclasses.replace(LATENT_BYTES, kv_dtype="float8_e5m2", scales="head", cap=3.0),
    ),
    ids=lambda case: f"{case.kv_dtype}, scales of a {case.scales}",
)
def test_latents_in_pairs(case, rope):
    """Rotary keys are multiplied by themselves, in the queries' dtype, quantised or not."""
    case = dataclasses.replace(case, v_dtype=rope, dtype="bfloat16")
    results, constants = attend_by(case)
    assert constants["PAIRS"] == {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}[case.kv_dtype]
    assert_agrees(case, results)


@pytest.mark.few(2)
@pytest.mark.parametrize("scales", ("token", "head"))
@pytest.mark.parametrize(
    "keys, values",
    [("bfloat16", "int8"), ("int8", "bfloat16"), ("int8", "float8_e5m2"), ("float8_e5m2", "float32")],
)
def test_keys_and_values_of_two_dtypes(keys, values, scales):
    """Neither goes in pairs; each has its scales or none."""
    case = dataclasses.replace(
        BYTES, kv_dtype=keys, v_dtype=values, scales=scales, dtype="bfloat16", **OPTIONS
    )
    results, constants = attend_by(case)
    kind = {"token": 1, "head": 2}[scales]
    assert [constants[name] for name in ("PAIRS", "K_SCALES", "V_SCALES", "R_SCALES")] == [
        0, kind * (keys != "bfloat16"), kind * (values not in ("bfloat16", "float32")), 0
    ]  # fmt: skip
    assert_agrees(case, results)


@pytest.mark.few(2)
@pytest.mark.parametrize("rope", ("int8", "bfloat16"))
@pytest.mark.parametrize("latent", ("float8_e5m2", "bfloat16"))
@pytest.mark.parametrize("scales", ("token", "head"))
def test_latents_and_rotary_keys_of_two_dtypes(latent, rope, scales):
    if latent == rope:
        scales = None
    case = Case(
        (1, 4),
        (33, 50),
        p=16,
        H=4,
        K=1,
        D=32,
        rope=16,
        kv_dtype=latent,
        v_dtype=rope,
        scales=scales,
        dtype="bfloat16",
    )
    assert_agrees(case, attend(case))


def test_pages_of_infinities_are_not_read_where_nobody_sees_them():
    """Pages of float8_e5m2 hold infinities and NaN, which its instructions keep."""
    case = dataclasses.replace(
        BYTES, kv_dtype="float8_e5m2", scales="head", dtype="bfloat16", missing=((1, 1),)
    )
    arrays, spec = with_axis(case)
    unseen = jnp.isnan(arrays.k.astype(jnp.float32))
    spoilt = arrays._replace(
        k=jnp.where(unseen, jnp.inf, arrays.k.astype(jnp.float32)).astype(arrays.k.dtype)
    )
    assert jnp.isinf(spoilt.k.astype(jnp.float32)).any()
    assert_agrees(case, compiled.forward(spoilt, spec, CONFIG, execute=interpret))
    assert arrays.v is not None
    first = arrays._replace(v=arrays.v.at[0].set(jnp.inf), page_table=jnp.zeros_like(arrays.page_table))
    seen = compiled.forward(first, spec, CONFIG, execute=interpret)["out"]
    assert not np.isfinite(np.asarray(seen, np.float32)[0, : sum(case.q_lens)]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("size", (2.0**-100, 2.0**-20, 1.0, 2.0**100))
@pytest.mark.parametrize("kv_dtype", ("int8", "float8_e4m3fn", "float8_e5m2"))
def test_bytes_of_any_size(kv_dtype, size):
    """Float16 holds neither such queries nor such scales: rows are divided by a power of two, sums kept in units of the largest scale."""
    case = dataclasses.replace(BYTES, kv_dtype=kv_dtype, scales="token", dtype="bfloat16")
    arrays, spec = with_axis(case)
    plain = compiled.forward(arrays, spec, CONFIG, execute=interpret)
    scales = {name: getattr(arrays, name) for name in ("k_scale", "v_scale")}
    grown = arrays._replace(
        q=arrays.q * size, k_scale=scales["k_scale"] / size, v_scale=scales["v_scale"] * size
    )
    results = compiled.forward(grown, spec, CONFIG, execute=interpret)
    expected = np.asarray(plain["out"], np.float64) * size
    np.testing.assert_allclose(
        np.asarray(results["out"], np.float64), expected, rtol=2**-7, atol=2**-8 * size
    )
    np.testing.assert_allclose(np.asarray(results["lse"]), np.asarray(plain["lse"]), rtol=1e-3, atol=1e-3)


@pytest.mark.few(7)
@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("scales", ("token", "head"))
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("above", (20.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (16.0, 18.0))))
def test_bytes_behind_a_heavy_key(scales, sinks, above, splits):
    """A key that takes nearly all weight and has no value, as first tokens do: what the others add is small, but no less exact."""
    keys, page = 129, 16
    pages = -(-keys // page)
    rng = np.random.default_rng(0)
    k = np.zeros((pages, page, 1, 32), np.int8)
    k[0, 0] = 127
    v = rng.integers(32, 128, (pages, page, 1, 32)).astype(np.int8)
    v[0, 0] = 0
    shape = (pages, page, 1) if scales == "token" else (1,)
    one = jnp.ones((1, 1), jnp.int32)
    arrays = PagedArrays(
        q=jnp.ones((1, 1, 2, 32), jnp.bfloat16),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None, None],
        q_start=0 * one,
        q_len=one,
        kv_len=keys * one,
        k_scale=jnp.full(shape, 1 / 127, jnp.float32),
        v_scale=jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32),
        sinks=jnp.full((2,), above - 1.0) if sinks else None,
    )
    spec = PagedSpec(above / 32, max_query_len=1, scales=scales)
    results = compiled.forward(arrays, spec, dataclasses.replace(CONFIG, split_k=splits), execute=interpret)
    s = np.zeros(keys)
    s[0] = above
    total = np.exp(s).sum() + (np.exp(above - 1.0) if sinks else 0.0)
    scale = np.broadcast_to(np.asarray(arrays.v_scale, np.float64), (pages, page, 1))
    values = (v.astype(np.float64) * scale[..., None]).reshape(-1, 32)[:keys]
    expected = (np.exp(s)[:, None] * values).sum(0) / total
    for head in range(2):
        assert_close(np.asarray(results["out"])[0, 0, head], expected, "bfloat16", "forward", name="out")
    np.testing.assert_allclose(np.asarray(results["lse"]), np.log(total), rtol=1e-5)


def test_rows_of_many_blocks():
    case = Case((12, 3, 1), (20, 19, 17), H=8, K=2, sinks=True)
    assert_agrees(case, attend(case))


def test_a_sequence_does_not_depend_on_the_others():
    case = dataclasses.replace(LONG, qq_bias=None, tail=0)
    arrays, spec = with_axis(case)
    together = compiled.forward(arrays, spec, CONFIG, execute=interpret)
    for n, first in enumerate(np.cumsum((0, *case.q_lens[:-1]))):
        tokens = slice(first, first + case.q_lens[n])
        alone = arrays._replace(
            q=arrays.q[:, tokens],
            q_start=jnp.zeros((1, 1), jnp.int32),
            **{name: getattr(arrays, name)[:, n : n + 1] for name in ("page_table", "q_len", "kv_len")},
        )
        results = compiled.forward(alone, spec, CONFIG, execute=interpret)
        assert same(results, {name: x[:, tokens] for name, x in together.items()})


@pytest.mark.few(1)
@pytest.mark.parametrize("splits", (1, 3))
def test_sequences_with_more_queries_are_left_alone(splits):
    """Of 17 queries or fewer, two fill the smallest tile; tokens of no sequence are filled."""
    case = Case((17, 2, 3, 1), (20, 9, 11, 30), H=16, K=2, sinks=True, first=1, tail=2)
    arrays, spec = with_axis(case)
    call = folded(arrays, spec, dataclasses.replace(CONFIG, split_k=splits), interpret)
    queries = compiled.decode_queries(spec.max_query_len, call.group)
    assert queries == 2
    results, expected = triton_decode.decode(call, queries), run_reference(case)
    taken = np.r_[0, 18:20, 23:26]
    for name, x in results.items():
        assert np.isnan(
            np.delete(np.asarray(x), taken, 0)
        ).all()  # as the interpreter gives what is not written
        np.testing.assert_allclose(np.asarray(x)[taken], expected[name][taken], rtol=1e-4, atol=1e-5)


def kernels(case: Case, config: TritonConfig) -> list[str]:
    arrays, spec = with_axis(case)
    return list(
        launches_of(lambda arrays, execute: compiled.forward(arrays, spec, config, execute=execute), arrays)
    )


def test_only_what_is_needed_is_launched():
    one = dataclasses.replace(CONFIG, split_k=1)
    assert kernels(LONG, one) == ["decode_kernel"]
    assert kernels(LONG, CONFIG) == ["decode_kernel", "merge_kernel"]
    assert kernels(CASES["decode"], dataclasses.replace(CONFIG, chunk_size=256)) == ["decode_kernel"]
    window = dataclasses.replace(LONG, left=3)  # too few keys for a second split
    assert kernels(window, dataclasses.replace(CONFIG, chunk_size=32)) == ["decode_kernel"]
    assert kernels(dataclasses.replace(LONG, max_query_len=17), one) == ["decode_kernel", "prefill_kernel"]


# The merge in the launch of the splits

TOGETHER = dataclasses.replace(CONFIG, together=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FEW)
def test_the_last_program_merges(name):
    assert_agrees(CASES[name], attend(CASES[name], TOGETHER))


@pytest.mark.few(1)
@pytest.mark.parametrize("splits", (2, 3, 5, 9))
def test_the_last_program_merges_any_number_of_splits(splits):
    config = dataclasses.replace(TOGETHER, split_k=splits)
    assert_agrees(LONG, attend(LONG, config))


@pytest.mark.parametrize(
    "case",
    (
        dataclasses.replace(
            LONG, kv_lens=(70, 1, 33), q_lens=(1, 0, 2), tail=3
        ),  # a sequence without queries
        dataclasses.replace(
            LONG, missing=((0, 0), (1, 3)), kv_start=(70, 200, 0), left=None
        ),  # and without keys
        pytest.param(dataclasses.replace(LONG, H=24, K=2), marks=pytest.mark.slow),  # three blocks
    ),
    ids=("no queries", "no keys", "many blocks"),
)
def test_whatever_a_sequence_lacks_its_result_is_stored(case):
    assert_agrees(case, attend(case, TOGETHER))


def test_which_program_is_last_changes_nothing(monkeypatch):
    """Programs run one by one, forwards and backwards, and all at once."""
    interpreter = importlib.import_module("ejkernel_eqx.testing._interpreter")
    case = dataclasses.replace(LONG, q_lens=(1,), kv_lens=(97,), qq_bias=None)
    expected = attend(case, TOGETHER)
    monkeypatch.setattr(interpreter, "_TOGETHER", 1)
    assert same(expected, attend(case, TOGETHER))
    backwards = types.SimpleNamespace(**vars(np))
    backwards.indices = lambda extents: np.indices(extents)[:, ::-1]
    monkeypatch.setattr(interpreter, "np", backwards)
    assert same(expected, attend(case, TOGETHER))


def test_one_launch():
    assert kernels(LONG, TOGETHER) == ["decode_kernel"]
    with_prefill = dataclasses.replace(LONG, max_query_len=17)
    assert kernels(with_prefill, TOGETHER) == ["decode_kernel", "prefill_kernel"]


def test_what_merging_takes_is_no_parameter_elsewhere():
    """Kernels that do not merge are compiled to what they were."""
    arrays, spec = with_axis(LONG)

    def signature(config: TritonConfig) -> dict[str, str]:
        forward = lambda arrays, execute: compiled.forward(arrays, spec, config, execute=execute)
        return specialisation(launches_of(forward, arrays)["decode_kernel"])[0]

    merging, plain = signature(TOGETHER), signature(CONFIG)
    own = {"zeros_ptr", "count_ptr", "parts_ptr", "part_lse_ptr"}
    assert {name for name, kind in plain.items() if kind == "constexpr"} >= own
    assert {merging[name] for name in own} == {"*i32", "*fp32"}


def test_buckets_of_queries_share_one_kernel():
    def constants(max_query_len: int) -> dict[str, Any]:
        arrays, spec = with_axis(dataclasses.replace(LONG, max_query_len=max_query_len))
        forward = lambda arrays, execute: compiled.forward(arrays, spec, CONFIG, execute=execute)
        return launches_of(forward, arrays)["decode_kernel"].constants

    assert constants(32) == constants(64)


MAPPED = {
    "nothing shared": (Case((1, 3), (6, 9), sinks=True, slopes=True, qq_bias=3), ()),
    "pages shared": (Case((1, 3), (6, 9), sinks=True, slopes=True), ("k", "v", "slopes")),
    "sinks shared": (Case((1, 3), (6, 9), sinks=True, missing=((1, 0),)), ("sinks",)),
    "scales of tokens": (Case((1, 3), (6, 9), kv_dtype="int8", scales="token"), ("v", "v_scale")),
    "scales of heads": (Case((1, 3), (6, 9), kv_dtype="int8", scales="head"), ("k", "v", "v_scale")),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name):
    case, shared = MAPPED[name]
    arrays, spec = make(case)
    stacked = {}
    for field, x in arrays._asdict().items():
        if x is None or field in shared:
            stacked[field] = x
        elif jnp.issubdtype(x.dtype, jnp.floating):
            stacked[field] = jnp.stack([x, x * jnp.asarray(0.5, x.dtype)])
        else:
            stacked[field] = jnp.stack([x, x])
    axes = {field: None if x is None or field in shared else 0 for field, x in stacked.items()}

    def rows(platform: str, config: Any) -> Any:
        plan = make_plan("paged_attention", platform=platform, config=config)
        one = lambda given: core.attend(plan, "paged_attention", PagedArrays(**given), spec)
        return quick(jax.vmap(one, (axes,)))(stacked)

    results, expected = rows("triton-interpret", CONFIG), rows("xla", None)
    for field in ("out", "lse"):
        np.testing.assert_allclose(results[field], expected[field], rtol=1e-5, atol=1e-5)


def problem(case: Case) -> Any:
    return core.problem_of("paged_attention", *make(case))


def test_unsupported():
    sm_80, sm_90 = DEVICES["sm_80"], DEVICES["sm_90"]
    plain = CASES["decode"]
    assert compiled.unsupported(problem(plain), sm_80) is None
    arrays, spec = make(plain)
    wide = arrays._replace(k=jax.ShapeDtypeStruct(arrays.k.shape, "float64"))  # pyright: ignore[reportArgumentType]
    assert "float64" in str(compiled.unsupported(core.problem_of("paged_attention", wide, spec), sm_90))
    assert "512" in str(compiled.unsupported(problem(dataclasses.replace(plain, D=512)), sm_90))
    latent = dataclasses.replace(CASES["latent"], D=512, rope=64)
    half, quantised = (dataclasses.replace(latent, dtype=dtype) for dtype in ("bfloat16", "float16"))
    quantised = dataclasses.replace(quantised, kv_dtype="int8", scales="token")
    assert (
        compiled.unsupported(problem(half), sm_90) is compiled.unsupported(problem(quantised), sm_90) is None
    )
    for wide in (latent, dataclasses.replace(half, kv_dtype="float32")):
        assert "128 channels in float32, not 512" in str(compiled.unsupported(problem(wide), sm_90))
    assert compiled.unsupported(problem(dataclasses.replace(latent, D=128)), sm_90) is None
    assert "513" in str(compiled.unsupported(problem(dataclasses.replace(CASES["latent"], D=513)), sm_90))
    float8 = problem(CASES["float8"])
    assert "8.9" in str(compiled.unsupported(float8, sm_80)) and compiled.unsupported(float8, sm_90) is None
    values = problem(CASES["int8 keys, float8 values"])
    assert (
        "float8_e4m3fn" in str(compiled.unsupported(values, sm_80))
        and compiled.unsupported(values, sm_90) is None
    )
    assert compiled.unsupported(problem(CASES["float8 with infinities"]), sm_80) is None
    table = jax.ShapeDtypeStruct((3, 2**29), jnp.int32)
    asked = core.problem_of("paged_attention", arrays._replace(page_table=table), spec)  # pyright: ignore[reportArgumentType]
    assert "2**31" in str(compiled.unsupported(asked, sm_90))


@pytest.mark.parametrize("field", ("split_k", "chunk_size", "float32_dot", "block_k", "num_warps"))
def test_configurations_that_mean_nothing(field):
    values = dict(split_k=0, chunk_size=-1, float32_dot="fp8", block_k=48, num_warps=3)
    with pytest.raises(ValueError, match=field):
        of_tile = field in ("block_k", "num_warps")
        dataclasses.replace(SMALL if of_tile else CONFIG, **{field: values[field]})
