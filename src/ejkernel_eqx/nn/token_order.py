"""Recurrent layers between others that take tokens in zigzag order: tokens go to the devices that have them in temporal order, and back."""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..attention.ring.arguments import Split
from ..parallel import explicit_mesh
from ..parallel.layout import check_split, mesh_axes
from ..parallel.mesh import inside_manual_mesh, spec_of
from ..sequences import reorder_sequence, restore_sequence


def is_zigzag(split: Split | None) -> TypeGuard[Split]:
    return split is not None and split.order == "zigzag"


def in_temporal_order(split: Split, layer: Any, x: Array, rows: dict[str, Any]) -> Array:
    """`layer(x, **rows)`, with tokens `x` `[..., T, E]` and rows `[..., T]` in zigzag order, for a layer that takes them in temporal order."""
    rows = {name: moved(split, jnp.asarray(row), -1) for name, row in rows.items()}
    return moved(split, layer(moved(split, x), **rows), back=True)


def moved(split: Split, x: Array, axis: int = -2, back: bool = False) -> Array:
    """An array whose axis of tokens is in zigzag order, in temporal order; or `back`. Each device sends its two chunks, and no others."""
    devices, axis = split.devices(x), axis % x.ndim
    if devices == 1:
        return x
    if inside_manual_mesh():
        return _sent(split.axis, x, axis, back)
    check_split(split.axis, x.shape[axis], {split.axis: devices}, 2)
    if explicit_mesh(x) is not None and split.axis not in mesh_axes(spec_of(x)[axis]):
        return (reorder_sequence if back else restore_sequence)(x, devices, axis=axis)
    spec, mesh = PartitionSpec(*(None,) * axis, split.axis), split.mesh(x)
    send = lambda x: _sent(split.axis, x, axis, back)
    return jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={split.axis})(x)


def _sent(name: str, x: Array, axis: int, back: bool) -> Array:
    """One device's tokens. Of `2 n` chunks, device `i` has `i` and `2 n - 1 - i` in zigzag order, `2 i` and `2 i + 1` in temporal order: an even
    and an odd one in both, and so in two permutations all chunks arrive."""
    devices, size = lax.axis_size(name), x.shape[axis] // 2
    is_odd = lax.axis_index(name) % 2
    of_device = [(n, 2 * devices - 1 - n)[:: -1 if n % 2 else 1] for n in range(devices)]  # even, odd
    part = lambda which: lax.dynamic_slice_in_dim(x, which * size, size, axis)
    chunks = (part(0), part(1)) if back else (part(is_odd), part(1 - is_odd))
    arrived = []
    for parity, chunk in enumerate(chunks):
        pairs = [(n, numbers[parity] // 2) for n, numbers in enumerate(of_device)]
        pairs = [(there, n) for n, there in pairs] if back else pairs
        arrived.append(lax.ppermute(chunk, name, pairs))
    even, odd = arrived
    if back:
        even, odd = jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)
    return lax.concatenate([even, odd], axis)
