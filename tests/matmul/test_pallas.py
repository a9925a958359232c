"""The grouped matmul's kernels for TPU without one: interpreted against the reference, lowered, compiled, and beside JAX's own."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import kernel_registry, Platform, Problem
from ejkernel_eqx.matmul.pallas import compiled, visits
from ejkernel_eqx.matmul.pallas.compiled import PallasConfig
from ejkernel_eqx.matmul.pallas.tile_sizes import product_of, TpuTile, vmem
from ejkernel_eqx.matmul.spec import GroupedArrays
from ejkernel_eqx.matmul.workload import example_problem, make_arrays, spec_of
from tests import meshes, tpus
from tests.matmul.cases import Case, CASES, exact, learned, make, results
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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_the_contracted_axis(name):
    case, sizes = BLOCKS[name]
    tile = TpuTile(*sizes)
    check(case, *make(case), config=PallasConfig(tile, tile, TpuTile(16, 128, 256)))


def test_nan_of_others_reaches_nothing():
    """In rows past the last group and their cotangents, and in the matrices and biases of a group that has no rows."""
    case = Case(sizes=(3, 0, 5), M=12, activation="silu", gated="pair", bias=True)
    given, dout = make(case)
    given["lhs"] = given["lhs"].at[8:].set(jnp.nan)
    given |= {name: given[name].at[1].set(jnp.nan) for name in ("rhs", "up", "bias", "up_bias")}
    found = results(case, case.operation(PLATFORM), given, dout.at[8:].set(jnp.nan))
    assert not found["out"][8:].any() and not found["lhs"][8:].any() and not found["rhs"][1].any()
    assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.slow
def test_mapped():
    """Of right sides too, whose gradients are then those of each example."""
    case = Case(sizes=(3, 0, 5), M=12, bias=True)
    examples = [make(case, 1), make(dataclasses.replace(case, sizes=(0, 7, 2)), 2)]
    given, dout = jax.tree.map(lambda *x: jnp.stack(x), *examples)
    found = jax.vmap(functools.partial(results, case, case.operation(PLATFORM)))(given, dout)
    for i, example in enumerate(examples):
        for name, x in exact(case, *example).items():
            assert_close(found[name][i], x, "float32", "gradient", name=name)


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


@pytest.mark.parametrize("transform", ["jit", "vmap", "checkpoint", "loop"])
def test_without_a_gradient(transform):
    """The call that `vmap` folds first is still in the program when it is compiled."""
    case = CASES["plain"]
    given, _ = make(case)

    def run(platform: Any) -> Any:
        op = ejx.GroupedMatmul(platform=platform)
        call = lambda lhs: op(lhs, given["rhs"], given["group_sizes"])
        if transform == "vmap":
            return jax.vmap(call)(jnp.stack([given["lhs"]] * 2))
        if transform == "checkpoint":
            return jax.checkpoint(call)(given["lhs"])
        if transform == "loop":
            return jax.jit(lambda lhs: jax.lax.map(call, lhs[None]))(given["lhs"])
        return jax.jit(call)(given["lhs"])

    assert_close(np.asarray(run(PLATFORM)), np.asarray(run("xla")), case.dtype)


@pytest.mark.slow
def test_inside_shard_map():
    """The same columns, as each device sees them."""
    case = Case(sizes=(3, 0, 4), M=8, K=6, N=8)
    given, _ = make(case)
    op = {name: ejx.GroupedMatmul(platform=name) for name in (PLATFORM, "xla")}
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    columns = P(None, None, "tp")

    def loss(call: Any) -> Any:
        total = lambda lhs, rhs: (call(lhs, rhs, given["group_sizes"]) ** 2).sum()
        return jax.jit(jax.value_and_grad(total, (0, 1)))(given["lhs"], given["rhs"])

    # JAX's interpreter compares an index of a grid whose length is data, which varies, with a constant, which does not: its check does not let it.
    how: Any = dict(in_specs=(P(), columns, P()), out_specs=P(None, "tp"), check_vma=False)
    split = jax.shard_map(op[PLATFORM], mesh=mesh, **how)
    for x, y in zip(*map(jax.tree.leaves, (loss(split), loss(op["xla"]))), strict=True):
        assert_close(np.asarray(x), np.asarray(y), "float32", "gradient")


@pytest.mark.parametrize("mapped", [False, True])
def test_visits_cover_every_row_once(mapped):
    rng = np.random.default_rng(0)
    of_rows, of_groups = (
        jax.jit(of, static_argnums=(1, 2, 3)) for of in (visits.row_visits, visits.group_visits)
    )
    for rows, block, batch, count in ((40, 16, 2, 5), (64, 8, 3, 1)):
        sizes = rng.multinomial(rows, np.full(count + 1, 1 / (count + 1)), batch)[:, :count].astype(np.int32)
        sizes[-1, 0] = 0
        group = np.repeat(np.tile(np.arange(count + 1), batch), np.c_[sizes, rows - sizes.sum(1)].ravel())
        matrix = group + count * mapped * np.repeat(np.arange(batch), rows)
        table, total = of_rows(jnp.asarray(sizes), rows, block, mapped)
        seen, order = np.full(batch * rows, -1), []
        for tile, own, begin, end, kind in np.asarray(table).T[: int(total)]:
            mine = np.arange(max(begin, tile * block), min(end, (tile + 1) * block))
            assert mine.size and (seen[mine] == -1).all()
            seen[mine] = own if kind & visits.REAL else count
            order.append(tile)
        assert (seen == np.where(group == count, count, matrix)).all() and order == sorted(order)
        assert int(total) <= table.most

        table, total = of_groups(jnp.asarray(sizes), rows, block, mapped)
        counted, order = np.zeros(batch * count if mapped else count, int), []
        for tile, own, begin, end, kind in np.asarray(table).T[: int(total)]:
            counted[own] += max(0, min(end, (tile + 1) * block) - max(begin, tile * block))
            assert bool(kind & visits.FIRST) == (not order or order[-1] != own)
            order.append(own)
        assert (counted == (sizes.ravel() if mapped else sizes.sum(0))).all() and order == sorted(order)
        assert set(order) == set(range(counted.size)) and int(total) <= table.most


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


def problem_of(name: str) -> Problem:
    dims, dtype, flags = PROBLEMS[name]
    return example_problem(OPERATION, dims, dtype, flags)


def both(problem: Problem, config: PallasConfig) -> tuple[Any, Any, Any]:
    """Forward and backward in one program, and its arrays."""
    spec = spec_of(problem)

    def call(arrays: GroupedArrays, dout: Any, **execute: Any) -> Any:
        found = compiled.forward(arrays, spec, config, **execute)
        saved = {name: x for name, x in found.items() if name != "out"}
        return found, compiled.backward(arrays, spec, config, saved, {"out": dout}, **execute)

    arrays = jax.eval_shape(lambda: make_arrays(problem, spec, 0))
    dout = jax.ShapeDtypeStruct((problem.dim("B"), problem.dim("M"), problem.dim("N")), problem.dtype("out"))
    return call, arrays, dout


@pytest.mark.few(1)
@pytest.mark.parametrize("generation", tpus.GENERATIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_defaults_and_candidates(name, generation):
    """They lower, and take no more vector memory than they say, which the device has."""
    problem, device = problem_of(name), tpus.FACTS[generation]
    assert compiled.unsupported(problem, device) is None
    configs = compiled.candidates(problem, device)
    assert configs[0] == compiled.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    for config in configs if generation == "v4" else configs[:1]:
        assert compiled.config_unsupported(config, problem, device) is None
        call, *arrays = both(problem, config)
        tpus.lower(call, *arrays)
        for label, (launch, given) in tpus.launches_of(call, *arrays).items():
            kernel = label.rpartition(".")[2]
            if kernel in compiled.KERNELS:
                estimate = vmem(kernel, getattr(config, kernel), product_of(kernel, problem))
                taken = launch.vmem([x.dtype for x in given[launch.scalars :]])
                assert taken * 5 / 4 <= device.vmem and 0.85 * estimate < taken < 1.05 * estimate, (
                    kernel,
                    taken,
                    estimate,
                )


@tpus.needs_libtpu
@pytest.mark.parametrize("generation", tpus.GENERATIONS)
@pytest.mark.parametrize("name", ["many", "everything"])
def test_defaults_compile(name, generation):
    problem = problem_of(name)
    call, *arrays = both(problem, compiled.default_config(problem, tpus.FACTS[generation]))
    tpus.compile_ahead(generation, call, *arrays)


@tpus.needs_libtpu
@pytest.mark.parametrize("name", ["decode", "float32", "int8, halves", "float8_e5m2"])
def test_kinds_compile(name):
    problem = problem_of(name)
    call, *arrays = both(problem, compiled.default_config(problem, tpus.FACTS["v4"]))
    tpus.compile_ahead("v4", call, *arrays)


def test_jax_s_own_product_is_the_default_on_a_tpu():
    found = {x.platform: x.priority for x, _ in kernel_registry.list_implementations(OPERATION)}
    assert found[Platform.XLA] > found[Platform.PALLAS] > 0


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


@pytest.mark.slow
def test_beside_megablox():
    """JAX's own kernels on the same inputs, interpreted."""
    case = Case(sizes=(9, 0, 30, 25), M=64, K=128, N=256)
    given, dout = make(case)
    found = results(case, case.operation(PLATFORM), given, dout)
    x, w, sizes = given["lhs"], given["rhs"], given["group_sizes"]
    tiles = (16, 128, 128)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = {
            "out": gmm(x, w, sizes, tiling=tiles, interpret=True),
            "lhs": gmm(dout, w, sizes, tiling=tiles, transpose_rhs=True, interpret=True),
            "rhs": tgmm(x.T, dout, sizes, tiling=tiles, interpret=True),
        }
    assert set(found) == set(theirs) == {"out", *learned(case, given)}
    for name, expected in theirs.items():
        assert_close(found[name], expected, "float32", "gradient", name=name)
