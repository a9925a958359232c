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
    by_head,
    divided,
    entry_of,
    form_of,
    head_of,
    modulo,
    of_call,
    of_contents,
    of_map,
    of_queries,
    Operand,
    Operands,
    over_scores,
    Place,
    Scalars,
    scalars_of,
)
from .steps import Entry, key_steps, query_steps
from .tile import Form, LANES


class Rows(NamedTuple):
    """Holds what gradients need of each query: its cotangent `[B, T, H, V]`; and `[B, H, T]` its lse in log2 units, infinite if it sees nothing, and
    delta."""

    do: Array
    lse: Array
    delta: Array


class Result(NamedTuple):
    """The shape of an output, its block and where that is."""

    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int | None, ...]
    at: Callable[[Place], tuple[Any, ...]]


def forward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    tile: tuple[int, int],
    k_rope: Array | None,
) -> tuple[Array, Array]:
    call = _Call.of_queries(arrays, spec, tile, k_rope)
    form, values = call.form, arrays.v.shape[-1]
    (batch, queries, heads, _), length = arrays.q.shape, call.queries
    results = {
        "out": Result(
            (batch, heads, length, values), arrays.q.dtype, (None, None, form.block_q, values), _query_tile
        ),
        "lse": _row_result(batch, heads, length, form),
    }
    scratch = {"acc": (form.block_q, values), "top": (form.block_q, LANES), "total": (form.block_q, LANES)}
    guarded = (
        spec.listed or form.packed_rows or form.mask or not form.folded or spec.left is not None or form.blind
    )

    def body(refs: Any, scalars: Any, place: Place, entry: Entry) -> None:
        number = place.batch * heads + place.head
        refs.sink = scalars.sinks[number] if form.sinks else None
        head = head_of(form, scalars, number)
        forward_kernel.forward_kernel(form, refs, entry, head, guarded=guarded)

    temporaries = forward_kernel.temporaries(*tile, arrays.q.dtype.itemsize)
    out, lse = call.launch("forward", body, {}, results, scratch, temporaries)
    return out[:, :, :queries].swapaxes(1, 2), lse[:, :, 0, :queries]


def key_gradient(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    tile: tuple[int, int],
    rows: Rows,
    k_rope: Array | None,
) -> tuple[Array, Array, Array | None]:
    """`dk`, `dv` and that of `k_rope`. One program has all heads that read a key head, one after the other. Each head has a part of the gradient of
    shared keys, in float32, and turned, as few channels would fill a part of a register."""
    call = _Call.of_keys(arrays, spec, tile, k_rope)
    form, group = call.form, call.grid[3]
    batch, keys, kv_heads, dim = arrays.k.shape
    at = lambda p: (p.batch, p.kv_head, p.k_tile, 0)
    sides = {"dk": (dim, arrays.k.dtype), "dv": (arrays.v.shape[-1], arrays.v.dtype)}
    results = {
        name: Result((batch, kv_heads, call.keys, width), dtype, (None, None, form.block_k, width), at)
        for name, (width, dtype) in sides.items()
    }
    scratch = {f"{name}_sum": (form.block_k, width) for name, (width, _) in sides.items()}
    if form.shared:
        results["dk_rope"] = Result(
            (batch, kv_heads, form.shared, call.keys),
            jnp.float32,
            (None, None, form.shared, form.block_k),
            lambda p: (p.batch, p.kv_head, 0, p.k_tile),
        )
        scratch["dk_sum"] = (form.block_k, dim + form.shared)

    def body(refs: Any, scalars: Any, place: Place, entry: Entry) -> None:
        head = head_of(form, scalars, place.batch * arrays.q.shape[2] + place.head)
        first, last = (True, True) if group == 1 else (pl.program_id(3) == 0, pl.program_id(3) == group - 1)
        backward_kernels.key_gradient_kernel(form, refs, entry, head, first, last)

    temporaries = backward_kernels.temporaries(*tile, arrays.q.dtype.itemsize)
    found = call.launch("key_gradient", body, _of_rows(rows, form), results, scratch, temporaries)
    dk, dv = (x[:, :, :keys].swapaxes(1, 2) for x in found[:2])
    return dk, dv, found[2].sum(1)[:, :, :keys].mT if form.shared else None


