"""`RaggedDecodeAttention`: decoding on dense keys, with a range of valid keys per row."""

from typing import ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from .arguments import resolve_dense, Scoring
from .core import finish
from .operation import PagedOperation
from .signature import DecodeInputs, Output, WithLse


class RaggedDecodeAttention(PagedOperation):
    r"""Attention of one query per row on dense, padded keys and values, of which those from `start` to `end` are valid.

    $$s_{bj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_b \cdot k_{bj}\right), \qquad
    o_b = \sum_{j = \max(\mathrm{start}_b,\, \mathrm{end}_b - w)}^{\mathrm{end}_b - 1}
    \frac{e^{s_{bj}}}{\sum_l e^{s_{bl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_{bj}$$

    with $\mathrm{cap}(s) = c \tanh(s / c)$ if `logits_soft_cap` $= c$ is given (else $s$) and a window of $w$ keys. A row with an empty range
    returns 0. Keys and values outside the ranges are not read and may hold NaN. Query head $h$ reads key head
    $\lfloor h / (H / K) \rfloor$.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). For inference only:
    differentiating it raises `UnsupportedError`.
    """

    operation: ClassVar[str] = "ragged_decode_attention"
    __init__ = PagedOperation.__init__

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B H D"],
            k: Float[AnyArray, "*B S K D"],
            v: Float[AnyArray, "*B S K V"],
            start: int | Int[Numbers, "*B"],
            end: int | Int[Numbers, "*B"],
            *,
            return_lse: Literal[False] = False,
            **others: Unpack[DecodeInputs],
        ) -> Output: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B H D"],
            k: Float[AnyArray, "*B S K D"],
            v: Float[AnyArray, "*B S K V"],
            start: int | Int[Numbers, "*B"],
            end: int | Int[Numbers, "*B"],
            *,
            return_lse: Literal[True],
            **others: Unpack[DecodeInputs],
        ) -> WithLse: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B H D"],
            k: Float[AnyArray, "*B S K D"],
            v: Float[AnyArray, "*B S K V"],
            start: int | Int[Numbers, "*B"],
            end: int | Int[Numbers, "*B"],
            *,
            return_lse: bool,
            **others: Unpack[DecodeInputs],
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.RaggedDecodeAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B S K D"],
        v: Float[AnyArray, "*B S K V"],
        start: int | Int[Numbers, "*B"],
        end: int | Int[Numbers, "*B"],
        *,
        sinks: Float[Numbers, " H *n"] | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B H V"] | tuple[Float[Array, "*B H V"], Float[Array, "*B H"]]:
        """**Arguments:**

        - `q`: `[..., H, D]`, with any number of leading axes (the rows). bf16, f16, f32 (f64 on XLA).
        - `k`, `v`: `[..., S, K, D]` and `[..., S, K, V]`, with the leading axes of `q`.
        - `start`, `end`: ints from 0 to `S`, one per row or one for all: the row's keys are `start .. end - 1`. The query's position is
            `end - 1`.
        - `sinks`, `return_lse`: as in [`ejkernel_eqx.PagedAttention`][].

        **Returns:**

        `[..., H, V]` in the dtype of `q`. With `return_lse` also `[..., H]` in float32. It is the natural logarithm,
        including sinks, and `-inf` for a row that sees no key. Raises `ValueError` for invalid arguments, and
        `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        arrays, spec = resolve_dense(q, k, v, start, end, self.options, Scoring(return_lse, sinks))
        results = finish(self.plan, arrays, spec)
        # A row is a sequence of one query, whose axis the results do not have.
        return jax.tree.map(lambda x: jnp.squeeze(x, arrays.q.ndim - 3), results)
