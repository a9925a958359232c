"""Each operation as its contract states it, token by token, gates included; written apart from the package.

A formula takes one row, `[T, heads, ...]`, in float64, its arguments by the names of the call, `ids [T]` that say which tokens go together
(negative: padding), and the state that enters the first of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def recurrence(
    q,
    k,
    v,
    ids,
    state,
    *,
    decay: Any = None,
    beta: Any = None,
    scale: Any = None,
    delta=False,
    ab: Any = None,
    bonus: Any = None,
    heads,
):
    """`out [T, R, V]` and the last state. `decay` has the shape `[T, heads, D or 1, V or 1]`. `k`, `v` and `beta` may have an axis of writes
    after the tokens."""
    out_heads = max(heads, q.shape[1])
    beta = jnp.ones(k.shape[:-1])[..., :1] if beta is None else beta
    if k.ndim == 3:
        k, v, beta = k[:, None], v[:, None], beta[:, None]
    q, (k, v, beta) = grouped(q, out_heads), (grouped(x, heads, 2) for x in (k, v, beta))
    decay = jnp.ones((1, 1, 1, 1)) if decay is None else grouped(decay, heads)
    decay = jnp.broadcast_to(decay, (len(ids), *decay.shape[1:]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ab = None if ab is None else tuple(grouped(x, heads) for x in ab)
    spread = lambda x: jnp.repeat(x, out_heads // heads, axis=0)
    bonus = None if bonus is None else grouped(bonus[None], out_heads)[0]

    def token(carry, x):
        state, latest = carry
        q, k, v, decay, beta, ab, ident = x
        real = ident >= 0
        carried = jnp.where(real & (latest >= 0) & (ident != latest), 0.0, state)
        new = carried * decay
        for key, value, strength in zip(k, v, beta, strict=True):
            written = value - (new * key[:, :, None]).sum(1) if delta else value
            new = new + strength[:, None, None] * key[:, :, None] * written[:, None, :]
        if ab is not None:
            new = new + ab[1][:, :, None] * (carried * ab[0][:, :, None]).sum(1)[:, None, :]
        state = jnp.where(real, new, state)
        read = spread(state)
        if bonus is not None:
            read = spread(carried) + bonus[:, :, None] * spread(k[0, :, :, None] * v[0, :, None, :])
        out = jnp.where(real, scale * (read * q[:, :, None]).sum(1), 0.0)
        return (state, jnp.where(real, ident, latest)), out

    (state, _), out = jax.lax.scan(token, (state, jnp.int32(-1)), (q, k, v, decay, beta, ab, ids))
    return out, state


def grouped(x, heads, axis=1):
    """Head `h` reads `h // (heads / n)`."""
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


def linear(scale=None, normalize=False):
    def formula(ids, state, q, k, v, g=None, gk=None, gv=None, g_gamma=None):
        if normalize:
            return normalized(ids, state, q, k, v)
        decay = None
        if g_gamma is not None:
            decay = jnp.exp(g_gamma)[None, :, None, None]
        if g is not None:
            decay = jnp.exp(g)[:, :, None, None]
        if gk is not None:
            of_keys = jnp.exp(gk)[..., None]
            many = max(of_keys.shape[1], 1 if decay is None else decay.shape[1])
            decay = grouped(of_keys, many) * (1.0 if decay is None else grouped(decay, many))
        if gv is not None:
            decay = jnp.exp(gv)[:, :, None, :]
        heads = state.shape[0]
        return recurrence(q, k, v, ids, state, decay=decay, scale=scale, heads=heads)

    def normalized(ids, state, q, k, v):
        scaling = q.shape[-1] ** -0.5 if scale is None else scale
        out, values = recurrence(q, k, v, ids, state[0], scale=scaling, heads=state[0].shape[0])
        heads = state[1].shape[0]
        ones = jnp.ones((*k.shape[:2], 1))
        weight, weights = recurrence(q, k, ones, ids, state[1][..., None], scale=scaling, heads=heads)
        real = (ids >= 0)[:, None, None]
        out = out / jnp.where(real, grouped(weight, out.shape[1]) + 1e-10, 1.0)
        return out, (values, weights[..., 0])

    return formula


def gated_linear(ids, state, q, k, v, g, bonus=None, scale=None):
    decay = jnp.exp(g)[..., None]
    return recurrence(q, k, v, ids, state, decay=decay, scale=scale, bonus=bonus, heads=state.shape[0])


def dplr(ids, state, q, k, v, a, b, g, scale: Any = None):
    decay = jnp.exp(g)[..., None]
    return recurrence(q, k, v, ids, state, decay=decay, ab=(a, b), scale=scale, heads=state.shape[0])


def rwkv7(ids, state, r, w, k, v, kappa, eta):
    g = -jnp.exp(-0.5) / (1 + jnp.exp(-w))
    return dplr(ids, state, r, k, v, -kappa, kappa * eta, g, scale=1.0)


def lightning(rule=None, layer=0, layers=1, scale=None):
    def formula(ids, state, q, k, v, slopes: Any = None):
        heads = max(x.shape[1] for x in (q, k, v))
        h = jnp.arange(heads, dtype=jnp.float64)
        if rule == "minimax":
            slopes = 2 ** (-8 * (h + 1) / heads) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        if rule == "fla":
            slopes = 8 / heads * (1 - layer / layers) * h
        return linear(scale)(ids, state, q, k, v, g_gamma=-slopes)

    return formula


def delta(
    use_qk_l2norm=False, gate="log", lower_bound: Any = None, beta_sigmoid=False, allow_neg_eigval=False
):
    """All delta rules: `g` is per channel, per head, or not there; and products of them."""

    def formula(ids, state, q, k, v, g: Any = None, beta: Any = None, A_log: Any = None, dt_bias: Any = None):
        if use_qk_l2norm:
            q, k = (x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        if beta_sigmoid:
            beta = 1 / (1 + jnp.exp(-beta))
        if allow_neg_eigval:
            beta = 2 * beta
        decay = None
        if g is not None:
            rate: Any = None if A_log is None else jnp.exp(A_log).reshape(1, -1, *(1,) * (g.ndim - 2))
            raw = g if dt_bias is None else g + dt_bias[None]
            if gate == "softplus":
                g = -rate * jnp.log(1 + jnp.exp(raw))
            if gate == "bounded":
                g = lower_bound / (1 + jnp.exp(-rate * raw))
            decay = jnp.exp(g)[..., None] if g.ndim == 3 else jnp.exp(g)[..., None, None]
        heads = state.shape[0]
        return recurrence(q, k, v, ids, state, decay=decay, beta=beta, delta=True, heads=heads)

    return formula


def state_space(dt_softplus=False, dt_limit=None, norm=None, norm_eps=1e-5):
    def formula(ids, state, x, dt, A, B, C, D: Any = None, z: Any = None, dt_bias=None, norm_weight=None):
        dt = dt if dt_bias is None else dt + dt_bias[None]
        dt = jnp.log(1 + jnp.exp(dt)) if dt_softplus else dt
        if dt_limit is not None:
            dt = jnp.where(
                (dt >= dt_limit[0]) & (dt <= dt_limit[1]), dt, jnp.clip(jax.lax.stop_gradient(dt), *dt_limit)
            )
        heads, groups = x.shape[1], B.shape[1]
        decay, before = jnp.exp(dt * A[None])[..., None, None], state.swapaxes(1, 2)
        y, state = recurrence(C, B, x, ids, before, decay=decay, beta=dt, scale=1.0, heads=heads)
        if D is not None:
            y = y + (D[:, None] if D.ndim == 1 else D)[None] * x
        y = y if z is None else y * (z / (1 + jnp.exp(-z)))
        if norm is not None:
            parts = y.reshape(len(y), groups if norm == "group" else 1, -1)
            parts = parts / jnp.sqrt((parts**2).mean(-1, keepdims=True) + norm_eps)
            y = parts.reshape(y.shape)
        y = y if norm_weight is None else y * norm_weight[None]
        return jnp.where((ids >= 0)[:, None, None], y, 0.0), state.swapaxes(1, 2)

    return formula


def trapezoid(interleaved=True):
    """Mamba-3: `h` and what the rule takes of the token before, which a state has apart."""

    def formula(
        ids,
        state,
        x,
        dt,
        g,
        B,
        C,
        trap,
        angles,
        B_bias: Any = None,
        C_bias: Any = None,
        D: Any = None,
        mimo_x: Any = None,
    ):
        heads, channels = x.shape[1:]
        pairs = angles.shape[-1]
        ranks, size = B.shape[1], B.shape[-1]
        many = lambda y, axis: jnp.repeat(y, heads // y.shape[axis], axis=axis).astype(jnp.float64)
        B, C, angles = many(B, 2), many(C, 2), many(angles, 1)
        B = B if B_bias is None else B + B_bias.swapaxes(0, 1)[None]
        C = C if C_bias is None else C + C_bias.swapaxes(0, 1)[None]
        factors = jnp.ones((heads, 1, channels)) if mimo_x is None else mimo_x
        first, second = np.arange(pairs) * 2, np.arange(pairs) * 2 + 1
        if not interleaved:
            first, second = np.arange(pairs), np.arange(pairs) + size // 2

        def turned(y, angle):  # [M, H, N]
            a, b, cos, sin = y[..., first], y[..., second], jnp.cos(angle)[None], jnp.sin(angle)[None]
            return y.at[..., first].set(a * cos - b * sin).at[..., second].set(a * sin + b * cos)

        def write(weight, x, k):
            return jnp.einsum("h,hmp,mhn->hpn", weight, x[:, None] * factors, k)

        def split(last):
            k = last[:, : ranks * size].reshape(heads, ranks, size).swapaxes(0, 1)
            rest = last[:, ranks * size :]
            return k, rest[:, :channels], rest[:, channels], rest[:, channels + 1 :]

        def token(carry, now):
            *old, latest = carry
            x, dt, g, B, C, trap, omega, ident = now
            fresh = (ident >= 0) & (latest >= 0) & (ident != latest)
            h, k, before, _, angle = (jnp.where(fresh, 0.0, y) for y in old)
            angle = angle + dt[:, None] * omega
            angle = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
            B, C = turned(B, angle), turned(C, angle)
            h = jnp.exp(g)[:, None, None] * (h + write((1 - trap) * dt, before, k)) + write(trap * dt, x, B)
            y = jnp.einsum("hpn,mhn->mhp", h, C)
            if D is not None:
                y = y + (D[:, None, None] * x[:, None] * factors).swapaxes(0, 1)
            new = h, B, x, trap * dt, angle
            kept = [jnp.where(ident >= 0, y, z) for y, z in zip(new, old)]
            return (*kept, jnp.where(ident >= 0, ident, latest)), jnp.where(ident >= 0, y, 0.0)

        S, (k, before, weight, angle) = state[0], split(state[1])
        start = S + write(weight, before, k), k, before, weight, angle, jnp.int32(-1)
        (h, k, before, weight, angle, _), y = jax.lax.scan(token, start, (x, dt, g, B, C, trap, angles, ids))
        k_flat = k.swapaxes(0, 1).reshape(heads, ranks * size)
        last = jnp.concatenate([k_flat, before, weight[:, None], angle], -1)
        return y, (h - write(weight, before, k), last)

    return formula
