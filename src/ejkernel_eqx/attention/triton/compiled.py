"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ...launch import Launch, run
from ..cotangents import clean_cotangent, row_terms, sinks_gradient
from ..masks import tile_table
from ..philox import threshold
from ..spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges
from . import backward_kernels, forward_kernel, tile_sizes

OPAQUE = True
_LOG2E = 1.4426950408889634
MAX_HEAD_DIM = 256
_CACHED_BYTES = 24 * 2**20
_MOST_CANDIDATES = 12  # of each kernel
Sizes = Callable[[str, Problem, DeviceFacts], list[tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One kernel's tile of scores (`block_q` queries by `block_k` keys, powers of two from 16) and compiler options."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    """Registers a thread may have, 0 for the compiler's choice; without effect on jax-triton before 0.4."""

    def __post_init__(self):
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 16 or size & (size - 1):
                raise ValueError(f"TileConfig.{name}: expected a power of two from 16, received {size!r}.")
        if (
            self.num_warps not in (1, 2, 4, 8, 16)
            or not isinstance(self.num_stages, int)
            or self.num_stages < 1
        ):
            raise ValueError(
                f"TileConfig: expected num_warps 1, 2, 4, 8 or 16 and num_stages >= 1, received {self.num_warps!r} and {self.num_stages!r}."
            )


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """`forward`, and of the backward the kernels of the key side (`dk`, `dv`) and the query side (`dq`, bias)."""

    forward: TileConfig
    key_gradient: TileConfig
    query_gradient: TileConfig
    fast_tanh: bool = True
    """The soft cap of 16-bit inputs by NVIDIA's `tanh.approx` (error 5e-4 of the cap)."""
    float32_dot: str = "tf32x3"
    """How float32 matrices are multiplied: `"tf32x3"` (three passes, float32's accuracy), `"ieee"`, or on request `"tf32"`."""

    def __post_init__(self):
        if self.float32_dot not in ("tf32x3", "ieee", "tf32"):
            raise ValueError(
                f"TritonConfig.float32_dot: expected 'tf32x3', 'ieee' or 'tf32', received {self.float32_dot!r}."
            )


config_type = TritonConfig
_SMALLEST = TileConfig(16, 16, 4, 1)


unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if max(problem.dim("D"), problem.dim("V")) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')} and V {problem.dim('V')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The first preferred tile of each kernel that fits the device's shared memory."""
    forward, keys, queries = (
        _fitting(kernel, tile_sizes.preferred, problem, device)[0] for kernel in tile_sizes.KERNELS
    )
    return TritonConfig(forward, keys, queries, **_arithmetic(device))


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first: the next tiles of all kernels together, a row after a row."""
    heuristic = default_config(problem, device)
    columns = []
    for kernel in tile_sizes.KERNELS:
        tiles = _fitting(kernel, tile_sizes.choices, problem, device)
        columns.append(list(dict.fromkeys([getattr(heuristic, kernel), *tiles]))[:_MOST_CANDIDATES])
    rows = (
        [column[min(row, len(column) - 1)] for column in columns] for row in range(max(map(len, columns)))
    )
    return [TritonConfig(forward, keys, queries, **_arithmetic(device)) for forward, keys, queries in rows]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Tiles that cannot fit the device's shared memory, by an estimate from above; of the smallest the compiler must tell."""
    for kernel in tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        needed = _needed_memory(kernel, problem, tile)
        if needed > _shared_memory(device) and tile != _SMALLEST:
            return (
                f"{kernel} with {tile.block_q}x{tile.block_k} tiles and {tile.num_stages} stages takes about {needed} bytes of "
                f"shared memory, the device has {_shared_memory(device)}"
            )
    return None


def _arithmetic(device: DeviceFacts) -> dict[str, Any]:
    return {} if device.vendor == "nvidia" else {"fast_tanh": False, "float32_dot": "ieee"}


def _shared_memory(device: DeviceFacts) -> int:
    return device.shared_memory or 49_152


def _needed_memory(kernel: str, problem: Problem, tile: TileConfig) -> int:
    return tile_sizes.shared_memory(kernel, problem, tile.block_q, tile.block_k, tile.num_stages)


def _fitting(kernel: str, sizes: Sizes, problem: Problem, device: DeviceFacts) -> list[TileConfig]:
    tiles = [TileConfig(*tile) for tile in sizes(kernel, problem, device)]
    fitting = [tile for tile in tiles if _needed_memory(kernel, problem, tile) <= _shared_memory(device)]
    return fitting or [_SMALLEST]


Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]


def forward(
    arrays: AttentionArrays, spec: AttentionSpec, config: TritonConfig, *, execute: Execute = run
) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`."""
    arrays, spec = _explicit_ranges(arrays, spec)
    (batch, queries, heads, _), values = arrays.q.shape, arrays.v.shape[-1]
    _, keys_seen = _seen(arrays, spec)
    inputs = _common_inputs(arrays) | {
        "key_seen_ptr": keys_seen,
        "sinks_ptr": _rows_of(arrays.sinks, arrays),
        "tiles_ptr": _key_tiles(arrays, spec, config.forward),
    }
    outputs = {
        "out_ptr": jax.ShapeDtypeStruct((batch, queries, heads, values), arrays.q.dtype),
        "lse_ptr": jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
    }
    grid = (_count(queries, config.forward.block_q) * batch * heads,)
    call = _Call(arrays, spec, config, execute)
    results = call(
        forward_kernel.forward_kernel, config.forward, inputs, outputs, grid, SINKS=arrays.sinks is not None
    )
    return results["out_ptr"], results["lse_ptr"]


def backward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    execute: Execute = run,
) -> AttentionGrads:
    """All gradients; bitwise repeatable, as every sum has one fixed order."""
    arrays, spec = _explicit_ranges(arrays, spec)
    call = _Call(arrays, spec, config, execute)
    delta, empty = row_terms(arrays, out, lse, dout, dlse)
    if arrays.bias is not None:
        # A bias of minus infinity hides as well, where the kernels see no mask.
        dout = clean_cotangent(dout, empty)
    queries_seen, keys_seen = _seen(arrays, spec)
    inputs = _common_inputs(arrays) | {
        "do_ptr": dout.astype(arrays.q.dtype),
        "lse_ptr": jnp.where(lse == -jnp.inf, jnp.inf, lse * _LOG2E),
        "delta_ptr": delta,
        "query_seen_ptr": queries_seen,
        "key_seen_ptr": keys_seen,
    }
    dk, dv = _key_gradient(call, inputs)
    dq, dslopes = _query_gradient(call, inputs)
    dbias = None if arrays.bias is None else _bias_gradient(call, inputs)
    dsinks = None
    if arrays.sinks is not None:
        dsinks = _sum_batch(sinks_gradient(arrays, lse, delta), arrays.sinks)
    return AttentionGrads(dq, dk, dv, dbias, dslopes, dsinks)


def _key_gradient(call: "_Call", inputs: dict[str, Array]) -> tuple[Array, Array]:
    arrays, tile = call.arrays, call.config.key_gradient
    table = (
        tile_table.query_tile_table(arrays, call.spec, tile.block_q, tile.block_k)
        if _ragged(arrays)
        else arrays.q
    )
    outputs = {
        "dk_ptr": jax.ShapeDtypeStruct(arrays.k.shape, arrays.k.dtype),
        "dv_ptr": jax.ShapeDtypeStruct(arrays.v.shape, arrays.v.dtype),
    }
    batch, keys, heads, _ = arrays.k.shape
    results = call(
        backward_kernels.key_gradient_kernel,
        tile,
        inputs | {"tiles_ptr": table},
        outputs,
        (_count(keys, tile.block_k) * batch * heads,),
    )
    return results["dk_ptr"], results["dv_ptr"]


def _query_gradient(call: "_Call", inputs: dict[str, Array]) -> tuple[Array, Array | None]:
    arrays, tile = call.arrays, call.config.query_gradient
    batch, queries, heads, _ = arrays.q.shape
    count = _count(queries, tile.block_q)
    slopes = arrays.alibi_slopes
    partials = (batch, heads, count) if slopes is not None else (1,)
    outputs = {
        "dq_ptr": jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
        "dslope_ptr": jax.ShapeDtypeStruct(partials, jnp.float32),
    }
    inputs = inputs | {"tiles_ptr": _key_tiles(arrays, call.spec, tile)}
    results = call(backward_kernels.query_gradient_kernel, tile, inputs, outputs, (count * batch * heads,))
    return results["dq_ptr"], None if slopes is None else _sum_rows(results["dslope_ptr"], slopes)


def _bias_gradient(call: "_Call", inputs: dict[str, Array]) -> Array:
    """Where an axis of the bias has size one, a program sums over that axis itself."""
    arrays, tile = call.arrays, call.config.query_gradient
    assert arrays.bias is not None
    rows, heads, queries, keys = arrays.bias.shape
    # One axis: the others of a GPU's grid end at 65,535.
    grid = (_count(queries, tile.block_q) * _count(keys, tile.block_k) * rows * heads,)
    outputs = {"dbias_ptr": jax.ShapeDtypeStruct(arrays.bias.shape, jnp.float32)}
    inputs = {name: x for name, x in inputs.items() if name != "tiles_ptr"}
    readers = arrays.q.shape[0] // max(rows, 1)  # 1, the usual number, is a constant to the compiler
    result = call(
        backward_kernels.bias_gradient_kernel, tile, inputs, outputs, grid, scalars={"readers": readers}
    )
    return result["dbias_ptr"].astype(arrays.bias.dtype)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Launches kernels of one call: fills in the scalars and constants that all of them share."""

    arrays: AttentionArrays
    spec: AttentionSpec
    config: TritonConfig
    execute: Execute

    def __call__(
        self,
        kernel: Any,
        tile: TileConfig,
        inputs: dict[str, Array],
        outputs: dict[str, jax.ShapeDtypeStruct],
        grid: tuple[int, ...],
        *,
        scalars: dict[str, int] | None = None,
        **constants: Any,
    ) -> dict[str, Array]:
        launch = Launch(
            kernel=kernel,
            inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
            outputs=outputs,
            scalars={
                "T": self.arrays.q.shape[1],
                "S": self.arrays.k.shape[1],
                "offset": self.spec.offset,
                "bias_run": self.spec.bias_run,
                "bias_rows": self._shared_rows(self.arrays.bias),
                "mask_run": self.spec.mask_run,
                "mask_rows": self._shared_rows(self.arrays.mask),
                **(scalars or {}),
            },
            constants=self._constants(tile) | constants,
            grid=grid,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
            name=f"ejkernel_eqx.attention.{kernel.fn.__name__}",
        )
        return self.execute(launch, inputs)

    def _shared_rows(self, x: Array | None) -> int:
        """How many rows of an array over the scores take turns; 1, a constant to the compiler, where each batch row has its own."""
        return 1 if x is None or x.shape[0] == self.arrays.q.shape[0] else x.shape[0]

    def _axes(self, x: Array | None) -> int:
        """The bits that tell a kernel which axes of an array over the scores are there, and whether batch rows share its rows."""
        if x is None:
            return 0
        present = 1 + sum(2 << axis for axis, size in enumerate(x.shape) if size != 1)
        return present | (32 if self._shared_rows(x) > 1 else 0)

    def _group(self) -> int:
        """How many rows of batch times heads run together: one where all tiles are alike, else what the second-level cache holds."""
        arrays, spec = self.arrays, self.spec
        if _ragged(arrays) or spec.right is None or spec.left is not None:
            return 1
        heads, keys = arrays.q.shape[2] // arrays.k.shape[2], arrays.k.shape[1]
        row = max(keys, 1) * (arrays.k.shape[3] + arrays.v.shape[3]) * arrays.k.dtype.itemsize
        most = max(1, heads * _CACHED_BYTES // row)
        return 1 << min(most.bit_length() - 1, 6)

    def _constants(self, tile: TileConfig) -> dict[str, Any]:
        arrays, spec = self.arrays, self.spec
        is_float32, rate = arrays.q.dtype == jnp.float32, spec.dropout_rate
        ragged = _ragged(arrays)
        folded = arrays.bias is None and arrays.alibi_slopes is None and spec.scale > 0
        # Whether the first tile may show a row nothing at all: not where every row sees key 0. A window bounded on the right alone
        # that lets a row see nothing has become ranges before.
        guard = ragged or arrays.mask is not None or not folded or spec.left is not None
        return {
            "H": arrays.q.shape[2],
            "K": arrays.k.shape[2],
            "D": arrays.q.shape[3],
            "V": arrays.v.shape[3],
            "BLOCK_D": _padded(arrays.q.shape[3]),
            "BLOCK_V": _padded(arrays.v.shape[3]),
            "BQ": tile.block_q,
            "BK": tile.block_k,
            "SCALE": spec.scale,
            "CAP": spec.logits_soft_cap or 0.0,
            "FAST_TANH": self.config.fast_tanh and not is_float32,
            "LEFT": -1 if spec.left is None else spec.left,
            "RIGHT": -1 if spec.right is None else spec.right,
            "BIAS": self._axes(arrays.bias),
            "ALIBI": arrays.alibi_slopes is not None,
            "MASK": self._axes(arrays.mask),
            "ROWS": arrays.rows is not None,
            "SEGMENTS": arrays.q_segments is not None,
            "DROPOUT": threshold(rate) if rate > 0 else 0,
            "KEEP_SCALE": 1.0 / (1.0 - rate),
            "PRECISION": self.config.float32_dot if is_float32 else "ieee",
            "FOLDED": folded,
            "MULTIPLIER": (spec.logits_soft_cap or spec.scale) * _LOG2E if folded else 1.0,
            "EVEN_Q": arrays.q.shape[1] % tile.block_q == 0,
            "EVEN_K": arrays.k.shape[1] % tile.block_k == 0,
            "GUARD": guard,
            # Whether a query that is no padding may still see nothing: then what it holds must be cleaned away.
            "CLEAN": arrays.mask is not None or (arrays.q_segments is not None and not spec.same_segments),
            "GROUP": self._group(),
        }


def _common_inputs(arrays: AttentionArrays) -> dict[str, Array]:
    """The inputs of every kernel. What a call does not have is never read: the queries stand in for it."""
    rows = arrays.rows
    mask = None if arrays.mask is None else arrays.mask.astype(jnp.int8)
    return {
        "q_ptr": arrays.q,
        "k_ptr": arrays.k,
        "v_ptr": arrays.v,
        "bias_ptr": arrays.q if arrays.bias is None else arrays.bias,
        "slopes_ptr": _rows_of(arrays.alibi_slopes, arrays),
        "mask_ptr": arrays.q if mask is None else mask,
        "q_segments_ptr": _rows_of(arrays.q_segments, arrays),
        "kv_segments_ptr": _rows_of(arrays.kv_segments, arrays),
        "start_ptr": _rows_of(rows and rows.start, arrays),
        "end_ptr": _rows_of(rows and rows.end, arrays),
        "position_ptr": _rows_of(rows and rows.position, arrays),
        "seeds_ptr": arrays.q if arrays.seeds is None else arrays.seeds,
    }


def _seen(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[Array, Array]:
    """Flags of the queries and of the keys that are no padding; the queries stand in where kernels never read them."""
    queries, keys = tile_table.seen(arrays, spec) if _ragged(arrays) else (None, None)
    return _rows_of(queries, arrays), _rows_of(keys, arrays)


def _explicit_ranges(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[AttentionArrays, AttentionSpec]:
    """The same call, its static window turned into ranges where that leaves a query or a key unseen: kernels then know which."""
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
    """Whether the visible range differs from row to row by more than the static window."""
    return arrays.rows is not None or arrays.q_segments is not None


def _key_tiles(arrays: AttentionArrays, spec: AttentionSpec, tile: TileConfig) -> Array:
    return (
        tile_table.key_tile_table(arrays, spec, tile.block_q, tile.block_k) if _ragged(arrays) else arrays.q
    )


def _rows_of(x: Array | None, arrays: AttentionArrays) -> Array:
    """`x` repeated for every batch row (it is small); the queries where it is absent."""
    return arrays.q if x is None else jnp.broadcast_to(x, (arrays.q.shape[0], *x.shape[1:]))


def _sum_rows(x: Array, like: Array) -> Array:
    """`[B, H, n]` summed to the shape `[B or 1, H]` of an array."""
    return _sum_batch(x.sum(-1), like)


def _sum_batch(per_row: Array, like: Array) -> Array:
    return per_row if like.shape[0] == per_row.shape[0] else per_row.sum(0, keepdims=True)


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _count(length: int, block: int) -> int:
    return math.ceil(length / block)
