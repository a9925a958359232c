"""Checks what a user passes to latent attention. Errors are raised before anything is computed and name the argument, what was expected,
what was received, and the remedy."""

from typing import Any

from jax import Array

from ..core.arguments import array, fitting


def read_expanded(q: Any, k: Any, k_rope: Any, v: Any) -> dict[str, Array]:
    """The checked arrays of the expanded form."""
    q, k, v = array("q", q, "T H D"), array("k", k, "S H Dn"), array("v", v, "S H V")
    k_rope = array("k_rope", k_rope, "S Dr")
    _check_dtypes(q=q, k=k, k_rope=k_rope, v=v)
    # Queries hold both parts, so their width less that of the rotary keys is that of the keys.
    lead, heads, nope = q.shape[:-3], q.shape[-2], q.shape[-1] - k_rope.shape[-1]
    if nope < 1 or k_rope.shape[-1] < 1:
        raise ValueError(
            f"q: expected more channels than the {k_rope.shape[-1]} of k_rope, [nope, rope] in this order, received shape {q.shape}; without "
            "rotary keys use FlashAttention."
        )
    if heads == 0:
        raise ValueError(f"q: expected at least one head, [..., T, H, D], received shape {q.shape}.")
    k = fitting("k", k, (*lead, None, heads, nope), "S H Dn")
    keys = (*lead, k.shape[-3])
    k_rope = fitting("k_rope", k_rope, (*keys, k_rope.shape[-1]), "S Dr")
    v = fitting("v", v, (*keys, heads, None), "S H V")
    return {"q": q, "k": k, "k_rope": k_rope, "v": v}


def read_latents(latent: Any, k_rope: Any, lead: tuple[int, ...]) -> tuple[Array, Array]:
    """Dense latents `[..., S, R]` and rotary keys `[..., S, Dr]`, with the leading axes of the queries."""
    if k_rope is None:
        raise ValueError(
            "k_rope: expected the rotary keys [..., S, Dr] with dense latents, received None; a PagedLatentCache holds both."
        )
    latent, k_rope = array("latent", latent, "S R"), array("k_rope", k_rope, "S Dr")
    _check_dtypes(latent=latent, k_rope=k_rope)
    latent = fitting("latent", latent, (*lead, None, None), "S R")
    if latent.shape[-2] == 0:
        raise ValueError(
            f"latent: expected at least one key, received shape {latent.shape}; give it a capacity, with kv_lengths=0."
        )
    return latent, fitting("k_rope", k_rope, (*lead, latent.shape[-2], None), "S Dr")


def read_weights(w_uk: Any, w_uv: Any, q: Array, sizes: tuple[int, int]) -> tuple[Array | None, Array | None]:
    """The weights that a query and an output are multiplied by; `sizes`: those of a latent and of a rotary key."""
    heads, (latent, rope) = q.shape[-2], sizes
    # Without the weight, queries are absorbed already and are as wide as a latent.
    nope = latent if w_uk is None else q.shape[-1] - rope
    if q.shape[-1] != nope + rope or nope < 1:
        raise ValueError(
            f"q: expected latent and rotary channels [..., T, H, {latent} + {rope}] without w_uk, received shape {q.shape}; pass w_uk= for "
            "queries that are not absorbed yet."
        )
    keys, values = (heads, nope, latent), (heads, None, latent)
    w_uk = None if w_uk is None else fitting("w_uk", w_uk, keys, "H Dn R")
    return w_uk, None if w_uv is None else fitting("w_uv", w_uv, values, "H V R")


def _check_dtypes(**arrays: Array) -> None:
    if len({x.dtype for x in arrays.values()}) > 1:
        raise ValueError(
            f"{', '.join(arrays)}: expected one dtype, received {', '.join(str(x.dtype) for x in arrays.values())}; cast them to the same dtype."
        )
