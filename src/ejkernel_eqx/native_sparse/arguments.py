"""Checks what a user passes to native sparse attention and resolves it to `NativeArrays`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from .._values import check_between, FAR
from ..core.arguments import array, fitting
from ..parallel.mesh import gathered
from ..sequences.packing import read_count, read_ids
from ..sequences.rows import read_packing
from ..sequences.tokens import masked
from . import blocks
from .spec import NativeArrays, NativeSpec


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an operation, checked."""

    block_size: int
    num_blocks: int
    sliding_window: int
    compression_size: int
    compression_stride: int
    softmax_scale: float | None

    def __post_init__(self):
        for field in dataclasses.fields(self)[:-1]:
            read_count(field.name, getattr(self, field.name), 1)
        stride = self.compression_stride
        for name in ("block_size", "compression_size"):
            if getattr(self, name) % stride:
                raise ValueError(
                    f"{name}: expected a multiple of compression_stride={stride}, received {getattr(self, name)}; compressed keys are whole strides."
                )
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            raise ValueError(
                f"softmax_scale: expected a finite number or None, received {self.softmax_scale!r}."
            )

    def spec(self, dim: int, **more: Any) -> NativeSpec:
        """The static half of a call with key dim `dim`."""
        *sizes, scale = dataclasses.astuple(self)
        return NativeSpec(dim**-0.5 if scale is None else float(scale), *sizes, **more)


def resolve(
    options: Options, given: Any, compressed: Any, block_indices: Any, packing: Any, q_offset: Any
) -> tuple[NativeArrays, NativeSpec]:
    """`given` are `q`, `k`, `v` and `gates`, `compressed` keys and values, and `packing` `cu_seqlens`, `segment_ids` and `max_segments`."""
    q, k, v, gates = given
    q, k, v = array("q", q, "T H D"), array("k", k, "S K D"), array("v", v, "S K V")
    lead, (length, heads, dim) = q.shape[:-3], q.shape[-3:]
    k = fitting("k", k, (*lead, None, None, dim), "S K D")
    keys, kv_heads = k.shape[-3:-1]
    v = fitting("v", v, (*lead, keys, kv_heads, None), "S K V")
    _check_dtypes("q", q.dtype, "cast them to the same dtype", k=k, v=v)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"k: expected a number of heads that divides the {heads} heads of q, received {kv_heads}."
        )
    gates = fitting("gates", gates, (*lead, length, heads, 3), "T H 3")
    # Blocks and compressed keys consist of tokens side by side.
    q, k, v, gates, block_indices = (_gathered(x, -3) for x in (q, k, v, gates, block_indices))
    packing = (packing[0], _gathered(packing[1], -1), packing[2])
    sizes = (options.compression_size, options.compression_stride)
    tables, begin = _tables(options, lead, length, keys, packing, q_offset)
    if packing[1] is not None:
        # Padding between sequences may hold NaN, in tiles that kernels multiply by weights of 0.
        k, v = (masked(x, tables["position"] >= 0) for x in (k, v))
    compressed_k, compressed_v = _compressed(compressed, k, v, sizes, begin)
    offset = keys - length if q_offset is None else q_offset
    spec = options.spec(dim, offset=0 if "position" in tables else int(offset))
    arrays = NativeArrays(q, k, v, compressed_k, compressed_v, gates, **tables)
    if block_indices is not None:
        indices = _indices(block_indices, (*lead, length, kv_heads), arrays, spec)
        spec = dataclasses.replace(spec, given=True, count=indices.shape[-1])
        arrays = arrays._replace(indices=indices)
    return arrays, spec


def _check_dtypes(of: str, dtype: Any, remedy: str, **arrays: Array) -> None:
    for name, x in arrays.items():
        if x.dtype != dtype:
            raise ValueError(f"{name}: expected the dtype of {of}, {dtype}, received {x.dtype}; {remedy}.")


def _gathered(x: Any, axis: int) -> Any:
    """An argument with all of its tokens on every device."""
    return gathered(x, axis) if isinstance(x, Array) and x.ndim >= -axis else x


