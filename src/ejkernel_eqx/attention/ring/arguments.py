"""Checks a call whose tokens are split over a mesh axis, and resolves it: masks over the whole sequence, arrays as they are given."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from ...core import Named
from ...parallel import explicit_mesh
from ...parallel.layout import check_split, mesh_axes
from ...parallel.mesh import inside_manual_mesh, spec_of
from .. import arguments as attention
from ..arguments import MaskInputs, ScoreInputs, ScoreOptions
from ..masks.mask import Mask
from ..spec import AttentionArrays, AttentionSpec
from .schedule import Sizes
from .spec import CHUNKS, Method, Order, Reach, RingSpec


@dataclasses.dataclass(frozen=True)
class Split:
    """Says how tokens are split over devices; by an axis without a name they are not."""

    axis: str
    order: Order
    method: Method | None

    def __post_init__(self):
        if not isinstance(self.axis, str):
            raise ValueError(f"axis_name: expected the name of one mesh axis, received {self.axis!r}.")
        if self.order not in ("contiguous", "zigzag"):
            raise ValueError(f"order: expected 'contiguous' or 'zigzag', received {self.order!r}.")
        if self.method not in (None, "ring", "all_to_all"):
            raise ValueError(f"method: expected 'ring', 'all_to_all' or None, received {self.method!r}.")

    def over(self, arrays: Named) -> int:
        """By how much the tokens of these arrays are to be multiplied: the number of devices inside `shard_map`, where arrays are parts, else 1.
        Raises `ValueError` if a mesh cannot split them."""
        if not self.axis:
            return 1
        if inside_manual_mesh():
            mesh = jax.sharding.get_abstract_mesh()
            if self.axis not in mesh.manual_axes:
                raise ValueError(
                    f"axis_name: expected an axis that shard_map has made manual, {', '.join(map(repr, mesh.manual_axes))}, received {self.axis!r}; "
                    "add it to axis_names of shard_map."
                )
            devices = mesh.shape[self.axis]
        else:
            if explicit_mesh(arrays) is not None:
                self._check_types(arrays)
            mesh, devices = _any_mesh(arrays), 1
        if mesh is not None:
            for x in arrays.values():
                check_split(self.axis, x.shape[-3] * devices, mesh.shape, CHUNKS[self.order])
        return devices

    def times(self, x: Array, tokens: int) -> Array | None:
        """The places in the whole sequence of the tokens of an array with so many, int32 `[T]`, as far as the mesh is known; `None` if they are in
        temporal order."""
        devices = self.devices(x) if inside_manual_mesh() or self.order == "zigzag" else 1
        if devices == 1:
            return None
        own = tokens if inside_manual_mesh() else tokens // devices
        starts = np.asarray([Sizes(devices, own, own, self.order).starts(n, own) for n in range(devices)])
        every = starts[:, :, None] + np.arange(own // CHUNKS[self.order])
        places = jnp.asarray(every.reshape(devices, -1), jnp.int32)
        return places[lax.axis_index(self.axis)] if inside_manual_mesh() else places.reshape(-1)

    def devices(self, x: Array) -> int:
        """The number of devices that share the tokens of an array, as far as the mesh is known; one without an axis. Raises `ValueError` where
        several may, and only the mesh would tell in which order."""
        if not self.axis:
            return 1
        mesh = self.mesh(x)
        if mesh is None and jax.device_count() > 1 and self.order == "zigzag":
            raise ValueError(
                "positions: expected those of tokens in zigzag order, since the mesh is unknown here, received None; pass them, or make the call "
                "within jax.set_mesh(mesh)."
            )
        return 1 if mesh is None else dict(mesh.shape).get(self.axis, 1)

    def mesh(self, x: Array) -> Any:
        """The mesh that an array is on, as far as it is known; else `None`."""
        return jax.sharding.get_abstract_mesh() if inside_manual_mesh() else _any_mesh({"x": x})

    def _check_types(self, arrays: Named) -> None:
        for name, x in arrays.items():
            *others, tokens, heads, dim = (mesh_axes(entry) if entry else set() for entry in spec_of(x))
            if tokens - {self.axis}:
                raise ValueError(
                    f"{name}: expected tokens that are split over axis {self.axis!r} or not at all, received {spec_of(x)}; reshard them."
                )
            if self.axis in heads.union(dim, *others):
                raise ValueError(
                    f"{name}: expected axis {self.axis!r} to split the tokens, received {spec_of(x)}; reshard them."
                )


def _any_mesh(arrays: Named) -> Any:
    """An automatic mesh, as far as it is known: that of the arrays' types or of the context, or of concrete arrays."""
    types = [getattr(jax.typeof(x), "sharding", None) for x in arrays.values()]
    placed = [getattr(x, "sharding", None) for x in arrays.values() if not isinstance(x, Tracer)]
    typed, concrete = ([getattr(x, "mesh", None) for x in shardings] for shardings in (types, placed))
    meshes = *typed, jax.sharding.get_abstract_mesh(), *concrete
    return next((mesh for mesh in meshes if mesh is not None and mesh.axis_names), None)