def query_gradient(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    tile: tuple[int, int],
    rows: Rows,
    k_rope: Array | None,
) -> tuple[Array, Array | None]:
    """`dq`, and `[B, H]` of the slopes."""
    call = _Call.of_queries(arrays, spec, tile, k_rope)
    form, length = call.form, call.queries
    batch, queries, heads, dim = arrays.q.shape
    results = {
        "dq": Result(
            (batch, heads, length, dim), arrays.q.dtype, (None, None, form.block_q, dim), _query_tile
        )
    }
    columns = (form.block_q, LANES)
    scratch = {"dq_sum": (form.block_q, dim), "lse_column": columns, "delta_column": columns}
    if form.alibi:
        tiles = (batch, heads, length // form.block_q, 1, LANES)
        at = lambda p: (p.batch, p.head, p.q_tile, 0, 0)
        results["dslope"] = Result(tiles, jnp.float32, (None, None, None, 1, LANES), at)
        scratch["slope_sum"] = (1, form.block_k)

    def body(refs: Any, scalars: Any, place: Place, entry: Entry) -> None:
        head = head_of(form, scalars, place.batch * heads + place.head)
        backward_kernels.query_gradient_kernel(form, refs, entry, head)

    temporaries = backward_kernels.temporaries(*tile, arrays.q.dtype.itemsize)
    found = call.launch("query_gradient", body, _of_rows(rows, form), results, scratch, temporaries)
    slopes = found[1][:, :, :, 0, 0].sum(-1) if form.alibi else None
    return found[0][:, :, :queries].swapaxes(1, 2), slopes


def bias_gradient(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    tile: tuple[int, int],
    rows: Rows,
    k_rope: Array | None,
) -> Array:
    """Along an axis where the bias has size one, the last axis of the grid sums, and within a tile the kernel."""
    bias = arrays.bias
    assert bias is not None
    form = form_of(arrays, spec, *tile, contents=None)
    batch, heads = arrays.q.shape[0], arrays.q.shape[2]
    tiles = cdiv(arrays.q.shape[1], form.block_q), cdiv(arrays.k.shape[1], form.block_k)
    rows_of_bias, heads_of_bias, *sides = bias.shape
    own = (rows_of_bias, heads_of_bias, *(n if side > 1 else 1 for n, side in zip(tiles, sides, strict=True)))
    sums = tuple(n // max(part, 1) for n, part in zip((batch, heads, *tiles), own, strict=True))
    run = 1 if rows_of_bias == batch else spec.bias_run
    group = heads // arrays.k.shape[2]

    def locate(scalars: Any, *ids: Any) -> tuple[Place, None]:
        rest, parts = ids[4], []
        for size in reversed(sums):
            parts.append(modulo(rest, size))
            rest = divided(rest, size)
        reader, h, i, j = reversed(parts)
        row = divided(reader, run) * (run * rows_of_bias) + ids[0] * run + modulo(reader, run)
        head = ids[1] + h
        return Place(row, head, divided(head, group), ids[2] + i, ids[3] + j, 0, ids), None

    def body(refs: Any, scalars: Any, place: Place, entry: None) -> None:
        head, has = head_of(form, scalars, place.batch * heads + place.head), (sides[0] > 1, sides[1] > 1)
        tiles = (place.q_tile, place.k_tile)
        backward_kernels.bias_gradient_kernel(form, refs, tiles, head, place.ids[4] == 0, has)

    sizes = tuple(size if side > 1 else 1 for size, side in zip(tile, sides, strict=True))
    shape = (*own[:2], *(n * size for n, size in zip(own[2:], sizes, strict=True)))
    result = Result(shape, jnp.float32, (None, None, *sizes), lambda p: p.ids[:4])
    call = _Call(
        form,
        (*own, math.prod(sums)),
        (0, 1, 2, 3),
        locate,
        of_call(arrays, form, k_rope) | _over_scores(arrays, spec, form),
        scalars_of(arrays, None),
    )
    temporaries = backward_kernels.temporaries(*tile, arrays.q.dtype.itemsize)
    (dbias,) = call.launch("bias_gradient", body, _of_rows(rows, form), {"dbias": result}, {}, temporaries)
    return dbias[:, :, : sides[0], : sides[1]].astype(bias.dtype)


class _Call(NamedTuple):
    """Holds what the launches of a kernel have in common. `locate(scalars, *grid)` is where a step is, and its entry."""

    form: Form
    grid: tuple[Any, ...]
    parallel: tuple[int, ...]
    locate: Callable[..., tuple[Place, Any]]
    inputs: Operands
    scalars: Scalars

    @classmethod
    def of_queries(
        cls, arrays: AttentionArrays, spec: AttentionSpec, tile: tuple[int, int], k_rope: Array | None
    ) -> "_Call":
        """One program for each batch row and head; its steps are tiles of keys of one tile of queries after the other."""
        steps, contents = query_steps(arrays, spec, *tile)
        form = form_of(arrays, spec, *tile, contents=contents)
        batch, heads = arrays.q.shape[0], arrays.q.shape[2]
        group = heads // arrays.k.shape[2]

        def locate(scalars: Any, b: Any, h: Any, step: Any) -> tuple[Place, Entry]:
            entry, content = entry_of(steps, scalars, b * heads + h, step)
            return Place(b, h, divided(h, group), entry.own, entry.other, content), entry

        inputs = _inputs(arrays, spec, form, contents, k_rope)
        return cls(form, (batch, heads, steps.count), (0, 1), locate, inputs, scalars_of(arrays, steps))

    @classmethod
    def of_keys(
        cls, arrays: AttentionArrays, spec: AttentionSpec, tile: tuple[int, int], k_rope: Array | None
    ) -> "_Call":
        """One program for each batch row and key head; its steps are tiles of queries of one tile of keys after the other, each for all heads that
        read the key head."""
        steps, contents = key_steps(arrays, spec, *tile)
        form = form_of(arrays, spec, *tile, contents=contents, by_key=True)
        batch, _, kv_heads, _ = arrays.k.shape
        group = arrays.q.shape[2] // kv_heads

        def locate(scalars: Any, b: Any, kv: Any, step: Any, member: Any) -> tuple[Place, Entry]:
            entry, content = entry_of(steps, scalars, b * kv_heads + kv, step)
            head = kv * group + entry.head + member
            return Place(b, head, kv, entry.other, entry.own, content), entry

        grid = (batch, kv_heads, steps.count, 1 if steps.split_heads else group)
        inputs = _inputs(arrays, spec, form, contents, k_rope)
        return cls(form, grid, (0, 1), locate, inputs, scalars_of(arrays, steps))

    @property
    def queries(self) -> int:
        """Their number with padding."""
        return self.inputs["q"].array.shape[2]

    @property
    def keys(self) -> int:
        return self.inputs["k"].array.shape[2]

    def launch(
        self,
        name: str,
        body: Callable[..., None],
        more: Operands,
        results: Mapping[str, Result],
        scratch: Mapping[str, tuple[int, int]],
        temporaries: int,
    ) -> tuple[Array, ...]:
        """Runs `body(refs, scalars, place, entry)` on the grid."""
        inputs, axes, known = self.inputs | more, len(self.grid), self.scalars
        names = (*inputs, *results, *scratch)

        def spec(block: tuple[int | None, ...], at: Callable[[Place], tuple[Any, ...]]) -> Any:
            def where(*given: Any) -> tuple[Any, ...]:
                return at(self.locate(known.by_name(given[axes:]), *given[:axes])[0])

            return pl.BlockSpec(block, where)

        def kernel(*refs: Any) -> None:
            scalars = known.by_name(refs)
            place, entry = self.locate(scalars, *(pl.program_id(axis) for axis in range(axes)))
            others = dict(zip(names, refs[len(known.arrays) :], strict=True))
            body(types.SimpleNamespace(**others), scalars, place, entry)

        launch = TpuLaunch(
            kernel=kernel,
            name=f"attention.{name}",
            grid=self.grid,
            in_specs=[spec(x.block, x.at) for x in inputs.values()],
            out_specs=[spec(x.block, x.at) for x in results.values()],
            outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()],
            scratch=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
            scalars=len(known.arrays),
            parallel=self.parallel,
            temporaries=temporaries,
        )
        return run(launch, [*known.arrays, *(x.array for x in inputs.values())])


def _inputs(
    arrays: AttentionArrays, spec: AttentionSpec, form: Form, contents: Array | None, k_rope: Array | None
) -> Operands:
    found = of_call(arrays, form, k_rope) | _over_scores(arrays, spec, form)
    if contents is not None:
        found["bits"] = of_contents(contents)
    if form.blocks is not None:
        assert arrays.blocks is not None
        found["map"] = of_map(arrays.blocks, form.blocks, form, arrays.q.shape[1], arrays.k.shape[1])
    return found


def _over_scores(arrays: AttentionArrays, spec: AttentionSpec, form: Form) -> Operands:
    batch, found = arrays.q.shape[0], {}
    if arrays.bias is not None:
        found["bias"] = over_scores(arrays.bias, spec.bias_run, batch, form)
    if arrays.mask is not None:
        found["mask"] = over_scores(arrays.mask.astype(jnp.int8), spec.mask_run, batch, form)
    return found


def _of_rows(rows: Rows, form: Form) -> Operands:
    do = by_head(rows.do, form.block_q)
    cotangent = Operand(do, (None, None, form.block_q, do.shape[3]), _query_tile)
    return {"do": cotangent} | of_queries({"lse": rows.lse, "delta": rows.delta}, form)


def _row_result(batch: int, heads: int, length: int, form: Form) -> Result:
    at = lambda p: (p.batch, p.head, 0, p.q_tile)
    return Result((batch, heads, 1, length), jnp.float32, (None, None, 1, form.block_q), at)


def _query_tile(place: Place) -> tuple[Any, ...]:
    return place.batch, place.head, place.q_tile, 0