def _tables(
    options: Options, lead: tuple[int, ...], length: int, keys: int, packing: Any, q_offset: Any
) -> tuple[dict[str, Array], Array | None]:
    """The integer arrays of the call, and the first token of each compressed key; nothing if positions are static."""
    cu_seqlens, segment_ids, most = packing
    if most is not None:
        read_count("max_segments", most, 1)
        if segment_ids is None:
            raise ValueError(f"max_segments: expected None without segment_ids, received {most}.")
    if cu_seqlens is not None or segment_ids is not None:
        name = "segment_ids" if cu_seqlens is None else "cu_seqlens"
        if q_offset is not None:
            raise ValueError(
                f"q_offset: expected None with {name}, received both; positions are those in the packed sequences."
            )
        if keys != length:
            raise ValueError(f"k: expected as many tokens as q with {name}, {length}, received {keys}.")
        sizes = options.block_size, options.compression_size, options.compression_stride
        offsets = read_packing(cu_seqlens, segment_ids, lead, length, False).offsets
        if offsets is None:
            ids = jnp.broadcast_to(read_ids(segment_ids), (*lead, length))
            tables = blocks.of_ids(ids, min(most or length, length), *sizes)
        else:
            tables = blocks.of_offsets(offsets, length, *sizes)
        tables = tables._asdict()
        begin = tables.pop("compressed_begin")
        return tables, begin
    static = q_offset is None or (isinstance(q_offset, int | np.integer) and q_offset in (0, keys - length))
    if static:
        return {}, None
    offset = jnp.asarray(q_offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(f"q_offset: expected ints, received dtype {offset.dtype}.")
    remedy = "query positions count from the first key"
    offset = check_between("q_offset", offset.astype(jnp.int32), q_offset, -FAR, FAR, remedy)
    try:
        offset = jnp.broadcast_to(offset, lead)
    except ValueError:
        raise ValueError(
            f"q_offset: expected an int or a shape that broadcasts to {lead}, received {offset.shape}."
        ) from None
    offset = offset[..., None]
    position = offset + like(jnp.arange(length, dtype=jnp.int32), offset)
    return {"position": position}, None


def _compressed(
    given: tuple[Any, Any], k: Array, v: Array, sizes: tuple[int, int], begin: Array | None
) -> tuple[Array, Array]:
    """Compressed keys and values: those given, else means."""
    if (given[0] is None) != (given[1] is None):
        raise ValueError("compressed_k, compressed_v: expected both or neither, received one of them.")
    if given[0] is None:
        return blocks.means(k, *sizes, begin), blocks.means(v, *sizes, begin)
    count = None if begin is None else begin.shape[-1]
    shape = (*k.shape[:-3], count, *k.shape[-2:])
    compressed_k = fitting("compressed_k", given[0], shape, "C K D")
    shape = (*v.shape[:-3], compressed_k.shape[-3], *v.shape[-2:])
    compressed_v = fitting("compressed_v", given[1], shape, "C K V")
    _check_dtypes("k", k.dtype, "cast it first", compressed_k=compressed_k, compressed_v=compressed_v)
    for name, x in (("compressed_k", compressed_k), ("compressed_v", compressed_v)):
        if x.shape[-3] == 0:
            raise ValueError(
                f"{name}: expected at least one compressed key, received {x.shape}; one that no query sees may hold anything."
            )
    return compressed_k, compressed_v


def _indices(given: Any, shape: tuple[int, ...], arrays: NativeArrays, spec: NativeSpec) -> Array:
    """Blocks numbered over the row; -1 also for those that begin after the query."""
    indices = read_indices(given, shape)
    place = (
        jnp.arange(shape[-2], dtype=jnp.int32) + spec.offset if arrays.position is None else arrays.position
    )
    place = place if arrays.first is None else place - arrays.first
    later = indices * spec.block > like(place[..., None, None], indices)
    indices = jnp.where(later, -1, indices)
    if arrays.base is None:
        return indices
    return jnp.where(indices < 0, -1, indices + arrays.base[..., None, None])


def read_indices(given: Any, shape: tuple[int, ...]) -> Array:
    """Given blocks; -1 for negative numbers, and of equal ones for all but the first, as a block counts once."""
    indices = jnp.asarray(given)
    are_ints = jnp.issubdtype(indices.dtype, jnp.integer)
    if indices.shape[:-1] != shape or indices.shape[-1] == 0 or not are_ints:
        raise ValueError(
            f"block_indices: expected ints [..., T, K, n] with leading axes {shape}, received {indices.dtype} {indices.shape}; "
            "each key head of each query has its own, -1 for none."
        )
    indices = jax.lax.stop_gradient(indices.astype(jnp.int32))
    earlier = jnp.asarray(np.tri(indices.shape[-1], k=-1, dtype=bool))
    again = ((indices[..., :, None] == indices[..., None, :]) & like(earlier, indices[..., None])).any(-1)
    return jnp.where(again | (indices < 0), -1, indices)
