"""Attention and its gradients as one writes them down, in numpy and float64: shares nothing with the package."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import assert_close

INTERPRET = "triton-interpret"
quick = jax.jit


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype), dtype)


def qkv(
    *lead: int, t=20, s=26, heads=4, kv_heads=2, d=16, v=16, dtype: Any = jnp.float32, seed=0
) -> dict[str, jax.Array]:
    return dict(
        q=normal(seed, *lead, t, heads, d, dtype=dtype),
        k=normal(seed + 1, *lead, s, kv_heads, d, dtype=dtype),
        v=normal(seed + 2, *lead, s, kv_heads, v, dtype=dtype),
    )


def exact(
    arrays,
    dout,
    dlse,
    seen: Any = True,
    *,
    scale=None,
    cap=None,
    positions: Any = None,
    keep: Any = True,
    rate=0.0,
    by_row=False,
):
    """`(out [..., T, H, V], lse [..., T, H])` and the gradients, in float64.

    `positions [..., T]` are those of the queries, by default the last keys; `keep` is what dropout left, `[..., H, T, S]`.
    `alibi_slopes` are `[H]`, `sinks` `[H]` or `[H, n]`; with `by_row` both are `[B or 1, H]`. `log_forget` is `[..., S, H]`.
    """
    given = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    dout, dlse = (np.asarray(x).astype(np.float64) for x in (dout, dlse))
    q, (t, heads, d), s = given["q"], arrays["q"].shape[-3:], arrays["k"].shape[-3]
    k, v = (np.repeat(given[name], heads // given[name].shape[-2], axis=-2) for name in "kv")
    bias, slopes = given.get("bias", np.zeros(())), given.get("alibi_slopes", np.zeros((heads,)))
    sinks = given.get("sinks", np.zeros((heads, 0)))
    alone = "sinks" in given and (by_row or sinks.ndim == 1)
    sinks = sinks[..., None] if alone else sinks  # [..., H, n]
    scale = d**-0.5 if scale is None else scale
    distance = (
        np.arange(s) - (np.arange(t) + s - t if positions is None else np.asarray(positions))[..., None]
    )
    # Gates between a key and a later query count once, [..., T, S, tokens]; between a query and a later key they count as minus one.
    place = np.clip(np.arange(s) - distance, 0, s - 1)[..., None]
    token, key = np.arange(s), np.arange(s)[:, None]
    between = ((key < token) & (token <= place)) * 1.0 - ((place < token) & (token <= key))
    forget = given.get("log_forget")
    gates = 0 if forget is None else np.einsum("...lh,...tsl->...hts", forget, between)
    distance = distance[..., None, :, :]

    scores = scale * np.einsum("...thd,...shd->...hts", q, k)
    bent = np.zeros_like(scores) if cap is None else np.tanh(scores / cap)
    scores = (scores if cap is None else cap * bent) + bias + slopes[..., None, None] * distance + gates
    scores = np.where(np.asarray(seen), scores, -np.inf)
    every = np.concatenate(
        [scores, np.broadcast_to(sinks[..., None, :], (*scores.shape[:-1], sinks.shape[-1]))], axis=-1
    )
    top = every.max(-1, initial=-np.inf, keepdims=True)
    weights = np.exp(every - np.where(top == -np.inf, 0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(top == -np.inf, 0, top))[..., 0]
    weights = weights / np.where(total > 0, total, 1)
    weights, taken = weights[..., :s], weights[..., s:]
    factor = np.asarray(keep) / (1 - rate)
    out = np.einsum("...hts,...shv->...thv", weights * factor, v)

    dlse = np.swapaxes(dlse, -1, -2)[..., None]
    shift = dlse - np.swapaxes((dout * out).sum(-1), -1, -2)[..., None]
    after = weights * (factor * np.einsum("...thv,...shv->...hts", dout, v) + shift)
    before = scale * after * (1 - bent**2)
    full = dict(
        q=np.einsum("...hts,...shd->...thd", before, k),
        k=np.einsum("...hts,...thd->...shd", before, q),
        v=np.einsum("...hts,...thv->...shv", weights * factor, dout),
        bias=after,
        alibi_slopes=(after * distance).sum((-1, -2)),
        sinks=(taken * shift).sum(-2),
        log_forget=0 if forget is None else np.einsum("...hts,...tsl->...lh", after, between),
    )
    full["sinks"] = full["sinks"][..., 0] if alone else full["sinks"]
    for name in "kv":
        shape = given[name].shape
        full[name] = full[name].reshape(*shape[:-2], shape[-2], heads // shape[-2], shape[-1]).sum(-2)
    return (out, np.swapaxes(lse, -1, -2)), {name: _sum_to(full[name], x.shape) for name, x in given.items()}


def _sum_to(x, shape):
    """Summed over the axes along which an array of this shape was broadcast."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(
        tuple(axis for axis, size in enumerate(shape) if size != x.shape[axis]), keepdims=True
    ).reshape(shape)


def cotangents(arrays, seed=9):
    q, v = arrays["q"], arrays["v"]
    return normal(seed, *q.shape[:-1], v.shape[-1], dtype=q.dtype), normal(seed + 1, *q.shape[:-1])


def with_gradients(function, arrays, dout, dlse):
    """`(out, lse), gradients` of a function of the arrays."""
    outputs, vjp = jax.vjp(function, arrays)
    return outputs, vjp((dout.astype(outputs[0].dtype), dlse.astype(outputs[1].dtype)))[0]


def check(call, arrays, seen: Any = True, *, poisoned=None, **options):
    """`call(**arrays)`, giving `(out, lse)`, and all its gradients against `exact`.

    `poisoned` arrays stand in for `arrays` in the call only: what is hidden may be NaN there.
    """
    dout, dlse = cotangents(arrays)
    (out, lse), grads = exact(arrays, dout, dlse, seen, **options)
    given = arrays if poisoned is None else poisoned
    run = quick(lambda *args: with_gradients(lambda a: call(**a), *args))
    actual, actual_grads = run(given, dout, dlse)
    dtype = arrays["q"].dtype
    assert actual[0].dtype == dtype
    assert_close(actual[0], out, dtype, name="out")
    assert_close(actual[1], lse, dtype, name="lse")
    for name in arrays:
        assert actual_grads[name].dtype == arrays[name].dtype
        narrow = arrays[name].dtype if arrays[name].dtype.itemsize == 2 else dtype
        assert_close(actual_grads[name], grads[name], narrow, "gradient", name=f"gradient of {name}")


def causal(t, s, offset=None):
    return np.arange(s) <= np.arange(t)[:, None] + (s - t if offset is None else offset)


def lse_of(module, **options):
    return lambda **arrays: module(**arrays, **options, return_lse=True)
