"""A step of decoding: in one launch, or if programs share the keys of a query in four: compressed keys and their scores, the choice beside the
window, the chosen blocks, and the sum of all parts.

Each key is read once for all heads of a group. What does not fit goes branch by branch."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core import Named
from ...dispatch import DeviceFacts
from ...launch import Launcher, NOTHING, Options, result
from ...launch.sizes import cdiv, padded
from ...paged.flat import part_of
from ...paged.spec import PagedArrays
from ...paged.triton import compiled as pages
from ...paged.triton.tile import FILLED
from ..spec import most_blocks, NativeArrays, NativeSpec, positions
from . import step_choice, step_kernels, whole_step
from .choice_kernels import GROUPS
from .tiles import StepTile

BY_BRANCH = StepTile(0, 1, 4, 1)
MOST_QUERIES = 8
"""With more of them, tiles of softmax attention's kernels read a key less often."""

MOST_GROUP = 64
MOST_BLOCKS = 4096
_MOST_BYTES = 2**14  # of the queries of a group, whose sums are in registers
_MANY_BYTES = 2**13
_SCORE_BYTES = 2**28
_GROUPS = GROUPS.value
_NUMBERS, _MANY_NUMBERS = (4096, 8192)  # of scores at a time, as many as no kernel spills


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """The arrays of a call over pages, or their shapes, without leading axes: tokens, and the sequences of a batch with their tables. Over dense
    keys, a row is a sequence, and parts of it are pages."""

    # A pytree is also made of other leaves than arrays, so their type is open.

    q: Any  # [T, H, D]
    gates: Any  # [T, H, 3]
    k: Any  # [P, PAGE, K, D]
    v: Any
    compressed_k: Any  # [P', PAGE', K, D]
    compressed_v: Any
    table: Any  # int32 [N, M]
    small_table: Any  # int32 [N, M']
    q_start: Any  # int32 [N]
    q_len: Any  # int32 [N]
    kv_len: Any  # int32 [N]
    queries: int = eqx.field(static=True)
    """The most of a sequence."""
    blocks: int = eqx.field(static=True)
    """The most that a sequence may have."""
    first_slot: int = eqx.field(default=0, static=True)
    """Where compressed key 0 is."""
    indices: Any = None  # int32 [T, K, n]

    @property
    def rows(self) -> int:
        """The queries that there may be."""
        return self.q_len.shape[0] * self.queries

    @property
    def compressed_keys(self) -> int:
        return self.small_table.shape[1] * self.compressed_k.shape[1]

    @property
    def main(self) -> PagedArrays:
        """Attention to the keys."""
        return PagedArrays(self.q, self.k, self.v, self.table, self.q_start, self.q_len, self.kv_len)

    @property
    def small(self) -> PagedArrays:
        """Attention to the compressed keys."""
        return self.main._replace(k=self.compressed_k, v=self.compressed_v, page_table=self.small_table)

    @property
    def group(self) -> int:
        """The query heads of a key head."""
        return self.q.shape[1] // self.v.shape[2]

    @property
    def bytes(self) -> int:
        """Those of a query's heads of a group, padded."""
        channels = max(self.q.shape[2], self.v.shape[3])
        return padded(self.group) * padded(channels) * self.q.dtype.itemsize

    def reason_against(self) -> str:
        """The reason why this goes branch by branch; empty if it does not."""
        scores, group = 4 * self.rows * self.q.shape[1] * self.compressed_keys, self.group
        if self.queries > MOST_QUERIES:
            return f"takes up to {MOST_QUERIES} queries a sequence, not {self.queries}"
        if group > MOST_GROUP:
            return f"takes up to {MOST_GROUP} query heads a key head, not {group}"
        if self.bytes > _MOST_BYTES:
            most, needed = _MOST_BYTES // 1024, self.bytes // 1024
            return f"takes up to {most} KiB of query heads a key head, not {needed}"
        if self.blocks > MOST_BLOCKS:
            return f"takes sequences of up to {MOST_BLOCKS} blocks, not {self.blocks}"
        if scores > _SCORE_BYTES:
            most, needed = _SCORE_BYTES // 2**20, scores // 2**20
            return f"holds up to {most} MiB of scores of compressed keys, not {needed}"
        return "" if min(self.compressed_keys, self.blocks) else "needs room for keys and compressed keys"


def remark_on(tile: StepTile, step: Step) -> str:
    """Returns what `explain` says of steps that go branch by branch."""
    if step.queries > MOST_QUERIES:
        return ""
    if reason := step.reason_against():
        return f"each branch has kernels of its own, as a step of decoding {reason}"
    return "" if tile.block_k else "each branch has kernels of its own, as the configuration says"


