"""The grouped matmul's kernels for TPU without one: interpreted against the reference, lowered and compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.matmul.pallas import compiled
from ejkernel_eqx.matmul.pallas.tile_sizes import product_of, TpuTile, vmem
from tests import meshes, tpus
from tests.matmul.cases import Case, CASES, exact, example_problem, make, make_arrays, results, spec_of
from tests.tolerances import assert_close

PLATFORM = "pallas-interpret"
OPERATION = "grouped_matmul"
pytestmark = pytest.mark.usefixtures("no_races")


def check(case: Case, given, dout, **options: Any) -> dict[str, Any]:
    found = results(case, case.operation(PLATFORM, **options), given, dout)
    expected = exact(case, given, dout)
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], case.dtype, "forward" if name == "out" else "gradient", name=name)
    return found


NAMES = (
    "plain",
    "transposed",
    "no group has any",
    "SwiGLU",
    "GPT-OSS",
    "gathered, gated",
    "int8",
    "float8",
    "leading axes",
)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_reference(name):
    check(CASES[name], *make(CASES[name]))


LONG = Case(sizes=(9, 0, 14, 3), M=30, K=700, N=256, dtype="bfloat16", activation="silu", gated="halves")
BLOCKS = {
    "a chunk and a masked step": (dataclasses.replace(LONG, transpose=True, stored="int8"), (16, 128, 512)),
    "whole chunks": (dataclasses.replace(LONG, K=2048, gated=None), (16, 128, 2048)),
    "chunks of one block": (dataclasses.replace(LONG, gated="pair", K=1100, N=40), (32, 128, 2048)),
    "gate and up of one matrix": (LONG, (16, 128, 1024)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_the_contracted_axis(name):
    case, sizes = BLOCKS[name]
    tile = TpuTile(*sizes)
    check(case, *make(case), config=compiled.PallasConfig(tile, tile, TpuTile(16, 128, 256)))


def test_nan_of_others_reaches_nothing():
    """In rows past the last group and their cotangents, and in the matrices and biases of a group that has no rows."""
    case = Case(sizes=(3, 0, 5), M=12, activation="silu", gated="pair", bias=True)
    given, dout = make(case)
    given["lhs"] = given["lhs"].at[8:].set(jnp.nan)
    given |= {name: given[name].at[1].set(jnp.nan) for name in ("rhs", "up", "bias", "up_bias")}
    found = results(case, case.operation(PLATFORM), given, dout.at[8:].set(jnp.nan))
    assert not found["out"][8:].any() and not found["lhs"][8:].any() and not found["rhs"][1].any()
    assert all(np.isfinite(x).all() for x in found.values())


def test_the_call_that_vmap_folds_is_compiled_without_a_gradient():
    given, _ = make(CASES["plain"])

    def run(platform: Any) -> Any:
        op = ejx.GroupedMatmul(platform=platform)
        call = jax.vmap(jax.checkpoint(lambda lhs: op(lhs, given["rhs"], given["group_sizes"])))
        return jax.jit(lambda lhs: jax.lax.map(call, lhs))(jnp.stack([given["lhs"]] * 2)[None])

    assert_close(np.asarray(run(PLATFORM)), np.asarray(run("xla")))


@pytest.mark.slow
def test_on_an_explicit_mesh():
    """Columns of right sides over two devices."""
    case = Case(sizes=(3, 0, 4), M=8, K=6, N=8)
    given, dout = make(case)
    op = case.operation(PLATFORM)
    mesh = meshes.mesh_of("explicit", (1, 2))
    lie = {"rhs": (None, None, meshes.HEADS)}
    placed = meshes.place(mesh, given, {name: meshes.spec("tensor", *lie.get(name, ())) for name in given})
    (placed_dout,) = meshes.place(mesh, (dout,), (meshes.spec("tensor", None, meshes.HEADS),))
    with jax.set_mesh(mesh):
        found = results(case, op, placed, placed_dout)
    meshes.agree(found, results(case, op, given, dout), "gradient")
    assert meshes.lies(found["rhs"], mesh, meshes.spec("tensor", *lie["rhs"]))


MANY, DECODE = dict(M=16384, K=4096, N=14336, E=8), dict(M=64, K=2048, N=1408, E=64)
EVERYTHING = dict(gated="pair", activation="silu", bias=True, clipped=True, transpose_rhs=True)
PROBLEMS = {
    "many": (MANY, "bfloat16", {}),
    "decode": (DECODE, "bfloat16", dict(stored="float8_e4m3fn")),
    "everything": (dict(M=4096, K=2880, N=2880, E=32), "bfloat16", EVERYTHING),
    "float32": (dict(B=2, M=1000, K=130, N=77, E=5), "float32", dict(activation="gelu", gathered=True)),
    "int8, halves": (MANY, "bfloat16", dict(stored="int8", gated="halves", activation="gelu_tanh")),
    "float8_e5m2": (DECODE, "bfloat16", dict(stored="float8_e5m2", gated="interleaved", activation="relu")),
}


def problem_of(name: str) -> Any:
    dims, dtype, flags = PROBLEMS[name]
    return example_problem(OPERATION, dims, dtype, flags)


def both(problem: Any, config: Any) -> tuple[Any, Any, Any]:
    """Forward and backward in one program, and its arrays."""
    spec = spec_of(problem)

    def call(arrays: Any, dout: Any) -> Any:
        found = compiled.forward(arrays, spec, config)
        saved = {name: x for name, x in found.items() if name != "out"}
        return found, compiled.backward(arrays, spec, config, saved, {"out": dout})

    arrays = jax.eval_shape(lambda: make_arrays(problem, spec, 0))
    dout = jax.ShapeDtypeStruct((problem.dim("B"), problem.dim("M"), problem.dim("N")), problem.dtype("out"))
    return call, arrays, dout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "decode" else pytest.mark.slow) for name in PROBLEMS]
)
def test_defaults_and_candidates(name):
    """They lower, and take no more vector memory than they say, which every generation has. Candidates differ in tiles alone: they are lowered
    without options and with all."""
    problem = problem_of(name)
    taken: dict[Any, dict[str, int]] = {}
    for generation, device in tpus.FACTS.items():
        assert compiled.unsupported(problem, device) is None
        configs = compiled.candidates(problem, device)
        assert configs[0] == compiled.default_config(problem, device)
        assert len(set(configs)) == len(configs) > 1
        for config in configs if generation == "v4" and name in ("many", "everything") else configs[:1]:
            assert compiled.config_unsupported(config, problem, device) is None
            if config not in taken:
                taken[config] = memory_of(problem, config)
            for kernel, size in taken[config].items():
                estimate = vmem(kernel, getattr(config, kernel), product_of(kernel, problem))
                assert size * 5 / 4 <= device.vmem, (kernel, size, generation)
                assert 0.85 * estimate < size < 1.05 * estimate, (kernel, size, estimate)


def memory_of(problem: Any, config: Any) -> dict[str, int]:
    """The vector memory that each kernel takes, which is lowered."""
    call, *arrays = both(problem, config)
    tpus.lower(call, *arrays)
    launches = {label.rpartition(".")[2]: x for label, x in tpus.launches_of(call, *arrays).items()}
    sizes = lambda launch, given: launch.vmem([x.dtype for x in given[launch.scalars :]])
    return {kernel: sizes(*x) for kernel, x in launches.items() if kernel in compiled.KERNELS}


@tpus.needs_libtpu
@pytest.mark.parametrize(
    "name, generation",
    [
        *(("everything", generation) for generation in tpus.GENERATIONS),
        *zip((name for name in PROBLEMS if name != "everything"), tpus.GENERATIONS, strict=True),
    ],
)
def test_defaults_compile(name, generation):
    """All options for every generation, of the others each for one."""
    problem = problem_of(name)
    call, *arrays = both(problem, compiled.default_config(problem, tpus.FACTS[generation]))
    tpus.compile_ahead(generation, call, *arrays)


def test_what_is_not_supported():
    device, small = tpus.FACTS["v5e"], dict(M=20, K=12, N=8, E=3)
    reason = compiled.unsupported(example_problem(OPERATION, small, "float16", {}), device)
    assert reason == "takes float32 and bfloat16, not float16"
    reason = compiled.unsupported(example_problem(OPERATION, small | dict(E=5000), "bfloat16", {}), device)
    assert reason is not None and "4096" in reason and "5000" in reason
    with pytest.raises(ValueError, match="power of two"):
        TpuTile(48, 128, 128)
    problem = problem_of("many")
    config = dataclasses.replace(
        compiled.default_config(problem, tpus.FACTS["v4"]), lhs=TpuTile(512, 1024, 16384)
    )
    assert compiled.config_unsupported(config, problem, device) is None
    reason = compiled.config_unsupported(config, problem, tpus.FACTS["v4"])
    assert reason is not None and "lhs with 512x1024x16384" in reason
