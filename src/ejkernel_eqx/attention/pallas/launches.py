"""The launches of attention's Pallas kernels: which steps run, what each reads, and where its results go."""

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...launch.pallas import run, TpuLaunch
from ...launch.sizes import cdiv
from ..spec import AttentionArrays, AttentionSpec
from . import backward_kernels, forward_kernel
from .operands import (
    divided,
    entry_of,
    form_of,
    head_of,
    key_tile,
    modulo,
    of_call,
    of_rows,
    Operands,
    Place,
    query_tile,
    Rows,
    scalars_of,
)
from .steps import Entry, steps_of
from .tile import Form, Head, LANES, temporaries


class Call(NamedTuple):
    """A call of attention, and the keys that its heads share, `[B, S, R]`."""

    arrays: AttentionArrays
    spec: AttentionSpec
    k_rope: Array | None


class Result(NamedTuple):
    """The shape of an output, its block and where that is."""

    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int | None, ...]
    at: Callable[[Place], tuple[Any, ...]]


def forward(call: Call, tile: tuple[int, int]) -> tuple[Array, Array]:
    kernel, (arrays, spec, _) = _Kernel.of_tiles(call, tile), call
    form, values = kernel.form, arrays.v.shape[-1]
    (batch, queries, heads, _), length = arrays.q.shape, kernel.inputs["q"].array.shape[2]
    at = lambda p: (p.batch, p.head, 0, p.q_tile)
    results = {
        "out": _by_query(kernel, arrays.q.dtype, values),
        "lse": Result((batch, heads, 1, length), jnp.float32, (None, None, 1, form.block_q), at),
    }
    columns = (form.block_q, LANES)
    scratch = {"acc": (form.block_q, values), "top": columns, "total": columns}
    # Whether a query may see nothing in its first tile.
    partly = form.packed_rows or form.mask or form.blind or spec.listed
    guarded = partly or not form.folded or spec.left is not None

    def body(refs: Any, scalars: Any, place: Place, entry: Entry, head: Head) -> None:
        refs.sink = scalars.sinks[head.number] if form.sinks else None
        forward_kernel.forward_kernel(form, refs, entry, head, guarded=guarded)

    out, lse = kernel.launch("forward", body, {}, results, scratch)
    return out[:, :, :queries].swapaxes(1, 2), lse[:, :, 0, :queries]


def key_gradient(call: Call, tile: tuple[int, int], rows: Rows) -> tuple[Array, Array, Array | None]:
    """`dk`, `dv` and that of `k_rope`. One program has all heads that read a key head, one after the other. Each head has a part of the gradient of
    shared keys, in float32, and turned, as few channels would fill a part of a register."""
    kernel, k, v = _Kernel.of_tiles(call, tile, by_key=True), call.arrays.k, call.arrays.v
    form, group = kernel.form, kernel.grid[3]
    (batch, keys, kv_heads, dim), length = k.shape, kernel.inputs["k"].array.shape[2]
    # Sums stay in scratch memory over all steps of a tile of keys.
    results, scratch = {}, {}
    for name, x in {"dk": k, "dv": v}.items():
        shape, block = (batch, kv_heads, length, x.shape[-1]), (None, None, form.block_k, x.shape[-1])
        results[name] = Result(shape, x.dtype, block, key_tile)
        scratch[f"{name}_sum"] = block[2:]
    if form.shared:
        shape, block = (batch, kv_heads, form.shared, length), (None, None, form.shared, form.block_k)
        at = lambda p: (p.batch, p.kv_head, 0, p.k_tile)
        results["dk_rope"] = Result(shape, jnp.float32, block, at)
        scratch["dk_sum"] = (form.block_k, dim + form.shared)

    def body(refs: Any, scalars: Any, place: Place, entry: Entry, head: Head) -> None:
        first, last = (True, True) if group == 1 else (pl.program_id(3) == 0, pl.program_id(3) == group - 1)
        backward_kernels.key_gradient_kernel(form, refs, entry, head, first, last)

    grads = kernel.launch("key_gradient", body, of_rows(rows, form), results, scratch)
    dk, dv = (x[:, :, :keys].swapaxes(1, 2) for x in grads[:2])
    return dk, dv, grads[2].sum(1)[:, :, :keys].mT if form.shared else None