def programs_for(step: Step, block_k: int, device: DeviceFacts) -> int:
    """The programs that share a branch's keys of each query and key head, at most: two for each multiprocessor, and with more queries twice that, as
    those that end early make room for others. Each has at least two tiles, or if there are many programs eight. A program of all branches would
    spill with 8 KiB of query heads, and on AMD's devices."""
    full, pairs = 2 * (device.num_multiprocessors or 108), max(1, step.rows * step.v.shape[2])
    few = pairs <= full
    count = full // pairs if few else cdiv(4 * full, pairs)
    least = 1 if device.vendor == "nvidia" and step.bytes < _MANY_BYTES else 2
    return max(least, min(count, cdiv(step.compressed_keys, (2 if few else 8) * block_k)))


def tiles_for(branch: list[pages.TritonConfig], step: Step, device: DeviceFacts) -> list[StepTile]:
    """Tiles worth timing, from the configurations of the compressed branch as attention over pages, best first; the last goes branch by branch, as
    does what is not served."""
    if step.reason_against():
        return [BY_BRANCH]
    most = 32 if step.bytes >= _MANY_BYTES else 256
    if device.vendor != "nvidia":  # whose compiler keeps loads in flight in registers
        most = min(most, 64) // 2
    # Several configurations may have one tile for decoding; it is kept once, in their order.
    first, *others = dict.fromkeys(config.decode for config in branch)
    found = []
    for tile, factor in ((first, 1.0), (first, 2.0), (first, 0.5), *((tile, 1.0) for tile in others[:2])):
        block_k = min(tile.block_k, most)
        splits = max(1, int(programs_for(step, block_k, device) * factor))
        found.append(StepTile(block_k, splits, tile.num_warps, tile.num_stages))
    return list(dict.fromkeys([*found, BY_BRANCH]))


def of_rows(arrays: NativeArrays, spec: NativeSpec) -> Step:
    """Few queries over dense keys: each row is a sequence, and parts of it are pages, their table a constant."""
    (batch, length), flat = arrays.q.shape[:2], lambda x: x.reshape(-1, *x.shape[2:])
    (k, table), (small, small_table) = _in_pages(arrays.k), _in_pages(arrays.compressed_k)
    start, last = np.arange(batch, dtype=np.int32) * length, positions(arrays, spec)[:, -1]
    return Step(
        q=flat(arrays.q), gates=flat(arrays.gates), k=k, v=_in_pages(arrays.v)[0], compressed_k=small,
        compressed_v=_in_pages(arrays.compressed_v)[0], table=table, small_table=small_table, q_start=jnp.asarray(start),
        q_len=jnp.full(batch, length, jnp.int32), kv_len=jnp.broadcast_to(last + 1, (batch,)), queries=length,
        blocks=most_blocks(arrays, spec), indices=None if arrays.indices is None else flat(arrays.indices),
    )  # fmt: skip


