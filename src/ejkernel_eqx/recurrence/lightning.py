"""`LightningAttention`: linear attention with a constant decay per head."""

import functools
from collections.abc import Callable
from typing import Any, cast, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Float, Int, Numbers
from .._values import checked
from ..core.arguments import accumulator, array, fitting
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .arguments import check_scale, Frame, Operands, step_frame_of
from .operation import Recurrence
from .spec import CONSTANT

F = TypeVar("F", bound=Callable[..., Any])
_RULES = ("minimax", "fla")


def lightning_slopes(
    rule: Literal["minimax", "fla"], num_heads: int, layer_index: int, num_layers: int
) -> np.ndarray:
    r"""The slopes of a layer's heads, from which [`ejkernel_eqx.LightningAttention`][] takes the log-decays $-\mathrm{slope}_h$:

    $$\mathrm{minimax:}\; 2^{-8(h+1)/H}\left(1 - \frac{l}{L - 1 + 10^{-5}} + 10^{-5}\right), \qquad
      \mathrm{fla:}\; \frac{8}{H}\left(1 - \frac{l}{L}\right) h .$$

    **Arguments:** `rule`; `num_heads` $H$, where heads $h$ count from 0; `layer_index` $l$, from 0; `num_layers` $L$.

    **Returns:** float64 `[H]`, at least 0. For stacked layers, stack the slopes and pass them with each call.

    **Raises:** `ValueError` for an unknown rule or an index outside the layers.

    Sources: MiniMax, *MiniMax-01: Scaling Foundation Models with Lightning Attention* (2025), and its published model;
    flash-linear-attention's `lightning_attn`.
    """
    if rule not in _RULES:
        raise ValueError(
            f"slopes: expected 'minimax', 'fla' or None, received {rule!r}; with None the slopes are passed with each call."
        )
    if not 0 <= layer_index < num_layers:
        raise ValueError(
            f"layer_index: expected 0 <= layer_index < num_layers, received {layer_index} of {num_layers}; layers count from 0."
        )
    # float64 on the host, so that the slopes are rounded once, when they become an array.
    heads = np.arange(num_heads, dtype=np.float64)
    if rule == "minimax":
        rate = 1.0 - layer_index / (num_layers - 1 + 1e-5) + 1e-5
        return 2.0 ** (-8.0 * (heads + 1) / num_heads) * rate
    return 8.0 / num_heads * (1.0 - layer_index / num_layers) * heads


def _with_slopes(call: F) -> F:
    """Decorates a call whose heads devices may share: the slopes of all heads are known before."""

    @functools.wraps(call)
    def resolved(self: Any, q: Any, k: Any, v: Any, *, slopes: Any = None, **others: Any) -> Any:
        return call(self, q, k, v, slopes=self._slopes(q, k, v, slopes), **others)

    return cast(F, resolved)


class LightningAttention(Recurrence):
    r"""Lightning attention: linear attention with a constant decay per head.

    $$S_t = e^{-\mathrm{slope}_h} S_{t-1} + k_t v_t^\top, \qquad o_t = \mathrm{scale}\; S_t^\top q_t$$

    with the slopes of [`ejkernel_eqx.lightning_slopes`][], or with slopes passed with each call. Each of the $H$ heads
    has one, where $H$ is the largest head count of `q`, `k`, `v`. Heads are shared as in
    [`ejkernel_eqx.GatedLinearAttention`][]; the state has the largest head count of the slopes, `k` and `v`.

    Platforms and derivatives: as for [`ejkernel_eqx.GatedLinearAttention`][].

    Sources: Qin et al., *Lightning Attention-2* (2024); MiniMax, *MiniMax-01* (2025).
    """

    operation: ClassVar[str] = "lightning_attention"

    slopes: str | None = eqx.field(static=True)
    layer_index: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        slopes: Literal["minimax", "fla"] | None = "minimax",
        layer_index: int = 0,
        num_layers: int = 1,
        scale: float | None = None,
        *,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `slopes`: the rule for the slopes, or `None` to pass them with each call.
        - `layer_index`, `num_layers`: the index of the layer, from 0, and the number of layers; used by the rules.
        - `scale`: scale of the outputs; default 1 for `"minimax"`, else `D**-0.5`.
        - `reverse`, `sequence_axis`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(q, k, v)` or [`ejkernel_eqx.inputs`][]`(q, k, v, ...)`: fix the choice for these inputs now.
        """
        if slopes is not None:
            lightning_slopes(slopes, 1, layer_index, num_layers)  # raises for invalid arguments
        self.slopes, self.layer_index, self.num_layers = slopes, layer_index, num_layers
        self.scale = check_scale(1.0 if scale is None and slopes == "minimax" else scale)
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.LightningAttention")
    @_with_slopes
    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        *,
        slopes: Float[AnyArray, " H"] | None = None,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments:**

        - `q`, `k`: `[..., T, H, D]`; `v`: `[..., T, H, V]`; bf16, f16, f32 (f64 on XLA). Heads as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `slopes`: `[H]`, at least 0, any float dtype; only if the module was built with `slopes=None`. Differentiable.
        - `initial_state`, `cu_seqlens`, `segment_ids`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and `[..., H, D, V]` (`[N, H, D, V]` with `cu_seqlens`). Raises the
        errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        assert slopes is not None
        frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
        return self._run(frame, self._operands(frame, q, k, v, slopes), initial_state)

    @jax.named_scope("ejkernel_eqx.LightningAttention.step")
    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        state: Float[AnyArray, "... H D V"],
        *,
        slopes: Float[AnyArray, " H"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(q, "q", "H D", state_indices)
        return self._run(frame, self._operands(frame, q, k, v, self._slopes(q, k, v, slopes)), state)

    def _operands(self, frame: Frame, q: AnyArray, k: AnyArray, v: AnyArray, slopes: AnyArray) -> Operands:
        q, k, v = frame.qkv(q, k, v)
        slopes = fitting("slopes", slopes, (None,), "H")
        say = lambda value: (
            f"slopes: expected slopes of at least 0, received {value}; a head decays by exp(-slope)."
        )
        slopes = checked(slopes, jnp.min(slopes, initial=0), lambda x: x < 0, say)
        return Operands(q, k, v, self.scale, frame.shared(-slopes), decay=CONSTANT)

    def _slopes(self, q: AnyArray, k: AnyArray, v: AnyArray, slopes: AnyArray | None) -> AnyArray:
        """Slopes that were passed, or those of the rule for as many heads."""
        # Slopes come from exactly one source: the rule or the call.
        if (slopes is None) != (self.slopes is not None):
            expected = "an array [H]" if self.slopes is None else "None"
            raise ValueError(
                f"slopes: expected {expected} from a call of LightningAttention(slopes={self.slopes!r}), received "
                f"{'None' if slopes is None else 'an array'}; build it with slopes=None to pass them with each call."
            )
        if self.slopes is None:
            assert slopes is not None
            return slopes
        # The rule depends on the number of heads, which is that of the operand with the most.
        heads = max(array(name, x, "H D").shape[-2] for name, x in (("q", q), ("k", k), ("v", v)))
        rule: Any = self.slopes
        known = lightning_slopes(rule, heads, self.layer_index, self.num_layers)
        return jnp.asarray(known, accumulator(q.dtype))