def query_gradient(call: Call, tile: tuple[int, int], rows: Rows) -> tuple[Array, Array | None]:
    """`dq`, and `[B, H]` of the slopes."""
    kernel, q = _Kernel.of_tiles(call, tile), call.arrays.q
    form, (batch, queries, heads, dim) = kernel.form, q.shape
    results = {"dq": _by_query(kernel, q.dtype, dim)}
    columns = (form.block_q, LANES)
    scratch = {"dq_sum": (form.block_q, dim), "lse_column": columns, "delta_column": columns}
    if form.alibi:  # a part of the slope's gradient from each tile of queries
        tiles = (batch, heads, cdiv(queries, form.block_q), 1, LANES)
        at = lambda p: (p.batch, p.head, p.q_tile, 0, 0)
        results["dslope"] = Result(tiles, jnp.float32, (None, None, None, 1, LANES), at)
        scratch["slope_sum"] = (1, form.block_k)

    def body(refs: Any, scalars: Any, place: Place, entry: Entry, head: Head) -> None:
        backward_kernels.query_gradient_kernel(form, refs, entry, head)

    grads = kernel.launch("query_gradient", body, of_rows(rows, form), results, scratch)
    slopes = grads[1][:, :, :, 0, 0].sum(-1) if form.alibi else None
    return grads[0][:, :, :queries].swapaxes(1, 2), slopes


