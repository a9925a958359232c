"""The writing kernel, interpreted, against the scatter on XLA, and compiled for devices that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.launch import compile_ahead, interpreter_unavailable, run
from ejkernel_eqx.paged.cache import write as xla
from ejkernel_eqx.paged.cache.quantise import LARGEST
from ejkernel_eqx.paged.spec import WriteArrays
from tests.paged import writes
from tests.paged.writes import K, KINDS, LATENT, make, P, p
from tests.recurrence.quick import quick

if reason := interpreter_unavailable():
    pytest.skip(reason, allow_module_level=True)
from ejkernel_eqx.paged.triton import write_kernel  # needs Triton

write = functools.partial(write_kernel.write, execute=functools.partial(run, interpret=True))
assert_same = functools.partial(writes.assert_same, write)


@pytest.mark.few(7)
@pytest.mark.parametrize("new", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_pages(dtype, new):
    assert_same(make(dtype, new=new))


@pytest.mark.few(4)
@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize(
    "dtype, new",
    [
        ("int8", "float32"),
        ("float8_e4m3fn", "float32"),
        ("int8", "bfloat16"),
        ("float8_e5m2", "float32"),
        ("float8_e5m2", "bfloat16"),
    ],
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


def test_not_a_number_stays_visible():
    arrays = make("int8", scales="token")
    token = int(jnp.argmax(arrays.slots == 11))
    arrays.new["k"] = arrays.new["k"].at[token, 1, 3].set(jnp.nan).at[token, 2, 3].set(jnp.inf)
    scale = np.asarray(write(arrays)["k_scale"]).reshape(P * p, K)
    assert np.isnan(scale[11, 1]) and np.isinf(scale[11, 2]) and np.isfinite(scale[11, 0])


def test_under_jit_with_donated_pages():
    arrays = make("bfloat16")
    expected = quick(xla.write)(arrays)
    results = quick(write)(arrays)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(results[name]), np.asarray(expected[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles(target):
    """For the pages of a large model: no spills, hardly any shared memory. What is wide is stored by whole vectors."""

    def launch(dtype, scales, kinds, heads):
        struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
        pages = {name: struct((1024, 16, heads, width), dtype) for name, width in kinds.items()}
        if scales == "token":
            pages |= {f"{name}_scale": struct((1024, 16, heads), jnp.float32) for name in kinds}
        new = {name: struct((4096, heads, width), jnp.bfloat16) for name, width in kinds.items()}
        arrays = WriteArrays(pages, new, struct((4096,), jnp.int32))  # pyright: ignore[reportArgumentType]
        return write_kernel.write_launch(arrays, list(kinds))[0]

    eight_bits = [jnp.int8, jnp.float8_e5m2] + ([] if target == "sm_80" else [jnp.float8_e4m3fn])
    launches = [launch(jnp.bfloat16, None, {"k": 128, "v": 128}, 8)]
    launches += [launch(dtype, "token", {"k": 128, "v": 128}, 8) for dtype in eight_bits]
    launches += [launch(jnp.bfloat16, None, {"k": 512, "rope": 64}, 1)]
    for one in launches:
        report = compile_ahead(one, target)
        assert report.fits and report.spills == 0 and report.shared <= 4096, report
