"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...attention.cotangents import row_terms
from ...attention.spec import AttentionArrays
from ...attention.triton import compiled as attention
from ...attention.triton import tile_sizes
from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Execute, Launcher, limits_registers, LOG2E, register_limits_measured, result, run
from ...launch.fields import check_fields, Float32Dot
from ...launch.sizes import cdiv, padded
from ...paged.triton import compiled as pages
from .. import branches
from ..lists import by_key, lists_of
from ..problems import COMPRESSED, of_branch, SLIDING
from ..spec import (
    begins,
    BRANCHES,
    compressed_ranges,
    most_blocks,
    NativeArrays,
    NativeSpec,
    num_blocks,
    of_sequence,
    positions,
)
from . import by_blocks, choice_kernels, few, kernels, steps
from .tiles import FewTiles, ForwardTile, KeyTile, RowTile, SelectionTile, Warped

OPAQUE = True
PARTS = {
    "forward": FORWARD,
    "selection": FORWARD,
    "query_gradient": "q",
    "key_gradient": "k v",
    "compressed": BOTH,
    "sliding": BOTH,
    "few": FORWARD,
}
MAX_HEAD_DIM = 256
MAX_GROUP = 128
_MAX_BLOCK = 256
_BRANCHES = {COMPRESSED: branches.compressed, SLIDING: branches.sliding}
_BYTES = 2**28  # of weights of compressed keys at a time
_MANY = 4096  # queries from which on the forward runs by blocks
_MANY_BLOCKS = 1024  # to choose from
_FEW = 512  # programs, which do not fill a GPU evenly


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Kernels of the selected branch and of its choice, and the configurations of the two branches that are softmax attention."""

    forward: ForwardTile
    query_gradient: RowTile
    key_gradient: KeyTile
    selection: SelectionTile
    compressed: attention.TritonConfig
    sliding: attention.TritonConfig
    few: FewTiles
    float32_dot: Float32Dot = "tf32x3"

    __post_init__ = check_fields


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if max(problem.dim("D"), problem.dim("V")) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')} and V {problem.dim('V')}"
    group = problem.dim("H") // problem.dim("K")
    if group > MAX_GROUP:
        return f"takes up to {MAX_GROUP} query heads a key head, not {group}"
    block = int(str(problem.flag("block")))
    if block > _MAX_BLOCK:
        return f"takes blocks of up to {_MAX_BLOCK} tokens, not {block}"
    return None


# Rows of a tile, warps and stages: of the forward by blocks and of the gradient of keys. Warps and stages of the forward by queries and of the
# gradient of queries. Best first.
_BLOCKS = ((64, 4, 3), (64, 4, 2), (64, 4, 4))
_FEW_ROWS = ((4, 3), (4, 2), (2, 3), (2, 2), (4, 4), (8, 2))
_ROWS = ((1, 2), (2, 2), (4, 3), (2, 3), (4, 2))
_QUERIES = ((2, 2), (4, 3), (1, 2), (4, 2))
_KEYS = ((64, 4, 2), (32, 4, 2), (32, 4, 3), (64, 4, 1), (16, 4, 2))
_SPARING_KEYS = (64, 8, 2)

# Of the weights of compressed keys: queries, keys, warps, stages.
_SELECTIONS = ((64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 128, 8, 3), (64, 64, 4, 2))
_SPARING_SELECTION = (128, 64, 8, 2)  # of registers, for an A100
_WIDE_SELECTIONS = ((64, 32, 4, 1), (32, 32, 4, 1), (64, 64, 8, 1))
_FEW_SELECTIONS = ((16, 64, 4, 1), (16, 32, 2, 1), (16, 32, 4, 1))


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    is_wide = problem.dtype("qkv") == "float32" or device.vendor != "nvidia"
    width = max(padded(problem.dim("D")), padded(problem.dim("V")))
    large = width > 128
    group = padded(problem.dim("H") // problem.dim("K"))
    dot: dict[str, Any] = {} if device.vendor == "nvidia" else {"float32_dot": "ieee"}
    found = []
    compressed, sliding = (
        attention.candidates(of_branch(problem, name), device) for name in (COMPRESSED, SLIDING)
    )
    if limits_registers(device) and register_limits_measured(device) and width == 128 and not is_wide:
        # Ranges that grow with the queries leave two of Triton's programs a multiprocessor about even.
        even = dataclasses.replace(compressed[0], forward=attention.TileConfig(*tile_sizes.SIDE_BY_SIDE))
        hopper = 1 if compressed[0].forward.hopper_programs else 0
        compressed = [*compressed[:hopper], even, *compressed[hopper:]]
    pages_of = [pages.candidates(few.of_branch(problem, name), device) for name in (COMPRESSED, SLIDING)]
    select = _WIDE_SELECTIONS if is_wide or large else _SELECTIONS
    if problem.dim("T") <= few.MOST_QUERIES:
        select = _FEW_SELECTIONS
    elif select is _SELECTIONS and device.capability < (9, 0):
        select = (_SPARING_SELECTION, *select)
    programs, count = problem.dim("B") * problem.dim("T") * problem.dim("K"), padded(problem.dim("n"), 1)
    step_tiles = steps.tiles_for(pages_of[0], _sizes(problem), device)
    span, rows_of = (
        span_for(programs, count, device),
        _FEW_ROWS if problem.dim("T") <= few.MOST_QUERIES else _ROWS,
    )
    forwards = [ForwardTile(0, span, warps, 1 if is_wide or large else stages) for warps, stages in rows_of]
    if problem.dim("T") >= _MANY and not (is_wide or large):
        # Of the merge: a thread has 128 numbers in 64 registers, and with 80 three programs share a multiprocessor.
        numbers = count * group * padded(problem.dim("V"))
        registers = 80 if numbers == 8 * 4096 and device.capability < (10, 0) else 0
        by_block = [
            ForwardTile(max(1, rows // group), 256, warps, stages, registers)
            for rows, warps, stages in _BLOCKS
        ]
        forwards = [*by_block, *forwards[:3]]
    # On an H200 four warps take half of the time of eight, although they spill 32 bytes a thread.
    keys_of = _KEYS if device.capability >= (9, 0) else (_SPARING_KEYS, *_KEYS)
    for n in range(max(map(len, (forwards, _QUERIES, keys_of, step_tiles, *pages_of)))):
        take = lambda of: of[min(n, len(of) - 1)]  # noqa: B023
        (qw, qs), (rows, kw, ks) = take(_QUERIES), take(keys_of)
        if is_wide or large:
            qs, rows, ks = 1, 32, 1
        keys = KeyTile(max(1, rows // group), 1024, kw, ks)
        own = take(forwards), RowTile(qw, qs), keys, SelectionTile(*take(select))
        few_tiles = FewTiles(take(step_tiles), *map(take, pages_of))
        found.append(TritonConfig(*own, take(compressed), take(sliding), few_tiles, **dot))
    return list(dict.fromkeys(found))


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """Where few queries go branch by branch."""
    return "" if problem.flag("packed") else steps.remark_on(config.few.step, _sizes(problem))


def _sizes(problem: Problem) -> steps.Sizes:
    size, blocks = problem.dim, cdiv(problem.dim("S"), int(str(problem.flag("block"))))
    itemsize = jnp.dtype(problem.dtype("qkv")).itemsize
    rows, channels = size("B") * size("T"), max(size("D"), size("V"))
    return steps.Sizes(size("T"), rows, size("H"), size("K"), channels, itemsize, size("C"), blocks)


def span_for(programs: int, count: int, device: DeviceFacts) -> int:
    """The blocks of a program, of `count` for each query and key head: fewer if these `programs` leave the device idle. Not on AMD's, whose compiler
    merges them through more memory than there is."""
    if device.vendor != "nvidia":
        return count
    idle = 4 * (device.num_multiprocessors or 108) // max(1, programs)
    return max(1, count >> max(0, idle.bit_length() - 1))


def forward(
    arrays: NativeArrays,
    spec: NativeSpec,
    config: TritonConfig,
    *,
    save: bool = True,
    execute: Execute = run,
) -> dict[str, Array]:
    """The output, the blocks that were chosen, and what the backward needs."""
    if not save and config.few.step.block_k and few.serves(arrays):
        step = steps.of_rows(arrays, spec)
        if not step.sizes.reason_against():
            results = steps.attend(step, spec, config.few.step, config.float32_dot, execute=execute)
            return {name: x.reshape(*arrays.q.shape[:2], *x.shape[1:]) for name, x in results.items()}
    found: dict[str, Array] = {}
    for name in (COMPRESSED, SLIDING):
        if few.serves(arrays):
            call, tiles = few.call_of(name, arrays, spec), getattr(config.few, name)
            results = few.by_row(pages.forward(*call, tiles, execute=execute), arrays.q.shape[0])
        else:
            results = attention.forward(
                *_BRANCHES[name](arrays, spec), getattr(config, name), execute=execute
            )
        found[f"{name}_out"], found[f"{name}_lse"] = results
    launch = launcher_of(arrays, spec, config.float32_dot, execute)
    indices = arrays.indices
    if indices is None:
        indices = _choose(launch, arrays, spec, config.selection, found["compressed_lse"])
    if config.forward.tokens and not save:  # the sum of the branches with that of a query's blocks
        gated = found | {"gates": arrays.gates}
        out = by_blocks.attended(launch, arrays, spec, config.forward, indices, gated)["out"]
        return {"out": out, "indices": indices}
    if config.forward.tokens:
        selected = by_blocks.attended(launch, arrays, spec, config.forward, indices)
    else:
        selected = by_blocks.by_queries(
            launch.knowing({"indices": indices}),
            kernels.forward_kernel,
            config.forward,
            (*arrays.q.shape[:3], arrays.v.shape[-1]),
            arrays.k.shape[2],
            spec.count,
            config.forward.span,
        )
    found["selected_out"], found["selected_lse"] = selected["out"], selected["lse"]
    out = branches.combine(arrays.gates, found, arrays.q.dtype)
    return {"out": out, "indices": indices} | (found if save else {})


def backward(
    arrays: NativeArrays,
    spec: NativeSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """The gradients of all float arrays; bitwise repeatable, as every sum has one fixed order."""
    douts, dgates = branches.split(arrays.gates, saved, cotangents["out"].astype(arrays.q.dtype))
    results = {name: (saved[f"{name}_out"], saved[f"{name}_lse"], douts[name]) for name in BRANCHES}
    whole = {}
    for name in (COMPRESSED, SLIDING):
        (call, own), (out, lse, dout) = _BRANCHES[name](arrays, spec), results[name]
        tiles, times = getattr(config, name), 1
        if cdiv(call.k.shape[1], tiles.key_gradient.block_k) * call.k.shape[0] * call.k.shape[2] < _FEW:
            times = arrays.q.shape[2] // arrays.k.shape[2]
        grads = attention.backward(
            _copied(call, times), own, tiles, out, lse, dout, jnp.zeros_like(lse), execute=execute
        )
        whole[name] = grads._replace(k=_total(grads.k, times), v=_total(grads.v, times))
    out, lse, dout = results["selected"]
    delta, _ = row_terms(AttentionArrays(arrays.q, arrays.k, arrays.v), out, lse, dout, None)
    own = {
        "do": dout,
        "lse": jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E),
        "delta": delta,
        "indices": saved["indices"],
    }
    launch = launcher_of(arrays, spec, config.float32_dot, execute).knowing(own)
    programs = arrays.q.shape[0] * arrays.q.shape[1] * arrays.k.shape[2]
    outputs = {"dq": result(*arrays.q.shape)}
    dq = launch(kernels.query_gradient_kernel, config.query_gradient, outputs, programs)["dq"]
    dk, dv = _key_gradient(launch, arrays, spec, config.key_gradient, saved["indices"])
    wide = lambda x: x.astype(jnp.float32)
    return {
        "q": dq + wide(whole[COMPRESSED].q) + wide(whole[SLIDING].q),
        "k": dk + wide(whole[SLIDING].k),
        "v": dv + wide(whole[SLIDING].v),
        "compressed_k": whole[COMPRESSED].k,
        "compressed_v": whole[COMPRESSED].v,
        "gates": dgates,
    }


def _copied(call: AttentionArrays, times: int) -> AttentionArrays:
    """With keys and values for that many times as many heads, so that more programs sum their gradients: compressed keys are few, and each program
    would have all queries of a group."""
    copies = lambda x: x if times == 1 else jnp.repeat(x, times, 2)
    return call._replace(k=copies(call.k), v=copies(call.v))


def _total(gradient: Array, times: int) -> Array:
    batch, keys, heads, channels = gradient.shape
    if times == 1:
        return gradient
    each = gradient.reshape(batch, keys, heads // times, times, channels)
    return each.astype(jnp.float32).sum(3).astype(gradient.dtype)


def _key_gradient(
    launch: Launcher, arrays: NativeArrays, spec: NativeSpec, tile: KeyTile, indices: Array
) -> tuple[Array, Array]:
    """`dk`, `dv` in float32: parts of each block's sums, then the sum of the parts."""
    (batch, _, heads, dim), values = arrays.k.shape, arrays.v.shape[-1]
    blocks = num_blocks(arrays, spec)
    lists = lists_of(indices, blocks, tile.span, together=True)
    own, pieces = by_blocks.given(lists), lists.owner.shape[-1]
    part = lambda channels: result(batch, heads, pieces, spec.block, channels)
    parts = launch(
        kernels.key_gradient_kernel,
        tile,
        {"dk": part(dim), "dv": part(values)},
        batch * heads * pieces,
        own,
        PIECES=pieces,
    )

    def whole(x: Array, channels: int) -> Array:
        size, block = spec.block * channels, 1024
        found = launch(
            kernels.combine_kernel,
            Warped(4),
            {"whole": result(batch, heads, blocks, spec.block, channels)},
            batch * heads * blocks * cdiv(size, block),
            {"part": x, "piece": lists.piece},
            PIECES=pieces,
            SIZE=size,
            BLOCK=block,
        )
        return by_key(found["whole"], arrays)

    return whole(parts["dk"], dim), whole(parts["dv"], values)


