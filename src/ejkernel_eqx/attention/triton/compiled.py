"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import DeviceFacts, FORWARD, Problem
from ...launch import given, Launcher, LOG2E, NOTHING, result, result_like
from ...launch.fields import Block, Checked, Count, Float32Dot, Programs, Registers, RowBlock, Warps
from ...launch.sizes import cdiv, fitting, padded, rows_of, too_large
from .. import log_forget, xla
from ..core import problem_of
from ..cotangents import clean_cotangent, row_terms, sinks_gradient, sum_batch
from ..masks import tile_table
from ..masks.call_lists import tile_lists, without_lists
from ..masks.tile_shape import Shape
from ..philox import threshold
from ..spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges
from . import backward_kernels, forward_kernel, tile_sizes, two_part_sizes
from .hopper import backward_call, backward_tiles
from .hopper import call as hopper_call
from .hopper import tile_sizes as hopper
from .tile_sizes import is_wide, MAX_HEAD_DIM

OPAQUE = True
PARTS = {
    "forward": FORWARD,
    "key_gradient": "q k v log_forget",
    "query_gradient": "q bias alibi_slopes sinks",
}  # Hopper's key gradients come with `q`
GATES = 2  # of the kernels' ALIBI, `tile.GATES`
_CACHED_BYTES = 24 * 2**20
_MOST_CANDIDATES = 12  # of each kernel
Sizes = Callable[[str, Problem, DeviceFacts], list[tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class TileConfig(Checked):
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
        super().__post_init__()
        if self.block_q & (self.block_q - 1) and not self.hopper_programs:
            raise ValueError(
                f"TileConfig.block_q: expected a power of two without hopper_programs, received {self.block_q}."
            )


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    """`forward`, and the backward kernels of the key side (`dk`, `dv`) and the query side (`dq`, bias). At head dims above 256 `key_gradient` has the
    tile of XLA's backward, which computes everything."""

    forward: TileConfig
    key_gradient: TileConfig
    query_gradient: TileConfig
    """Not used beside Hopper's kernel in `key_gradient`."""
    fast_tanh: bool = True
    """Soft caps of 16-bit inputs use NVIDIA's `tanh.approx` (error 5e-4 of the cap)."""
    float32_dot: Float32Dot = "tf32x3"


config_type = TritonConfig
_SMALLEST = TileConfig(16, 16, 4, 1)
# The choice of Hopper's kernels, of each field of a configuration that may stand for one.
_HOPPER: dict[str, Any] = {"forward": hopper, "key_gradient": backward_tiles}
_WIDE_REMARKS = {"key_gradient": "backward: XLA's"}
_HOPPER_REMARKS = {"forward": "forward: Triton's kernel", "key_gradient": "backward: Triton's kernels"}

unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("score_mod"):
        return "takes a score_mod only if it is cap * tanh(score / cap) + slope[head] * (key - query), or one of the two"
    if (
        max(problem.dim("D"), problem.dim("V")) > MAX_HEAD_DIM
    ):  # `is_wide`, which would be a function more on the way to every launch
        reason = hopper.too_short(problem) or hopper.unfit(problem, device)
        return reason and f"takes head dims above {MAX_HEAD_DIM} by Hopper's kernel, which {reason}"
    return None


def by_request(problem: Problem, device: DeviceFacts) -> str | None:
    if is_wide(problem):
        return f'takes head dims above {MAX_HEAD_DIM} with platform="triton" only, as not all tests have passed on a GPU yet'
    if problem.flag("log_forget"):
        return 'takes log_forget with platform="triton" only, as its gradients have not passed all tests on a GPU yet'
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The first preferred tile of each kernel that fits the device's shared memory, or Hopper's kernel where it is the faster one."""
    tiles = {}
    for kernel in tile_sizes.KERNELS:
        if kernel in _HOPPER and not _HOPPER[kernel].not_chosen(problem, device):
            tiles[kernel] = _hopper_tiles(kernel, problem, device)[0]
        else:
            tiles[kernel] = _other_tiles(kernel, _sizes_of(problem).preferred, problem, device)[0]
    return TritonConfig(**tiles, **_arithmetic(device))


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first. Each takes the next tile of every kernel."""
    heuristic, choices = default_config(problem, device), _sizes_of(problem).choices
    columns = []
    for kernel in tile_sizes.KERNELS:
        tiles = _hopper_tiles(kernel, problem, device) + _other_tiles(kernel, choices, problem, device)
        columns.append(list(dict.fromkeys([getattr(heuristic, kernel), *tiles]))[:_MOST_CANDIDATES])
    return [TritonConfig(*tiles, **_arithmetic(device)) for tiles in rows_of(columns)]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Says why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler."""
    if is_wide(problem) and not config.forward.hopper_programs:
        return f"forward takes head dims above {MAX_HEAD_DIM} with hopper_programs"
    for kernel in ("forward",) if is_wide(problem) else tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        if tile.hopper_programs:
            reason = "has no kernel of its own"
            if kernel in _HOPPER:
                reason = _HOPPER[kernel].config_unfit(tile, problem, device)
            if reason is not None:
                return f"{kernel} with hopper_programs={tile.hopper_programs} {reason}"
        needed, shape = _needed_memory(kernel, problem, device, tile), f"{tile.block_q}x{tile.block_k}"
        if problem.flag("log_forget") and _is_beyond_sums(tile):
            return f"{kernel} takes tiles of up to {log_forget.CHUNK} queries and keys with log_forget, not {shape}"
        reason = too_large(kernel, shape, tile.num_stages, needed, device)
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
    for kernel, words in (_HOPPER_REMARKS | (_WIDE_REMARKS if is_wide(problem) else {})).items():
        if not getattr(config, kernel).hopper_programs:
            reason = _HOPPER[kernel].not_chosen(problem, device) or "the configuration leaves out"
            reasons.append(f"{words}, not Hopper's, which {reason}")
    return "; ".join(reasons)


def _hopper_tiles(kernel: str, problem: Problem, device: DeviceFacts) -> list[TileConfig]:
    sizes = _HOPPER[kernel].tiles(problem, device) if kernel in _HOPPER else []
    return [TileConfig(*size) for size in sizes]


def _sizes_of(problem: Problem) -> Any:
    """The module that knows tiles of Triton's kernels for such keys."""
    return two_part_sizes if hopper.rotary(problem) else tile_sizes


def _other_tiles(kernel: str, choices: Sizes, problem: Problem, device: DeviceFacts) -> list[TileConfig]:
    """Tiles of Triton's kernels; where heads are too wide for them, of XLA's backward."""
    if not is_wide(problem):
        tiles = [TileConfig(*tile) for tile in choices(kernel, problem, device)]
        needed = lambda tile: _needed_memory(kernel, problem, device, tile)
        return fitting(tiles, needed, device) or [_SMALLEST]
    tiles = [found.backward for found in xla.candidates(problem, device)]
    found = [TileConfig(tile.block_q, tile.block_k, 4, 1) for tile in tiles]
    return {"forward": [], "key_gradient": found}.get(kernel, [_SMALLEST])


def _needed_memory(kernel: str, problem: Problem, device: DeviceFacts, tile: TileConfig) -> int:
    if tile.hopper_programs:
        return _HOPPER[kernel].shared_memory(tile, problem)
    return _sizes_of(problem).shared_memory(kernel, problem, device, tile)


def _is_beyond_sums(tile: TileConfig) -> bool:
    """Tells whether queries or keys of a tile have more than one coarse sum of gates."""
    return max(tile.block_q, tile.block_k) > log_forget.CHUNK


def _check_tile(
    kernel: str, config: TritonConfig, arrays: AttentionArrays, spec: AttentionSpec, k_rope: Array | None
) -> None:
    """`ValueError` if the configuration has Hopper's kernel for a call that it cannot run, or a tile with more gates than a chunk of their sums."""
    tile, choice = getattr(config, kernel), _HOPPER.get(kernel)
    if arrays.log_forget is not None and _is_beyond_sums(tile):
        raise ValueError(
            f"config: expected tiles of up to {log_forget.CHUNK} queries and keys in {kernel} with log_forget, received "
            f"{tile.block_q}x{tile.block_k}."
        )
    if choice is None or not tile.hopper_programs:
        return
    problem = problem_of("attention", arrays, spec)
    if k_rope is not None:
        problem = dataclasses.replace(problem, dims=(*problem.dims, ("Dr", k_rope.shape[-1])))
    reason = choice.problem_unfit(problem) or choice.tile_unfit(tile, problem)
    if reason is not None:
        raise ValueError(
            f"config: expected hopper_programs=0 in {kernel}, received {tile.hopper_programs}: Hopper's kernel {reason}."
        )


def forward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    *,
    k_rope: Array | None = None,
) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`. `k_rope [B, S, R]`: keys that all heads share, of the last channels of the queries."""
    tile = config.forward
    _check_tile("forward", config, arrays, spec, k_rope)
    arrays, spec = explicit_ranges(arrays, spec)
    launch = launcher(arrays, spec, config, k_rope)
    if tile.hopper_programs and arrays.k.shape[1] > 0:
        return hopper_call.attended(launch, arrays, spec, tile, _resident(arrays))
    (batch, queries, heads, _), values = arrays.q.shape, arrays.v.shape[-1]
    tiles, numbers = _tiled(arrays, spec, tile)
    results = launch(
        forward_kernel.forward_kernel,
        tile,
        {
            "out": result(batch, queries, heads, values, dtype=arrays.q.dtype),
            "lse": result(batch, heads, queries),
        },
        cdiv(queries, tile.block_q) * batch * heads,
        tiles,
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
    """All gradients, from the results and their cotangents; bitwise repeatable, as every sum has one fixed order."""
    return gradients(arrays, spec, config, out, lse, dout, dlse)[0]


def gradients(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    k_rope: Array | None = None,
) -> tuple[AttentionGrads, Array | None]:
    """Works as `backward`, and the gradient of `k_rope` (see `forward`), in float32."""
    if max(arrays.q.shape[-1], arrays.v.shape[-1]) > MAX_HEAD_DIM:
        tile = xla.XlaTile(config.key_gradient.block_q, config.key_gradient.block_k)
        return xla.backward(arrays, spec, xla.XlaConfig(tile, tile), out, lse, dout, dlse), None
    for kernel in ("key_gradient", "query_gradient"):
        _check_tile(kernel, config, arrays, spec, k_rope)
    arrays, spec = explicit_ranges(arrays, spec)
    delta, empty = row_terms(arrays, out, lse, dout, dlse)
    if arrays.bias is not None:
        # A bias of minus infinity also hides entries, though the kernels see no mask.
        dout = clean_cotangent(dout, empty)
    launch, queries, shift = launcher(arrays, spec, config, k_rope), arrays.q.shape[1], 0
    if arrays.log_forget is not None:  # the rest of the sum of gates at each query
        begin = arrays.k.shape[1] + cdiv(arrays.k.shape[1], log_forget.CHUNK)
        shift = launch.arrays["slopes"][..., begin : begin + queries]
    row_inputs = {
        "do": dout.astype(arrays.q.dtype),
        "lse": jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E - shift),
        "delta": delta,
    }
    launch = launch.knowing(row_inputs)
    dmore = dslopes = dgates = None
    if config.key_gradient.hopper_programs and arrays.k.shape[1] > 0:
        dq, dk, dmore, dv, of_gates = backward_call.gradients(
            launch, arrays, spec, config.key_gradient, empty
        )
        if arrays.log_forget is not None:
            dslopes = log_forget.of_queries(
                arrays, of_gates, config.key_gradient.block_q, lse, delta, dlse, empty
            )
    else:
        dk, dmore, dv = _key_gradient(launch, arrays, spec, config.key_gradient)
        dq, dslopes = _query_gradient(launch, arrays, spec, config.query_gradient)
    if arrays.log_forget is not None:
        assert dslopes is not None and dmore is not None
        dslopes, dgates = None, log_forget.gradient(arrays, spec, dslopes, dmore)
    elif dslopes is not None and arrays.alibi_slopes is not None:
        dslopes = sum_batch(dslopes.sum(-1), arrays.alibi_slopes)
    dbias, bias = None, arrays.bias
    if bias is not None:
        if spec.listed:  # every tile of the bias has a gradient, of hidden ones zero
            arrays, spec = without_lists(arrays, spec)
            launch = launcher(arrays, spec, config, k_rope).knowing(row_inputs)
        dbias = _bias_gradient(launch, bias, arrays, config.query_gradient)
    dsinks = sinks_gradient(arrays, lse, delta)
    return AttentionGrads(dq, dk, dv, dbias, dslopes, dsinks, dgates), None if k_rope is None else dmore


def _key_gradient(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: TileConfig
) -> tuple[Array, Array | None, Array]:
    """Each head has a part of the gradient of shared keys, in float32. A program that summed over heads itself would spill registers. With gates,
    instead of that the sums of the scores' gradient over each key's queries `[B, H, S]`."""
    tiles, numbers = _tiled(arrays, spec, tile, by_key=True)
    (batch, keys, heads, _), k_rope = arrays.k.shape, launch.arrays["k_rope"]
    more = NOTHING if k_rope is None else result(batch, heads, keys, k_rope.shape[-1])
    more = more if arrays.log_forget is None else result(batch, arrays.q.shape[2], keys)
    results = launch(
        backward_kernels.key_gradient_kernel,
        tile,
        {"dk": result_like(arrays.k), "dmore": more, "dv": result_like(arrays.v)},
        cdiv(keys, tile.block_k) * batch * heads,
        tiles,
        **numbers,
    )
    return results["dk"], results["dmore"] if k_rope is None else results["dmore"].sum(1), results["dv"]


def _query_gradient(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: TileConfig
) -> tuple[Array, Array | None]:
    """And the parts of the slopes' gradient `[B, H, tiles]` or, with gates, the sums of the scores' gradient over each query's keys `[B, H, T]`."""
    batch, queries, heads, _ = arrays.q.shape
    count = cdiv(queries, tile.block_q)
    dslope = NOTHING if arrays.alibi_slopes is None else result(batch, heads, count)
    dslope = dslope if arrays.log_forget is None else result(batch, heads, queries)
    tiles, numbers = _tiled(arrays, spec, tile)
    results = launch(
        backward_kernels.query_gradient_kernel,
        tile,
        {"dq": result_like(arrays.q), "dslope": dslope},
        count * batch * heads,
        tiles,
        **numbers,
    )
    return results["dq"], None if dslope is NOTHING else results["dslope"]


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
    (batch, queries, heads, _), (_, keys, kv_heads, dim) = arrays.q.shape, arrays.k.shape
    values, rope = arrays.v.shape[-1], 0 if k_rope is None else k_rope.shape[-1]
    is_float32, ragged = arrays.q.dtype == jnp.float32, _ragged(arrays)
    rate, rows = spec.dropout_rate, arrays.rows
    queries_seen, keys_seen = tile_table.seen(arrays, spec) if ragged else (None, None)
    gates = None if arrays.log_forget is None else log_forget.for_tiles(arrays, spec, LOG2E)
    small = dict(
        slopes=arrays.alibi_slopes if gates is None else gates, sinks=arrays.sinks, q_segments=arrays.q_segments, kv_segments=arrays.kv_segments,
        start=rows and rows.start, end=rows and rows.end, position=rows and rows.position,
        query_seen=queries_seen, key_seen=keys_seen, map=None if arrays.blocks is None else arrays.blocks.astype(jnp.int8),
    )  # fmt: skip
    named = {name: _every_row(x, arrays) for name, x in small.items()}
    mask = None if arrays.mask is None else arrays.mask.astype(jnp.int8)
    named |= dict(
        q=arrays.q, k=arrays.k, k_rope=k_rope, v=arrays.v, bias=arrays.bias, mask=mask, seeds=arrays.seeds
    )
    named |= dict.fromkeys(("row", "list", "pattern", "bits"))
    finite = arrays.bias is None and arrays.alibi_slopes is None and spec.scale > 0
    folded = finite and gates is None
    # In the order of the kernels' tuples: lengths and sizes, how bias and mask are shared, scoring, masking.
    numbers = dict(
        B=batch, T=queries, S=keys, offset=spec.offset, H=heads, K=kv_heads, D=dim, R=rope, V=values,
        BLOCK_D=padded(dim), BLOCK_R=padded(rope), BLOCK_V=padded(values),
        bias_run=spec.bias_run, bias_rows=_shared_rows(arrays.bias, arrays),
        mask_run=spec.mask_run, mask_rows=_shared_rows(arrays.mask, arrays),
        SCALE=spec.scale, CAP=spec.logits_soft_cap or 0.0, FAST_TANH=config.fast_tanh and not is_float32,
        FOLDED=folded, MULTIPLIER=(spec.logits_soft_cap or spec.scale) * LOG2E if folded else 1.0,
        BIAS=_axes(arrays.bias, arrays), DROPOUT=threshold(rate) if rate > 0 else 0,
        SEED_WORDS=2 if arrays.seeds is None else arrays.seeds.shape[-1], KEEP_SCALE=1.0 / (1.0 - rate),
        PRECISION=config.float32_dot if is_float32 else "ieee",
        LEFT=-1 if spec.left is None else spec.left, RIGHT=-1 if spec.right is None else spec.right, ROWS=rows is not None,
        ALIBI=arrays.alibi_slopes is not None if gates is None else GATES, **given(SINKS=arrays.sinks, SEGMENTS=arrays.q_segments), MASK=_axes(arrays.mask, arrays),
        LISTED=0, BITS=0, MAP_HEADS=arrays.blocks is not None and arrays.blocks.shape[1] > 1,
        **dict(zip(("MAP_Q", "MAP_K"), spec.block_size or (0, 0), strict=True)),
        # Whether a row may see nothing in its first tile: impossible if every row sees key 0. A window bounded only on the right
        # that leaves a row without keys has already become ranges.
        GUARD=spec.listed or ragged or arrays.mask is not None or not finite or spec.left is not None,
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
        row = None if len(tiles) == 1 else row
        return {"row": row, "tiles": tiles, "list": entries, "pattern": patterns, "bits": bits}, numbers
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
    """Turns a static window into ranges if it leaves a query without keys or a key unseen, so that kernels know which."""
    queries, keys = arrays.q.shape[1], arrays.k.shape[1]
    if arrays.rows is not None or not spec.ranged or spec.covers(queries, keys):
        return arrays, spec
    position = jnp.arange(queries, dtype=jnp.int32)[None] + spec.offset
    arrays = arrays._replace(rows=RowRanges(*tile_table.row_ranges(arrays, spec), position))
    return arrays, dataclasses.replace(spec, left=None, right=None, offset=0)


def _ragged(arrays: AttentionArrays) -> bool:
    """Tells whether the visible range varies between rows beyond the static window."""
    return arrays.rows is not None or arrays.q_segments is not None


def _every_row(x: Array | None, arrays: AttentionArrays) -> Array | None:
    """`x` repeated for every batch row; it is small."""
    return None if x is None else jnp.broadcast_to(x, (arrays.q.shape[0], *x.shape[1:]))


_TILE = TileConfig(32, 32, 4, 1)
interpreted = Interpreted(__name__, TritonConfig(_TILE, _TILE, _TILE), fast_tanh=False, float32_dot="ieee")
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
