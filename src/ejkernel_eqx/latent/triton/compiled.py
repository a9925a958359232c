"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...attention.cotangents import row_terms, sinks_gradient
from ...attention.masks import tile_table
from ...attention.spec import AttentionSpec
from ...attention.triton.compiled import explicit_ranges, launcher, TileConfig, TritonConfig
from ...core.platforms import kernels_unavailable
from ...dispatch import DeviceFacts, FORWARD, Problem
from ...launch import Execute, Launcher, LOG2E, result, result_like, run
from ...launch.sizes import cdiv, fitting, padded, rows_of, too_large
from ..spec import LatentArrays, LatentGrads
from . import backward_kernels, forward_kernel, tile_sizes

OPAQUE = True
PARTS = {"forward": FORWARD, "key_gradient": "k k_rope v", "query_gradient": "q sinks"}
MAX_DIM = 128
config_type = TritonConfig
_SMALLEST = TileConfig(16, 16, 4, 1)

unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("mask"):
        return "takes no mask that is an array over queries and keys"
    if problem.flag("tiles"):
        return "takes no masks that are functions, unions, complements or maps of blocks"
    nope, rope, values = tile_sizes.dims(problem)
    if max(nope, rope, values) > MAX_DIM:
        return f"takes parts of keys and values up to {MAX_DIM}, not Dn {nope}, Dr {rope} and V {values}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The first preferred tile of each kernel that fits the device's shared memory."""
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first. Each takes the next tile of every kernel."""
    columns = []
    for kernel in tile_sizes.KERNELS:
        tiles = [TileConfig(*tile) for tile in tile_sizes.choices(kernel, problem, device)]
        needed = lambda tile, kernel=kernel: _needed_memory(kernel, problem, device, tile)
        columns.append(fitting(tiles, needed, device) or [_SMALLEST])
    how = {} if device.vendor == "nvidia" else {"fast_tanh": False, "float32_dot": "ieee"}
    return [TritonConfig(*tiles, **how) for tiles in rows_of(columns)]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler."""
    for kernel in tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        needed, sizes = _needed_memory(kernel, problem, device, tile), f"{tile.block_q}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, needed, device)
        if reason is not None and tile != _SMALLEST:
            return reason
    return None


def _needed_memory(kernel: str, problem: Problem, device: DeviceFacts, tile: TileConfig) -> int:
    return tile_sizes.shared_memory(kernel, problem, device, tile.block_q, tile.block_k, tile.num_stages)


def forward(
    arrays: LatentArrays, spec: AttentionSpec, config: TritonConfig, *, execute: Execute = run
) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`."""
    arrays, spec, launch = _launcher(arrays, spec, config, execute)
    (batch, queries, heads, _), tile = arrays.q.shape, config.forward
    sinks = (
        None if arrays.sinks is None else jnp.broadcast_to(arrays.sinks, (batch, heads)).astype(jnp.float32)
    )
    results = launch(
        forward_kernel.latent_forward_kernel,
        tile,
        {
            "out": result(batch, queries, heads, arrays.v.shape[-1], dtype=arrays.q.dtype),
            "lse": result(batch, heads, queries),
        },
        cdiv(queries, tile.block_q) * batch * heads,
        {"sinks": sinks, "tiles": _tiles(tile_table.key_tile_table, arrays, spec, tile)},
        SINKS=sinks is not None,
        **_tiled(arrays, tile),
    )
    return results["out"], results["lse"]


def backward(
    arrays: LatentArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    execute: Execute = run,
) -> LatentGrads:
    """All gradients; bitwise repeatable, as every sum has one fixed order."""
    arrays, spec, launch = _launcher(arrays, spec, config, execute)
    delta, _ = row_terms(arrays.apart, out, lse, dout, dlse)
    own = {
        "do": dout.astype(arrays.q.dtype),
        "lse": jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E),
        "delta": delta,
    }
    launch = launch.knowing(own)
    dk, dk_rope, dv = _key_gradient(launch, arrays, spec, config.key_gradient)
    (batch, queries, heads, _), tile = arrays.q.shape, config.query_gradient
    dq = launch(
        backward_kernels.latent_query_gradient_kernel,
        tile,
        {"dq": result_like(arrays.q)},
        cdiv(queries, tile.block_q) * batch * heads,
        {"tiles": _tiles(tile_table.key_tile_table, arrays, spec, tile)},
        **_tiled(arrays, tile),
    )["dq"]
    dsinks = None
    if arrays.sinks is not None:
        dsinks = sinks_gradient(arrays.apart, lse, delta)
        dsinks = dsinks if arrays.sinks.shape[0] == batch else dsinks.sum(0, keepdims=True)
    return LatentGrads(dq, dk, dk_rope, dv, dsinks)


def _key_gradient(
    launch: Launcher, arrays: LatentArrays, spec: AttentionSpec, tile: TileConfig
) -> tuple[Array, Array, Array]:
    """Each head has a part of the gradient of the shared keys, in float32, as large as that of its own keys. A program that summed over heads
    itself would spill registers."""
    (batch, keys, heads, _), rope = arrays.k.shape, arrays.k_rope.shape[-1]
    results = launch(
        backward_kernels.latent_key_gradient_kernel,
        tile,
        {
            "dk": result_like(arrays.k),
            "dk_rope": result(batch, heads, keys, rope),
            "dv": result_like(arrays.v),
        },
        cdiv(keys, tile.block_k) * batch * heads,
        {"tiles": _tiles(tile_table.query_tile_table, arrays, spec, tile)},
        **_tiled(arrays, tile),
    )
    return results["dk"], results["dk_rope"].sum(1), results["dv"]


def _launcher(
    arrays: LatentArrays, spec: AttentionSpec, config: TritonConfig, execute: Execute
) -> tuple[LatentArrays, AttentionSpec, Launcher]:
    """The arguments that all kernels of a call share, without their tiles; and the call with explicit ranges."""
    apart, spec = explicit_ranges(arrays.apart, spec)
    arrays = arrays._replace(rows=apart.rows)
    nope, rope = arrays.k.shape[-1], arrays.k_rope.shape[-1]
    sizes = {"D": nope, "R": rope, "BLOCK_D": padded(nope), "BLOCK_R": padded(rope)}
    launch = launcher(apart, spec, config, execute).knowing({"k_rope": arrays.k_rope}, **sizes)
    return arrays, spec, launch


def _tiled(arrays: LatentArrays, tile: TileConfig) -> dict[str, Any]:
    """The tile, and whether it divides queries and keys."""
    return {
        "EVEN_Q": arrays.q.shape[1] % tile.block_q == 0,
        "EVEN_K": arrays.k.shape[1] % tile.block_k == 0,
        "BQ": tile.block_q,
        "BK": tile.block_k,
    }


def _tiles(
    table: Callable[..., Array], arrays: LatentArrays, spec: AttentionSpec, tile: TileConfig
) -> Array | None:
    """The tiles that each program reads, where that varies between rows."""
    if arrays.rows is None and arrays.q_segments is None:
        return None
    return table(arrays.apart, spec, tile.block_q, tile.block_k)
