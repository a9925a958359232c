"""Exact combination of attention over parts of the keys."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

Part = tuple[Float[Array, "..."], Float[Array, "..."]]


@jax.named_scope("ejkernel_eqx.merge_attention")
def merge_attention(
    *parts: Part, sinks: Float[Array, "..."] | None = None, return_lse: bool = True
) -> Part | Float[Array, "..."]:
    r"""Combines attention over disjoint sets of keys into attention over their union.

    $$\mathrm{lse} = \log \sum_n e^{\mathrm{lse}_n}, \qquad o = \sum_n e^{\mathrm{lse}_n - \mathrm{lse}}\, o_n$$

    **Arguments:**

    - `parts`: pairs `(out [..., T, H, V], lse [..., T, H])`, each computed without sinks.
    - `sinks`: logits `[H]` or `[H, n]`, added to the denominator here, once.
    - `return_lse`: whether to return `lse` as well.

    **Returns:**

    `(out, lse)`, or `out` alone. If no part sees a key, the output is 0 and `lse` is that of the sinks (`-inf` without sinks). Differentiable.
    """
    if not parts:
        raise ValueError("parts: expected at least one pair (out, lse), received none.")
    for out, lse in parts:
        if out.shape[:-1] != lse.shape or out.shape != parts[0][0].shape:
            raise ValueError(
                f"parts: expected out [..., T, H, V] and lse [..., T, H] with matching axes, received {out.shape} and {lse.shape}."
            )
    lses = [lse for _, lse in parts]
    if sinks is not None:
        heads = lses[0].shape[-1]
        if sinks.ndim not in (1, 2) or sinks.shape[0] != heads:
            raise ValueError(f"sinks: expected [{heads}] or [{heads}, n], received {sinks.shape}.")
        sink = sinks if sinks.ndim == 1 else jax.nn.logsumexp(sinks.astype(lses[0].dtype), axis=1)
        lses.append(jnp.broadcast_to(sink.astype(lses[0].dtype), lses[0].shape))
    stacked = jnp.stack(lses)
    top = jnp.max(stacked, axis=0)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top).astype(stacked.dtype))
    weights = jnp.exp(jnp.where(stacked == -jnp.inf, -jnp.inf, stacked - top[None]))
    total = jnp.sum(weights, axis=0)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out = sum(
        (w / safe)[..., None] * o.astype(stacked.dtype) for w, (o, _) in zip(weights, parts, strict=False)
    )
    merged = jnp.asarray(out).astype(parts[0][0].dtype)
    return (merged, jnp.where(seen, jnp.log(safe) + top, -jnp.inf)) if return_lse else merged
