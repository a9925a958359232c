"""`Matmul`: rows by the weights of linear layers, with a norm before and a bias, an activation, a gate and a residual behind."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._kernel import Kernel, make_plan, Plan
from ..._shapes import AnyArray, Float, is_symbolic
from ...core.arguments import array, check_flags, fitting, is_finite
from ...core.plans import plan_of
from ...dispatch import PlatformLike
from ...quantised import QuantFormat, QuantizedWeight
from ..arguments import check_epilogue
from .core import KINDS
from .spec import BIASES, CODED, FEW_ROWS, MatmulArrays, MatmulSpec, RESULTS, RIGHTS


class Matmul(Kernel):
    r"""Multiplies rows by the weights of one to three linear layers, with all that surrounds the products in a block of a decoder:

    $$h = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \odot n, \qquad
      \mathrm{out}_i = \mathrm{act}(h W_i^\top + b_i) + \mathrm{residual}$$

    and with `gated`, which takes two weights, of a gate and of what it multiplies,

    $$\mathrm{out} = \mathrm{act}(h W_0^\top + b_0) \odot (h W_1^\top + b_1 + s) + \mathrm{residual}.$$

    Norm, bias, activation and residual are optional. Sums are in float32 (float64 for float64), in a fixed order. Triton's kernel rounds the result
    once; XLA rounds the norm, each product and the result, as separate layers do.

    It is for few rows, as in decoding, where the time is that of reading the weights. On GPUs, up to 64 rows are by
    default one launch of Triton's kernel. More rows are XLA's. Weights are `[out, in]`, as in `equinox.nn.Linear`.

    Weights may be quantised, all in one format ([`ejkernel_eqx.QuantizedWeight`][]). Then Triton's kernel reads their codes and makes numbers of them
    in registers, by default for up to 64 rows. Of more rows, in bfloat16 on Hopper, a kernel does so in each tile; elsewhere a kernel makes floats
    of the codes, by which XLA multiplies. Codes, scales and zero points are constants. XLA, and for tensor cores Triton, rounds the numbers to the
    dtype of `x`.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in all float arrays;
    `platform="xla"` also supports forward mode and second derivatives.
    """

    operation: ClassVar[str] = "matmul"

    spec: MatmulSpec = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        activation: str | None = None,
        *,
        gated: bool = False,
        alpha: float = 1.0,
        limit: float | None = None,
        up_shift: float = 0.0,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `activation`: of the product, or of the gate: `None`, `"silu"`, `"gelu"` (exact), `"gelu_tanh"` or `"relu"`.
        - `gated`: whether calls take two weights, of the gate and of what it multiplies.
        - `alpha`, `limit`, `up_shift`: as in [`ejkernel_eqx.GroupedMatmul`][].
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.
        """
        check_epilogue(activation, alpha, limit, up_shift)
        check_flags(gated=gated)
        if not gated and (limit is not None or up_shift):
            name, value = ("limit", limit) if limit is not None else ("up_shift", up_shift)
            raise ValueError(
                f"{name}: expected no value with gated=False, received {value!r}; it belongs to a gate."
            )
        limit = None if limit is None else float(limit)
        self.spec = MatmulSpec(activation, bool(gated), float(alpha), limit, float(up_shift))
        self.plan = plan_of(Matmul, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.Matmul")
    def __call__(
        self,
        x: Float[AnyArray, "*B K"],
        *weights: Float[AnyArray, "N K"] | QuantizedWeight,
        biases: Sequence[Float[AnyArray, " N"] | None] = (),
        norm: Float[AnyArray, " K"] | bool = False,
        norm_eps: float = 1e-6,
        residual: Float[AnyArray, "*B N"] | None = None,
    ) -> Float[Array, "*B N"]:
        """**Arguments:**

        - `x`: `[..., K]` with any number of leading axes, the rows; bf16, f16, f32 (f64 on XLA).
        - `weights`: one, `[N, K]`, in the dtype of `x` or quantised. With `gated` there are two of equal shape: that of
            the gate, and that of what it multiplies.
        - `biases`: for each weight a vector `[N]` of any float dtype, or `None`; default none.
        - `norm`: whether rows are normalised first: `True`, or the weight of the norm, `[K]`.
        - `norm_eps`: added to the mean square, with a norm.
        - `residual`: `[..., N]` in the dtype of `x`, added to the result.

        **Returns:** `[..., N]` in the dtype of `x`.

        **Raises:** `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        expected = 2 if self.spec.gated else 1
        if len(weights) != expected:
            words = "two, of gate and up," if self.spec.gated else "one"
            raise ValueError(
                f"weights: expected {words} with gated={self.spec.gated}, received {len(weights)}; `together` multiplies by several."
            )
        return self._results(x, weights, biases, norm, norm_eps, residual)[0]

    @jax.named_scope("ejkernel_eqx.Matmul")
    def together(
        self,
        x: Float[AnyArray, "*B K"],
        *weights: Float[AnyArray, "N K"] | QuantizedWeight,
        biases: Sequence[Float[AnyArray, " N"] | None] = (),
        norm: Float[AnyArray, " K"] | bool = False,
        norm_eps: float = 1e-6,
    ) -> tuple[Float[Array, "*B N"], ...]:
        """Multiplies rows by one to three weights of any numbers of rows, such as those of queries, keys and values, in one launch. Not with `gated`.

        **Arguments:** those of a call.

        **Returns:** a result for each weight.
        """
        if self.spec.gated or not 1 <= len(weights) <= len(RIGHTS):
            raise ValueError(
                f"weights: expected one to {len(RIGHTS)} and gated=False, received {len(weights)} and gated={self.spec.gated}."
            )
        return self._results(x, weights, biases, norm, norm_eps, None)

    def _results(self, x: Any, *given: Any) -> tuple[Array, ...]:
        arrays, spec = self._resolved(x, *given)
        lead = x.shape[:-1]
        shapes = [(*lead, right.shape[0]) for right in arrays.rights[: spec.count]]
        if 0 in lead:  # no rows: nothing to launch
            return tuple(jnp.zeros(shape, arrays.x.dtype) for shape in shapes)
        plan = self._plan_for(lead, spec.format is not None)
        results = KINDS[spec.count].call(plan, self.operation, arrays, spec)
        return tuple(results[name].reshape(shape) for name, shape in zip(RESULTS, shapes))

    def _plan_for(self, lead: tuple[Any, ...], is_quantised: bool = False) -> Plan:
        """The plan of a call with rows of these axes: many are for XLA, unless weights are quantised, or a platform or a configuration was asked
        for."""
        rows, snapshot = math.prod(lead), self.plan.snapshot
        asked = snapshot.requested is not None or snapshot.override is not None
        if asked or (not is_symbolic(rows) and (is_quantised or rows <= FEW_ROWS)):
            return self.plan
        return dataclasses.replace(make_plan(self.operation, platform="xla"), path=self.plan.path)

    def _resolved(
        self, x: Any, weights: Any, biases: Any, norm: Any, norm_eps: Any, residual: Any
    ) -> tuple[MatmulArrays, MatmulSpec]:
        x, gated = array("x", x, "features"), self.spec.gated
        if x.shape[-1] == 0:
            raise ValueError(f"x: expected at least one feature, received shape {x.shape}.")
        biases = tuple(biases or ()) or (None,) * len(weights)
        form = _format_of(weights)
        if len(biases) != len(weights):
            raise ValueError(
                f"biases: expected {len(weights)}, one for each weight, received {len(biases)}; None stands for none."
            )
        named: dict[str, Any] = {}
        for i, (weight, bias) in enumerate(zip(weights, biases)):
            if form is None:
                weight = array(f"weights[{i}]", weight, "N K")
            if (
                weight.ndim != 2
                or weight.shape[1] != x.shape[-1]
                or (form is None and weight.dtype != x.dtype)
            ):
                raise ValueError(
                    f"weights[{i}]: expected [N, {x.shape[-1]}] in {x.dtype}, the features and the dtype of x, received {weight.dtype} of shape "
                    f"{weight.shape}; weights are [out, in], as in equinox.nn.Linear."
                )
            if 0 in weight.shape:
                raise ValueError(f"weights[{i}]: expected at least one row, received shape {weight.shape}.")
            named |= {RIGHTS[i]: weight} if form is None else _coded(f"weights[{i}]", weight, CODED[i])
            if bias is not None:
                named[BIASES[i]] = fitting(f"biases[{i}]", bias, weight.shape[:1], "N")
        if gated and weights[0].shape != weights[1].shape:
            raise ValueError(
                f"weights: expected two of equal shape with gated=True, received {weights[0].shape} and {weights[1].shape}."
            )
        count = 1 if gated else len(weights)
        eps = None
        if isinstance(norm, np.bool_):
            norm = bool(norm)
        if norm is not False and norm is not None:
            if not (is_finite(norm_eps) and norm_eps >= 0):
                raise ValueError(f"norm_eps: expected a finite number >= 0, received {norm_eps!r}.")
            eps = float(norm_eps)
            if norm is not True and not isinstance(norm, Array | np.ndarray):
                raise ValueError(f"norm: expected True, False or the weight of the norm, received {norm!r}.")
            if norm is not True:
                named["norm"] = fitting("norm", norm, x.shape[-1:], "features")
        if form is not None:
            # If one matrix has a factor, all have one.
            names = [fields[3] for fields in CODED[: len(weights)]]
            if any(name in named for name in names):
                named = dict.fromkeys(names, jnp.uint32(0x3F800000)) | named
        spec = dataclasses.replace(self.spec, count=count, eps=eps, format=form)
        rows = lambda a: a if a.ndim > 1 else a.reshape(1, -1)
        if residual is not None:
            shape = (*x.shape[:-1], weights[0].shape[0])
            residual = fitting("residual", residual, shape, "features")
            if residual.dtype != x.dtype:
                raise ValueError(
                    f"residual: expected {x.dtype}, as x, received {residual.dtype}; cast it first."
                )
            named["residual"] = rows(residual)
        return MatmulArrays(rows(x), **named), spec


def _format_of(weights: Sequence[Any]) -> QuantFormat | None:
    """The format of quantised weights; `None` if they are arrays."""
    forms = [w.format if isinstance(w, QuantizedWeight) else None for w in weights]
    if any(form != forms[0] for form in forms):
        names = " and ".join(str(form or "an array") for form in forms)
        raise ValueError(
            f"weights: expected arrays, or quantised weights of one format, received {names}; call for each of them, or pass floats, "
            "weight.astype(x.dtype)."
        )
    return forms[0]


def _coded(name: str, weight: Any, fields: tuple[str, ...]) -> dict[str, Array]:
    """The arrays of a quantised weight by the names of `MatmulArrays`."""
    if weight.transposed:
        raise ValueError(
            f"{name}: expected codes [out, in], received a transposed {weight!r}; pass its floats, weight.astype(x.dtype)."
        )
    arrays = (weight.codes, weight.scales, weight.zeros, weight.tensor_scale)
    return {field: jax.device_put(x) for field, x in zip(fields, arrays) if x is not None}


QuantizedMatmul = Matmul
"""The same class, by the name under which other libraries have the product with a quantised weight."""
