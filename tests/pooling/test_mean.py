"""Pooling on XLA and by its Triton kernels, interpreted: against numpy, packed, padded, composed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.pooling.arguments import resolve
from ejkernel_eqx.pooling.core import POOL
from tests.agreement import assert_agrees, assert_same, platforms
from tests.arrays import normal
from tests.attention.dense import INTERPRET, quick
from tests.pooling.cases import by_hand, Case, CASES, make, result_shape, results
from tests.tolerances import assert_close

platform = platforms()


# One of each form, of each reduction, and with chunks that end a row early, by default.
DEFAULTS = ("chunks", "lengths", "offsets, long", "ids, last", "ties", "chunks of rising ids")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULTS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_agrees_with_numpy(name, platform):
    """Results and gradients; bit for bit the same with NaN wherever nothing may be read."""
    case = CASES[name]
    x, dout = make(case)
    op, tables = case.operation(platform), case.tables()
    if case.ids is not None and case.segments is None:  # known outside of `jit` alone
        out, pull = jax.vjp(lambda x: op(x, **tables), x)
        found = {"out": out, "x": pull(dout)[0]}
        assert_agrees(case, found, by_hand(case, x, dout))
        return
    found = results(op, x, tables, dout)
    assert found["out"].shape == result_shape(case)
    assert found["out"].dtype == found["x"].dtype == x.dtype
    assert_agrees(case, found, by_hand(case, x, dout))
    padding, empty = case.padding(), case.empty().reshape(dout.shape[:-1])
    assert not np.asarray(found["x"])[padding].any() and not np.asarray(found["out"])[empty].any()
    if padding.any() or empty.any():
        poisoned = jnp.where(padding[..., None], jnp.nan, x), jnp.where(empty[..., None], jnp.nan, dout)
        assert_same(results(op, poisoned[0], tables, poisoned[1]), found)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.segments or not case.ids])
def test_the_reference_is_what_numpy_says(name):
    case = CASES[name]
    x, dout = make(case)
    with jax.enable_x64(True):
        wide, cotangent = (jnp.asarray(np.asarray(a, np.float64)) for a in (x, dout))
        call = resolve(case.operation().options, wide, **{**_NO_TABLES, **case.tables()})
        inputs = Inputs(call.arrays, {"out": cotangent.reshape(call.shape)})
        found = exact_results(POOL, call.spec, inputs)
    expected = by_hand(case, x, dout)
    np.testing.assert_allclose(np.asarray(found["out"]).reshape(dout.shape), expected["out"], atol=1e-13)
    np.testing.assert_allclose(found["x"], expected["x"], atol=1e-13)


_NO_TABLES = dict.fromkeys(("mask", "lengths", "cu_seqlens", "segment_ids"))


# What is special


def test_a_nan_is_the_largest(platform):
    """Among tokens that are pooled, and nowhere else; infinities are numbers like others."""
    x = jnp.array([[1.0, jnp.nan, 3.0, jnp.nan], [-jnp.inf] * 4, [2.0, jnp.inf, -jnp.inf, jnp.inf]])[
        ..., None
    ]
    op = ejx.MeanPooling("max", platform=platform)
    found = results(op, x, {}, jnp.ones((3, 1)))
    np.testing.assert_array_equal(found["out"][:, 0], [jnp.nan, -jnp.inf, jnp.inf])
    np.testing.assert_array_equal(found["x"][..., 0], [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]])
    assert np.isnan(ejx.MeanPooling(platform=platform)(x)[0, 0])
    assert np.isnan(op(x)[0, 0]) and op(x, mask=x[..., 0] == x[..., 0])[0, 0] == 3  # without a gradient


def test_a_result_of_0_has_a_norm(platform):
    """Its gradient is finite, as PyTorch's is."""
    op = ejx.MeanPooling("sum", normalize=True, eps=0.5, platform=platform)
    found = results(op, jnp.array([[[1.0, 2.0], [-1.0, -2.0]]]), {}, jnp.ones((1, 2)))
    np.testing.assert_array_equal(found["out"], 0)
    np.testing.assert_array_equal(found["x"], 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["chunks", "chunks and mask", "offsets, long", "ids"])