def resolve(
    q: Any, k: Any, v: Any, split: Split, options: ScoreOptions, masking: MaskInputs, scoring: ScoreInputs
) -> tuple[AttentionArrays, RingSpec]:
    """The resolved call of these arrays: inside `shard_map` those of one device, else all."""
    qkv = q, k, v = attention.check_qkv(q, k, v)
    devices = split.over({"q": q, "k": k, "v": v})
    lead, queries, keys = q.shape[:-3], q.shape[-3], k.shape[-3]
    pairs, dense, rest = _by_token(masking, queries, keys)
    attention.check_axes("mask", dense, lead)
    whole = (*lead, queries * devices, *q.shape[-2:])
    lowered = attention.visible(rest, whole, keys * devices)
    if any(x is not None for x in (lowered.pattern, lowered.blocks, lowered.dense)):
        raise ValueError(
            "mask: expected a Mask of windows, chunks, prefixes, lengths, segments or packed sequences, or of one dense array, received one that "
            "needs lists of tiles or a mask of all scores; pass booleans [..., H, T, S]."
        )
    if len(pairs) > 1:
        raise ValueError(
            f"segment_ids: expected one pair of ids, received {len(pairs)}; number the segments that both tell apart."
        )
    lowered = lowered._replace(dense=dense, segments=pairs[0] if pairs else None)
    arrays, spec = attention.arranged(qkv, options, scoring, lowered, keys * devices)
    fields = vars(spec) | {
        "axis": split.axis,
        "order": split.order,
        "method": split.method,
        "reach": _reach(spec, arrays, masking, (keys - queries) * devices),
        "slopes": arrays.alibi_slopes is not None,
    }
    return arrays, RingSpec(**fields)


def _by_token(masking: MaskInputs, queries: int, keys: int) -> tuple[list[Any], Array | None, MaskInputs]:
    """The masks that are given token by token, which devices have parts of: pairs of segment ids and a dense mask. And all others."""
    pairs, dense, mask = [], None, masking.mask
    if isinstance(mask, Mask):
        pairs, dense = list(mask.segments), mask.dense
        mask = dataclasses.replace(mask, segments=(), dense=None)
    elif mask is not None:
        dense, mask = Mask.from_dense(mask).dense, None
    if (pair := attention.segments_of(masking, queries, keys)) is not None:
        pairs.append(pair)
    if masking.cu_seqlens is not None and masking.segment_ids is not None:
        raise ValueError(
            "segment_ids: expected None with cu_seqlens, received both; cu_seqlens already defines where sequences begin and end."
        )
    return pairs, dense, masking._replace(mask=mask, segment_ids=None, kv_segment_ids=None)


def _reach(spec: AttentionSpec, arrays: AttentionArrays, masking: MaskInputs, default: int) -> Reach:
    """The window that all visible keys are in, as far as it is known while tracing."""
    if arrays.rows is None:
        return spec.left, spec.right, spec.offset
    offset = default if masking.q_offset is None else masking.q_offset
    apart = masking.kv_cu_seqlens is not None or (masking.cu_seqlens is not None and default != 0)
    if isinstance(masking.mask, Mask) or apart or not isinstance(offset, int):
        return None, None, 0
    left, right = masking.own.window
    return left, 0 if masking.own.is_causal else right, offset
