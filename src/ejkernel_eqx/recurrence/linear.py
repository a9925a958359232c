"""`LinearAttention`: attention without a softmax, as a recurrence with one kind of decay or none."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import array, fitting, wide
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .arguments import check_scale, Frame, log_decays, Operands, read_pair, step_frame_of
from .heads import repeat_heads
from .operation import Recurrence
from .spec import CONSTANT, KEY, NONE, SCALAR, VALUE

# With `normalize` pairs.
State = Float[AnyArray, "... H D V"] | tuple[Float[AnyArray, "... H D V"], Float[AnyArray, "... H D"]]
FinalState = Float[Array, "... H D V"] | tuple[Float[Array, "... H D V"], Float[Array, "... H D"]]


class LinearAttention(Recurrence):
    r"""Linear attention, in time and memory linear in the sequence length.

    $$S_t = \alpha_t \odot S_{t-1} + k_t v_t^\top, \qquad o_t = \mathrm{scale}\; S_t^\top q_t$$

    where $\alpha_t$ is 1, or the exponential of the log-decay that is given: `g_gamma` (one per head), `g` (one per
    head and token), `gk` (one per key channel and token), or `gv` (one per value channel and token). If both `g` and
    `gk` are given, they are added first. With `normalize`

    $$z_t = z_{t-1} + k_t, \qquad o_t = \frac{\mathrm{scale}\; S_t^\top q_t}{\mathrm{scale}\; z_t \cdot q_t + 10^{-10}},$$

    without a decay, and every state is a pair `(S, z)`. Let $R$ be the largest head count. Output head $r$ reads head
    $\lfloor r / (R / n) \rfloor$ of an operand with $n$ heads. The state has the largest head count of `k`, `v` and the
    decay, $z$ that of `k`.

    Platforms and derivatives: as for [`ejkernel_eqx.GatedLinearAttention`][]; Triton and Pallas do not support `gv`.

    Sources: Katharopoulos et al., *Transformers are RNNs* (2020); with decay: Sun et al., *Retentive Network* (2023), and Yang et al.,
    *Gated Linear Attention Transformers with Hardware-Efficient Training* (2023).
    """

    operation: ClassVar[str] = "linear_attention"

    scale: float | None = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)

    def __init__(
        self,
        scale: float | None = None,
        *,
        normalize: bool = False,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `scale`: scale of the outputs; default `D**-0.5`.
        - `normalize`: divide by the sum of the weights; not with a decay.
        - `reverse`, `sequence_axis`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(q, k, v)` or [`ejkernel_eqx.inputs`][]`(q, k, v, g=g, ...)`: fix the choice for these inputs now.
        """
        self.scale, self.normalize = check_scale(scale), normalize
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.LinearAttention")
    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        *,
        g: Float[AnyArray, "*B T H"] | None = None,
        gk: Float[AnyArray, "*B T H D"] | None = None,
        gv: Float[AnyArray, "*B T H V"] | None = None,
        g_gamma: Float[AnyArray, " H"] | None = None,
        initial_state: State | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], FinalState]:
        """**Arguments:**

        - `q`, `k`: `[..., T, H, D]`; `v`: `[..., T, H, V]`; bf16, f16, f32 (f64 on XLA). Heads as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `g`: `[..., T, H]`; `gk`: `[..., T, H, D]`; `gv`: `[..., T, H, V]`; `g_gamma`: `[H]`. Log-decays of at most 0; any float dtype.
        - `initial_state`: `[..., H, D, V]`, or `[N, H, D, V]` with `cu_seqlens`; default zero. With `normalize` a pair, with $z$
            `[..., H, D]` or `[N, H, D]`.
        - `cu_seqlens`, `segment_ids`, `state_indices`: packed sequences, padding, and a pool of states (with `normalize` a pair of them), as in
            [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and the state after the last token, in the shape of `initial_state`.
        Raises the errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
        operands = self._operands(frame, q, k, v, _decay(frame, q, v, g, gk, gv, g_gamma))
        return self._normalized(frame, operands, "initial_state", initial_state)

    @jax.named_scope("ejkernel_eqx.LinearAttention.step")
    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        state: State,
        *,
        g: Float[AnyArray, "*B H"] | None = None,
        gk: Float[AnyArray, "*B H D"] | None = None,
        gv: Float[AnyArray, "*B H V"] | None = None,
        g_gamma: Float[AnyArray, " H"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], FinalState]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]. With `normalize` a state, or a pool of states, is a pair, with $z$ `[..., H, D]`."""
        frame = step_frame_of(q, "q", "H D", state_indices)
        operands = self._operands(frame, q, k, v, _decay(frame, q, v, g, gk, gv, g_gamma))
        return self._normalized(frame, operands, "state", state)

    def _normalized(self, frame: Frame, operands: Operands, name: str, state: Any) -> tuple[Array, Any]:
        if not self.normalize:
            return self._run(frame, operands, state)
        values, weights = _pair(name, state, operands.k)
        out, values = self._run(frame, operands, values)
        # The sum of the keys is the same recurrence on values of 1; padding adds nothing to it.
        ones = frame.mask(jnp.ones((*frame.over_tokens, 1, 1), operands.v.dtype))
        weight, weights = self._run(frame, dataclasses.replace(operands, v=ones), weights)
        # The sum has the heads of `q` and `k`, which may be fewer than those of the output.
        divisor = repeat_heads(wide(weight), -2, out.shape[-2]) + 1e-10
        return (wide(out) / divisor).astype(frame.dtype), (values, weights[..., 0])

    def _operands(
        self, frame: Frame, q: AnyArray, k: AnyArray, v: AnyArray, decay: tuple[str, Array | None]
    ) -> Operands:
        kind, g = decay
        q, k, v = frame.qkv(q, k, v)
        if self.normalize and kind != NONE:
            raise ValueError(
                "normalize: expected no decay with normalize=True, received one; the sum of decayed weights normalises nothing, so drop either."
            )
        if self.normalize and frame.dtype == jnp.float16:
            # Sums over thousands of tokens exceed the largest float16 before the division.
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return Operands(q, k, v, self.scale, g, decay=kind)


