"""`RaggedDecodeAttention`: decoding on dense keys of which each row has its own range."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array
from jaxtyping import Float, Int

from .._kernel import Kernel, Plan
from ..core.platforms import register
from .arguments import PagedOptions, resolve_dense, Scoring
from .operation import finish, plan_of

register("ragged_decode_attention", __package__)


class RaggedDecodeAttention(Kernel):
    r"""Attention of one query of each row on dense, padded keys and values, of which the row has those from `start` to `end`.

    $$s_{bj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_b \cdot k_{bj}\right), \qquad
    o_b = \sum_{j = \max(\mathrm{start}_b,\, \mathrm{end}_b - w)}^{\mathrm{end}_b - 1}
    \frac{e^{s_{bj}}}{\sum_l e^{s_{bl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_{bj}$$

    with $\mathrm{cap}(s) = c \tanh(s / c)$ where `logits_soft_cap` $= c$ is given (else $s$) and a window of $w$ keys. A row with an empty range
    gives 0. What lies outside the ranges is not read and may hold NaN. Query head $h$ reads key head $\lfloor h / (H / K) \rfloor$.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). For inference: differentiating it raises `UnsupportedError`.
    """

    operation: ClassVar[str] = "ragged_decode_attention"

    options: PagedOptions = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        *,
        platform: str | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `sliding_window`: an int $w$: the last $w$ keys, the query's own included; a pair `(left, right)`: `left` keys before its own (`None`: all;
            there are none behind).
        - `logits_soft_cap`: the bound $c$ of the tanh soft cap.
        - `softmax_scale`: default `D**-0.5`; required with a `PagedLatentCache`.
        - `platform`: use this platform or raise; `None` chooses by device and request.
        - `config`: use this kernel configuration; it implies its platform.
        - `tune_for`: [`ejkernel_eqx.inputs`][]`(q, k, v, start, end)`, arrays or `jax.ShapeDtypeStruct`s: settle the choice for these now.

        Raises `ValueError` for options that mean nothing.
        """
        self.options = PagedOptions.read(sliding_window, logits_soft_cap, softmax_scale)
        self.plan = plan_of(RaggedDecodeAttention, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.RaggedDecodeAttention")
    def __call__(
        self,
        q: Float[Array, "..."],
        k: Float[Array, "..."],
        v: Float[Array, "..."],
        start: Int[Array, "..."],
        end: Int[Array, "..."],
        *,
        sinks: Float[Array, "..."] | None = None,
        return_lse: bool = False,
    ) -> Any:  # one array or two, as `return_lse` says
        """**Arguments:**

        - `q`: `[..., H, D]`, any number of leading axes, the rows. bf16, f16, f32 (f64 on XLA).
        - `k`, `v`: `[..., S, K, D]` and `[..., S, K, V]`, the leading axes of `q`.
        - `start`, `end`: ints, one for each row or one for all: the row's keys are `start .. end - 1`; at most `S` of them. The query sits at
            `end - 1`.
        - `sinks`: logits `[H]` or `[H, n]` that join the denominator and carry no value.
        - `return_lse`: also return the log-sum-exp of the scores, as [`ejkernel_eqx.merge_attention`][] takes it (without sinks).

        **Returns:**

        `[..., H, V]` in the dtype of `q`; with `return_lse` also `[..., H]` in float32: natural logarithm, sinks included, `-inf` for a row
        that sees nothing. Raises `ValueError` for arguments that do not fit, `UnsupportedError` if no platform (or not the given one)
        supports the call.
        """
        arrays, spec = resolve_dense(q, k, v, start, end, self.options, Scoring(sinks), return_lse=return_lse)
        return finish(self.plan, arrays, spec, -3)
