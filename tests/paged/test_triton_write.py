"""The writing kernel, interpreted, against the scatter on XLA, and compiled for devices that are not here."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.compiled import DEVICES, executed
from tests.paged import writes
from tests.paged.cases import LARGEST
from tests.paged.triton_calls import interpret, write_kernel
from tests.paged.writes import KINDS, LATENT, make, WriteArrays
from tests.recurrence.quick import quick

write = executed(write_kernel.write, interpret)
assert_same = functools.partial(writes.assert_same, write)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "new, dtype", [("float32", "float16"), ("float16", "bfloat16"), ("bfloat16", "float32")]
)
def test_plain_pages(dtype, new):
    assert_same(make(dtype, new=new))


@pytest.mark.few(3)
@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize(
    "dtype, new", [("int8", "float32"), ("float8_e4m3fn", "float32"), ("float8_e5m2", "bfloat16")]
)
def test_quantised_pages(dtype, new, scales):
    arrays = make(dtype, new=new, scales=scales)
    if scales == "token":  # nothing to scale by, and hardly anything
        zero, tiny = (int(jnp.argmax(arrays.slots == slot)) for slot in (11, 5))
        arrays.new["k"] = arrays.new["k"].at[zero].set(0).at[tiny, 0].multiply(1e-38)
    assert_same(arrays)


@pytest.mark.few(1)
@pytest.mark.parametrize("scales", [None, "token", "head"])
def test_latent_pages_and_one_kind_alone(scales):
    dtype = "bfloat16" if scales is None else "int8"
    assert_same(make(dtype, scales=scales, kinds=LATENT, heads=1))
    assert_same(make(dtype, scales=scales, kinds={"k": 32}, heads=1))
    assert_same(make(dtype, scales=scales, kinds=KINDS | {"rope": 8}, heads=2))


@pytest.mark.few(1)
@pytest.mark.parametrize("scales", [None, "token", "head"])
def test_leading_axes(scales):
    dtype = "float32" if scales is None else "int8"
    shared = make(dtype, scales=scales, lead=(2,))
    assert_same(shared)
    mapped = make(dtype, scales=scales, lead=(2,), pages_lead=(2,))
    assert_same(mapped)
    assert_same(make(dtype, scales=scales, lead=(2, 2), pages_lead=(2, 2)))
    if scales == "head":  # one set of scales for all
        pages = {name: x[0] if name.endswith("_scale") else x for name, x in mapped.pages.items()}
        assert_same(mapped._replace(pages=pages))


@pytest.mark.few(2)
@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "int8"), ("int8", "float32"), ("float8_e5m2", "int8")])
def test_each_kind_of_pages_has_its_own_dtype(dtypes, scales):
    assert_same(make(dtypes, scales=scales))
    assert_same(make(dtypes, scales=scales, kinds=LATENT, heads=1))
    assert_same(make(dtypes, scales=scales, lead=(2,), pages_lead=(2,)))


@pytest.mark.parametrize("scales", ["token", "head"])
def test_nothing_becomes_infinite(scales):
    """Float8_e5m2 has infinities; what is beyond its largest number is clipped, as in the other dtypes."""
    arrays = make("float8_e5m2", scales=scales)
    arrays.new["k"] = jnp.where(jnp.isnan(arrays.new["k"]), jnp.nan, 3e38 * jnp.sign(arrays.new["k"]))
    assert_same(arrays)
    written = np.asarray(write(arrays)["k"]).astype(np.float32)
    assert np.isfinite(written).all() and np.abs(written).max() == LARGEST["float8_e5m2"]


def test_programs_of_other_sizes():
    """Rows wider and narrower than a program, and a last program that is not full."""
    for width in (5, 640):
        assert_same(make("float32", kinds={"k": width, "v": 3}, seed=width))
    none = make("float32")
    assert_same(none._replace(slots=none.slots[:0], new={name: x[:0] for name, x in none.new.items()}))


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scales", ["token", "head"])
def test_not_a_number_is_stored_alike(dtype, scales):
    """Also where nothing that a number is divided by is finite."""
    arrays = make(dtype, scales=scales)
    token = int(jnp.argmax(arrays.slots == 11))
    arrays.new["k"] = arrays.new["k"].at[token, 1, 3].set(jnp.nan).at[token, 2, 3].set(jnp.inf)
    wanted, found = quick(writes.scatter)(arrays), write(arrays)
    for name in wanted:
        want, got = (np.asarray(x[name]).astype(np.float32) for x in (wanted, found))
        if (
            scales == "token" and name == "k"
        ):  # whose scales have no number, so that the numbers have no meaning
            want[2, 3, 1:], got[2, 3, 1:] = 0, 0
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        finite = np.isfinite(want)
        np.testing.assert_allclose(got[finite], want[finite], rtol=0.25, atol=1)
    if scales == "token":
        scale = np.asarray(found["k_scale"])[2, 3]
        assert np.isnan(scale[1]) and np.isinf(scale[2]) and np.isfinite(scale[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("target", DEVICES)
def test_compiles(target):
    """For the pages of a large model: no spills, hardly any shared memory. What is wide is stored by whole vectors."""
    shape: Any = jax.ShapeDtypeStruct
    for dtype, width, heads in ((jnp.bfloat16, 512, 1), (jnp.int8, 128, 8), (jnp.float8_e5m2, 128, 8)):
        pages = {name: shape((1024, 16, heads, width), dtype) for name in "kv"}
        if dtype != jnp.bfloat16:
            pages |= {f"{name}_scale": shape((1024, 16, heads), jnp.float32) for name in "kv"}
        new = {name: shape((4096, heads, width), jnp.bfloat16) for name in "kv"}
        arrays = WriteArrays(pages, new, shape((4096,), jnp.int32))
        report = ejx.launch.compile_ahead(write_kernel.write_launch(arrays, ["k", "v"])[0], target)
        assert report.fits and report.spills == 0 and report.shared <= 4096, report
