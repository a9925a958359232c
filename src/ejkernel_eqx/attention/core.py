"""One attention call, from resolved arrays to a platform and back: differentiation, batching, partitioning.

`attend` is the only way from an operation of this family to a kernel, and holds its only `custom_vjp`. Platforms see one batch
axis; here arrays have any number of leading axes, added by the caller, by `jax.vmap`, or by both.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from .._kernel import Plan
from ..dispatch import Platform, Problem
from ..parallel import match_varying, partition
from .spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges

F = TypeVar("F", bound=Callable[..., Any])

OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""Names of the two residuals that only the kernel can make again, for `jax.checkpoint_policies.save_only_these_names`."""

# Axes of each array behind its leading ones, by the letters of `spec.py`.
_LETTERS: dict[str, Any] = {
    "q": ("T", "H", "D"),
    "k": ("S", "K", "D"),
    "v": ("S", "K", "V"),
    "bias": ("H", "T", "S"),
    "alibi_slopes": ("H",),
    "sinks": ("H",),
    "mask": ("H", "T", "S"),
    "q_segments": ("T",),
    "kv_segments": ("S",),
    "rows": RowRanges._make([("T",)] * 3),
    "seeds": ("H", "two"),
}
_AXES = AttentionArrays(**_LETTERS)
_OUT_AXES, _LSE_AXES = ("T", "H", "V"), ("H", "T")
_WHOLE = ("q", "k", "v", "seeds")  # their leading axes are never of size one in place of a larger one
_LEARNED = ("bias", "alibi_slopes", "sinks")


class _Residuals(NamedTuple):
    arrays: AttentionArrays
    out: Array
    lse: Array


def attend(
    plan: Plan, operation: str, arrays: AttentionArrays, spec: AttentionSpec
) -> tuple[Array, Array | None]:
    """`out [..., T, H, V]` and `lse [..., H, T]` on the platform that the plan chooses for these shapes.

    `lse` is `None` where the platform does not give it (it was then not asked for).
    """
    selection = plan.select(problem_of(operation, arrays, spec))
    platform = selection.implementation.load()
    if hasattr(platform, "attend"):
        return platform.attend(arrays, spec), None
    # Inside `shard_map` a gradient varies over every axis that any array does: so must the arrays that it belongs to.
    return _differentiable(plan, operation, selection.platform, spec)(match_varying(arrays, arrays))


