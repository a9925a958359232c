"""Native sparse attention from three dense ones, differentiable by JAX: the oracle of every test."""

import jax
import jax.numpy as jnp
from jax import Array

from ..attention import reference as attention
from ..attention.spec import AttentionArrays, AttentionSpec
from . import branches, selection
from .spec import begins, NativeArrays, NativeSpec, of_sequence, positions


def attend(
    arrays: NativeArrays, spec: NativeSpec, there: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """The output `[B, T, H, V]`, in float64 for float64 inputs and in float32 otherwise, and the blocks that were chosen. `there` are those of the
    keys `[B, S]` and of the compressed keys `[B, C]` that exist; default all."""
    keys, compressed_keys = (None, None) if there is None else (x[:, None, None] for x in there)
    results, group = {}, arrays.q.shape[2] // arrays.k.shape[2]
    (call, own), (near, window) = branches.compressed(arrays, spec), branches.sliding(arrays, spec)
    call, near = call._replace(mask=compressed_keys), near._replace(mask=keys)
    *found, weights = attention.attend_with_weights(call, own)
    results["compressed_out"], results["compressed_lse"] = found
    indices = arrays.indices
    if indices is None:
        # Summed over the heads of a group, `[B, T, K, C]`.
        grouped = weights.reshape(weights.shape[0], -1, group, *weights.shape[2:]).sum(2)
        importance = jax.lax.stop_gradient(grouped).swapaxes(1, 2)
        indices = selection.choose(importance, arrays, spec)
    mask = jnp.repeat(visibility(arrays._replace(indices=indices), spec), group, 1)
    mask = mask if keys is None else mask & keys
    call = AttentionArrays(arrays.q, arrays.k, arrays.v, mask=mask)
    results["selected_out"], results["selected_lse"] = attention.attend(call, AttentionSpec(spec.scale))
    results["sliding_out"], results["sliding_lse"] = attention.attend(near, window)
    return branches.combine(arrays.gates, results, results["selected_out"].dtype), indices


def visibility(arrays: NativeArrays, spec: NativeSpec) -> Array:
    """Returns which keys the selected branch sees: bool `[B, K, T, S]`."""
    assert arrays.indices is not None
    batch, keys = arrays.k.shape[:2]
    place = jnp.arange(keys, dtype=jnp.int32)[None, None]
    last, first = positions(arrays, spec)[..., None], of_sequence(arrays.first)[..., None]
    seen = jnp.zeros((*arrays.indices.shape[:3], keys), bool)
    begin = jnp.broadcast_to(begins(arrays, spec), (batch, begins(arrays, spec).shape[1]))
    for n in range(arrays.indices.shape[-1]):
        index = arrays.indices[..., n]
        start = jnp.take_along_axis(begin[:, None], jnp.maximum(index, 0), 2)[..., None]
        key = place[:, :, None]
        seen |= (index[..., None] >= 0) & (start <= key) & (key < start + spec.block)
    return jnp.swapaxes(seen & ((first <= place) & (place <= last))[:, :, None], 1, 2)
