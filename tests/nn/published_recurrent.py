"""Recurrent layers of published models, written down from their formulas, token by token, in NumPy and whatever precision
they are given. Nothing here uses the package. `w` maps the published parameter names to arrays of the published shapes;
`x` is `[T, E]`.
"""

import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def convolution(w, name, x, activation=silu):
    """`torch.nn.Conv1d` with a group for each channel, padded on the left, then an activation."""
    weight = w[f"{name}.weight"][:, 0]
    width = weight.shape[1]
    rows = []
    for t in range(len(x)):
        seen = [(x[t - i], weight[:, width - 1 - i]) for i in range(min(t + 1, width))]
        rows.append(sum(a * b for a, b in seen) + w.get(f"{name}.bias", 0.0))
    return activation(np.stack(rows))


def short_convolution(w, x):
    """LFM2's layer; the state is the last inputs of the convolution."""
    B, C, x = np.split(linear(w, "in_proj", x), 3, axis=-1)
    y = linear(w, "out_proj", C * convolution(w, "conv", B * x, lambda y: y))
    return y, (B * x)[1 - w["conv.weight"].shape[-1] :]


def rms(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def mamba(w, x, *, norm_eps=None):
    """Mamba; with `norm_eps` Falcon-Mamba, and with weights of the norms Jamba."""
    hidden, z = np.split(linear(w, "in_proj", x), 2, axis=-1)
    hidden = convolution(w, "conv1d", hidden)
    size, rank = w["A_log"].shape[1], w["dt_proj.weight"].shape[1]
    parts = np.split(linear(w, "x_proj", hidden), [rank, rank + size], axis=-1)
    dt, B, C = parts if norm_eps is None else (rms(part, norm_eps) for part in parts)
    if "dt_layernorm.weight" in w:
        dt, B, C = (part * w[f"{name}_layernorm.weight"] for name, part in (("dt", dt), ("b", B), ("c", C)))
    dt, A = softplus(linear(w, "dt_proj", dt)), -np.exp(w["A_log"])
    state, rows = np.zeros(A.shape), []
    for t in range(len(x)):
        state = np.exp(dt[t][:, None] * A) * state + (dt[t] * hidden[t])[:, None] * B[t]
        rows.append(state @ C[t] + w["D"] * hidden[t])
    return linear(w, "out_proj", np.stack(rows) * silu(z)), state


def mamba2(
    w, x, *, head_dim, groups, size, limit=(0.0, np.inf), norm_first=False, per_group=True, factors=None
):
    """Mamba-2; with `factors` of z, x, B, C and dt Falcon-H1."""
    heads, eps = w["A_log"].shape[0], 1e-5
    inner, projected = heads * head_dim, linear(w, "in_proj", x)
    if factors is not None:
        projected = projected * np.repeat(factors, [inner, inner, groups * size, groups * size, heads])
    z, mixed, dt = np.split(projected, [inner, 2 * inner + 2 * groups * size], axis=-1)
    mixed = convolution(w, "conv1d", mixed)
    hidden = mixed[:, :inner].reshape(-1, heads, head_dim)
    B, C = (
        np.repeat(part.reshape(-1, groups, size), heads // groups, axis=1)
        for part in np.split(mixed[:, inner:], 2, axis=-1)
    )
    dt, A = np.clip(softplus(dt + w["dt_bias"]), *limit), -np.exp(w["A_log"])
    state, rows = np.zeros((heads, head_dim, size)), []
    for t in range(len(x)):
        new = np.einsum("h,hp,hn->hpn", dt[t], hidden[t], B[t])
        state = np.exp(dt[t] * A)[:, None, None] * state + new
        rows.append(np.einsum("hpn,hn->hp", state, C[t]) + w["D"][:, None] * hidden[t])
    y = np.stack(rows).reshape(len(x), inner)
    if "norm.weight" not in w:
        return linear(w, "out_proj", y * silu(z)), state

    def norm(y):
        parts = np.split(y, groups if per_group else 1, axis=-1)
        return np.concatenate([rms(part, eps) for part in parts], axis=-1) * w["norm.weight"]

    return linear(w, "out_proj", norm(y) * silu(z) if norm_first else norm(y * silu(z))), state


def mamba3(w, x, *, head_dim, groups, size, angles, ranks=1, floor=1e-4, eps=1e-5):
    """Mamba-3, with `h` as published, from which the last token's own write is taken for the state."""
    heads, halves = w["D"].shape[0], "mimo_x" in w
    inner, shared = heads * head_dim, ranks * groups * size
    ends = np.cumsum([inner, inner, shared, shared, heads, heads, heads])
    z, hidden, B, C, dt, A, trap, phi = np.split(linear(w, "in_proj", x), ends, axis=-1)
    z, hidden = (part.reshape(-1, heads, head_dim) for part in (z, hidden))

    def keys(part, name):
        part = rms(part.reshape(-1, ranks, groups, size), eps) * w[f"{name}_norm.weight"]
        return np.repeat(part, heads // groups, axis=2) + np.swapaxes(w[f"{name}_bias"], 0, 1)

    def rotated(part, angle):
        """Each pair as one complex number."""
        at = np.arange(angles) if halves else 2 * np.arange(angles)
        to = at + (size // 2 if halves else 1)
        numbers = (part[..., at] + 1j * part[..., to]) * np.exp(1j * angle)
        part = part.copy()
        part[..., at], part[..., to] = numbers.real, numbers.imag
        return part

    ones = np.ones((heads, 1, head_dim))
    up, gate, down = (np.swapaxes(w[f"mimo_{name}"] if halves else ones, 0, 1) for name in "xzo")
    B, C, dt = keys(B, "B"), keys(C, "C"), softplus(dt + w["dt_bias"])
    alpha = np.exp(dt * -np.maximum(softplus(A), floor))
    gamma = dt / (1 + np.exp(-trap))
    h, angle, rows = np.zeros((heads, head_dim, size)), np.zeros((heads, angles)), []
    key, value, write = np.zeros((ranks, heads, size)), np.zeros((ranks, heads, head_dim)), h
    for t in range(len(x)):
        angle = angle + dt[t][:, None] * np.pi * np.tanh(phi[t])
        of = lambda weight, value, key: np.einsum("h,rhp,rhn->hpn", weight, value, key)
        before = of(dt[t] - gamma[t], value, key)
        key, value = rotated(B[t], angle), hidden[t] * up
        write = of(gamma[t], value, key)
        h = alpha[t][:, None, None] * (h + before) + write
        y = np.einsum("hpn,rhn->rhp", h, rotated(C[t], angle)) + w["D"][:, None] * value
        weight = w.get("norm.weight")
        y = y if weight is None else rms(y, eps) * weight.reshape(heads, head_dim)
        rows.append((y * silu(z[t] * gate) * down).sum(0))
    angle = (angle + np.pi) % (2 * np.pi) - np.pi
    left = [np.swapaxes(key, 0, 1).reshape(heads, -1), hidden[-1], gamma[-1][:, None], angle]
    return linear(w, "out_proj", np.stack(rows).reshape(len(x), inner)), (h - write, np.concatenate(left, -1))


def forgetting(q, k, v, decay, scale):
    """Linear attention whose keys' channels forget by factors `decay`; all `[T, H, ...]`."""
    state, rows = np.zeros((q.shape[1], k.shape[-1], v.shape[-1])), []
    for t in range(len(q)):
        state = decay[t][..., None] * state + np.einsum("hd,hv->hdv", k[t], v[t])
        rows.append(scale * np.einsum("hdv,hd->hv", state, q[t]))
    return np.stack(rows), state


def delta_rule(q, k, v, decay, beta):
    """What a key already holds is replaced; all `[T, H, ...]`. Of several writes per token, `k`, `v` and `beta` are `[T, M, H, ...]`."""
    if beta.ndim == 2:
        k, v, beta = k[:, None], v[:, None], beta[:, None]
    state, rows = np.zeros((q.shape[1], k.shape[-1], v.shape[-1])), []
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    for t in range(len(q)):
        state = decay[t][..., None] * state
        for key, value, strength in zip(k[t], v[t], beta[t]):
            held = np.einsum("hdv,hd->hv", state, key)
            state = state + np.einsum("h,hd,hv->hdv", strength, key, value - held)
        rows.append(np.einsum("hdv,hd->hv", state, q[t]))
    return np.stack(rows), state


def gla(w, x, *, heads, kv_heads, eps=1e-5, normalizer=16.0, gate_min=-np.inf):
    def project(name, count):
        y = linear(w, f"{name}_proj", x)
        if f"{name}_conv1d.weight" in w:
            y = convolution(w, f"{name}_conv1d", y)
        return y.reshape(len(x), count, -1)

    shared = heads // kv_heads
    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    logits = linear(w, "gk_proj.1", linear(w, "gk_proj.0", x))
    gate = np.maximum(-softplus(-logits) / normalizer, gate_min).reshape(len(x), kv_heads, -1)
    k, v, gate = (np.repeat(part, shared, axis=1) for part in (k, v, gate))
    out, state = forgetting(q, k, v, np.exp(gate), q.shape[-1] ** -0.5)
    if "g_proj.weight" in w:
        out = rms(out, eps) * w["g_norm_swish_gate.weight"]
        out = out * silu(linear(w, "g_proj", x)).reshape(out.shape)
    else:
        out = rms(out, eps) * w["g_norm.weight"]
    return linear(w, "o_proj", out.reshape(len(x), -1)), state[::shared]


def minimax(w, x, *, heads, layer, layers, eps=1e-6):
    """MiniMax-01's lightning attention."""
    qkv = silu(linear(w, "qkv_proj", x)).reshape(len(x), heads, -1)
    q, k, v = np.split(qkv, 3, axis=-1)
    slopes = np.array([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])
    slopes = slopes * (1.0 - layer / (layers - 1 + 1e-5) + 1e-5)
    decay = np.broadcast_to(np.exp(-slopes)[:, None], q.shape)
    out, state = forgetting(q, k, v, decay, 1.0)
    out = rms(out.reshape(len(x), -1), eps) * w["norm.weight"]
    return linear(w, "out_proj", sigmoid(linear(w, "output_gate", x)) * out), state


def kimi(w, x, *, heads, v_heads=None, eps=1e-5, lower_bound=None, doubled=False):
    """Kimi Linear's KDA, and with `v_heads`, `lower_bound`, `doubled` what flash-linear-attention adds to it."""
    v_heads = heads if v_heads is None else v_heads
    q, k, v = (convolution(w, f"{name}_conv1d", linear(w, f"{name}_proj", x)) for name in "qkv")
    q, k = (np.repeat(part.reshape(len(x), heads, -1), v_heads // heads, axis=1) for part in (q, k))
    raw = linear(w, "f_b_proj", linear(w, "f_a_proj", x)) + w["dt_bias"]
    raw, rate = raw.reshape(len(x), v_heads, -1), np.exp(w["A_log"]).reshape(v_heads, 1)
    log_decay = -rate * softplus(raw) if lower_bound is None else lower_bound * sigmoid(rate * raw)
    beta = sigmoid(linear(w, "b_proj", x)) * (2.0 if doubled else 1.0)
    out, state = delta_rule(q, k, v.reshape(len(x), v_heads, -1), np.exp(log_decay), beta)
    gate = linear(w, "g_b_proj", linear(w, "g_a_proj", x)).reshape(out.shape)
    out = rms(out, eps) * w["o_norm.weight"] * sigmoid(gate)
    return linear(w, "o_proj", out.reshape(len(x), -1)), state


def shifted(x):
    """What the token before differs by."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]]) - x


def group_norm(w, name, x, heads, eps):
    parts = x.reshape(len(x), heads, -1)
    centred = parts - parts.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return normed.reshape(x.shape) * w[f"{name}.weight"] + w[f"{name}.bias"]


def low_rank(w, name, x, activation=lambda x: x):
    return linear(w, f"{name}.lora.2", activation(linear(w, f"{name}.lora.0", x)))


def rwkv7(w, x, *, heads, eps, v_first=None):
    """RWKV-7's time mix."""
    delta = shifted(x)
    r, wx, k, of_v, a, g = (x + delta * weight for weight in w["x_mix"])
    r, k, v = (linear(w, f"{name}_proj", part) for name, part in (("r", r), ("k", k), ("v", of_v)))
    decay = np.exp(-np.exp(-0.5) * sigmoid(low_rank(w, "w_lora", wx, np.tanh)))
    eta, gate = sigmoid(low_rank(w, "a_lora", a)), low_rank(w, "g_lora", g, sigmoid)
    if v_first is not None:
        mix = sigmoid(low_rank(w, "v_lora", of_v))
        v = v + (v_first - v) * mix
    split = lambda y: y.reshape(len(x), heads, -1)
    kappa = split(k * w["k_k"])
    kappa = kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
    k = k * (1 + (eta - 1) * w["k_a"])
    r, decay, k, v, eta = map(split, (r, decay, k, v, eta))
    state, rows = np.zeros((heads, k.shape[-1], v.shape[-1])), []
    for t in range(len(x)):
        removed = np.einsum("hdv,hd->hv", state, kappa[t])
        state = decay[t][..., None] * state - (kappa[t] * eta[t])[..., None] * removed[:, None]
        state = state + np.einsum("hd,hv->hdv", k[t], v[t])
        rows.append(np.einsum("hdv,hd->hv", state, r[t]))
    out = group_norm(w, "g_norm", np.stack(rows).reshape(len(x), -1), heads, eps)
    again = np.sum(r * k * w["r_k"], -1, keepdims=True) * v
    return linear(w, "o_proj", (out + again.reshape(out.shape)) * gate), state


def rwkv7_channels(w, x):
    """RWKV-7's channel mix; the state is the last token."""
    return linear(w, "value", np.maximum(linear(w, "key", x + shifted(x) * w["x_k"]), 0) ** 2), x[-1:]


def rwkv6(w, x, *, heads, eps):
    """RWKV-6's time mix."""
    delta = shifted(x)
    inner = np.tanh(linear(w, "x_down", x + delta * w["x_mu"])).reshape(len(x), 5, -1)
    mixes = np.einsum("tnr,nre->tne", inner, w["x_up"]) + w["x_bias"]
    r, wx, k, v, g = (x + delta * mixes[:, n] for n in range(5))
    r, k, v, gate = (linear(w, f"{name}_proj", part) for name, part in zip("rkvg", (r, k, v, g)))
    decay = np.exp(-np.exp(low_rank(w, "w_lora", wx, np.tanh)))
    r, decay, k, v = (part.reshape(len(x), heads, -1) for part in (r, decay, k, v))
    state, rows = np.zeros((heads, k.shape[-1], v.shape[-1])), []
    for t in range(len(x)):
        new = np.einsum("hd,hv->hdv", k[t], v[t])
        rows.append(np.einsum("hdv,hd->hv", state + w["bonus"][..., None] * new, r[t]))
        state = decay[t][..., None] * state + new
    out = group_norm(w, "g_norm", np.stack(rows).reshape(len(x), -1), heads, eps)
    return linear(w, "o_proj", out * silu(gate)), state


def qwen3_next(w, x, *, k_heads, v_heads, head_dim, v_head_dim, eps=1e-6, writes=1, doubled=False):
    """Qwen3-Next's gated delta net: the rows of its projections are those of the first key head, then the second's. With `writes`, Gated
    DeltaProduct, which has that many parts of `k`, `v` and `b` one after the other."""
    shared, count = v_heads // k_heads, len(x)
    mixed, ba = linear(w, "in_proj_qkvz", x), linear(w, "in_proj_ba", x)
    q, k, v, z, b, a = ([] for _ in range(6))
    keys, values = [head_dim] * (1 + writes), [shared * v_head_dim] * (1 + writes)
    for row in np.split(mixed, k_heads, axis=-1):
        parts = np.split(row, np.cumsum(keys + values)[:-1], axis=-1)
        q.append(parts[0])
        k.append(parts[1 : 1 + writes])
        v.append(parts[1 + writes : -1])
        z.append(parts[-1])
    for gate in np.split(ba, k_heads, axis=-1):
        *parts, last = np.split(gate, 1 + writes, axis=-1)
        b.append(parts)
        a.append(last)
    # Of every write all heads: [T, M, heads * size].
    k, v, b = (np.concatenate([np.stack(parts, 1) for parts in heads], axis=-1) for heads in (k, v, b))
    q, z, a = (np.concatenate(part, axis=-1) for part in (q, z, a))
    together = [q, k.reshape(count, -1), v.reshape(count, -1)]
    mixed = convolution(w, "conv1d", np.concatenate(together, axis=-1))
    q, k, v = np.split(mixed, np.cumsum([part.shape[-1] for part in together])[:-1], axis=-1)
    q = np.repeat(q.reshape(count, k_heads, head_dim), shared, axis=1)
    k = np.repeat(k.reshape(count, writes, k_heads, head_dim), shared, axis=2)
    v, decay = v.reshape(count, writes, v_heads, -1), np.exp(-np.exp(w["A_log"]) * softplus(a + w["dt_bias"]))
    out, state = delta_rule(q, k, v, decay[..., None], sigmoid(b) * (2.0 if doubled else 1.0))
    out = rms(out, eps) * w["norm.weight"] * silu(z.reshape(out.shape))
    return linear(w, "out_proj", out.reshape(count, -1)), state
