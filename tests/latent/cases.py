"""Latent attention as one writes it down, in numpy and float64, on attention's own formula."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx.attention.spec import AttentionSpec, RowRanges
from ejkernel_eqx.latent.core import problem_of
from ejkernel_eqx.latent.spec import LatentArrays
from tests.attention.dense import cotangents, exact, normal, quick, with_gradients
from tests.tolerances import assert_close

NOPE, ROPE, VALUES, LATENT = 16, 8, 12, 20
OPERATION = "multi_head_latent_attention"
DEEPSEEK = (128, 64, 128)  # of a key without and with a rotation, and of a value
EVERY = ("bias", "alibi_slopes", "sinks", "mask", "q_segments", "kv_segments", "rows", "seeds", "blocks")


def call_of(length: int, *flags: str, heads: int = 4, dims: Any = DEEPSEEK, dtype: str = "bfloat16") -> Any:
    """The shapes of a call, its spec and its problem: causal, or with these arrays and a soft cap."""
    shape: Any = lambda *sizes, of=dtype: jax.ShapeDtypeStruct(sizes, of)
    (nope, rope, values), B = dims, 2
    ids, scores = shape(B, length, of="int32"), shape(1, heads, of="float32")
    optional = dict(
        bias=shape(1, heads, length, length),
        alibi_slopes=scores,
        sinks=scores,
        mask=shape(B, 1, length, length, of="bool"),
        q_segments=ids,
        kv_segments=ids,
        rows=RowRanges(ids, ids, ids),
        seeds=shape(B, heads, 2, of="uint32"),
        blocks=shape(B, heads, -(-length // 64), -(-length // 96), of="bool"),
    )
    key = lambda width: shape(B, length, heads, width)
    arrays = LatentArrays(key(nope + rope), key(nope), shape(B, length, rope), key(values))
    spec = AttentionSpec((nope + rope) ** -0.5, right=None if flags else 0)
    if flags:
        spec = dataclasses.replace(spec, logits_soft_cap=30.0, dropout_rate=0.1 if "seeds" in flags else 0.0)
        arrays = arrays._replace(**{name: optional[name] for name in flags})
    if "blocks" in flags:
        spec = dataclasses.replace(spec, block_size=(64, 96))
    return arrays, spec, problem_of(OPERATION, arrays, spec)


def poison(given: dict[str, Any], keys: Any = None, queries: Any = None) -> dict[str, Any]:
    """NaN where nothing may be read."""
    hidden = {"q": queries} | dict.fromkeys(("k", "k_rope", "v", "latent"), keys)

    def put(name: str, x: jax.Array) -> jax.Array:
        if (where := hidden.get(name)) is None:
            return x
        return jnp.where(jnp.reshape(where, (*where.shape, *(1,) * (x.ndim - where.ndim))), jnp.nan, x)

    return {name: put(name, x) for name, x in given.items()}


def arrays_of(*lead: int, t=20, s=26, heads=3, dtype: Any = jnp.float32, seed=0) -> dict[str, Any]:
    """The arrays of the expanded form."""
    return dict(
        q=normal(seed, *lead, t, heads, NOPE + ROPE, dtype=dtype),
        k=normal(seed + 1, *lead, s, heads, NOPE, dtype=dtype),
        k_rope=normal(seed + 2, *lead, s, ROPE, dtype=dtype),
        v=normal(seed + 3, *lead, s, heads, VALUES, dtype=dtype),
    )


def latents_of(*lead: int, t=20, s=26, heads=3, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The arrays of the absorbed form."""
    return dict(
        q=normal(0, *lead, t, heads, NOPE + ROPE, dtype=dtype),
        latent=normal(1, *lead, s, LATENT, dtype=dtype),
        k_rope=normal(2, *lead, s, ROPE, dtype=dtype),
        w_uk=(normal(3, heads, NOPE, LATENT) / 4).astype(dtype),
        w_uv=(normal(4, heads, VALUES, LATENT) / 4).astype(dtype),
    )


def wide(given: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x).astype(np.float64) for name, x in given.items()}


def whole(given: dict[str, Any]) -> dict[str, Any]:
    """Keys with the rotary part of every head, as attention takes them."""
    given = wide(given)
    rope = given.pop("k_rope")[..., None, :]
    rope = np.broadcast_to(rope, (*given["k"].shape[:-1], rope.shape[-1]))
    return given | {"k": np.concatenate([given["k"], rope], axis=-1)}


def exact_expanded(given: dict[str, Any], dout: Any, dlse: Any, seen: Any = True, **options: Any) -> Any:
    """`(out, lse)` and the gradients."""
    results, grads = exact(whole(given), dout, dlse, seen, **options)
    dk, own = grads.pop("k"), given["k"].shape[-1]
    return results, grads | {"k": dk[..., :own], "k_rope": dk[..., own:].sum(-2)}


def expanded_of(given: dict[str, Any]) -> dict[str, Any]:
    """The arrays of the expanded form from those of the absorbed one, in float64."""
    x = wide(given)
    return dict(
        q=x["q"],
        k=np.einsum("...sr,hdr->...shd", x["latent"], x["w_uk"]),
        k_rope=x["k_rope"],
        v=np.einsum("...sr,hvr->...shv", x["latent"], x["w_uv"]),
    )


def exact_absorbed(given: dict[str, Any], seen: Any = True, **options: Any) -> tuple[Any, Any]:
    """`(out, lse)` of latents."""
    arrays = expanded_of(given) | {name: given[name] for name in ("sinks",) if name in given}
    heads = arrays["q"].shape[:-1]
    nothing = np.zeros((*heads, VALUES)), np.zeros(heads)
    return exact_expanded(arrays, *nothing, seen, **options)[0]


def check(call: Any, given: dict[str, Any], seen: Any = True, *, poisoned: Any = None, **options: Any):
    """`call(**given)`, giving `(out, lse)`, and all its gradients; `poisoned` stand in for the arrays in the call only."""
    dout, dlse = cotangents(given)
    (out, lse), grads = exact_expanded(given, dout, dlse, seen, **options)
    run = quick(lambda *args: with_gradients(lambda a: call(**a), *args))
    found, found_grads = run(given if poisoned is None else poisoned, dout, dlse)
    dtype = given["q"].dtype
    assert found[0].dtype == dtype
    assert_close(found[0], out, dtype, name="out")
    assert_close(found[1], lse, dtype, name="lse")
    for name, x in given.items():
        assert found_grads[name].dtype == x.dtype
        assert_close(found_grads[name], grads[name], dtype, "gradient", name=f"gradient of {name}")
