"""Attention layers of published models, written down from their formulas, dense and slow, in whatever
precision they are given. Nothing here uses the package. `w` maps the published parameter names to arrays; `x`
is `[T, E]`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(dim, theta):
    return np.array([1.0 / theta ** (2 * i / dim) for i in range(dim // 2)])


def llama3_scaled(dim, theta, factor, low, high, original):
    """`apply_scaling` of Meta's llama-models."""
    scaled = []
    for frequency in inverse_frequencies(dim, theta):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(scaled)


def yarn_scaled(dim, theta, factor, original, fast, slow, truncate):
    """The paper's "NTK by parts", as in `transformers` (`_compute_yarn_parameters`) and in `gpt_oss`."""
    low = dim * math.log(original / (fast * 2 * math.pi)) / (2 * math.log(theta))
    high = dim * math.log(original / (slow * 2 * math.pi)) / (2 * math.log(theta))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    scaled = []
    for i, frequency in enumerate(inverse_frequencies(dim, theta)):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(interpolated * frequency / factor + (1 - interpolated) * frequency)
    return np.array(scaled)


def _turns(frequencies, positions):
    return jnp.asarray(np.exp(1j * np.outer(positions, frequencies)))[:, None, :]


def rotate_halves(x, frequencies, positions, magnitude=1.0):
    """Complex numbers made of the two halves of the features, turned. `x` is `[T, H, R]`."""
    half = x.shape[-1] // 2
    z = jax.lax.complex(x[..., :half], x[..., half:])
    z = float(magnitude) * z * _turns(frequencies, positions)
    return jnp.concatenate([z.real, z.imag], axis=-1)


def rotate_neighbours(x, frequencies, positions):
    z = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * _turns(frequencies, positions)
    return jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def rms_norm(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight[None, None]


def heads(w, name, x, count):
    y = jnp.einsum("te,oe->to", x, w[f"{name}.weight"])
    if f"{name}.bias" in w:
        y = y + w[f"{name}.bias"][None]
    return y.reshape(len(x), count, -1)


def attend(q, k, v, scale, *, window=None, cap=None, sinks=None):
    """Dense and causal. Query head `h` reads key head `h // (H / K)`; a sink is one more column without a
    value."""
    count, num_heads, _ = q.shape
    reads = np.array([h * k.shape[1] // num_heads for h in range(num_heads)])
    score = scale * jnp.einsum("ihd,jhd->hij", q, k[:, reads])
    if cap is not None:
        score = cap * jnp.tanh(score / cap)
    hidden = np.triu(np.ones((count, count), bool), 1)
    if window is not None:
        hidden |= np.tril(np.ones((count, count), bool), -window)
    score = jnp.where(hidden, -jnp.inf, score)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (num_heads, count, 1))
        score = jnp.concatenate([score, column], axis=-1)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))
    weight = (weight / jnp.sum(weight, axis=-1, keepdims=True))[..., :count]
    return jnp.einsum("hij,jhd->ihd", weight, v[:, reads]).reshape(count, -1)


def output(w, x):
    y = jnp.einsum("to,eo->te", x, w["o_proj.weight"])
    return y + w["o_proj.bias"][None] if "o_proj.bias" in w else y


def qkv(w, x, num_heads, num_kv_heads):
    counts = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    return tuple(heads(w, name, x, count) for name, count in counts.items())


def turned(frequencies, *parts, magnitude=1.0):
    return tuple(rotate_halves(part, frequencies, np.arange(len(part)), magnitude) for part in parts)


def llama3(w, x, *, num_heads, num_kv_heads, theta=500000.0, scaling=(8.0, 1.0, 4.0, 8192)):
    q, k, v = qkv(w, x, num_heads, num_kv_heads)
    q, k = turned(llama3_scaled(q.shape[-1], theta, *scaling), q, k)
    return output(w, attend(q, k, v, q.shape[-1] ** -0.5))


def mistral(w, x, *, num_heads, num_kv_heads, window, theta=10000.0):
    q, k, v = qkv(w, x, num_heads, num_kv_heads)
    q, k = turned(inverse_frequencies(q.shape[-1], theta), q, k)
    return output(w, attend(q, k, v, q.shape[-1] ** -0.5, window=window))


def gemma2(w, x, *, num_heads, num_kv_heads, query_pre_attn_scalar, window, cap=50.0, theta=10000.0):
    """`window` is `None` in every second layer."""
    q, k, v = qkv(w, x, num_heads, num_kv_heads)
    q, k = turned(inverse_frequencies(q.shape[-1], theta), q, k)
    return output(w, attend(q, k, v, query_pre_attn_scalar**-0.5, window=window, cap=cap))


def qwen3(w, x, *, num_heads, num_kv_heads, theta=1000000.0, eps=1e-6):
    q, k, v = qkv(w, x, num_heads, num_kv_heads)
    q, k = rms_norm(q, w["q_norm.weight"], eps), rms_norm(k, w["k_norm.weight"], eps)
    q, k = turned(inverse_frequencies(q.shape[-1], theta), q, k)
    return output(w, attend(q, k, v, q.shape[-1] ** -0.5))


def olmo2(w, x, *, num_heads, num_kv_heads, theta=10000.0, eps=1e-6):
    """The norms are over all heads' features together."""
    q, k = (heads(w, name, x, 1) for name in ("q_proj", "k_proj"))
    q, k = rms_norm(q, w["q_norm.weight"], eps), rms_norm(k, w["k_norm.weight"], eps)
    q, k = q.reshape(len(x), num_heads, -1), k.reshape(len(x), num_kv_heads, -1)
    q, k = turned(inverse_frequencies(q.shape[-1], theta), q, k)
    return output(w, attend(q, k, heads(w, "v_proj", x, num_kv_heads), q.shape[-1] ** -0.5))


def gpt_oss(w, x, *, num_heads, num_kv_heads, window, theta=150000.0, factor=32.0, original=4096):
    """`window` is 128 in every second layer, `None` in the others."""
    q, k, v = qkv(w, x, num_heads, num_kv_heads)
    frequencies = yarn_scaled(q.shape[-1], theta, factor, original, 32.0, 1.0, truncate=False)
    q, k = turned(frequencies, q, k, magnitude=0.1 * math.log(factor) + 1.0)
    return output(w, attend(q, k, v, q.shape[-1] ** -0.5, window=window, sinks=w["sinks"]))


def qwen3_next(w, x, *, num_heads, num_kv_heads, rotary_dim, theta=10000000.0, eps=1e-6):
    """Gated attention: each head of `q_proj` is a query and then its gate; a quarter of the features is
    turned. The norms' published weights are added to one."""
    mixed = heads(w, "q_proj", x, num_heads)
    half = mixed.shape[-1] // 2
    q, gate = mixed[..., :half], mixed[..., half:]
    k, v = heads(w, "k_proj", x, num_kv_heads), heads(w, "v_proj", x, num_kv_heads)
    q, k = rms_norm(q, 1.0 + w["q_norm.weight"], eps), rms_norm(k, 1.0 + w["k_norm.weight"], eps)
    frequencies, p = inverse_frequencies(rotary_dim, theta), np.arange(len(x))

    def turn(a):
        return jnp.concatenate(
            [rotate_halves(a[..., :rotary_dim], frequencies, p), a[..., rotary_dim:]], axis=-1
        )

    out = attend(turn(q), turn(k), v, half**-0.5)
    return output(w, out / (1 + jnp.exp(-gate.reshape(len(x), -1))))
