"""Attention as one writes it down, in float64, from a boolean array of what is visible: shares nothing with the package."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import assert_close

QUICK = {"xla_backend_optimization_level": 0}
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def qkv(*lead: int, t=20, s=26, heads=4, kv_heads=2, d=16, v=16, dtype: Any = jnp.float32, seed=0) -> dict[str, jax.Array]:
    return dict(
        q=normal(seed, *lead, t, heads, d, dtype=dtype),
        k=normal(seed + 1, *lead, s, kv_heads, d, dtype=dtype),
        v=normal(seed + 2, *lead, s, kv_heads, v, dtype=dtype),
    )


def dense(arrays, seen=True, *, scale=None, cap=None, positions=None, keep=True, rate=0.0):
    """`out [..., T, H, V]` and `lse [..., T, H]`; `positions [..., T]` of the queries, by default the last keys."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    (t, heads, d), s = q.shape[-3:], k.shape[-3]
    k, v = (jnp.repeat(x, heads // x.shape[-2], axis=-2) for x in (k, v))
    scores = (d**-0.5 if scale is None else scale) * jnp.einsum("...thd,...shd->...hts", q, k)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if arrays.get("bias") is not None:
        scores = scores + arrays["bias"]
    if arrays.get("alibi_slopes") is not None:
        at = jnp.arange(t) + s - t if positions is None else jnp.asarray(positions)
        distance = (jnp.arange(s) - at[..., None]).astype(scores.dtype)
        scores = scores + arrays["alibi_slopes"][:, None, None] * distance[..., None, :, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    if arrays.get("sinks") is not None:
        sinks = arrays["sinks"].reshape(heads, 1, -1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], sinks.shape[-1]))], axis=-1)
    top = jax.lax.stop_gradient(scores.max(-1, initial=-jnp.inf, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    some, total = total > 0, jnp.where(total > 0, total, 1)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)[..., 0]
    weights = jnp.where(keep, (weights / total)[..., :s] / (1 - rate), 0)
    return jnp.einsum("...hts,...shv->...thv", weights, v), jnp.swapaxes(lse, -1, -2)


def cotangents(arrays, seed=9):
    q, v = arrays["q"], arrays["v"]
    return normal(seed, *q.shape[:-1], v.shape[-1], dtype=q.dtype), normal(seed + 1, *q.shape[:-1])


def with_gradients(function, arrays, dout, dlse):
    """`(out, lse), gradients` of a function of the arrays."""
    outputs, vjp = jax.vjp(function, arrays)
    return outputs, vjp((dout.astype(outputs[0].dtype), dlse.astype(outputs[1].dtype)))[0]


def exact(arrays, dout, dlse, seen=True, **options):
    """The same of `dense`, in float64."""
    arrays, dout, dlse = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, dout, dlse))
    options = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    with jax.enable_x64(True):
        function = jax.jit(lambda *args: with_gradients(lambda a: dense(a, np.asarray(seen), **options), *args), compiler_options=QUICK)
        return jax.tree.map(np.asarray, function(*jax.tree.map(jnp.asarray, (arrays, dout, dlse))))


def check(call, arrays, seen=True, *, poisoned=None, **options):
    """`call(**arrays)`, giving `(out, lse)`, and all its gradients against `dense`.

    `poisoned` arrays stand in for `arrays` in the call only: what is hidden may be NaN there.
    """
    dout, dlse = cotangents(arrays)
    (out, lse), grads = exact(arrays, dout, dlse, seen, **options)
    given = arrays if poisoned is None else poisoned
    run = jax.jit(lambda *args: with_gradients(lambda a: call(**a), *args), compiler_options=QUICK)
    actual, actual_grads = run(given, dout, dlse)
    dtype = arrays["q"].dtype
    assert actual[0].dtype == dtype
    assert_close(actual[0], out, dtype, name="out")
    assert_close(actual[1], lse, dtype, name="lse")
    for name in arrays:
        assert actual_grads[name].dtype == arrays[name].dtype
        assert_close(actual_grads[name], grads[name], dtype, "gradient", name=f"gradient of {name}")