def test_composes(name, platform):
    """jit, vmap of tokens and of tables, scan, checkpoint."""
    case = dataclasses.replace(CASES[name], dtype="float32")
    op, tables = case.operation(platform), case.tables()
    one, other = make(case, 1), make(case, 2)
    loss = lambda x, dout: (op(x, **tables) * dout).sum()
    xs, douts = (jnp.stack(both) for both in zip(one, other))
    expected = jnp.stack([by_hand(case, *both)["x"].astype(np.float32) for both in (one, other)])
    assert_close(quick(jax.vmap(jax.grad(loss)))(xs, douts), expected, kind="gradient")
    rows = quick(lambda xs: jax.lax.map(lambda both: jax.grad(jax.checkpoint(loss))(*both), (xs, douts)))
    assert_close(rows(xs), expected, kind="gradient")
    if not case.lead:  # other offsets for each
        many = jnp.array([case.offsets, (0, 10, 20, 30, 40)])
        found = quick(jax.vmap(lambda x, cu: op(x, cu_seqlens=cu)))(xs, many)
        for x, offsets, out in zip(xs, np.asarray(many), found):
            shifted = dataclasses.replace(case, offsets=tuple(map(int, offsets)))
            assert_close(out, by_hand(shifted, x, one[1])["out"], "float32")


def test_any_leading_axes():
    x = normal(0, (6, 7, 4))
    op, mask = ejx.MeanPooling(chunk_size=3, platform="xla"), jnp.arange(7) % 3 > 0
    out = op(x, mask=mask)
    np.testing.assert_array_equal(op(x.reshape(2, 3, 7, 4), mask=mask).reshape(out.shape), out)
    np.testing.assert_array_equal(op(x[0], mask=mask), out[0])
    whole = ejx.MeanPooling(platform="xla")
    assert whole(x[0]).shape == (4,) and whole(x, lengths=3).shape == (6, 4)


def test_nothing_to_pool(platform):
    op = lambda **options: ejx.MeanPooling(platform=platform, **options)
    empty, x = jnp.ones((2, 0, 4)), jnp.ones((3, 4))
    np.testing.assert_array_equal(op()(empty), jnp.zeros((2, 4)))
    assert op(chunk_size=3)(empty).shape == (2, 0, 4)
    assert op()(x, cu_seqlens=[0]).shape == op(num_segments=0)(x, segment_ids=[-1] * 3).shape == (0, 4)
    assert op(max_chunks=0, chunk_size=2)(x, cu_seqlens=[1, 1]).shape == (0, 4)
    np.testing.assert_array_equal(op(chunk_size=2)(x, segment_ids=[-1] * 3), jnp.zeros((1, 4)))
    assert not jax.grad(lambda x: op()(x, cu_seqlens=[0]).sum())(x).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64])
def test_ids_of_any_integers(dtype):
    """Of which there are as many segments as the largest says."""
    x = np.arange(5.0, dtype=np.float32)[:, None]
    out = ejx.MeanPooling("sum", platform="xla")(x, segment_ids=np.array([0, 2, 2, 0, 1], dtype))
    np.testing.assert_array_equal(out[:, 0], [3, 4, 3])
    assert ejx.MeanPooling()(jnp.ones((0, 2)), segment_ids=np.zeros(0, dtype)).shape == (0, 2)


def test_what_is_traced_and_wrong_is_dropped(platform):
    """Surplus chunks, and ids past the last: never an access out of bounds."""
    x = jnp.arange(1.0, 7.0)[:, None]
    chunks = ejx.MeanPooling("sum", chunk_size=2, max_chunks=2, platform=platform)
    few = quick(lambda cu: chunks(x, cu_seqlens=cu))
    np.testing.assert_array_equal(few(jnp.array([0, 3, 6]))[:, 0], [3, 3])
    ids = ejx.MeanPooling("sum", num_segments=2, platform=platform)
    number = quick(lambda ids: ids_of(ids))
    ids_of = lambda given: ids(x, segment_ids=given)
    np.testing.assert_array_equal(number(jnp.array([1, 5, 0, 2, 1, -1]))[:, 0], [3, 6])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "max", "last"])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_mode_and_second_derivatives_on_xla(reduction, packed):
    case = Case(reduction, offsets=(0, 5, 13) if packed else None, normalize=True, chunk=4)
    x, dout = make(case)
    op, tables = case.operation("xla"), case.tables()
    loss = lambda x: (op(x, **tables) * dout).sum()
    v = jnp.cos(x)
    _, tangent = quick(lambda x: jax.jvp(loss, (x,), (v,)))(x)
    assert_close(tangent, (by_hand(case, x, dout)["x"] * np.asarray(v)).sum(), "float32", "gradient")
    gradient = lambda x: by_hand(case, x, dout)["x"]
    step = 1e-6 * np.asarray(v, np.float64)
    expected = (
        gradient(np.asarray(x, np.float64) + step) - gradient(np.asarray(x, np.float64) - step)
    ) / 2e-6
    _, second = quick(lambda x: jax.jvp(jax.grad(loss), (x,), (v,)))(x)
    assert_close(second, expected, "float32", "gradient")
    assert_close(quick(jax.grad(lambda x: (jax.grad(loss)(x) * v).sum()))(x), expected, "float32", "gradient")


