"""`RotaryHeads`: the rotation of queries and keys by given angles, with the norm of each head before it."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..._kernel import Kernel, Plan
from ..._shapes import AnyArray, Float
from ...core.arguments import accumulator, array, broadcasts, check_flags, fitting, is_finite
from ...core.plans import plan_of
from ...dispatch import PlatformLike
from .core import HEADS
from .spec import HeadsArrays, HeadsSpec, RESULTS


class RotaryHeads(Kernel):
    r"""Rotates pairs of features of queries and keys in one launch (Su et al. 2021, arXiv:2104.09864). On request it
    first normalises each head:

    $$h = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \odot w, \qquad
      (y_i, y_j) = (h_i \cos\theta - h_j \sin\theta,\; h_j \cos\theta + h_i \sin\theta)$$

    for the pairs $(i, j)$, which are the halves of the rotated features or neighbours. Features past the pairs are not rotated. The norm is rounded
    to the dtype of the heads before the rotation on XLA, and kept in float32 by Triton's kernel.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in all arrays;
    `platform="xla"` also supports forward mode and second derivatives.
    """

    operation: ClassVar[str] = "rotary_heads"

    spec: HeadsSpec = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        interleaved: bool = False,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `interleaved`: whether a pair is two neighbours, rather than one feature of each half.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(q, k, cos, sin)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs
            now.
        """
        check_flags(interleaved=interleaved)
        self.spec = HeadsSpec(bool(interleaved))
        self.plan = plan_of(RotaryHeads, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.RotaryHeads")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T K D"],
        cos: Float[AnyArray, "*B T R"],
        sin: Float[AnyArray, "*B T R"],
        *,
        q_norm: Float[AnyArray, " D"] | None = None,
        k_norm: Float[AnyArray, " D"] | None = None,
        norm_eps: float | None = None,
    ) -> tuple[Float[Array, "*B T H D"], Float[Array, "*B T K D"]]:
        """**Arguments:**

        - `q`, `k`: `[..., T, H, D]` and `[..., T, K, D]` with any number of leading axes, in one dtype: bf16, f16, f32 (f64 on XLA).
        - `cos`, `sin`: arrays that broadcast to `[..., T, R]`, of the angle of each pair. `2 R` features are rotated.
            [`RotaryEmbedding.tables`][ejkernel_eqx.nn.RotaryEmbedding] makes them.
        - `norm_eps`: added to the mean square of a head; default no norm.
        - `q_norm`, `k_norm`: weights of the norms, `[D]`, any float dtype; default ones.

        **Returns:** the rotated queries and keys, in their shapes and dtype. Raises `ValueError` for invalid arguments.
        """
        q, k = array("q", q, "T H D"), array("k", k, "T K D")
        if k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1] or k.dtype != q.dtype:
            raise ValueError(
                f"k: expected {q.dtype} of shape {(*q.shape[:-2], 'K', q.shape[-1])}, as q, received {k.dtype} of shape {k.shape}."
            )
        wide = accumulator(q.dtype)
        if 0 in (q.shape[-2], k.shape[-2]):
            raise ValueError(
                f"q, k: expected at least one head each, received shapes {q.shape} and {k.shape}."
            )
        cos = _table("cos", cos, q).astype(wide)
        if not 0 < 2 * cos.shape[-1] <= q.shape[-1]:
            raise ValueError(
                f"cos: expected at least one pair and at most {q.shape[-1] // 2}, half of the features, received {cos.shape[-1]}."
            )
        sin = _table("sin", sin, q).astype(wide)
        if sin.shape != cos.shape:
            raise ValueError(f"sin: expected the pairs of cos, {cos.shape[-1]}, received {sin.shape[-1]}.")
        named: dict[str, Any] = {"q": q, "k": k, "cos": cos, "sin": sin}
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            if weight is not None:
                if norm_eps is None:
                    raise ValueError(
                        f"{name}: expected None without norm_eps, received an array; pass norm_eps as well."
                    )
                named[name] = fitting(name, weight, q.shape[-1:], "D")
        if norm_eps is not None and not (is_finite(norm_eps) and norm_eps >= 0):
            raise ValueError(f"norm_eps: expected a finite number >= 0 or None, received {norm_eps!r}.")
        if q.size == 0:  # no tokens: nothing to launch
            return q, k
        spec = dataclasses.replace(self.spec, eps=None if norm_eps is None else float(norm_eps))
        results = HEADS.call(self.plan, self.operation, HeadsArrays(**named), spec)
        q_out, k_out = (results[name] for name in RESULTS)
        return q_out, k_out


def _table(name: str, x: Any, q: Array) -> Array:
    """Cosines or sines, for every token."""
    x = array(name, x, "T R")
    shape = (*q.shape[:-2], x.shape[-1])
    if not broadcasts(x.shape, shape):
        raise ValueError(
            f"{name}: expected [..., T, R] that broadcasts to {shape}, received shape {x.shape}."
        )
    return jnp.broadcast_to(x, shape)
