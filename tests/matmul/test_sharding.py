"""Grouped matmuls on meshes: rows of a batch, columns, and the contracted axis split over devices."""

import functools
from typing import Any

import jax
import pytest

from tests import meshes
from tests.matmul.cases import Case, learned, make
from tests.meshes import HEADS, ROWS

BATCH = ((3, 0, 4), (0, 7, 0), (1, 1, 1), (2, 3, 2))
COLUMNS, CONTRACTED = (None, None, HEADS), (None, HEADS)
OUT = (ROWS, None, HEADS)
CASES = {
    # how arrays lie, and the result
    "plain": (Case(BATCH, 8, 6, 8), {"lhs": (ROWS,), "rhs": COLUMNS}, OUT),
    "gate and up": (
        Case(BATCH, 8, 6, 4, activation="silu", gated="pair", bias=True, transpose=True),
        {"lhs": (ROWS,), "rhs": CONTRACTED, "up": CONTRACTED, "bias": CONTRACTED, "up_bias": CONTRACTED},
        OUT,
    ),
    "interleaved": (
        Case(BATCH, 8, 6, 4, activation="silu", gated="interleaved", bias=True),
        {"lhs": (ROWS,), "rhs": COLUMNS, "bias": CONTRACTED},
        OUT,
    ),
    "halves": (
        Case(BATCH, 8, 6, 4, activation="silu", gated="halves"),
        {"lhs": (ROWS,)},
        (ROWS,),
    ),
    "contracted axis": (Case(BATCH, 8, 8, 6), {"lhs": OUT, "rhs": CONTRACTED}, (ROWS,)),
    "gathered": (
        Case(BATCH, 8, 6, 8, gathered=5),
        {"lhs": (ROWS,), "row_indices": (ROWS,), "rhs": COLUMNS},
        OUT,
    ),
}


# Each on both kinds of mesh, one in every layout.
OPAQUE = "triton-interpret"
PLATFORMS = ("xla", OPAQUE)
ON_MESHES = [(name, platform, "explicit without context", "both") for name in CASES for platform in PLATFORMS]
ON_MESHES += [(name, "xla", "automatic", "both") for name in CASES] + [("plain", OPAQUE, "automatic", "both")]
ON_MESHES += [(name, OPAQUE, "explicit", "tensor") for name in ("plain", "contracted axis")]
ON_MESHES += [("plain", platform, "explicit", "data") for platform in PLATFORMS]


@functools.cache
def everything(name: str, platform: str) -> Any:
    """A compiled function of the arrays and a cotangent: the result and the gradients."""
    case = CASES[name][0]
    op = case.operation(platform)

    def results(arrays, dout):
        result, pull = jax.vjp(lambda some: op(**{**arrays, **some}), learned(case, arrays))
        return result, pull(dout)[0]

    return jax.jit(results)


@functools.cache
def on_one_device(name: str, platform: str) -> Any:
    return everything(name, platform)(*make(CASES[name][0]))


@pytest.mark.few(2)
@pytest.mark.parametrize("name, platform, kind, layout", ON_MESHES)
def test_on_a_mesh(name, platform, kind, layout):
    if platform != "xla":
        pytest.importorskip("triton")
    case, lie, out = CASES[name]
    given, dout = make(case)
    op, expected = case.operation(platform), on_one_device(name, platform)
    mesh = meshes.mesh_of(kind)
    lie = {name: (), **dict.fromkeys(given, ()), "group_sizes": (ROWS,), **lie}
    specs = {name: meshes.spec(layout, *lie[name]) for name in given}
    placed = meshes.place(mesh, given, specs)
    (placed_dout,) = meshes.place(mesh, (dout,), (meshes.spec(layout, *out),))
    with meshes.context(kind, mesh):
        result, gradients = everything(name, platform)(placed, placed_dout)
    meshes.agree(result, expected[0])
    meshes.agree(gradients, expected[1], "gradient")
    if kind == "automatic" and platform != "xla":
        return  # a callback stays whole where the compiler splits
    with meshes.context(kind, mesh):
        forward = jax.jit(lambda given: op(**given)).lower(placed).compile()
    if name != "contracted axis":
        assert not meshes.collectives(forward), meshes.collectives(forward)
    elif platform != "xla" and layout != "data":
        assert set(meshes.collectives(forward)) == {"all-reduce"}
    assert meshes.lies(result, mesh, meshes.spec(layout, *out)), result.sharding
    if kind != "automatic":
        for name, x in gradients.items():
            assert meshes.lies(x, mesh, specs[name]), (name, x.sharding)