def _decay(
    frame: Frame, q: AnyArray, v: AnyArray, g: Any, gk: Any, gv: Any, g_gamma: Any
) -> tuple[str, Array | None]:
    """The kind of decay and its log-decays."""
    kinds = [name for name, x in (("g", g), ("gk", gk), ("gv", gv), ("g_gamma", g_gamma)) if x is not None]
    if len(kinds) > 1 and kinds != ["g", "gk"]:
        raise ValueError(
            f"{kinds[1]}: expected one kind of decay, or g and gk together, received {' and '.join(kinds)}; pass one of them."
        )
    if g_gamma is not None:
        return CONSTANT, frame.shared(log_decays("g_gamma", fitting("g_gamma", g_gamma, (None,), "H")))
    if gv is not None:
        return VALUE, log_decays("gv", frame.operand("gv", gv, (None, v.shape[-1]), "H V"))
    scalar = None if g is None else log_decays("g", frame.operand("g", g, (None,), "H"))
    if gk is None:
        return (NONE, None) if scalar is None else (SCALAR, scalar)
    key = log_decays("gk", frame.operand("gk", gk, (None, q.shape[-1]), "H D"))
    if scalar is None:
        return KEY, key
    few, many = sorted((scalar.shape[-1], key.shape[-2]))
    if few == 0 or many % few:
        raise ValueError(
            f"gk: expected a head count that divides that of g or vice versa, received {key.shape[-2]} and {scalar.shape[-1]}."
        )
    # Widened before they are added, so that the sum is not rounded to a narrow dtype.
    scalar, key = repeat_heads(wide(scalar), -1, many), repeat_heads(wide(key), -2, many)
    return KEY, key + scalar[..., None].astype(key.dtype)


def _pair(name: str, state: Any, k: AnyArray) -> tuple[Array | None, Array | None]:
    """`S`, and `z` with one value channel, as the state of a recurrence whose values are ones."""
    values, weights = read_pair(name, state, "(S, z) with normalize=True")
    if state is None:
        return None, None
    weights = array(name, weights, "H D")
    if weights.shape[-2:] != k.shape[-2:]:
        raise ValueError(
            f"{name}: expected z of shape [..., {', '.join(map(str, k.shape[-2:]))}], as k, received {weights.shape}; every call returns S and z."
        )
    return values, weights[..., None]
