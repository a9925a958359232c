"""Many rows by quantised weights: floats by a kernel, interpreted, against NumPy in float64; and Hopper's kernel without a Hopper."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable
from ejkernel_eqx.matmul.dense.triton import compiled, many
from ejkernel_eqx.matmul.dense.triton.compiled import RowsTile, TritonConfig
from ejkernel_eqx.matmul.dense.workload import example_problem
from ejkernel_eqx.quantised.format import word_of
from tests.attention.dense import INTERPRET, normal, quick
from tests.compiled import DEVICES, waits
from tests.matmul.dense.weights import FORMS, weight
from tests.tolerances import assert_close
from tests.workloads import launches

pytest.importorskip("triton")
HOPPER = DEVICES["sm_90"]
_MISSING = gluon_unavailable(HOPPER)
needs_gluon = pytest.mark.skipif(_MISSING is not None, reason=f"Hopper's kernel {_MISSING}")
FLOATS = TritonConfig(RowsTile(64, 16, 32, 4, 1), float32_dot="ieee", fast_sigmoid=False, floats_apart=True)
BY_FLOATS: Any = {"platform": INTERPRET, "config": FLOATS}


@pytest.mark.parametrize("name", FORMS)
def test_floats_by_a_kernel(name):
    """Sizes that fill no tile, and weights that are mapped, each with blocks of its own."""
    both = [weight(name, 37, 160, seed) for seed in (0, 1)]
    x = normal(2, 70, 160)
    wanted = [np.asarray(x, np.float64) @ numbers.T for _, numbers in both]
    op = ejx.Matmul(**BY_FLOATS)
    assert_close(op(x, both[0][0]), wanted[0])
    stack = jax.tree.map(lambda *a: jnp.stack(a), *(coded for coded, _ in both))
    assert_close(quick(jax.vmap(op, (None, 0)))(x, stack), np.stack(wanted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_surrounds_them(dtype):
    """The norm, a gate, biases and a residual, and all gradients; a row of NaN stays alone."""
    (w, nw), (u, nu) = weight("zeros", 40, 96), weight("zeros", 40, 96, 1)
    given = {"x": normal(0, 70, 96, dtype=dtype), "norm": 1 + normal(1, 96) / 10, "bias": normal(2, 40)}
    call = lambda op, given, w, u: op(given["x"], w, u, biases=(given["bias"], None), norm=given["norm"])
    op, exact = ejx.Matmul("silu", gated=True, **BY_FLOATS), ejx.Matmul("silu", gated=True, platform="xla")
    numbers = [jnp.asarray(n, dtype) for n in (nw, nu)]
    assert_close(call(op, given, w, u), call(exact, given, *numbers), dtype)
    loss = lambda op, given, *sides: jnp.sum(call(op, given, *sides).astype("float32") * normal(4, 70, 40))
    found = quick(jax.grad(lambda given: loss(op, given, w, u)))(given)
    wanted = jax.grad(lambda given: loss(exact, given, *numbers))(given)
    for name, x in wanted.items():
        assert_close(found[name], x, dtype, "gradient", name=name)
    poisoned = call(op, given | {"x": given["x"].at[3].set(jnp.nan)}, w, u)
    np.testing.assert_array_equal(jnp.isnan(poisoned).any(-1), np.arange(70) == 3)


def problem(name: str = "int8", dtype: str = "bfloat16", **sizes: Any) -> Any:
    of = example_problem("matmul", {"M": 200, "K": 4096, "N": 14336} | sizes, dtype, {"weights": "int8"})
    known = dict(of.flags) | {"weights": word_of(FORMS[name])}
    return dataclasses.replace(of, flags=tuple(sorted(known.items())))


def test_which_calls_have_many_rows():
    asked = lambda *args: getattr(ejx.Matmul()._plan_for(*args).snapshot.requested, "value", None)
    assert (asked((65,)), asked((65,), True), asked((64,), False)) == ("xla", None, None)
    assert not compiled.candidates(problem(M=64), HOPPER)[0].floats_apart
    assert compiled.candidates(problem(), DEVICES["sm_80"])[0].floats_apart


@needs_gluon
@pytest.mark.parametrize(
    "of, is_chosen",
    [
        (problem(), True),
        (problem("nvfp4", K=4128), True),
        (problem(dtype="float16"), False),
        (problem(N=1004), False),
        (problem("int4", K=4112), False),
        (problem(M=2**30 + 1), False),
        (problem("zeros"), False),
        (problem("mxfp4", M=4096), False),
        (problem(M=40), True),
        (problem(M=40, N=4096), False),
    ],
)
def test_where_hoppers_kernel_is_chosen(of, is_chosen):
    first = compiled.candidates(of, HOPPER)[0]
    assert (first.tile.hopper_programs == 132) == is_chosen
    assert is_chosen or first.floats_apart == (of.dim("M") > 64)
    assert compiled.config_unsupported(first, of, HOPPER) is None


@needs_gluon
@pytest.mark.parametrize(
    "tile, words",
    [
        (RowsTile(256, 64, 64, 4, 4, 1, 132), "64 with split_k=2"),
        (RowsTile(64, 64, 128, 4, 3, 2, 132), "even number of stages"),
        (RowsTile(256, 128, 128, 4, 4, 1, 132), "bytes of shared memory"),
    ],
)
def test_tiles_that_it_does_not_have(tile, words):
    assert words in str(compiled.config_unsupported(TritonConfig(tile), problem(), HOPPER))


def test_options_of_quantised_weights():
    plain = example_problem("matmul", {"M": 200, "K": 64, "N": 64}, "bfloat16", {})
    assert "quantised weights" in str(compiled.config_unsupported(FLOATS, plain, HOPPER))


@needs_gluon
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_hoppers_tiles_compile(name):
    """Every candidate without spills, and products that do not wait for one another."""
    several: Any = ({}, {"N": 4096}, {"M": 2000, "K": 4160})
    for sizes in several:
        of = problem(name, **sizes)
        for config in compiled.candidates(of, HOPPER):
            for launch in launches("matmul", of, config):
                report = compile_ahead(launch, "sm_90")
                assert report.fits and report.spills == 0, (config, report)
                assert not launch.is_gluon or waits(launch) == []
                tile, form = config.tile, FORMS[name]
                assert not launch.is_gluon or report.shared <= many.shared_memory_of_hopper(tile, form)
