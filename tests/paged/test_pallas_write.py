"""The Pallas kernel that writes new tokens into pages, interpreted with races detected, against XLA's scatter; and compiled for TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from benchmarks.tpu_ahead import compile_for_tpu
from ejkernel_eqx.paged.pallas import write_kernel
from tests.attention.dense import normal
from tests.paged import writes
from tests.paged.writes import make, WriteArrays
from tests.recurrence.quick import quick
from tests.tpus import GENERATIONS, launches_of, lower, needs_libtpu

WIDE = {"k": 256, "v": 128}
TILES = {"k": 512, "rope": 64}  # of one head; the second kind is left to the scatter


platform = ejx.kernel_registry.get("paged_attention", "pallas-interpret").load()
assert_same = functools.partial(writes.assert_same, quick(platform.write))


def launched(arrays: WriteArrays) -> dict[str, Any]:
    return launches_of(write_kernel.write, arrays)


CASES: dict[str, dict[str, Any]] = {
    "plain": dict(dtype="bfloat16", heads=2),
    "one head": dict(dtype="float32", kinds=TILES, heads=1),
    "many heads": dict(dtype="float32", new="bfloat16", heads=8),
    "int8": dict(dtype="int8", scales="token", heads=4),
    "float8": dict(dtype="float8_e4m3fn", scales="head", heads=8),
    "two dtypes": dict(dtype=("int8", "bfloat16"), scales="token", heads=4),
    "shared pages": dict(dtype="bfloat16", heads=2, lead=(2,)),
    "mapped": dict(dtype="int8", scales="head", heads=4, lead=(2,), pages_lead=(2,)),
}


@pytest.mark.usefixtures("no_races")
@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_the_same_as_the_scatter(name):
    arrays = make(**{"kinds": WIDE, **CASES[name]})
    assert list(launched(arrays)) == ["paged.write"]
    assert_same(arrays)


@pytest.mark.usefixtures("no_races")
def test_runs_of_slots(monkeypatch):
    """Of every length and at every place, in several blocks."""
    rng = np.random.default_rng(0)
    slots, free = [], list(rng.permutation(40))
    monkeypatch.setattr(write_kernel, "_BLOCK", 64 * 8 * 128 * 2)
    while free and len(slots) < 300:
        length = int(rng.integers(1, 20))
        first = 20 * free.pop()
        slots += [*range(first, first + length), *([-1] * int(rng.integers(0, 3)))]
    pages = {"k": jnp.zeros((50, 16, 8, 128), jnp.bfloat16)}
    new = {"k": normal(0, len(slots), 8, 128, dtype=jnp.bfloat16)}
    assert_same(WriteArrays(pages, new, jnp.asarray(slots, jnp.int32)))  # pyright: ignore


OTHERS: dict[str, dict[str, Any]] = {
    "three heads": dict(dtype="float32", kinds=WIDE, heads=3),
    "half a word": dict(dtype="bfloat16", kinds=TILES, heads=1),
    "narrow": dict(dtype="float32", heads=8),
    "no token": dict(dtype="float32", kinds=WIDE, heads=8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_to_the_scatter(name):
    arrays = make(**OTHERS[name])
    if name == "no token":
        arrays = arrays._replace(slots=arrays.slots[:0], new={n: x[:0] for n, x in arrays.new.items()})
    assert not launched(arrays)
    assert_same(arrays)


def large(heads: int, dim: int, dtype: Any, scales: str | None = None) -> WriteArrays:
    shape, kinds = jax.ShapeDtypeStruct, ("k", "v")
    pages = {name: shape((4096, 128, heads, dim), dtype) for name in kinds}
    if scales == "token":
        pages |= {f"{name}_scale": shape((4096, 128, heads), jnp.float32) for name in kinds}
    new = {name: shape((700, heads, dim), jnp.bfloat16) for name in kinds}
    return WriteArrays(pages, new, shape((700,), jnp.int32))  # pyright: ignore[reportArgumentType]


LARGE: dict[str, WriteArrays] = {
    "bfloat16": large(8, 128, jnp.bfloat16),
    "two heads": large(2, 256, jnp.bfloat16),
    "int8": large(4, 128, jnp.int8, "token"),
    "float8": large(16, 128, jnp.float8_e4m3fn, "token"),
}


@pytest.mark.parametrize("name", LARGE)
def test_lowers(name):
    assert "ejkernel_eqx.paged.write" in lower(write_kernel.write, LARGE[name]).as_text()


@needs_libtpu
@pytest.mark.parametrize("generation", GENERATIONS)
def test_pages_are_written_in_place(generation):
    """No copy of the pages, not even in part, if they are donated."""
    write = lambda *given: write_kernel.write(WriteArrays(*given))
    for arrays in LARGE.values():
        pages = sum(x.size * x.dtype.itemsize for x in arrays.pages.values())
        memory = compile_for_tpu(generation, write, *arrays, donate=(0,)).memory_analysis()
        assert memory.alias_size_in_bytes >= pages > 20 * memory.temp_size_in_bytes
