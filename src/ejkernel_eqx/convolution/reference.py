"""The convolution token by token, as in its equation, with the state of its sequence: the oracle of every test."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.arguments import accumulator
from ..sequences.tokens import over
from .spec import as_called, ConvArrays, ConvSpec, merged, Places


def convolve(arrays: ConvArrays, spec: ConvSpec) -> dict[str, Array]:
    """`out [*, T, C]` and `final_state [*, N, K, C]` in float32 (float64 for float64 inputs)."""
    arrays = merged(arrays, spec)
    weight = arrays.weight
    call = lambda x, initial, places: _row(x, initial, places, weight, arrays.bias, spec)
    out, final = over(arrays.x.ndim - 2, call)(arrays.x, arrays.initial_state, arrays.places)
    return as_called({"out": out, "final_state": final}, spec)


def _row(
    x: Array, initial: Array | None, places: Places | None, weight: Array, bias: Array | None, spec: ConvSpec
) -> tuple[Array, Array]:
    """One row without leading axes."""
    wide = accumulator(x.dtype)
    (length, channels), width = x.shape, weight.shape[-1]
    weight = weight.astype(wide).T  # [W, C]
    offset = jnp.zeros(channels, wide) if bias is None else bias.astype(wide)
    zeros = jnp.zeros((width - 1, channels), wide)
    if places is None:
        tokens = jnp.arange(length, dtype=jnp.int32)
        places = Places(
            tokens, 0 * tokens, 0 * tokens, 0 * tokens, jnp.array([[0, length, 0, length]], jnp.int32)
        )
    count = places.spans.shape[0]
    starts = jnp.zeros((count, *zeros.shape), wide) if initial is None else initial.astype(wide)

    def token(state: Array, at: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        x, place, first, enter = at
        entering = jnp.where(enter >= 0, starts[jnp.maximum(enter, 0)], zeros)
        state = jnp.where(place == first, entering, state)
        window = jnp.concatenate([state, x[None]])
        y = jnp.sum(weight * window, 0) + offset
        y = jax.nn.silu(y) if spec.activation == "silu" else y
        if spec.norm_size is not None:
            heads = y.reshape(-1, spec.norm_size)
            y = (heads / jnp.sqrt(jnp.sum(heads**2, -1, keepdims=True) + 1e-6)).reshape(channels)
        real = first >= 0
        # Padding leaves the state as it is, and its output is 0.
        return jnp.where(real, window[1:], state), (jnp.where(real, y, 0.0), window[1:])

    along = (x[places.order].astype(wide), jnp.arange(length, dtype=jnp.int32), places.first, places.enter)
    _, (sorted_out, states) = lax.scan(token, zeros, along)
    out = jnp.zeros((length, channels), wide).at[places.order].set(sorted_out)

    def final(n: Array) -> Array:
        enter_first, enter_end, first, end = places.spans[n]
        whole = (enter_first == first) & (enter_end == end)
        untouched = jnp.where(whole, starts[n], zeros)
        return jnp.where(end > first, states[jnp.maximum(end - 1, 0)], untouched) if length else untouched

    return out, jax.vmap(final)(jnp.arange(count, dtype=jnp.int32))
