"""`DPLRDeltaRule` and `RWKV7`: a state whose transition is a diagonal and a matrix of rank one, with vectors of their own."""

import math
from typing import Any, ClassVar

import jax
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import wide
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .arguments import Frame, log_decays, Operands, step_frame_of
from .operation import Recurrence, ScaledRecurrence
from .spec import KEY

BOUND = -math.exp(-0.5)
"""The strongest log-decay of RWKV-7."""


class DPLRDeltaRule(ScaledRecurrence):
    r"""The generalised delta rule with a diagonal plus low-rank transition (DPLR): of rank one, with a decay for every key channel.

    $$S_t = \mathrm{diag}(e^{g_t})\, S_{t-1} + b_t (a_t^\top S_{t-1}) + k_t v_t^\top, \qquad o_t = \mathrm{scale}\; S_t^\top q_t$$

    with log-decays $g_t \le 0$. The vector $a_t$ reads the state before its decay, and $b_t$ writes what it read. A gated delta rule with keys
    $\kappa$ and write strengths $\beta$ is the case $a = e^{g} \odot \kappa$, $b = -\beta \kappa$, $k = \beta \kappa$;
    [`ejkernel_eqx.KernelDeltaAttention`][] computes that faster. Nothing keeps a state bounded if $b a^\top$ is large. RWKV-7 has
    $a = -\kappa$ and $b = \kappa \odot \eta$ with $\lVert \kappa \rVert = 1$ and $0 \le \eta \le 1$ ([`ejkernel_eqx.RWKV7`][]).

    Let $R$ be the largest head count. Output head $r$ reads head $\lfloor r / (R / n) \rfloor$ of an operand with $n$ heads. The state has
    the largest head count of `k`, `v`, `a`, `b`, `g`.

    Platforms: Triton (`"triton"`, `"triton-interpret"`; key dims up to 128, not float64) and XLA (`"xla"`). Differentiable in reverse mode in every
    float argument and through both results; `platform="xla"` also supports forward mode and second derivatives.

    Sources: Peng et al., *RWKV-7 "Goose" with Expressive Dynamic State Evolution* (2025); Yang et al., *Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length* (2024), whose WY form of a chunk it generalises.
    """

    operation: ClassVar[str] = "dplr_delta_rule"
    __init__ = ScaledRecurrence.__init__

    @jax.named_scope("ejkernel_eqx.DPLRDeltaRule")
    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        a: Float[AnyArray, "*B T H D"],
        b: Float[AnyArray, "*B T H D"],
        g: Float[AnyArray, "*B T H D"],
        *,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments:**

        - `q`, `k`, `a`, `b`: `[..., T, H, D]`; `v`: `[..., T, H, V]`; bf16, f16, f32, f64, all in the dtype of `q`.
        - `g`: log-decays `[..., T, H, D]` of at most 0; any float dtype.
        - `initial_state`, `cu_seqlens`, `segment_ids`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and `[..., H, D, V]` (`[N, H, D, V]` with `cu_seqlens`). Raises the
        errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
        return self._run(frame, self._operands(frame, (q, k, v), (a, b), g), initial_state)

    @jax.named_scope("ejkernel_eqx.DPLRDeltaRule.step")
    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        a: Float[AnyArray, "*B H D"],
        b: Float[AnyArray, "*B H D"],
        g: Float[AnyArray, "*B H D"],
        state: Float[AnyArray, "... H D V"],
        *,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(q, "q", "H D", state_indices)
        return self._run(frame, self._operands(frame, (q, k, v), (a, b), g), state)

    def _operands(self, frame: Frame, qkv: tuple[Any, Any, Any], ab: tuple[Any, Any], g: Any) -> Operands:
        q, k, v = frame.qkv(*qkv)
        dim = q.shape[-1]
        a, b = (frame.main(name, x, (None, dim), "H D") for name, x in zip("ab", ab, strict=True))
        g = log_decays("g", frame.operand("g", g, (None, dim), "H D"))
        return Operands(q, k, v, self.scale, g, a=a, b=b, decay=KEY)


class RWKV7(Recurrence):
    r"""The recurrence of RWKV-7, from the raw decay, the removal key and the in-context learning rate.

    $$S_t = \mathrm{diag}(e^{g_t})\, S_{t-1} - (\kappa_t \odot \eta_t) (\kappa_t^\top S_{t-1}) + k_t v_t^\top, \qquad
      o_t = S_t^\top r_t, \qquad g_t = -e^{-1/2} \sigma(w_t)$$

    It is [`ejkernel_eqx.DPLRDeltaRule`][] with $a = -\kappa$, $b = \kappa \odot \eta$ and scale 1. Decays and products are computed in float32.
    Heads, platforms and derivatives are those of that operation. States are `[D, V]`, keys first: those of BlinkDL's kernels are
    transposed.

    Source: Peng et al., *RWKV-7 "Goose" with Expressive Dynamic State Evolution* (2025).
    """

    operation: ClassVar[str] = "rwkv7"

    def __init__(
        self,
        *,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:** as for [`ejkernel_eqx.GatedLinearAttention`][]; `tune_for` takes `(r, w, k, v, kappa, eta)`."""
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.RWKV7")
    @over_sequence_axis()
    def __call__(
        self,
        r: Float[AnyArray, "*B T H D"],
        w: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        kappa: Float[AnyArray, "*B T H D"],
        eta: Float[AnyArray, "*B T H D"],
        *,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments:**

        - `r`, `k`, `kappa`: receptances, keys and removal keys `[..., T, H, D]`; `v`: `[..., T, H, V]`; bf16, f16, f32, f64, all in the dtype of
            `r`. Removal keys have length 1 in the published model.
        - `w`: raw decays `[..., T, H, D]`, before the sigmoid; any float dtype.
        - `eta`: in-context learning rates `[..., T, H, D]`, after their sigmoid; any float dtype.
        - `initial_state`, `cu_seqlens`, `segment_ids`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** as for [`ejkernel_eqx.DPLRDeltaRule`][], with its errors.
        """
        frame = self._frame(r, cu_seqlens, segment_ids, state_indices, "r")
        return self._run(frame, self._operands(frame, (r, k, kappa), v, w, eta), initial_state)

    @jax.named_scope("ejkernel_eqx.RWKV7.step")
    def step(
        self,
        r: Float[AnyArray, "*B H D"],
        w: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        kappa: Float[AnyArray, "*B H D"],
        eta: Float[AnyArray, "*B H D"],
        state: Float[AnyArray, "... H D V"],
        *,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(r, "r", "H D", state_indices)
        return self._run(frame, self._operands(frame, (r, k, kappa), v, w, eta), state)

    def _operands(self, frame: Frame, keys: tuple[Any, Any, Any], v: Any, w: Any, eta: Any) -> Operands:
        dim = keys[0].shape[-1]
        named = zip(("r", "k", "kappa"), keys, strict=True)
        r, k, kappa = (frame.main(name, x, (None, dim), "H D") for name, x in named)
        v = frame.main("v", v, (None, None), "H V")
        w = wide(frame.operand("w", w, (None, dim), "H D"))
        eta = frame.operand("eta", eta, (kappa.shape[-2], dim), "H D")
        # Masked after the sigmoid, which makes the zeros of padding one half.
        g = frame.mask(BOUND * jax.nn.sigmoid(w))
        b = (wide(kappa) * eta.astype(wide(kappa).dtype)).astype(kappa.dtype)
        return Operands(r, k, v, 1.0, g, a=-kappa, b=b, decay=KEY)