def test_float64(enable_x64):
    case = Case(chunk=5, masked=True, dtype="float64")
    x, dout = make(case)
    found = results(case.operation("xla"), x, case.tables(), dout)
    np.testing.assert_allclose(found["out"], by_hand(case, x, dout)["out"], rtol=1e-14)
    with pytest.raises(ejx.UnsupportedError, match="not float64"):
        case.operation(INTERPRET)(x)


def test_sums_are_in_float32(platform):
    """A mean of many bfloat16 numbers; and one whose sum is out of the range of float16."""
    x = 1 + jax.random.uniform(jax.random.key(0), (512, 4)).astype(jnp.bfloat16)
    assert_close(ejx.MeanPooling(platform=platform)(x), np.asarray(x, np.float64).mean(0))
    large = jnp.full((20, 4), 6e4, jnp.float16)
    np.testing.assert_array_equal(ejx.MeanPooling(platform=platform)(large), large[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["chunk", "offsets", "ids"])
def test_temporary_memory(form, optimised):
    """On XLA, below that of the tokens; of the gradient, nothing of their size."""
    x, ids = jax.ShapeDtypeStruct((4096, 128), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    op = ejx.MeanPooling(
        chunk_size=60 if form == "chunk" else None, num_segments=16 if form == "ids" else None, platform="xla"
    )
    arrays = {
        "chunk": {},
        "offsets": {"cu_seqlens": jax.ShapeDtypeStruct((17,), jnp.int32)},
        "ids": {"segment_ids": ids},
    }[form]
    size = 4 * 4096 * 128
    for function, allowed in (
        (lambda x, given: op(x, **given), 0.8),
        (jax.grad(lambda x, given: op(x, **given).sum()), 0.1),
    ):
        memory = jax.jit(function).lower(x, arrays).compile().memory_analysis()
        assert memory is None or memory.temp_size_in_bytes < allowed * size


# What it is told


@pytest.mark.parametrize(
    "options, change, words",
    [
        ({}, dict(x=jnp.ones(5)), ["x", "rank 2"]),
        ({}, dict(x=jnp.ones((2, 3, 5), jnp.int32)), ["x", "int32"]),
        ({}, dict(mask=jnp.ones((2, 13), jnp.int32)), ["mask", "booleans", "int32", "mask != 0"]),
        ({}, dict(mask=jnp.ones((3, 13), bool)), ["mask", "(2, 13)", "(3, 13)"]),
        ({}, dict(lengths=jnp.ones(2)), ["lengths", "ints", "float32"]),
        ({}, dict(lengths=[3, 14]), ["lengths", "0 to 13", "14"]),
        ({}, dict(lengths=[1, 2, 3]), ["lengths", "(2,)", "(3,)"]),
        ({}, dict(lengths=[3, 4], segment_ids=jnp.zeros((2, 13), int)), ["lengths", "both"]),
        ({}, dict(cu_seqlens=[0, 13]), ["cu_seqlens", "leading axes"]),
        ({}, dict(segment_ids=jnp.zeros((2, 3), jnp.int32)), ["segment_ids", "(2, 13)"]),
        (dict(num_segments=2), dict(segment_ids=jnp.full((2, 13), 2)), ["segment_ids", "num_segments=2", "received 2"]),
        (dict(num_segments=2), {}, ["segment_ids", "num_segments=2", "None"]),
        (dict(indices_are_sorted=True), dict(segment_ids=jnp.arange(13)[::-1]), ["segment_ids", "never decrease"]),
        (dict(chunk_size=2, max_chunks=2), {}, ["cu_seqlens, segment_ids", "max_chunks=2"]),
        (dict(chunk_size=2, max_chunks=2), dict(segment_ids=jnp.zeros(13, int)), ["max_chunks", "7", "received 2"]),
    ],
)  # fmt: skip
def test_wrong_arguments(options, change, words, unchecked):
    with pytest.raises(ValueError) as caught:
        ejx.MeanPooling(**options)(**({"x": jnp.ones((2, 13, 4))} | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_traced_number_of_segments():
    with pytest.raises(ValueError, match=r"num_segments: expected the number .*traced.*num_segments=\.\.\."):
        jax.eval_shape(
            lambda ids: ejx.MeanPooling()(jnp.ones((4, 2)), segment_ids=ids), jnp.zeros(4, jnp.int32)
        )


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(reduction="min"), "reduction: expected 'mean', 'sum', 'max' or 'last', received 'min'"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(chunk_size=2.0), "chunk_size"),
        (dict(num_segments=-1), "num_segments"),
        (dict(max_chunks=3), "max_chunks: expected None without chunk_size"),
        (dict(normalize=1), "normalize: expected True or False"),
        (dict(eps=0.0), "eps"),
        (dict(eps="small"), "eps: expected a finite number > 0, received 'small'"),
    ],
)
def test_wrong_options(options, words, unchecked):
    with pytest.raises(ValueError, match=words):
        ejx.MeanPooling(**options)
