"""One attention call, from resolved arrays to a platform and back: choice and differentiation.

`attend` is the only way from an operation of this family to a kernel, and holds its only `custom_vjp`. Platforms see one batch
axis; here arrays have any number of leading axes, added by the caller, by `jax.vmap`, or by both.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from .._jitted import jitted
from .._kernel import Plan
from .._reverse_only import reverse_only
from .._sizes import is_symbolic
from ..core import is_opaque
from ..dispatch import Problem, Selection
from ..dispatch.labels import kernel_scope
from ..parallel import how_split, match_varying
from .fold_first import fold_first
from .leading import (
    LEARNED,
    like,
    opaque_over_leading_axes,
    over_leading_axes,
    over_mesh,
    per_row,
)
from .masks.tile_table import window_covers
from .spec import AttentionArrays, AttentionGrads, AttentionSpec

OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""Names of the two residuals that only the kernel can make again, for `jax.checkpoint_policies.save_only_these_names`."""

_FORWARD_MODE = "Take ejkernel_eqx.Attention for forward mode and second derivatives: the same mathematics, at the size of the scores."


class _Residuals(NamedTuple):
    arrays: AttentionArrays
    out: Array
    lse: Array


def attend(
    plan: Plan, operation: str, arrays: AttentionArrays, spec: AttentionSpec
) -> tuple[Array, Array | None]:
    """`out [..., T, H, V]` and `lse [..., H, T]` on the platform that the plan chooses for these shapes.

    `lse` is `None` where it was not asked for.
    """
    finite = bool(getattr(jax.config, "jax_debug_infs"))  # noqa: B009, its type names no settings
    return jitted(_attend, plan, operation, spec, finite)(arrays)


def _attend(
    plan: Plan, operation: str, spec: AttentionSpec, finite: bool, arrays: AttentionArrays
) -> tuple[Array, Array | None]:
    selection = plan.select(problem_of(operation, arrays, spec))
    platform = selection.implementation.load()
    if hasattr(platform, "attend"):
        with kernel_scope(selection):
            return over_mesh(lambda arrays: platform.attend(arrays, spec), arrays), None
    call = _differentiable(plan, selection, spec, finite)
    # Inside `shard_map` a gradient varies over every axis that any array does: so must the arrays that it belongs to.
    arrays = reverse_only(match_varying(arrays, arrays), operation, selection.platform, _FORWARD_MODE)
    run = call if is_opaque(platform) else functools.partial(over_mesh, call)
    out, lse = run(arrays) if arrays.bias is None else fold_first(run, arrays)
    return out, lse if spec.return_lse else None


def problem_of(operation: str, arrays: AttentionArrays, spec: AttentionSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body.

    Of a bias or mask the pattern of axes is named, but for the leading ones: those differ between the forward and the backward
    of one call under `vmap`. `nested`: more than one leading axis. `unseen`: the static window leaves a query without keys or a key without queries.
    """
    q, k, v, bias = arrays.q, arrays.k, arrays.v, arrays.bias
    dims = {"B": math.prod(q.shape[:-3]), "T": q.shape[-3], "H": q.shape[-2], "D": q.shape[-1]}
    dims |= {"S": k.shape[-3], "K": k.shape[-2], "V": v.shape[-1]}
    segments = arrays.q_segments is not None
    symbolic = is_symbolic(dims["T"]) or is_symbolic(dims["S"])
    flags = {
        "bias": _pattern(bias),
        "mask": _pattern(arrays.mask),
        "alibi_slopes": arrays.alibi_slopes is not None,
        "sinks": arrays.sinks is not None,
        "rows": arrays.rows is not None,
        "segments": segments,
        "same_segments": segments and spec.same_segments,
        "causal": spec.right == 0,
        "window": None if not spec.ranged else f"{spec.left},{spec.right}",
        "unseen": spec.ranged and (symbolic or not window_covers(dims["T"], dims["S"], spec)),
        "top_left": spec.offset == 0,
        "soft_cap": spec.logits_soft_cap is not None,
        "negative_scale": spec.scale <= 0,
        "dropout": spec.dropout_rate > 0,
        "deterministic": spec.deterministic,
        "lse": spec.return_lse,
        "nested": sum(size != 1 for size in q.shape[:-3]) > 1,
    }
    dtypes = {"qkv": q.dtype} if bias is None else {"qkv": q.dtype, "bias": bias.dtype}
    return Problem.make(
        operation,
        dims=dims,
        dtypes=dtypes,
        flags=flags,
        lengths={"B", "T", "S"},
        counts={"H", "K"},
        requirements={"deterministic", "lse", "nested"},
    )


def _pattern(x: Any) -> str | None:
    """Which of the axes `H`, `T`, `S` an array over the scores has: `"1TS"`; `None` for no array."""
    if x is None:
        return None
    return "".join(letter if size != 1 else "1" for letter, size in zip("HTS", x.shape[-3:], strict=True))


def _differentiable(
    plan: Plan, selection: Selection, spec: AttentionSpec, finite: bool
) -> Callable[..., Any]:
    """The call as a function of its arrays, with the core's own backward.

    `finite`: what is kept for the backward has no infinities. Outside of `jit` the setting `jax_debug_infs` sees them there.
    """
    platform, implementation = selection.platform, selection.implementation.load()
    opaque = is_opaque(implementation)

    def choose(arrays: AttentionArrays) -> Selection:
        """For an opaque kernel by the shapes of the launch: all leading axes are merged by now."""
        if not opaque:
            return selection
        return plan.select(problem_of(selection.problem.operation, arrays, spec), platform=platform)

    def forward(arrays: AttentionArrays, **how: Any) -> tuple[Array, Array]:
        chosen = choose(arrays)
        with kernel_scope(chosen):
            return implementation.forward(arrays, dataclasses.replace(spec, **how), chosen.config)

    def backward(arrays: AttentionArrays, *results: Array, **how: Any) -> AttentionGrads:
        """`results`: out, lse, and their cotangents."""
        chosen = choose(arrays)
        with kernel_scope(chosen):
            return implementation.backward(arrays, dataclasses.replace(spec, **how), chosen.config, *results)

    if opaque:
        split = how_split(platform, plan.device)
        forward = opaque_over_leading_axes(forward, split)
        backward = opaque_over_leading_axes(backward, split, per_example=LEARNED, summed=True)
    else:
        forward, backward = over_leading_axes(forward), over_leading_axes(backward, gradients=True)

    @jax.custom_vjp
    def call(arrays: AttentionArrays) -> tuple[Array, Array]:
        return forward(arrays)

    def call_forward(arrays: AttentionArrays) -> tuple[tuple[Array, Array], _Residuals]:
        out, lse = forward(arrays)
        out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
        return (out, lse), _Residuals(
            arrays, out, jnp.maximum(lse, jnp.finfo(lse.dtype).min) if finite else lse
        )

    def call_backward(residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[AttentionArrays]:
        arrays = residuals.arrays
        lse = residuals.lse
        if finite:
            lse = jnp.where(lse == jnp.finfo(lse.dtype).min, -jnp.inf, lse)
        grads = backward(per_row(arrays) if opaque else arrays, residuals.out, lse, *cotangents)
        fields: dict[str, Any] = {
            n: like(g, getattr(arrays, n)) for n, g in zip(grads._fields, grads, strict=True) if g is not None
        }
        return (AttentionArrays(**fields),)

    call.defvjp(call_forward, call_backward)
    return call