def _weights(launch: Launcher, arrays: NativeArrays, tile: SelectionTile, chunk: int, count: int) -> Array:
    """The weights of compressed keys for some queries, `[B, K, count, C]`."""
    batch, length = arrays.q.shape[:2]
    keys, heads = arrays.compressed_k.shape[1:3]
    tile = dataclasses.replace(tile, block_q=min(tile.block_q, padded(length)))
    programs = cdiv(keys, tile.block_k) * cdiv(count, tile.block_q) * heads * batch
    outputs = {"importance": result(batch, heads, count, keys)}
    return launch(kernels.importance_kernel, tile, outputs, programs, chunk=chunk, length=count)["importance"]


def _choose(
    launch: Launcher, arrays: NativeArrays, spec: NativeSpec, tile: SelectionTile, lse: Array
) -> Array:
    """The blocks of each query."""
    every = lambda x: jnp.broadcast_to(x, arrays.q.shape[:2])
    start, end = compressed_ranges(arrays, spec)
    place = positions(arrays, spec) - of_sequence(arrays.first)
    base = of_sequence(arrays.base)
    tables = {"start": every(start), "end": every(end), "place": every(place), "base": every(base)}
    (batch, length), heads = arrays.q.shape[:2], arrays.k.shape[2]
    own, keys, blocks = {"k": arrays.compressed_k}, arrays.compressed_k.shape[1], most_blocks(arrays, spec)
    if few.serves(arrays):
        # A row of keys is a page, so that the heads of a group are the rows of a product.
        tokens = batch * length
        own |= {
            "lse": jnp.moveaxis(lse, 1, 0) * LOG2E,
            "table": jnp.arange(tokens, dtype=jnp.int32) // length,
        }
        launch = launch.knowing(own | tables, T=tokens, M=1, P=batch, PAGE=keys, C=keys)
        weights = lambda chunk, count: page_weights(launch, tile, (heads, keys), chunk, count)
        return chosen_by(weights, launch, (1, tokens, heads, keys, blocks), spec, 16).reshape(
            batch, length, heads, spec.count
        )
    launch = launch.knowing(own | tables | {"lse": lse * LOG2E}, C=keys)
    weights = functools.partial(_weights, launch, arrays, tile)
    return chosen_by(weights, launch, (batch, length, heads, keys, blocks), spec, tile.block_q)


