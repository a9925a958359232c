"""Grouped matmuls on a GPU: the Triton kernels against the float64 reference, and what only a GPU can show.

python -m pytest tests/gpu/test_matmul_gpu.py -n 6
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.quantised.format import word_of
from tests.gpu.host import candidates, example_problem
from tests.matmul.cases import Case, CASES, exact, make, results
from tests.matmul.test_quantised import agree, FORMS, quantised
from tests.matmul.test_quantised import results as quantised_results
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "grouped_matmul"
REPEATS = 8


def assert_agrees(case, found, expected):
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], case.dtype, "forward" if name == "out" else "gradient", name=name)


def longer(case: Case) -> Case:
    """The same at a size of several programs, with tiles that are not full."""
    sizes = (
        tuple(np.asarray(case.sizes) * 77)
        if not case.lead
        else tuple(tuple(np.asarray(row) * 77) for row in case.sizes)
    )
    return dataclasses.replace(
        case,
        sizes=sizes,
        M=case.M * 77 + 5,
        K=200,
        N=case.N * 24,
        gathered=case.gathered and case.gathered * 60,
    )


EVERY = CASES | {f"{name}, long": longer(case) for name, case in CASES.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", EVERY)
def test_agrees_with_the_reference(name, dtype):
    """The output and every gradient; the same bit for bit when run again, and with NaN in rows of no group."""
    case = dataclasses.replace(EVERY[name], dtype=dtype)
    given, dout = make(case)
    op = case.operation("triton")
    found = results(case, op, given, dout)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = exact(case, *jax.device_put((given, dout), jax.devices("cpu")[0]))
    assert_agrees(case, found, expected)
    real = int(np.sum(case.sizes))
    for n in range(REPEATS):
        if n == REPEATS - 1 and not case.lead:
            dout = dout.at[real:].set(jnp.nan)
            given |= {} if case.gathered else {"lhs": given["lhs"].at[real:].set(jnp.nan)}
        again = results(case, op, given, dout)
        for name, x in found.items():
            np.testing.assert_array_equal(np.asarray(x), np.asarray(again[name]), err_msg=f"{name}, run {n}")


@pytest.mark.parametrize(
    "sizes, case",
    [
        (dict(M=1100, K=264, N=520, E=5), Case((300, 0, 700, 3, 90), 1100, 264, 520)),
        (dict(M=9, K=264, N=520, E=5), Case((3, 0, 4, 1, 1), 9, 264, 520, gated="pair", activation="silu")),
    ],
)
def test_every_candidate(sizes, case):
    case = dataclasses.replace(case, dtype="bfloat16")
    given, dout = make(case)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = exact(case, *jax.device_put((given, dout), jax.devices("cpu")[0]))
    flags = {"gated": case.gated, "activation": case.activation}
    problem = example_problem("grouped_matmul", sizes, "bfloat16", flags)
    for config in candidates("grouped_matmul", problem):
        op = ejx.GroupedMatmul(**case.options, config=config)
        assert_agrees(case, results(case, op, given, dout), expected)


@pytest.mark.parametrize("sizes", [(1, 0, 2, 0, 0, 0, 1), (9, 0, 40, 0, 1, 3, 7)], ids=["one row", "rows"])
@pytest.mark.parametrize("name", FORMS)
def test_every_candidate_of_every_format(name, sizes):
    """Quantised right sides, with columns and features that fill no tile."""
    case = Case(sizes, sum(sizes) + 3, 1280, 328, "bfloat16", "silu", "pair", bias=True, transpose=True)
    given, floats, dout = quantised(case, FORMS[name])
    with jax.default_device(jax.devices("cpu")[0]):
        expected = exact(case, *jax.device_put((floats, dout), jax.devices("cpu")[0]))
    small = dict(M=case.M, K=case.K, N=case.N, E=len(sizes))
    flags = dict(gated="pair", activation="silu", bias=True, transpose_rhs=True, quantised="int8")
    problem, form = example_problem("grouped_matmul", small, "bfloat16", flags), FORMS[name]
    known = dict(problem.flags) | {"format": word_of(form), "factor": form.scale == "float8_e4m3fn"}
    problem = dataclasses.replace(
        problem,
        flags=tuple(sorted(known.items())),
        dtypes=tuple(sorted((dict(problem.dtypes) | {"rhs": form.element}).items())),
    )
    for config in candidates("grouped_matmul", problem):
        op = ejx.GroupedMatmul(**case.options, config=config)
        agree(quantised_results(op, given, dout), expected, "bfloat16")


LONG = Case((4000, 1, 0, 4700, 10), 9001, 512, 640)
HOPPER = {name: EVERY[name] for name in ("SwiGLU in halves, long", "GPT-OSS, long", "gathered, long")} | {
    "more tiles than programs": LONG,
    "more tiles than programs, SwiGLU": dataclasses.replace(
        LONG, gated="pair", activation="silu", transpose=True
    ),
    "halves, not transposed": dataclasses.replace(
        LONG, gated="halves", activation="silu", bias=True, clipped=True
    ),
    "pair, biases": dataclasses.replace(LONG, gated="pair", activation="gelu", bias=True, N=328),
    "transposed": dataclasses.replace(LONG, transpose=True, K=520),
    "every row in the last group": dataclasses.replace(LONG, sizes=(0, 0, 0, 0, 9001)),
    "no row in a group": dataclasses.replace(LONG, sizes=(0, 0, 0, 0, 0), bias=True),
    "many leading axes": Case(
        ((300, 0, 500), (0, 64, 0), (128, 128, 128), (1, 899, 0)), 900, 264, 328, bias=True, activation="relu"
    ),
}


@pytest.mark.parametrize("name", HOPPER)
def test_every_tile_of_hopper(name):
    """The heuristic's kernels with each of their tiles, NaN in rows of no group."""
    case = dataclasses.replace(HOPPER[name], dtype="bfloat16", out=None)
    platform = kernel_registry.get("grouped_matmul", "triton").load()
    flags = dict(
        gated=case.gated,
        activation=case.activation,
        transpose_rhs=case.transpose,
        bias=case.bias,
        stored=case.stored,
    ) | dict(clipped=case.clipped, gathered=case.gathered is not None)
    dims = dict(B=int(np.prod(case.lead)), M=case.M, K=case.K, N=case.N, E=np.shape(case.sizes)[-1])
    problem = example_problem("grouped_matmul", dims, "bfloat16", flags)
    configs = candidates("grouped_matmul", problem)
    used = lambda config: any(getattr(config, kernel).hopper_programs for kernel in platform.KERNELS)
    configs = [config for config in configs if used(config)]
    if not configs:
        pytest.skip(
            platform.remark(platform.default_config(problem, device_facts()), problem, device_facts())
        )
    # Fewer programs than multiprocessors, so that each has several tiles.
    few = {
        kernel: dataclasses.replace(tile, hopper_programs=5)
        for kernel in platform.KERNELS
        if (tile := getattr(configs[0], kernel)).hopper_programs
    }
    given, dout = make(case)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = exact(case, *jax.device_put((given, dout), jax.devices("cpu")[0]))
    if not case.lead and not case.gathered:
        real = int(np.sum(case.sizes))
        dout = dout.at[real:].set(jnp.nan)
        given |= {"lhs": given["lhs"].at[real:].set(jnp.nan)}
    for config in (dataclasses.replace(configs[0], **few), *configs):
        op = ejx.GroupedMatmul(**case.options, config=config)
        assert_agrees(case, results(case, op, given, dout), expected)


@pytest.mark.memory(16)
@pytest.mark.parametrize("which", [0, -1])  # of the candidates: on Hopper, the last one has Triton's kernels
def test_past_two_billion_numbers(which):
    """Right sides of more than 2**31 numbers, and rows of as many: the last group and the last rows are those that an offset of 32 bits misses."""
    count, inner, columns = 40, 8192, 8192
    rhs = jnp.zeros((count, inner, columns), jnp.bfloat16).at[-1].set(jnp.eye(inner, dtype=jnp.bfloat16))
    lhs = jax.random.normal(jax.random.key(0), (270_000, inner), jnp.bfloat16)
    sizes = jnp.zeros(count, jnp.int32).at[0].set(200_000).at[-1].set(70_000)
    problem = example_problem("grouped_matmul", dict(M=270_000, K=inner, N=columns, E=count), "bfloat16", {})
    config = candidates("grouped_matmul", problem)[which]
    out = ejx.GroupedMatmul(config=config)(lhs, rhs, sizes)
    assert not out[:200_000].any()
    np.testing.assert_array_equal(np.asarray(out[-1000:]), np.asarray(lhs[-1000:]))
