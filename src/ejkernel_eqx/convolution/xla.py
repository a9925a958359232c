"""The convolution in plain XLA: a sum of shifted inputs, which the compiler fuses."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._shapes import least
from .._take import take_along
from ..core.arguments import accumulator
from ..core.platforms import Plain
from ..parallel.mesh import spec_of
from ..sequences.tokens import over
from .spec import as_called, channels_as, ConvArrays, ConvSpec, merged, Places, split_heads


def apply(arrays: ConvArrays, spec: ConvSpec) -> dict[str, Array]:
    """`out [*, T, C]` and `final_state [*, N, K, C]` in the dtype of `x`."""
    arrays = merged(arrays, spec)
    x, wide = arrays.x, accumulator(arrays.x.dtype)
    weight = arrays.weight.astype(wide)
    bias = None if arrays.bias is None else arrays.bias.astype(wide)
    places = arrays.places
    if places is None:
        before = entering(arrays)[..., 0, :, :]
        out = valid(jnp.concatenate([before, x], -2), weight, bias, spec)
    else:
        out = _packed(arrays, places, weight, bias, spec)
    return as_called({"out": out.astype(x.dtype), "final_state": final_state(arrays)}, spec)


def valid(x: Array, weight: Array, bias: Array | None, spec: ConvSpec) -> Array:
    """`[*, T, C]` from `[*, T + K, C]`, in the dtype of the weight `[C, W]`."""
    return _activated(_shifted_sum(x.astype(weight.dtype), weight), bias, spec)


def _shifted_sum(x: Array, weight: Array) -> Array:
    width = weight.shape[-1]
    length = x.shape[-2] - width + 1
    return sum(like(weight[:, w], x) * x[..., w : w + length, :] for w in range(width))  # pyright: ignore[reportReturnType]


def _activated(y: Array, bias: Array | None, spec: ConvSpec) -> Array:
    y = y if bias is None else y + like(bias, y)
    y = jax.nn.silu(y) if spec.activation == "silu" else y
    if spec.norm_size is None:
        return y
    heads = split_heads(y, y.ndim - 1, spec.norm_size)
    normal = heads * lax.rsqrt(jnp.sum(heads * heads, -1, keepdims=True) + 1e-6)
    return channels_as(normal.reshape(y.shape), spec_of(y)[-1])


def _packed(arrays: ConvArrays, places: Places, weight: Array, bias: Array | None, spec: ConvSpec) -> Array:
    """Makes real tokens contiguous, and moves their results back."""
    width, length = weight.shape[-1], arrays.x.shape[-2]
    real = (places.first >= 0)[..., None]
    x = jnp.where(real, take_rows(arrays.x, places.order), 0).astype(weight.dtype)
    place = jnp.arange(length, dtype=jnp.int32)
    y = like(weight[:, -1], x) * x
    for back in range(1, least(width, length)):
        moved = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(back, 0), (0, 0)])[..., :length, :]
        visible = (like(place - back, places.first) >= places.first)[..., None]
        y += like(weight[:, -1 - back], x) * jnp.where(visible, moved, 0)
    if arrays.initial_state is not None and width > 1:
        # The contribution of the states to the first tokens of their sequences.
        state = arrays.initial_state.astype(weight.dtype)
        added = _shifted_sum(jnp.concatenate([state, jnp.zeros_like(state)], -2)[..., :-1, :], weight[:, :-1])
        at = places.spans[..., :1] + like(jnp.arange(width - 1, dtype=jnp.int32), places.spans)
        at = jnp.where(at < places.spans[..., 1:2], at, length)  # past the end: dropped
        y = _add_rows(
            y, at.reshape(*at.shape[:-2], -1), added.reshape(*added.shape[:-3], -1, added.shape[-1])
        )
    y = jnp.where(real, _activated(y, bias, spec), 0)
    return take_rows(y, jnp.argsort(places.order, -1))


def entering(arrays: ConvArrays) -> Array:
    """The initial states, `[*, N, K, C]`."""
    if arrays.initial_state is not None:
        return arrays.initial_state
    x, held = arrays.x, arrays.weight.shape[-1] - 1
    count = 1 if arrays.spans is None else arrays.spans.shape[-2]
    return jnp.zeros((*x.shape[:-2], count, held, x.shape[-1]), x.dtype)


def final_state(arrays: ConvArrays) -> Array:
    """The last inputs of each sequence, `[*, N, K, C]`, including those of its initial state if it is short."""
    held, length = arrays.weight.shape[-1] - 1, arrays.x.shape[-2]
    before, places = entering(arrays), arrays.places
    if places is None:
        whole = jnp.concatenate([before[..., 0, :, :], arrays.x], -2)
        return whole[..., length:, :][..., None, :, :]
    enter_first, enter_end, first, end = (places.spans[..., i : i + 1] for i in range(4))
    at = end - held + like(jnp.arange(held, dtype=jnp.int32), end)  # [*, N, K]
    flat = jnp.clip(at, 0, length - 1).reshape(*at.shape[:-2], -1)
    rows = take_rows(arrays.x, take_along(places.order, flat, -1)).reshape(before.shape)
    whole = (enter_first == first) & (enter_end == end)
    old = take_along(before, jnp.clip(at - first + held, 0, max(held - 1, 0))[..., None], -2)
    old = jnp.where(whole[..., None], old, 0)
    return jnp.where((at >= first)[..., None], rows, old)


def take_rows(x: Array, index: Array) -> Array:
    """`x [*, T, C]` at `index [*, M]`: `[*, M, C]`."""
    return take_along(x, index[..., None], -2)


def _add_rows(x: Array, index: Array, rows: Array) -> Array:
    add = lambda x, index, rows: x.at[index].add(rows, mode="drop")
    return over(x.ndim - 2, add)(x, index, rows)


platform = Plain(apply)