def bias_gradient(call: Call, tile: tuple[int, int], rows: Rows) -> Array:
    """Along an axis where the bias has size one, the last axis of the grid sums, and within a tile the kernel."""
    arrays, spec, k_rope = call
    bias = arrays.bias
    assert bias is not None
    form = form_of(arrays, spec, tile, bits=False)
    batch, heads = arrays.q.shape[0], arrays.q.shape[2]
    tiles = cdiv(arrays.q.shape[1], form.block_q), cdiv(arrays.k.shape[1], form.block_k)
    rows_of_bias, heads_of_bias, *sides = bias.shape
    # Programs of the bias' own axes, and over how many each of them sums.
    own = (rows_of_bias, heads_of_bias, *(n if side > 1 else 1 for n, side in zip(tiles, sides, strict=True)))
    sums = tuple(n // max(part, 1) for n, part in zip((batch, heads, *tiles), own, strict=True))
    run = 1 if rows_of_bias == batch else spec.bias_run
    group = heads // arrays.k.shape[2]

    def locate(scalars: Any, *ids: Any) -> tuple[Place, None]:
        # The last axis counts reader, head and tiles together, the last of them the fastest.
        rest, parts = ids[4], []
        for size in reversed(sums):
            parts.append(modulo(rest, size))
            rest = divided(rest, size)
        reader, h, i, j = reversed(parts)
        row = divided(reader, run) * (run * rows_of_bias) + ids[0] * run + modulo(reader, run)
        head = ids[1] + h
        return Place(row, head, divided(head, group), ids[2] + i, ids[3] + j, 0, ids), None

    def body(refs: Any, scalars: Any, place: Place, entry: None, head: Head) -> None:
        tiles, has = (place.q_tile, place.k_tile), (sides[0] > 1, sides[1] > 1)
        backward_kernels.bias_gradient_kernel(form, refs, tiles, head, place.ids[4] == 0, has)

    sizes = tuple(size if side > 1 else 1 for size, side in zip(tile, sides, strict=True))
    shape = (*own[:2], *(n * size for n, size in zip(own[2:], sizes, strict=True)))
    result = Result(shape, jnp.float32, (None, None, *sizes), lambda p: p.ids[:4])
    grid, inputs = (*own, math.prod(sums)), of_call(arrays, form, k_rope)
    kernel = _Kernel(form, heads, grid, (0, 1, 2, 3), locate, inputs, scalars_of(arrays, None))
    (dbias,) = kernel.launch("bias_gradient", body, of_rows(rows, form), {"dbias": result}, {})
    return dbias[:, :, : sides[0], : sides[1]].astype(bias.dtype)


class _Kernel(NamedTuple):
    """Holds what the launches of a kernel have in common. `locate(scalars, *grid)` is where a step is, and its entry."""

    form: Form
    heads: int
    grid: tuple[Any, ...]
    parallel: tuple[int, ...]
    locate: Callable[..., tuple[Place, Any]]
    inputs: Operands
    scalars: dict[str, Array]

    @classmethod
    def of_tiles(cls, call: Call, tile: tuple[int, int], by_key: bool = False) -> "_Kernel":
        """One program for each batch row and head; its steps are tiles of keys of one tile of queries after the other. `by_key`: one for each batch
        row and key head; its steps are tiles of queries of one tile of keys after the other, each for all heads that read the key head."""
        arrays, spec, k_rope = call
        steps, contents = steps_of(arrays, spec, *tile, by_key)
        form = form_of(arrays, spec, tile, bits=contents is not None, by_key=by_key)
        batch, heads, kv_heads = arrays.q.shape[0], arrays.q.shape[2], arrays.k.shape[2]
        group = heads // kv_heads

        def of_queries(scalars: Any, b: Any, h: Any, step: Any) -> tuple[Place, Entry]:
            entry, content = entry_of(steps, scalars, b * heads + h, step)
            return Place(b, h, divided(h, group), entry.own, entry.other, content), entry

        def of_keys(scalars: Any, b: Any, kv: Any, step: Any, member: Any) -> tuple[Place, Entry]:
            entry, content = entry_of(steps, scalars, b * kv_heads + kv, step)
            head = kv * group + entry.head + member
            return Place(b, head, kv, entry.other, entry.own, content), entry

        grid, locate = (batch, heads, steps.count), of_queries
        if by_key:
            grid, locate = (batch, kv_heads, steps.count, 1 if steps.split_heads else group), of_keys
        inputs = of_call(arrays, form, k_rope, contents)
        return cls(form, heads, grid, (0, 1), locate, inputs, scalars_of(arrays, steps))

    def launch(
        self,
        name: str,
        body: Callable[..., None],
        more: Operands,
        results: Mapping[str, Result],
        scratch: Mapping[str, tuple[int, int]],
    ) -> tuple[Array, ...]:
        """Runs `body(refs, scalars, place, entry, head)` on the grid."""
        form, inputs, axes, prefetched = self.form, self.inputs | more, len(self.grid), len(self.scalars)
        named = lambda names, refs: types.SimpleNamespace(**dict(zip(names, refs, strict=True)))

        # Index maps receive the grid's indices, then the prefetched scalars; a kernel receives scalars, inputs, results and scratch.
        def spec(block: tuple[int | None, ...], at: Callable[[Place], tuple[Any, ...]]) -> Any:
            def where(*ids: Any) -> tuple[Any, ...]:
                return at(self.locate(named(self.scalars, ids[axes:]), *ids[:axes])[0])

            return pl.BlockSpec(block, where)

        def kernel(*refs: Any) -> None:
            scalars = named(self.scalars, refs[:prefetched])
            place, entry = self.locate(scalars, *(pl.program_id(axis) for axis in range(axes)))
            head = head_of(form, scalars, place.batch * self.heads + place.head)
            body(named((*inputs, *results, *scratch), refs[prefetched:]), scalars, place, entry, head)

        launch = TpuLaunch(
            kernel=kernel,
            name=f"attention.{name}",
            grid=self.grid,
            in_specs=[spec(x.block, x.at) for x in inputs.values()],
            out_specs=[spec(x.block, x.at) for x in results.values()],
            outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()],
            scratch=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
            scalars=prefetched,
            parallel=self.parallel,
            temporaries=temporaries(name, form.block_q, form.block_k, form.dtype.itemsize),
        )
        return run(launch, [*self.scalars.values(), *(x.array for x in inputs.values())])


def _by_query(kernel: _Kernel, dtype: Any, width: int) -> Result:
    """A result `[B, H, T, width]`."""
    shape, block_q = kernel.inputs["q"].array.shape[:3], kernel.form.block_q
    return Result((*shape, width), dtype, (None, None, block_q, width), query_tile)
