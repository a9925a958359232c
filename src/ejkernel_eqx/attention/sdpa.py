"""`ScaledDotProductAttention`: the signature of `jax.nn.dot_product_attention` on our platforms."""

from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
import numpy as np
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import MaskInputs, parse_window, resolve, ScoreInputs, ScoreOptions
from .core import ATTEND
from .masks.mask import Mask
from .signature import DotProductInputs as Inputs
from .signature import K, Output, Q, V, WithLse


class ScaledDotProductAttention(Kernel):
    r"""$\mathrm{softmax}(\mathrm{scale}\, q k^\top + \mathrm{bias})\, v$ with the call signature of `jax.nn.dot_product_attention`.

    As in JAX, causal masks are aligned top-left (query $i$ sees keys up to $i$) and an int window $w$ means `(w, w)`.
    Four things differ from JAX. The output of a query that sees no key is 0, not the mean of the values. `V != D` is
    allowed. Memory is linear in the sequence length on every platform. The log-sum-exp is float32 and differentiable.
    For more options see [`ejkernel_eqx.FlashAttention`][].
    """

    operation: ClassVar[str] = "scaled_dot_product_attention"

    deterministic: bool = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        *,
        deterministic: bool = False,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:** as for [`ejkernel_eqx.FlashAttention`][]."""
        self.deterministic = deterministic
        self.plan = plan_of(ScaledDotProductAttention, self, platform, config, tune_for)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            query: Q,
            key: K,
            value: V,
            bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
            mask: Bool[Numbers, "#*B #H #T #S"] | None = None,
            *,
            return_residual: Literal[False] = False,
            **others: Unpack[Inputs],
        ) -> Output: ...

        @overload
        def __call__(
            self,
            query: Q,
            key: K,
            value: V,
            bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
            mask: Bool[Numbers, "#*B #H #T #S"] | None = None,
            *,
            return_residual: Literal[True],
            **others: Unpack[Inputs],
        ) -> WithLse: ...

        @overload
        def __call__(
            self,
            query: Q,
            key: K,
            value: V,
            bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
            mask: Bool[Numbers, "#*B #H #T #S"] | None = None,
            *,
            return_residual: bool,
            **others: Unpack[Inputs],
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.ScaledDotProductAttention")
    def __call__(
        self,
        query: Float[AnyArray, "*B T H D"],
        key: Float[AnyArray, "*B S K D"],
        value: Float[AnyArray, "*B S K V"],
        bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
        mask: Bool[Numbers, "#*B #H #T #S"] | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: Int[Numbers, "*B"] | None = None,
        key_value_seq_lengths: Int[Numbers, "*B"] | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        return_residual: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]:
        """**Arguments:**

        - `query [..., T, H, D]`, `key [..., S, K, D]`, `value [..., S, K, V]`.
        - `bias`, `mask`: broadcastable to `[..., H, T, S]`.
        - `scale`: default `D**-0.5`.
        - `is_causal`: query `i` sees keys up to `i`.
        - `query_seq_lengths`, `key_value_seq_lengths`: number of real tokens per row.
        - `local_window_size`: `w` or `(left, right)` keys on either side, not counting the query's own.
        - `return_residual`: also return the log-sum-exp `[..., T, H]`.

        **Returns:** `[..., T, H, V]`, and the log-sum-exp if `return_residual`.
        """
        whole = isinstance(local_window_size, int | np.integer)
        window = (local_window_size, local_window_size) if whole else local_window_size
        options = ScoreOptions(softmax_scale=scale, deterministic=self.deterministic)
        own = Mask(is_causal=is_causal, window=parse_window(window, is_causal))
        lengths = {"q_lengths": query_seq_lengths, "kv_lengths": key_value_seq_lengths}
        masking = MaskInputs(mask=mask, **lengths, q_offset=0, own=own)
        scoring = ScoreInputs(bias=bias, return_lse=return_residual)
        call = resolve(query, key, value, options, masking, scoring)
        return ATTEND.attend(self.plan, self.operation, *call)
