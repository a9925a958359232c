"""The kernels of the grouped matmul for `tpu_static.py`, beside JAX's megablox with the same tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from benchmarks.tpu_static import Case, PASSES, Program
from ejkernel_eqx.launch.tpu_ahead import facts_of
from ejkernel_eqx.matmul.core import problem_of
from ejkernel_eqx.matmul.pallas import compiled
from ejkernel_eqx.matmul.pallas.products_kernel import CHUNK, chunks_together
from ejkernel_eqx.matmul.pallas.tile_sizes import TpuTile
from ejkernel_eqx.matmul.spec import GroupedArrays, GroupedSpec, PAIR

_ROWS, _SIDE, _GROUPS = 8192, 4096, 8
_UNIT = 512**3


def cases(generation: str) -> list[Case]:
    plain = _kernels(generation, "bf16", jnp.bfloat16, GroupedSpec("bfloat16"))
    gated = GroupedSpec("bfloat16", "silu", PAIR)
    found = plain + _kernels(generation, "bf16 SwiGLU", jnp.bfloat16, gated)[:1]
    return found + _kernels(generation, "f32", jnp.float32, GroupedSpec("float32"))


def _kernels(generation: str, name: str, dtype: Any, spec: GroupedSpec) -> list[Case]:
    """A call's kernels with the heuristic's tiles: of the first two a chunk of the contracted axis, of the last a tile of rows."""
    shape: Any = jax.ShapeDtypeStruct
    right = shape((_GROUPS, _SIDE, _SIDE), dtype)
    lhs, out = shape((1, _ROWS, _SIDE), dtype), shape((1, _ROWS, _SIDE), dtype)
    sizes = shape((1, _GROUPS), jnp.int32)
    arrays = GroupedArrays(lhs, sizes, right, up=right if spec.gated else None)
    config = compiled.default_config(problem_of("grouped_matmul", arrays, spec), facts_of(generation))
    backward = functools.partial(_backward, spec, config), (arrays, out)
    given = {
        "forward": (functools.partial(_forward, spec, config), (arrays,)),
        "lhs": backward,
        "rhs": backward,
    }
    found = []
    for kernel, (function, shapes) in given.items():
        tile: TpuTile = getattr(config, kernel)
        last = tile.block_k if kernel == "rhs" else min(tile.block_k, CHUNK)
        sides = 2 if spec.gated else 1
        units = tile.block_m * tile.block_n * last / _UNIT
        peer = _peer(kernel, tile, last, dtype, units) if spec.gated is None else None
        is_loop = kernel != "rhs" and tile.block_k > CHUNK
        turn = chunks_together(jnp.dtype(dtype).name) if is_loop else 1
        others = {1: "a group's last rows"} if kernel == "rhs" else {}
        size = jnp.dtype(dtype).itemsize
        moved = tile.block_m * (last + tile.block_n * (kernel == "rhs")) * size
        found.append(
            Case(
                f"{kernel} {name}",
                "512x512x512 products",
                Program(function, shapes, f"matmul.{kernel}", units * turn, others=others),
                peer,
                "megablox",
                2.0 * _UNIT * sides * PASSES[size],
                moved / units,
                f"{tile.block_m}x{tile.block_n}x{tile.block_k}",
            )
        )
    return found


def _forward(spec: GroupedSpec, config: Any, arrays: GroupedArrays) -> Any:
    return compiled.forward(arrays, spec, config, save=False)


def _backward(spec: GroupedSpec, config: Any, arrays: GroupedArrays, dout: Any) -> Any:
    return compiled.backward(arrays, spec, config, {}, {"out": dout})


def _peer(kernel: str, tile: TpuTile, last: int, dtype: Any, units: float) -> Program:
    shape: Any = jax.ShapeDtypeStruct
    rows = shape((_ROWS, _SIDE), dtype)
    right, sizes = shape((_GROUPS, _SIDE, _SIDE), dtype), shape((_GROUPS,), jnp.int32)
    tiles = tile.block_m, last, tile.block_n
    # It multiplies float32 in one pass of bfloat16 unless it is told otherwise; ours never does.
    precision = "highest" if dtype == jnp.float32 else "default"

    def left(x: Any, w: Any, sizes: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return gmm(x, w, sizes, dtype, tiles, transpose_rhs=kernel == "lhs")

    def right_gradient(x: Any, y: Any, sizes: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return tgmm(x.T, y, sizes, dtype, tiles)

    if kernel == "rhs":
        return Program(right_gradient, (rows, rows, sizes), "tgmm", units)
    # Its last step along the contracted axis, which also writes, is a region of its own, and comes first.
    return Program(left, (rows, right, sizes), "gmm", units, step=1, others={0: "the last step"})
