"""Programs that the interpreter runs together: groups that part, print, fail and count as programs alone do."""

import importlib
import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.launch import kernels
from tests.launch.launches import array, interpret, InterpretError, Launch, run, S


def parting(counts, bad=-1, grid=(10, 13), block=4):
    count, real = math.prod(grid), jnp.float32
    return Launch(
        kernels.parting_kernel,
        {"counts": S((count,), jnp.int32), "pool": S((count, block), real)},
        {
            "new_pool": S((count, block), real),
            "sums": S((count, block), real),
            "steps": S((count,), jnp.int32),
        },
        {"bad": bad},
        {"BLOCK": block},
        grid,
        aliases={"pool": "new_pool"},
    )


@pytest.fixture
def groups(monkeypatch):
    """How many programs ran together, every time that some did."""
    interpreter, found = importlib.import_module("ejkernel_eqx.testing._interpreter"), []
    run_some = interpreter._run

    def counted(body, arguments, programs, depth):
        found.append(len(programs))
        return run_some(body, arguments, programs, depth)

    monkeypatch.setattr(interpreter, "_run", counted)
    return found


@pytest.mark.parametrize("spread", [1, 3, 40])
def test_programs_that_part_are_as_alone(spread, groups):
    """More than run together at once; what is written in place before they part is written once."""
    count, block = 130, 4
    counts = np.random.default_rng(spread).integers(0, spread, count).astype(np.int32)
    pool = np.asarray(array((count, block)))
    outputs = interpret(parting(counts), {"counts": counts, "pool": pool})
    doubled = np.where(counts % 3 == 1, 2, 1)[:, None]
    np.testing.assert_array_equal(outputs["new_pool"], (pool + 1) * doubled)
    series = np.array([sum(range(n // 2, n)) for n in counts])
    np.testing.assert_array_equal(outputs["sums"], series[:, None] * counts[:block].astype(np.float32))
    np.testing.assert_array_equal(outputs["steps"], np.maximum(0, np.log2(np.maximum(counts, 1))).astype(int))
    assert groups == [64, 64, 2] if spread == 1 else max(groups) == 64 and len(groups) > 3


@pytest.mark.parametrize("bad", [37])
def test_of_many_programs_the_one_that_fails_is_named(bad):
    counts, pool = np.zeros(130, np.int32), np.zeros((130, 4), np.float32)
    place = re.escape(str((bad // 13, bad % 13, 0)))
    with pytest.raises(InterpretError, match=rf"program {place} of grid .*load from 'counts' out of bounds"):
        interpret(parting(counts, bad), {"counts": counts, "pool": pool})


def test_every_program_has_its_own_planes(groups):
    planes, rows, columns = 5, 4, 8
    x, y = np.asarray(array((planes, rows, columns))), np.asarray(array((columns,), seed=1))
    order = np.random.default_rng(2).integers(0, rows, x.shape).astype(np.int32)
    shape = S(x.shape, jnp.float32)
    launch = Launch(
        kernels.shapes_kernel,
        {"x": shape, "y": S((columns,), jnp.float32), "order": S(x.shape, jnp.int32)},
        {"gathered": shape, "counted": S((planes, columns), jnp.int32), "joined": shape, "moved": shape},
        {},
        {"ROWS": rows, "COLUMNS": columns},
        (planes,),
    )
    outputs = interpret(launch, {"x": x, "y": y, "order": order})
    np.testing.assert_array_equal(outputs["gathered"], np.take_along_axis(x, order, 1))
    first = order.reshape(planes, -1)[:, :rows]
    np.testing.assert_array_equal(outputs["counted"], [np.bincount(row, minlength=columns) for row in first])
    np.testing.assert_allclose(outputs["joined"], 3 * x + y * 0, rtol=1e-6, atol=1e-6)
    shifted = np.zeros_like(x)
    shifted[:, : rows - 2] = x[:, 1 : rows - 1]
    for plane in range(planes):
        shifted[plane, max(0, rows - 1 - plane) :] = plane
    np.testing.assert_array_equal(outputs["moved"], shifted)
    assert groups == [planes], "what no program does alone, all do together"


def simple(kernel, x, **options: Any):
    shape = S(x.shape, x.dtype)
    return interpret(Launch(kernel, {"x": shape}, {"out": shape}, {}, {}, x.shape, **options), {"x": x})[
        "out"
    ]


def test_programs_that_part_print_once(capfd):
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(simple(kernels.talking_kernel, x), [-1, 0, 4, 6])
    lines = sorted(line for line in capfd.readouterr().out.splitlines() if "value" in line)
    assert [line.split()[:3] for line in lines] == [[f"({n},", "0,", "0)"] for n in range(4)]


def test_a_number_that_is_none_fails_and_ends():
    np.testing.assert_array_equal(simple(kernels.counting_kernel, np.array([1, 3, 3], np.float32)), [1, 3, 3])
    with pytest.raises(InterpretError, match=r"program \(1, 0, 0\).*NaN"):
        simple(kernels.counting_kernel, np.array([1, np.nan, np.nan], np.float32))


def test_rows_by_a_descriptor(groups):
    x, rows = np.asarray(array((12, 8))), np.random.default_rng(0).permutation(16).astype(np.int32)
    launch = Launch(
        kernels.rows_kernel,
        {"x": S(x.shape, jnp.float32), "rows": S(rows.shape, jnp.int32)},
        {"out": S((16, 8), jnp.float32), "scattered": S(x.shape, jnp.float32)},
        {},
        {"R": 12, "C": 8, "N": 8},
        (2,),
    )
    outputs = interpret(launch, {"x": x, "rows": rows})
    expected = np.where((rows < 12)[:, None], x[np.minimum(rows, 11)], 0)
    np.testing.assert_array_equal(outputs["out"], expected)
    np.testing.assert_array_equal(outputs["scattered"], x)
    assert groups == [2]


@pytest.mark.parametrize("programs", [7, 130])
def test_programs_count_themselves(programs):
    """An atomic addition returns what was there before, for every program another number, also where some of them part and restart."""
    two = S((2,), jnp.int32)
    launch = Launch(
        kernels.arriving_kernel,
        {"zeros": two},
        {"count": two, "order": S((programs,), jnp.int32), "total": two},
        {},
        {},
        (programs,),
        aliases={"zeros": "count"},
    )
    found = run(launch, {"zeros": jnp.zeros(2, jnp.int32)}, interpret=True)
    counts = [-(-programs // 2), programs // 2]
    np.testing.assert_array_equal(found["count"], counts)
    for group, count in enumerate(counts):
        assert sorted(np.asarray(found["order"])[group::2]) == list(range(count))
        assert count == 0 or found["total"][group] == count


def test_sums_that_depend_on_the_order_are_not_interpreted():
    one = S((1,), jnp.float32)
    launch = Launch(
        kernels.atomic_sum_kernel, {"zeros": one}, {"total": one}, {}, {}, (2,), aliases={"zeros": "total"}
    )
    with pytest.raises(InterpretError, match="an atomic other than an addition of integers"):
        run(launch, {"zeros": jnp.zeros(1)}, interpret=True)