def problem_of(operation: str, arrays: AttentionArrays, spec: AttentionSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    q, k, v = arrays.q, arrays.k, arrays.v
    dims = {"B": math.prod(q.shape[:-3]), "T": q.shape[-3], "H": q.shape[-2], "D": q.shape[-1]}
    dims |= {"S": k.shape[-3], "K": k.shape[-2], "V": v.shape[-1]}
    present = {
        name: getattr(arrays, name) is not None for name in ("bias", "alibi_slopes", "sinks", "mask", "rows")
    }
    flags = {
        **present,
        "segments": arrays.q_segments is not None,
        "causal": spec.right == 0,
        "window": None if not spec.ranged else f"{spec.left},{spec.right}",
        "top_left": spec.offset == 0,
        "soft_cap": spec.logits_soft_cap is not None,
        "dropout": spec.dropout_rate > 0,
        "deterministic": spec.deterministic,
        "lse": spec.return_lse,
    }
    return Problem.make(operation, dims=dims, dtypes={"qkv": q.dtype}, flags=flags, lengths={"B", "T", "S"})


@functools.lru_cache(maxsize=4096)
def _differentiable(
    plan: Plan, operation: str, platform: Platform, spec: AttentionSpec
) -> Callable[..., Any]:
    """The call as a function of its arrays, with the core's own backward."""
    implementation = next(i for i in plan.snapshot.implementations if i.platform is platform).load()
    opaque = getattr(implementation, "OPAQUE", False)

    def config(arrays: AttentionArrays) -> Any:
        problem = problem_of(operation, arrays, spec)
        selection = plan.select(problem)
        return (
            selection.config
            if selection.platform is platform
            else implementation.default_config(problem, plan.device)
        )

    def forward(arrays: AttentionArrays) -> tuple[Array, Array]:
        return implementation.forward(arrays, spec, config(arrays))

    def backward(arrays: AttentionArrays, out: Array, lse: Array, dout: Array, dlse: Array) -> AttentionGrads:
        return implementation.backward(arrays, spec, config(arrays), out, lse, dout, dlse)

    if opaque:
        split = plan.device.count > 1 and platform is not Platform.TRITON_INTERPRET
        forward, backward = (
            _batched(_opaque(forward, split)),
            _batched(_opaque(backward, split), per_example=_LEARNED),
        )
    else:
        forward, backward = over_leading_axes(forward), over_leading_axes(backward)

    @jax.custom_vjp
    def call(arrays: AttentionArrays) -> tuple[Array, Array]:
        return forward(arrays)

    def call_forward(arrays: AttentionArrays) -> tuple[tuple[Array, Array], _Residuals]:
        out, lse = forward(arrays)
        out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
        return (out, lse), _Residuals(arrays, out, lse)

    def call_backward(residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[AttentionArrays]:
        arrays = residuals.arrays
        grads = backward(_per_row(arrays) if opaque else arrays, *residuals[1:], *cotangents)
        fields: dict[str, Any] = {
            n: _like(g, getattr(arrays, n))
            for n, g in zip(grads._fields, grads, strict=True)
            if g is not None
        }
        return (AttentionArrays(**fields),)

    call.defvjp(call_forward, call_backward)
    return call


def _leading(arrays: AttentionArrays) -> tuple[int, ...]:
    return arrays.q.shape[:-3]


def over_leading_axes(function: F) -> F:
    """Lets JAX map a function of one batch axis over any number of them, without merging axes that may be sharded."""

    def mapped(arrays: AttentionArrays, *rest: Array) -> Any:
        count = len(_leading(arrays))
        if count == 0:
            expanded = jax.tree.map(lambda x: x[None], (arrays, *rest))
            return jax.tree.map(lambda x: x[0], mapped(*expanded))
        if count == 1:
            return function(arrays, *rest)
        return _map_first_axis(mapped, arrays, rest)

    return mapped  # type: ignore[return-value]


def _map_first_axis(function: Callable[..., Any], arrays: AttentionArrays, rest: tuple[Array, ...]) -> Any:
    size = _leading(arrays)[0]
    shared = {
        name
        for name in AttentionArrays._fields
        if name not in _WHOLE and _is_broadcast(getattr(arrays, name), size)
    }
    axes = AttentionArrays._make(
        (
            _axes_like(x, None if n in shared else 0)
            for n, x in zip(AttentionArrays._fields, arrays, strict=True)
        )
    )
    first = AttentionArrays._make(
        (
            jax.tree.map(lambda x: x[0], x) if n in shared else x
            for n, x in zip(arrays._fields, arrays, strict=True)
        )
    )
    result = jax.vmap(function, in_axes=(axes, *[0] * len(rest)))(first, *rest)
    if not isinstance(result, AttentionGrads):
        return result
    summed = {
        n: jnp.sum(getattr(result, n), axis=0, keepdims=True)
        for n in _LEARNED
        if n in shared and getattr(result, n) is not None
    }
    return result._replace(**summed)


def _is_broadcast(value: Any, size: int) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and size > 1 and all(leaf.shape[0] == 1 for leaf in leaves)


def _axes_like(value: Any, axis: int | None) -> Any:
    return jax.tree.map(lambda _: axis, value)


def _batched(function: F, per_example: tuple[str, ...] = ()) -> F:
    """Folds every `jax.vmap` into the leading axes: one launch, however many axes are mapped.

    An array that is not mapped gets an axis of size one where the kernel can broadcast it (all but `q`, `k`, `v`, the seeds, and
    those whose gradient is wanted per example).
    """

    @custom_vmap
    def call(arrays: AttentionArrays, *rest: Array) -> Any:
        return function(arrays, *rest)

    @call.def_vmap
    def rule(size: int, in_batched: list[Any], arrays: AttentionArrays, *rest: Array) -> tuple[Any, Any]:
        def widen(name: str, any_batched: bool, x: Array, batched: bool) -> Array:
            if batched:
                return x
            grow = size if any_batched or name in _WHOLE or name in per_example else 1
            return jnp.broadcast_to(x, (grow, *x.shape))

        fields = {}
        for name, value, batched in zip(AttentionArrays._fields, arrays, in_batched[0], strict=True):
            # The three arrays of `rows` keep one shape.
            fields[name] = jax.tree.map(
                functools.partial(widen, name, any(jax.tree.leaves(batched))), value, batched
            )
        others = [widen("q", True, x, batched) for x, batched in zip(rest, in_batched[1:], strict=True)]
        result = call(AttentionArrays(**fields), *others)
        return result, jax.tree.map(lambda _: True, result)

    return call  # type: ignore[return-value]


def _opaque(function: F, split: bool) -> F:
    """A kernel that the compiler cannot see into: folds the leading axes to one and, on several devices, says how to split it."""

    def folded(arrays: AttentionArrays, *rest: Array) -> Any:
        return _fold(function, arrays, rest)

    if not split:
        return folded  # type: ignore[return-value]

    def call(arrays: AttentionArrays, *rest: Array) -> Any:
        axes = _labels(arrays, rest)
        outs = partition.output_shapes(folded, arrays, *rest)
        out_axes = _output_labels(outs, arrays)
        return partition.partitioned(
            folded, (arrays, *rest), axes, outs, out_axes, split=_is_leading, group=("H", "K")
        )

    return call  # type: ignore[return-value]


def _labels(arrays: AttentionArrays, rest: tuple[Array, ...]) -> tuple[Any, ...]:
    """The letter of every axis of every argument; `None` where an axis has size one in place of a larger one."""
    labelled = jax.tree.map(lambda x, axes: _label(x.shape, axes, arrays), arrays, _present(arrays))
    # out, lse, dout, dlse
    others = [
        _label(x.shape, axes, arrays) for x, axes in zip(rest, (_OUT_AXES, _LSE_AXES) * 2, strict=False)
    ]
    return (labelled, *others)


def _present(arrays: AttentionArrays) -> AttentionArrays:
    """`_AXES` where there is an array, wrapped so that a tuple of letters is one leaf."""
    return AttentionArrays._make(
        (
            None if x is None else jax.tree.map(partition.Axes, a, is_leaf=_is_letters)
            for x, a in zip(arrays, _AXES, strict=True)
        )
    )  # type: ignore[arg-type]


def _is_leading(letter: str) -> bool:
    return letter.startswith("b") or letter == "H"


def _is_letters(value: Any) -> bool:
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def _label(shape: tuple[int, ...], axes: Any, arrays: AttentionArrays) -> "partition.Axes":
    letters = tuple(axes.letters if isinstance(axes, partition.Axes) else axes)
    lead = len(shape) - len(letters)
    sizes: dict[Any, int] = dict(zip(("T", "H", "D"), arrays.q.shape[-3:], strict=True)) | dict(
        zip(("S", "K", "V"), arrays.v.shape[-3:], strict=True)
    )
    full = (*_leading(arrays), *(sizes.get(letter, 2) for letter in letters))
    names = (*(f"b{i}" for i in range(lead)), *letters)
    # One key head serves any split of the query heads, so that it is none of the axes to split.
    split = (
        name if size == whole and (name, size) != ("K", 1) else None
        for name, size, whole in zip(names, shape, full, strict=True)
    )
    return partition.Axes(tuple(split))


def _output_labels(outs: Any, arrays: AttentionArrays) -> Any:
    if isinstance(outs, AttentionGrads):
        axes = AttentionGrads._make(
            (None if x is None else getattr(_AXES, name) for name, x in zip(outs._fields, outs, strict=True))
        )
        return AttentionGrads._make(
            (None if x is None else _label(x.shape, a, arrays) for x, a in zip(outs, axes, strict=True))
        )
    return tuple(_label(x.shape, axes, arrays) for x, axes in zip(outs, (_OUT_AXES, _LSE_AXES), strict=True))


def _fold(function: Callable[..., Any], arrays: AttentionArrays, rest: tuple[Array, ...]) -> Any:
    """Calls a function of one batch axis with all leading axes merged into it, and splits its results again."""
    lead = _leading(arrays)
    flat = AttentionArrays._make(
        (
            jax.tree.map(functools.partial(_merge, lead), x, _ranks(a, x))
            for x, a in zip(arrays, _AXES, strict=True)
        )
    )
    result = function(flat, *(_merge(lead, x, 3 if i % 2 == 0 else 2) for i, x in enumerate(rest)))
    if isinstance(result, AttentionGrads):
        return AttentionGrads._make(
            (
                None if g is None else _split_grad(g, getattr(arrays, n), lead)
                for n, g in zip(result._fields, result, strict=True)
            )
        )
    return jax.tree.map(lambda x: x.reshape(lead + x.shape[1:]), result)


def _ranks(axes: Any, value: Any) -> Any:
    return None if value is None else jax.tree.map(len, axes, is_leaf=_is_letters)


def _merge(lead: tuple[int, ...], x: Array, rank: int) -> Array:
    own, core = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
    if all(size == 1 for size in own):
        return x.reshape((1, *core))
    return jnp.broadcast_to(x, (*lead, *core)).reshape((math.prod(lead), *core))


def _split_grad(grad: Array, array: Array, lead: tuple[int, ...]) -> Array:
    """A gradient of merged axes, summed over those that its array broadcasts."""
    own, core = array.shape[: len(lead)], grad.shape[1:]
    return (
        grad.reshape(own + core)
        if grad.shape[0] == math.prod(own)
        else _sum_broadcast(grad.reshape(lead + core), array)
    )


def _like(grad: Array, array: Array) -> Array:
    return partition.match_sharding(_sum_broadcast(grad, array), array)


def _sum_broadcast(grad: Array, array: Array) -> Array:
    axes = tuple(i for i, (size, own) in enumerate(zip(grad.shape, array.shape, strict=True)) if size != own)
    return jnp.sum(grad, axis=axes, keepdims=True) if axes else grad


def _per_row(arrays: AttentionArrays) -> AttentionArrays:
    """Slopes and sinks repeated for every batch row, so that a kernel split over rows need not sum their gradients."""

    def widen(x: Array | None) -> Array | None:
        return None if x is None else jnp.broadcast_to(x, (*_leading(arrays), x.shape[-1]))

    return arrays._replace(alibi_slopes=widen(arrays.alibi_slopes), sinks=widen(arrays.sinks))