def _in_pages(x: Array) -> tuple[Array, Array]:
    batch, length = x.shape[:2]
    part = part_of(length)
    # In numpy, so that the device computes nothing for it.
    table = np.arange(batch * (length // part), dtype=np.int32).reshape(batch, -1)
    return x.reshape(-1, part, *x.shape[2:]), jnp.asarray(table)


def attend(step: Step, spec: NativeSpec, tile: StepTile, float32_dot: str) -> Named:
    """`out [T, H, V]` and the blocks `indices [T, K, n]`."""
    blocks, block_k = padded(step.blocks, _GROUPS), min(tile.block_k, padded(spec.block))
    alone = tile.split_k == 1
    many = not alone and spec.block == spec.span == spec.stride
    heads = min(padded(step.group, 1), max(1, (_MANY_NUMBERS if many else _NUMBERS) // blocks))
    numbers = {"CHOOSES": int(step.indices is None), "EACH": cdiv(spec.block, block_k), "BK": block_k}
    numbers |= {"BLOCK_M": blocks, "HEADS": heads}
    launch = _launcher(step, spec, float32_dot).knowing({"given": step.indices}, **numbers)
    found = (_in_one if alone else _in_four)(launch, step, spec, tile)
    return {"out": found["out"], "indices": found["indices"] if step.indices is None else step.indices}


def _in_one(launch: Launcher, step: Step, spec: NativeSpec, tile: StepTile) -> Named:
    tokens, heads, values = *step.q.shape[:2], step.v.shape[-1]
    lse = result(step.rows, heads) if step.indices is None else NOTHING
    outputs = {"out": result(tokens, heads, values, dtype=step.q.dtype), "lse": lse} | _choice(launch, step)
    return launch(whole_step.whole_step_kernel, tile, outputs, step.rows * step.v.shape[2] + _fills(step))


def _in_four(launch: Launcher, step: Step, spec: NativeSpec, tile: StepTile) -> Named:
    (tokens, heads, _), (kv_heads, values) = step.q.shape, step.v.shape[2:]
    rows, pairs, chooses = step.rows, step.rows * kv_heads, step.indices is None
    # Programs that share the keys of a branch, each with two tiles at least.
    shared = lambda count: max(1, min(tile.split_k, cdiv(count, 2 * tile.block_k)))
    small, room = shared(step.compressed_keys), step.table.shape[1] * step.k.shape[1]
    near = shared(min(spec.window, room))
    span = cdiv(spec.count, shared(spec.count * spec.block))
    chosen, writes = cdiv(spec.count, span), _choice(launch, step)

    def branch(kernel: Any, splits: int, programs: int, inputs: Any, more: Any, **numbers: int) -> Any:
        part, lse = result(rows, heads, splits, values), result(rows, heads, splits)
        outputs = {"part": part, "part_lse": lse} | more
        return launch(kernel, tile, outputs, programs, inputs, SPLITS=splits, **numbers)

    scores, kernel = {"scores": writes.pop("scores")}, step_kernels.compressed_step_kernel
    compressed = branch(kernel, small, pairs * small, {}, scores)
    launch = launch.knowing({}, PARTS=small, BLOCK_PARTS=padded(small, 1))
    scores = {"scores": compressed["scores"], "compressed_lse": compressed["part_lse"]}
    programs = pairs * (near + chooses) + (_fills(step) if chooses else 0)
    sliding = branch(step_kernels.sliding_step_kernel, near, programs, scores, writes)
    indices = {"indices": sliding["indices"] if chooses else step.indices}
    selected = branch(step_kernels.selected_step_kernel, chosen, pairs * chosen, indices, {}, SPAN=span)
    results = {"compressed": compressed, "selected": selected, "sliding": sliding}
    combined = {f"{name}_part": x["part"] for name, x in results.items()}
    combined |= {f"{name}_lse": x["part_lse"] for name, x in results.items()}
    warps = Options(min(4, max(1, padded(max(small, chosen, near), 1) * padded(values) // 512)), 1)
    numbers = {"CHOSEN_PARTS": chosen, "BLOCK_CHOSEN": padded(chosen, 1)}
    numbers |= {"NEAR_PARTS": near, "BLOCK_NEAR": padded(near, 1)}
    outputs = {"out": result(tokens, heads, values, dtype=step.q.dtype)}
    programs = rows * heads + _fills(step)
    out = launch(step_kernels.combine_step_kernel, warps, outputs, programs, combined, **numbers)
    return {"out": out["out"], "indices": sliding["indices"]}


def _choice(launch: Launcher, step: Step) -> dict[str, Any]:
    """The outputs of a choice."""
    if step.indices is not None:
        return dict.fromkeys(("indices", "scores", "keys"), NOTHING)
    number, tokens, pairs = launch.numbers, step.q.shape[0], (step.rows, step.v.shape[2])
    return {
        "indices": result(tokens, pairs[1], number["N"], dtype=jnp.int32),
        "scores": result(*pairs, number["G"], number["WIDTH"] * step_choice.SCORE_ROW.value),
        "keys": result(*pairs, number["BLOCK_M"] + _GROUPS, dtype=jnp.int32),
    }


def _fills(step: Step) -> int:
    """Programs for tokens of no sequence."""
    return cdiv(step.q.shape[0], FILLED.value)


def _launcher(step: Step, spec: NativeSpec, float32_dot: str) -> Launcher:
    """The arguments that the kernels of a step share."""
    (tokens, _, dim), (pages, page, kv_heads, values) = step.q.shape, step.v.shape
    small_pages, small_page = step.compressed_k.shape[:2]
    named = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)[:11]}
    far = lambda pages, page: max(pages, kv_heads * max(dim, values)) * page >= 2**31
    numbers = numbers_of(step.q, step.v, spec, float32_dot) | dict(
        T=tokens, R=step.rows, N_SEQUENCES=step.table.shape[0], QUERIES=step.queries, BLOCKS=step.blocks, WINDOW=spec.window,
        M=step.table.shape[1], P=pages, PAGE=page, FAR=far(pages, page),
        SMALL_M=step.small_table.shape[1], P_SMALL=small_pages, SMALL_PAGE=small_page, SMALL_FAR=far(small_pages, small_page),
        WIDTH=cdiv(step.compressed_keys, step_choice.SCORE_ROW.value), FIRST=step.first_slot,
        REACH=spec.span // spec.stride, STRIDE=spec.stride,
    )  # fmt: skip
    return Launcher("native_sparse_step", named, numbers, step.q)


def numbers_of(q: Array, v: Array, spec: NativeSpec, float32_dot: str) -> dict[str, Any]:
    """The numbers that all kernels share."""
    (heads, dim), (kv_heads, values) = q.shape[-2:], v.shape[-2:]
    group, is_float32 = heads // kv_heads, q.dtype == jnp.float32
    return dict(
        H=heads, K=kv_heads, D=dim, V=values, N=spec.count, BS=spec.block, G=group, GP=padded(group), BLOCK_D=padded(dim),
        BLOCK_V=padded(values), SCALE=spec.scale, PRECISION=float32_dot if is_float32 else "ieee",
    )  # fmt: skip