def page_weights(launch: Launcher, tile: Any, sizes: tuple[int, int], chunk: int, count: int) -> Array:
    """As `_weights`, of compressed keys in pages: `[1, K, count, C]` for `sizes` `K, C`."""
    heads, keys = sizes
    programs, outputs = (
        cdiv(keys, tile.block_k) * heads * count,
        {"importance": result(1, heads, count, keys)},
    )
    return launch(kernels.page_importance_kernel, tile, outputs, programs, chunk=chunk, length=count)[
        "importance"
    ]


def chosen_by(
    weights: Callable[[int, int], Array],
    launch: Launcher,
    sizes: tuple[int, int, int, int, int],
    spec: NativeSpec,
    multiple: int,
) -> Array:
    """The blocks of each query by `weights(chunk, count)`, those of compressed keys for queries from `chunk` on, `[B, K, count, C]`: for some
    queries at a time, a `multiple` of them, as they are in memory. `sizes` are `B, T, K, C, M`; `launch` knows where compressed keys `start` and
    `end`, the `place` of a query in its sequence, and the `base` of its blocks, `[B, T]` each."""
    batch, length, heads, keys, blocks = sizes
    size = max(multiple, _BYTES // max(1, 4 * batch * heads * keys) // multiple * multiple)
    columns = padded(blocks, 1)
    rows = max(1, min(8, 1024 // columns))  # of a warp, whose lanes compare faster than warps do
    shared = {"M": blocks, "BLOCK": spec.block, "BLOCK_M": columns}
    chosen = []
    for chunk in range(0, length, size):
        count = min(size, length - chunk)
        own = shared | {"chunk": chunk, "length": count}
        outputs = {"chosen": result(batch, heads, count, spec.count, dtype=jnp.int32)}
        given = {"importance": weights(chunk, count)}
        if columns >= _MANY_BLOCKS and spec.block == spec.span == spec.stride:
            programs, groups = count * heads * batch, choice_kernels.GROUPS.value
            outputs["peaks"] = result(batch, heads, count, groups, dtype=jnp.int32)
            found = launch(choice_kernels.choose_one_kernel, Warped(1), outputs, programs, given, **own)
        else:
            found = launch(
                choice_kernels.choose_kernel,
                Warped(min(8, max(1, columns // 2048))),
                outputs,
                cdiv(count, rows) * heads * batch,
                given,
                PER=spec.block // spec.stride,
                REACH=spec.span // spec.stride,
                ROWS=rows,
                **own,
            )
        chosen.append(jnp.moveaxis(found["chosen"], 1, 2))
    return jnp.concatenate(chosen, 1)


def launcher_of(
    arrays: NativeArrays, spec: NativeSpec, float32_dot: str, execute: Execute, family: str = "native_sparse"
) -> Launcher:
    """The arguments that the kernels of one call share."""
    (_, length, heads, dim), (_, keys, kv_heads, values) = arrays.q.shape, arrays.v.shape
    group = heads // kv_heads
    begin = None if arrays.begin is None else begins(arrays, spec)
    named = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "position": arrays.position, "begin": begin}
    numbers = {
        "T": length,
        "S": keys,
        "M": num_blocks(arrays, spec),
        "H": heads,
        "K": kv_heads,
        "D": dim,
        "V": values,
        "N": spec.count,
        "BS": spec.block,
        "BLOCK_S": padded(spec.block),
        "G": group,
        "GP": padded(group),
        "BLOCK_D": padded(dim),
        "BLOCK_V": padded(values),
        "SCALE": spec.scale,
        "offset": spec.offset,
        "PLACED": arrays.position is not None,
        "PACKED": begin is not None,
        "PRECISION": float32_dot if arrays.q.dtype == jnp.float32 else "ieee",
    }
    return Launcher(family, named, numbers, arrays.q, execute)
