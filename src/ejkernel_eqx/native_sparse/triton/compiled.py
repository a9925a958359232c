"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...attention.cotangents import row_terms
from ...attention.spec import AttentionArrays
from ...attention.triton import compiled as attention
from ...attention.triton import tile_sizes
from ...core import Named
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import (
    Launcher,
    limits_registers,
    LOG2E,
    Options,
    register_limits_measured,
    result,
)
from ...launch.fields import Checked, Float32Dot
from ...launch.sizes import cdiv, padded, rows_of
from ...paged.triton import compiled as pages
from .. import branches
from ..lists import by_key, lists_of
from ..problems import of_branch, shapes_of, spec_of
from ..spec import begins, NativeArrays, NativeSpec, num_blocks
from . import by_blocks, choice, few, kernels, steps
from .tiles import FewTiles, ForwardTile, KeyTile, RowTile, SelectionTile, StepTile

OPAQUE = True
PARTS = {"forward": FORWARD, "selection": FORWARD, "query_gradient": "q", "key_gradient": "k v"}
PARTS |= {"compressed": BOTH, "sliding": BOTH, "few": FORWARD}
MAX_HEAD_DIM = 256
MAX_GROUP = 128
_MAX_BLOCK = 256
_MANY = 4096  # queries from which on the forward runs by blocks
_FEW = 512  # programs, which do not fill a GPU evenly


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    """Kernels of the selected branch and of its choice, and the configurations of the two branches that are softmax attention."""

    forward: ForwardTile
    query_gradient: RowTile
    key_gradient: KeyTile
    selection: SelectionTile
    compressed: attention.TritonConfig
    sliding: attention.TritonConfig
    few: FewTiles
    float32_dot: Float32Dot = "tf32x3"


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
    group, sparing = padded(problem.dim("H") // problem.dim("K")), is_wide or width > 128
    dot: dict[str, Any] = {} if device.vendor == "nvidia" else {"float32_dot": "ieee"}
    of_softmax = (of_branch(problem, name) for name in branches.SOFTMAX)
    compressed, sliding = (attention.candidates(branch, device) for branch in of_softmax)
    if limits_registers(device) and register_limits_measured(device) and width == 128 and not is_wide:
        # Ranges that grow with the queries leave two of Triton's programs a multiprocessor about even.
        even = dataclasses.replace(compressed[0], forward=attention.TileConfig(*tile_sizes.SIDE_BY_SIDE))
        hopper = 1 if compressed[0].forward.hopper_programs else 0
        compressed = [*compressed[:hopper], even, *compressed[hopper:]]
    *branches_of, step = _few_parts(problem)
    pages_of = [pages.candidates(branch, device) for branch in branches_of]
    few_columns: list[list[Any]] = [steps.tiles_for(pages_of[0], step, device), *pages_of]
    few_tiles = [FewTiles(*row) for row in rows_of(few_columns)]
    are_few = problem.dim("T") <= steps.MOST_QUERIES
    select = _WIDE_SELECTIONS if sparing else _SELECTIONS
    if are_few:
        select = _FEW_SELECTIONS
    elif not sparing and device.capability < (9, 0):
        select = (_SPARING_SELECTION, *select)
    programs, count = problem.dim("B") * problem.dim("T") * problem.dim("K"), padded(problem.dim("n"), 1)
    span, rows_of_queries = span_for(programs, count, device), _FEW_ROWS if are_few else _ROWS
    forwards = [ForwardTile(0, span, warps, 1 if sparing else stages) for warps, stages in rows_of_queries]
    if problem.dim("T") >= _MANY and not sparing:
        # Of the merge: a thread has 128 numbers in 64 registers, and with 80 three programs share a multiprocessor.
        numbers = count * group * padded(problem.dim("V"))
        registers = 80 if numbers == 8 * 4096 and device.capability < (10, 0) else 0
        by_block = [
            ForwardTile(max(1, rows // group), 256, *how, merge_registers=registers) for rows, *how in _BLOCKS
        ]
        forwards = [*by_block, *forwards[:3]]
    queries = [RowTile(warps, 1 if sparing else stages) for warps, stages in _QUERIES]
    # On an H200 four warps take half of the time of eight, although they spill 32 bytes a thread.
    keys_of = _KEYS if device.capability >= (9, 0) else (_SPARING_KEYS, *_KEYS)
    if sparing:
        keys_of = [(32, warps, 1) for _, warps, _ in keys_of]
    keys = [KeyTile(max(1, rows // group), 1024, *how) for rows, *how in keys_of]
    selections = [SelectionTile(*tile) for tile in select]
    columns: list[list[Any]] = [forwards, queries, keys, selections, compressed, sliding, few_tiles]
    longest = max(map(len, (forwards, queries, keys, few_tiles)))
    return list(dict.fromkeys(TritonConfig(*row, **dot) for row in rows_of(columns)[:longest]))


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """Returns where few queries go branch by branch."""
    return "" if problem.flag("packed") else steps.remark_on(config.few.step, _few_parts(problem)[-1])


@functools.lru_cache(maxsize=256)
def _few_parts(problem: Problem) -> tuple[Problem, Problem, steps.Step]:
    """The branches as attention over pages, for few queries, and the shapes of a step."""
    spec = spec_of(problem)
    return few.parts_of(lambda arrays: steps.of_rows(arrays, spec), shapes_of(problem), spec)


def span_for(programs: int, count: int, device: DeviceFacts) -> int:
    """The blocks of a program, of `count` for each query and key head: fewer if these `programs` leave the device idle. Not on AMD's, whose compiler
    merges them through more memory than there is."""
    if device.vendor != "nvidia":
        return count
    idle = 4 * (device.num_multiprocessors or 108) // max(1, programs)
    return max(1, count >> max(0, idle.bit_length() - 1))


def forward(arrays: NativeArrays, spec: NativeSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """The output, the blocks that were chosen, and what the backward needs."""
    if arrays.begin is None and arrays.q.shape[1] <= steps.MOST_QUERIES:
        own = config.few
        few_tiles = own.compressed, own.sliding, config.float32_dot
        tiles = few.Tiles(own.step, config.forward, config.selection, *few_tiles)
        return few.attend(steps.of_rows(arrays, spec), spec, tiles, arrays.q.shape[:2], save)
    found: Named = {}
    for name, branch in branches.SOFTMAX.items():
        results = attention.forward(*branch(arrays, spec), getattr(config, name))
        found[f"{name}_out"], found[f"{name}_lse"] = results
    launch = launcher_of(arrays, spec, config.float32_dot)
    indices = arrays.indices
    if indices is None:
        indices = choice.choose(launch, arrays, spec, config.selection, found["compressed_lse"])
    if config.forward.tokens:
        # Without a gradient, one kernel also sums the branches.
        gated = None if save else found | {"gates": arrays.gates}
        selected = by_blocks.attended(launch, arrays, spec, config.forward, indices, gated)
        if gated:
            return {"out": selected["out"], "indices": indices}
    else:
        shape = (*arrays.q.shape[:3], arrays.v.shape[-1])
        launch_chosen = launch.knowing({"indices": indices})
        selected = by_blocks.by_queries(launch_chosen, kernels.forward_kernel, config.forward, shape)
    found["selected_out"], found["selected_lse"] = selected["out"], selected["lse"]
    out = branches.combine(arrays.gates, found, arrays.q.dtype)
    return {"out": out, "indices": indices} | (found if save else {})


def backward(
    arrays: NativeArrays, spec: NativeSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """The gradients of all float arrays; bitwise repeatable, as every sum has one fixed order."""
    results, dgates = branches.split(arrays.gates, saved, cotangents["out"].astype(arrays.q.dtype))
    whole = {}
    for name, branch in branches.SOFTMAX.items():
        (call, own), (out, lse, dout) = branch(arrays, spec), results[name]
        tiles, times = getattr(config, name), 1
        if cdiv(call.k.shape[1], tiles.key_gradient.block_k) * call.k.shape[0] * call.k.shape[2] < _FEW:
            # Keys and values of every head, so that more programs sum their gradients. Compressed keys are few:
            # each program would have all queries of a group.
            times = arrays.q.shape[2] // arrays.k.shape[2]
            call = call._replace(k=jnp.repeat(call.k, times, 2), v=jnp.repeat(call.v, times, 2))
        rest = out, lse, dout, jnp.zeros_like(lse)
        grads = attention.backward(call, own, tiles, *rest)
        whole[name] = grads._replace(k=_total(grads.k, times), v=_total(grads.v, times))
    out, lse, dout = results["selected"]
    delta, _ = row_terms(AttentionArrays(arrays.q, arrays.k, arrays.v), out, lse, dout, None)
    own = {"do": dout, "lse": jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E), "delta": delta}
    own["indices"] = saved["indices"]
    launch = launcher_of(arrays, spec, config.float32_dot).knowing(own)
    programs = arrays.q.shape[0] * arrays.q.shape[1] * arrays.k.shape[2]
    outputs = {"dq": result(*arrays.q.shape)}
    dq = launch(kernels.query_gradient_kernel, config.query_gradient, outputs, programs)["dq"]
    dk, dv = _key_gradient(launch, arrays, spec, config.key_gradient, saved["indices"])
    return branches.combined_gradients(dq, dk, dv, whole, dgates)


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
    outputs = {"dk": part(dim), "dv": part(values)}
    launch = launch.knowing(own | {"piece": lists.piece}, PIECES=pieces)
    parts = launch(kernels.key_gradient_kernel, tile, outputs, batch * heads * pieces)

    def whole(x: Array, channels: int) -> Array:
        size, block = spec.block * channels, 1024
        programs = batch * heads * blocks * cdiv(size, block)
        outputs = {"whole": result(batch, heads, blocks, spec.block, channels)}
        numbers = {"SIZE": size, "BLOCK": block}
        found = launch(kernels.combine_kernel, Options(4, 1), outputs, programs, {"part": x}, **numbers)
        return by_key(found["whole"], arrays)

    return whole(parts["dk"], dim), whole(parts["dv"], values)


def launcher_of(arrays: NativeArrays, spec: NativeSpec, float32_dot: str) -> Launcher:
    """The arguments that the kernels of one call share."""
    begin = None if arrays.begin is None else begins(arrays, spec)
    named = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "position": arrays.position, "begin": begin}
    numbers = steps.numbers_of(arrays.q, arrays.v, spec, float32_dot) | dict(
        T=arrays.q.shape[1], S=arrays.k.shape[1], M=num_blocks(arrays, spec), BLOCK_S=padded(spec.block), offset=spec.offset,
        PLACED=arrays.position is not None, PACKED=begin is not None,
    )  # fmt: skip
    return Launcher("native_sparse", named, numbers, arrays.q)


_SMALL = ForwardTile(0, 2, 4, 1), RowTile(4, 1), KeyTile(2, 8, 4, 1), SelectionTile(16, 16, 4, 1)
_WHOLE, _PAGES = attention.interpreted.config, pages.interpreted.config
_SMALL_FEW = FewTiles(StepTile(16, 3, 4, 1), _PAGES, _PAGES)
interpreted = Interpreted(__name__, TritonConfig(*_SMALL, _WHOLE, _WHOLE, _SMALL_FEW), float32_dot="ieee")
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
