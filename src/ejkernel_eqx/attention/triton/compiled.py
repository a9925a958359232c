"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import DeviceFacts, FORWARD, Problem
from ...launch import given, Launcher, LOG2E, NOTHING, result, result_like
from ...launch.fields import Block, check_fields, Count, Float32Dot, Programs, Registers, RowBlock, Warps
from ...launch.sizes import cdiv, fitting, padded, rows_of, too_large
from ..core import problem_of
from ..cotangents import clean_cotangent, row_terms, sinks_gradient, sum_batch
from ..masks import tile_table
from ..masks.call_lists import tile_lists, without_lists
from ..masks.tile_shape import Shape
from ..philox import threshold
from ..spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges
from . import backward_kernels, forward_kernel, tile_sizes
from .hopper import backward_call, backward_tiles
from .hopper import call as hopper_call
from .hopper import tile_sizes as hopper

OPAQUE = True
PARTS = {
    "forward": FORWARD,
    "key_gradient": "q k v",
    "query_gradient": "q bias alibi_slopes sinks",
}  # Hopper's key gradients come with `q`
MAX_HEAD_DIM = 256
_CACHED_BYTES = 24 * 2**20
_MOST_CANDIDATES = 12  # of each kernel
Sizes = Callable[[str, Problem, DeviceFacts], list[tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One kernel's tile of scores (`block_q` queries by `block_k` keys, powers of two from 16) and compiler options.

    `hopper_programs`: how many programs of Hopper's kernel go from tile to tile, usually one for each multiprocessor; 0 for Triton's kernel,
    with a program for each tile. `num_warps` are those that multiply 64 queries or keys, always 4. The forward's `block_q` is 128 or 192. In
    `key_gradient` any number stands for Hopper's backward kernel: a program for each tile of 128 keys, which computes `dq`, too."""

    block_q: RowBlock
    block_k: Block
    num_warps: Warps
    num_stages: Count
    max_registers: Registers = 0
    hopper_programs: Programs = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_q & (self.block_q - 1) and not self.hopper_programs:
            raise ValueError(
                f"TileConfig.block_q: expected a power of two without hopper_programs, received {self.block_q}."
            )


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """`forward`, and the backward kernels of the key side (`dk`, `dv`) and the query side (`dq`, bias)."""

    forward: TileConfig
    key_gradient: TileConfig
    query_gradient: TileConfig
    """Not used beside Hopper's kernel in `key_gradient`."""
    fast_tanh: bool = True
    """Soft caps of 16-bit inputs use NVIDIA's `tanh.approx` (error 5e-4 of the cap)."""
    float32_dot: Float32Dot = "tf32x3"

    __post_init__ = check_fields


config_type = TritonConfig
_SMALLEST = TileConfig(16, 16, 4, 1)


unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("score_mod"):
        return "takes a score_mod only if it is cap * tanh(score / cap) + slope[head] * (key - query), or one of the two"
    if max(problem.dim("D"), problem.dim("V")) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')} and V {problem.dim('V')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The first preferred tile of each kernel that fits the device's shared memory."""
    forward, keys, queries = (
        _fitting(kernel, tile_sizes.preferred, problem, device)[0] for kernel in tile_sizes.KERNELS
    )
    if not hopper.not_chosen(problem, device):
        forward = _hopper_tiles(problem, device)[0]
    if not backward_tiles.not_chosen(problem, device):
        keys = TileConfig(*backward_tiles.tiles(problem, device)[0])
    return TritonConfig(forward, keys, queries, **_arithmetic(device))


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first. Each takes the next tile of every kernel."""
    heuristic = default_config(problem, device)
    columns = []
    for kernel in tile_sizes.KERNELS:
        tiles = _fitting(kernel, tile_sizes.choices, problem, device)
        if kernel == "forward":
            tiles = _hopper_tiles(problem, device) + tiles
        elif kernel == "key_gradient":
            tiles = [TileConfig(*sizes) for sizes in backward_tiles.tiles(problem, device)] + tiles
        columns.append(list(dict.fromkeys([getattr(heuristic, kernel), *tiles]))[:_MOST_CANDIDATES])
    return [TritonConfig(*tiles, **_arithmetic(device)) for tiles in rows_of(columns)]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Says why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler."""
    for kernel in tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        if tile.hopper_programs:
            if kernel == "key_gradient":
                reason = backward_tiles.config_unfit(tile, problem, device)
            else:
                reason = hopper.config_unfit(kernel, tile, problem, device)
            if reason is not None:
                return f"{kernel} with hopper_programs={tile.hopper_programs} {reason}"
        needed, sizes = _needed_memory(kernel, problem, tile), f"{tile.block_q}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, needed, device)
        if reason is not None and tile != _SMALLEST:
            return reason
    return None


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """Keeps the tiles, except for those of Hopper's kernels: whether they run, and with which tile, depends on the number of tiles, on the device
    and on the software."""
    fit, tiles = default_config(problem, device), {}
    for kernel in tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        alone = dataclasses.replace(fit, **{kernel: tile})
        if tile.hopper_programs and (kernel == "forward" or config_unsupported(alone, problem, device)):
            tiles[kernel] = getattr(fit, kernel)
    return dataclasses.replace(config, **tiles)


def _arithmetic(device: DeviceFacts) -> dict[str, Any]:
    return {} if device.vendor == "nvidia" else {"fast_tanh": False, "float32_dot": "ieee"}


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """Says on Hopper why forward and backward run in Triton's kernels, if they do."""
    if device.vendor != "nvidia" or device.capability != (9, 0):
        return ""
    reasons = []
    if not config.forward.hopper_programs:
        reasons.append(
            f"forward: Triton's kernel, not Hopper's, which {hopper.not_chosen(problem, device) or 'the configuration leaves out'}"
        )
    if not config.key_gradient.hopper_programs:
        reasons.append(
            f"backward: Triton's kernels, not Hopper's, which {backward_tiles.not_chosen(problem, device) or 'the configuration leaves out'}"
        )
    return "; ".join(reasons)


def _hopper_tiles(problem: Problem, device: DeviceFacts) -> list[TileConfig]:
    return [TileConfig(*sizes) for sizes in hopper.tiles(problem, device)]


def _needed_memory(kernel: str, problem: Problem, tile: TileConfig) -> int:
    if tile.hopper_programs:
        return (backward_tiles if kernel == "key_gradient" else hopper).shared_memory(tile, problem)
    return tile_sizes.shared_memory(kernel, problem, tile.block_q, tile.block_k, tile.num_stages)


def _fitting(kernel: str, sizes: Sizes, problem: Problem, device: DeviceFacts) -> list[TileConfig]:
    tiles = [TileConfig(*tile) for tile in sizes(kernel, problem, device)]
    return fitting(tiles, lambda tile: _needed_memory(kernel, problem, tile), device) or [_SMALLEST]


def forward(arrays: AttentionArrays, spec: AttentionSpec, config: TritonConfig) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`."""
    return attended(arrays, spec, config)


def attended(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    *,
    k_rope: Array | None = None,
) -> tuple[Array, Array]:
    """Works as `forward`. `k_rope [B, S, R]`: keys that all heads share, of the last channels of the queries."""
    tile = config.forward
    if tile.hopper_programs:
        hopper.check(tile, problem_of("attention", arrays, spec), k_rope is not None)
    arrays, spec = explicit_ranges(arrays, spec)
    (batch, queries, heads, _), values = arrays.q.shape, arrays.v.shape[-1]
    if tile.hopper_programs and arrays.k.shape[1] > 0:
        return hopper_call.attended(launcher(arrays, spec, config), arrays, spec, tile, _resident(arrays))
    tiles, numbers = _tiled(arrays, spec, tile)
    results = launcher(arrays, spec, config, k_rope)(
        forward_kernel.forward_kernel,
        tile,
        {
            "out": result(batch, queries, heads, values, dtype=arrays.q.dtype),
            "lse": result(batch, heads, queries),
        },
        cdiv(queries, tile.block_q) * batch * heads,
        {"sinks": _every_row(arrays.sinks, arrays), **tiles},
        SINKS=arrays.sinks is not None,
        **numbers,
    )
    return results["out"], results["lse"]


def backward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
) -> AttentionGrads:
    """All gradients; bitwise repeatable, as every sum has one fixed order."""
    return gradients(arrays, spec, config, (out, lse), (dout, dlse))[0]


def gradients(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
    *,
    k_rope: Array | None = None,
) -> tuple[AttentionGrads, Array | None]:
    """Works as `backward`, and the gradient of `k_rope` (see `attended`), in float32."""
    (out, lse), (dout, dlse) = results, cotangents
    if config.key_gradient.hopper_programs:
        backward_tiles.check(config.key_gradient, problem_of("attention", arrays, spec), k_rope is not None)
    arrays, spec = explicit_ranges(arrays, spec)
    delta, empty = row_terms(arrays, out, lse, dout, dlse)
    if arrays.bias is not None:
        # A bias of minus infinity also hides entries, though the kernels see no mask.
        dout = clean_cotangent(dout, empty)
    row_inputs = {
        "do": dout.astype(arrays.q.dtype),
        "lse": jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E),
        "delta": delta,
    }
    launch = launcher(arrays, spec, config, k_rope).knowing(row_inputs)
    dk_rope = dslopes = None
    if config.key_gradient.hopper_programs and arrays.k.shape[1] > 0:
        rows = row_inputs["do"], row_inputs["lse"], row_inputs["delta"]
        dq, dk, dv = backward_call.gradients(launch, arrays, spec, config.key_gradient, rows, empty)
    else:
        dk, dk_rope, dv = _key_gradient(launch, arrays, spec, config.key_gradient, k_rope)
        dq, dslopes = _query_gradient(launch, arrays, spec, config.query_gradient)
    dbias, bias = None, arrays.bias
    if bias is not None:
        if spec.listed:  # every tile of the bias has a gradient, of hidden ones zero
            arrays, spec = without_lists(arrays, spec)
            launch = launcher(arrays, spec, config, k_rope).knowing(row_inputs)
        dbias = _bias_gradient(launch, bias, arrays, config.query_gradient)
    dsinks = None
    if arrays.sinks is not None:
        dsinks = sum_batch(sinks_gradient(arrays, lse, delta), arrays.sinks)
    return AttentionGrads(dq, dk, dv, dbias, dslopes, dsinks), dk_rope


def _key_gradient(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: TileConfig, k_rope: Array | None
) -> tuple[Array, Array | None, Array]:
    """Each head has a part of the gradient of shared keys, in float32. A program that summed over heads itself would spill registers."""
    tiles, numbers = _tiled(arrays, spec, tile, by_key=True)
    batch, keys, heads, _ = arrays.k.shape
    shared = NOTHING if k_rope is None else result(batch, heads, keys, k_rope.shape[-1])
    results = launch(
        backward_kernels.key_gradient_kernel,
        tile,
        {"dk": result_like(arrays.k), "dk_rope": shared, "dv": result_like(arrays.v)},
        cdiv(keys, tile.block_k) * batch * heads,
        tiles,
        **numbers,
    )
    return results["dk"], None if k_rope is None else results["dk_rope"].sum(1), results["dv"]


def _query_gradient(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: TileConfig
) -> tuple[Array, Array | None]:
    batch, queries, heads, _ = arrays.q.shape
    count, slopes = cdiv(queries, tile.block_q), arrays.alibi_slopes
    tiles, numbers = _tiled(arrays, spec, tile)
    results = launch(
        backward_kernels.query_gradient_kernel,
        tile,
        {"dq": result_like(arrays.q), "dslope": NOTHING if slopes is None else result(batch, heads, count)},
        count * batch * heads,
        tiles,
        **numbers,
    )
    return results["dq"], None if slopes is None else sum_batch(results["dslope"].sum(-1), slopes)


def _bias_gradient(launch: Launcher, bias: Array, arrays: AttentionArrays, tile: TileConfig) -> Array:
    """Along an axis where the bias has size one, each program sums over that axis itself."""
    rows, heads, queries, keys = bias.shape
    results = launch(
        backward_kernels.bias_gradient_kernel,
        tile,
        {"dbias": result(*bias.shape)},
        cdiv(queries, tile.block_q) * cdiv(keys, tile.block_k) * rows * heads,
        readers=arrays.q.shape[0] // max(rows, 1),  # 1, the usual number, is a constant to the compiler
        **_blocks(arrays, tile),
    )
    return results["dbias"].astype(bias.dtype)


def launcher(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    k_rope: Array | None = None,
) -> Launcher:
    """The arguments that all kernels of a call share, without their tiles."""
    (_, queries, heads, _), (_, keys, kv_heads, dim) = arrays.q.shape, arrays.k.shape
    values, rope = arrays.v.shape[-1], 0 if k_rope is None else k_rope.shape[-1]
    is_float32, ragged = arrays.q.dtype == jnp.float32, _ragged(arrays)
    rate, rows = spec.dropout_rate, arrays.rows
    queries_seen, keys_seen = tile_table.seen(arrays, spec) if ragged else (None, None)
    small = dict(
        slopes=arrays.alibi_slopes, q_segments=arrays.q_segments, kv_segments=arrays.kv_segments,
        start=rows and rows.start, end=rows and rows.end, position=rows and rows.position,
        query_seen=queries_seen, key_seen=keys_seen, map=None if arrays.blocks is None else arrays.blocks.astype(jnp.int8),
    )  # fmt: skip
    named = {name: _every_row(x, arrays) for name, x in small.items()}
    mask = None if arrays.mask is None else arrays.mask.astype(jnp.int8)
    named |= dict(
        q=arrays.q, k=arrays.k, k_rope=k_rope, v=arrays.v, bias=arrays.bias, mask=mask, seeds=arrays.seeds
    )
    named |= dict.fromkeys(("row", "list", "pattern", "bits"))
    folded = arrays.bias is None and arrays.alibi_slopes is None and spec.scale > 0
    # In the order of the kernels' tuples: lengths and sizes, how bias and mask are shared, scoring, masking.
    numbers = dict(
        T=queries, S=keys, offset=spec.offset, H=heads, K=kv_heads, D=dim, R=rope, V=values,
        BLOCK_D=padded(dim), BLOCK_R=padded(rope), BLOCK_V=padded(values),
        bias_run=spec.bias_run, bias_rows=_shared_rows(arrays.bias, arrays),
        mask_run=spec.mask_run, mask_rows=_shared_rows(arrays.mask, arrays),
        SCALE=spec.scale, CAP=spec.logits_soft_cap or 0.0, FAST_TANH=config.fast_tanh and not is_float32,
        FOLDED=folded, MULTIPLIER=(spec.logits_soft_cap or spec.scale) * LOG2E if folded else 1.0,
        BIAS=_axes(arrays.bias, arrays), DROPOUT=threshold(rate) if rate > 0 else 0,
        SEED_WORDS=2 if arrays.seeds is None else arrays.seeds.shape[-1], KEEP_SCALE=1.0 / (1.0 - rate),
        PRECISION=config.float32_dot if is_float32 else "ieee",
        LEFT=-1 if spec.left is None else spec.left, RIGHT=-1 if spec.right is None else spec.right, ROWS=rows is not None,
        **given(ALIBI=arrays.alibi_slopes, SEGMENTS=arrays.q_segments), MASK=_axes(arrays.mask, arrays),
        LISTED=0, BITS=0, MAP_HEADS=arrays.blocks is not None and arrays.blocks.shape[1] > 1,
        **dict(zip(("MAP_Q", "MAP_K"), spec.block_size or (0, 0), strict=True)),
        # Whether a row may see nothing in its first tile: impossible if every row sees key 0. A window bounded only on the right
        # that leaves a row without keys has already become ranges.
        GUARD=spec.listed or ragged or arrays.mask is not None or not folded or spec.left is not None,
        # Whether a query that is not padding may still see no key: then its contents must be zeroed. Lists decide for themselves.
        CLEAN=arrays.mask is not None or (arrays.q_segments is not None and not spec.same_segments),
        GROUP=_group(arrays, spec),
    )  # fmt: skip
    return Launcher("attention", named, numbers, arrays.q)


def _tiled(
    arrays: AttentionArrays, spec: AttentionSpec, tile: TileConfig, by_key: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays that say which tiles a kernel runs, and numbers of its tile."""
    numbers = _blocks(arrays, tile)
    if spec.listed:
        shape = Shape(arrays.q.shape[1], arrays.k.shape[1], tile.block_q, tile.block_k, by_key)
        row, tiles, entries, patterns, bits, blind = tile_lists(arrays, spec, shape)
        numbers |= {"BITS": 0 if bits is None else bits.shape[-1], "CLEAN": blind or arrays.mask is not None}
        # If all heads have one list, none looks up which is its own.
        numbers["LISTED"] = 1 if len(tiles) == 1 else 2
        lists = {
            "row": None if len(tiles) == 1 else row,
            "tiles": tiles,
            "list": entries,
            "pattern": patterns,
            "bits": bits,
        }
        return lists, numbers
    if not _ragged(arrays):
        return {"tiles": None}, numbers
    table = tile_table.query_tile_table if by_key else tile_table.key_tile_table
    return {"tiles": table(arrays, spec, tile.block_q, tile.block_k)}, numbers


def _blocks(arrays: AttentionArrays, tile: TileConfig) -> dict[str, Any]:
    """The tile, and whether it divides queries and keys."""
    evens = {"EVEN_Q": arrays.q.shape[1] % tile.block_q == 0, "EVEN_K": arrays.k.shape[1] % tile.block_k == 0}
    return {"BQ": tile.block_q, "BK": tile.block_k, **evens}


def _shared_rows(x: Array | None, arrays: AttentionArrays) -> int:
    """The number of rows of an array over the scores that batch rows share cyclically; 1, a compile-time constant, if each batch row has its own."""
    return 1 if x is None or x.shape[0] == arrays.q.shape[0] else x.shape[0]


def _axes(x: Array | None, arrays: AttentionArrays) -> int:
    """Bits that tell a kernel which axes an array over the scores has, and whether batch rows share its rows."""
    if x is None:
        return 0
    present = 1 + sum(2 << axis for axis, size in enumerate(x.shape) if size != 1)
    return present | (32 if _shared_rows(x, arrays) > 1 else 0)


def _group(arrays: AttentionArrays, spec: AttentionSpec) -> int:
    """The number of rows of batch times heads that run together: one if all tiles are alike, else as many as fit the L2 cache."""
    if not spec.listed and (_ragged(arrays) or spec.right is None or spec.left is not None):
        return 1
    return _resident(arrays)


def _resident(arrays: AttentionArrays) -> int:
    """The number of rows of batch times heads that fit the L2 cache with their keys and values."""
    heads, keys = arrays.q.shape[2] // arrays.k.shape[2], arrays.k.shape[1]
    row = max(keys, 1) * (arrays.k.shape[3] + arrays.v.shape[3]) * arrays.k.dtype.itemsize
    most = max(1, heads * _CACHED_BYTES // row)
    return 1 << min(most.bit_length() - 1, 6)


def explicit_ranges(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[AttentionArrays, AttentionSpec]:
    """Turns a static window into ranges if it leaves a query without keys or a key unseen, so that kernels
    know which."""
    if (
        arrays.rows is not None
        or not spec.ranged
        or tile_table.window_covers(arrays.q.shape[1], arrays.k.shape[1], spec)
    ):
        return arrays, spec
    start, end = tile_table.row_ranges(arrays, spec)
    position = jnp.arange(arrays.q.shape[1], dtype=jnp.int32)[None] + spec.offset
    return arrays._replace(rows=RowRanges(start, end, position)), dataclasses.replace(
        spec, left=None, right=None, offset=0
    )


def _ragged(arrays: AttentionArrays) -> bool:
    """Tells whether the visible range varies between rows beyond the static window."""
    return arrays.rows is not None or arrays.q_segments is not None


def _every_row(x: Array | None, arrays: AttentionArrays) -> Array | None:
    """`x` repeated for every batch row; it is small."""
    return None if x is None else jnp.broadcast_to(x, (arrays.q.shape[0], *x.shape[1:]))
