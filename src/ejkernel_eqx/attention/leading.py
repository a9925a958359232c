"""The leading axes of an attention call: mapped by JAX, or folded into one launch, split over devices, folded under `vmap`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from ..dispatch import replaceable
from ..parallel import (
    Axes,
    explicit_mesh,
    match_sharding,
    output_shapes,
    over_explicit_mesh,
    partitioned,
    Split,
)
from .spec import AttentionArrays, AttentionGrads, RowRanges

F = TypeVar("F", bound=Callable[..., Any])

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
LEARNED = ("bias", "alibi_slopes", "sinks")


def _leading(arrays: AttentionArrays) -> tuple[int, ...]:
    return arrays.q.shape[:-3]


def over_leading_axes(function: F, gradients: bool = False) -> F:
    """Lets JAX map a function of one batch axis over any number of them, without merging axes that may be sharded.

    If it gives `gradients`, it is told as `bias_over` the names of the mapped axes that the bias lacks, to sum that gradient over.
    """

    def mapped(arrays: AttentionArrays, *rest: Array, bias_over: tuple[str, ...] = ()) -> Any:
        count = len(_leading(arrays))
        if count == 0:
            expanded = jax.tree.map(lambda x: x[None], (arrays, *rest))
            return jax.tree.map(lambda x: x[0], mapped(*expanded))
        if count == 1:
            return function(arrays, *rest, **({"bias_over": bias_over} if gradients else {}))
        if gradients:
            return _gradients_over_first_axis(mapped, arrays, rest, bias_over)
        return _map_first_axis(mapped, arrays, rest)

    return mapped  # type: ignore[return-value]


def _map_first_axis(
    function: Callable[..., Any], arrays: AttentionArrays, rest: tuple[Array, ...], **how: Any
) -> Any:
    """`jax.vmap` over the first axis of all arrays, but those that broadcast it."""
    shared = _shared(arrays)
    axes = AttentionArrays._make(
        (_axes_like(x, None if n in shared else 0) for n, x in zip(arrays._fields, arrays, strict=True))
    )
    first = AttentionArrays._make(
        (
            jax.tree.map(lambda x: x[0], x) if n in shared else x
            for n, x in zip(arrays._fields, arrays, strict=True)
        )
    )
    return jax.vmap(function, in_axes=(axes, *[0] * len(rest)), **how)(first, *rest)


def _gradients_over_first_axis(
    function: Callable[..., Any], arrays: AttentionArrays, rest: tuple[Array, ...], bias_over: tuple[str, ...]
) -> AttentionGrads:
    """What `_map_first_axis` gives, summed over the axis where an array broadcasts it: of the bias, which is large, in the mapped function."""
    shared, name = _shared(arrays), f"ejkernel_eqx.leading_{len(_leading(arrays))}"
    inside = "bias" in shared
    result = _map_first_axis(
        functools.partial(function, bias_over=(*bias_over, name) if inside else bias_over),
        arrays,
        rest,
        axis_name=name,
        out_axes=AttentionGrads(0, 0, 0, None if inside else 0, 0, 0),  # type: ignore[arg-type]
    )
    summed = {
        n: jnp.sum(getattr(result, n), axis=0, keepdims=True) for n in shared & {"alibi_slopes", "sinks"}
    }
    return result._replace(**summed, **({"bias": result.bias[None]} if inside else {}))


def _shared(arrays: AttentionArrays) -> set[str]:
    """The names of the arrays that broadcast the first axis."""
    size = _leading(arrays)[0]
    fields = zip(arrays._fields, arrays, strict=True)
    return {name for name, x in fields if name not in _WHOLE and _is_broadcast(x, size)}


def _is_broadcast(value: Any, size: int) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and size > 1 and all(leaf.shape[0] == 1 for leaf in leaves)


def _axes_like(value: Any, axis: int | None) -> Any:
    return jax.tree.map(lambda _: axis, value)


def opaque_over_leading_axes(
    function: F, split: Split, per_example: tuple[str, ...] = (), summed: bool = False
) -> F:
    """As `over_leading_axes`, for a kernel that the compiler cannot see into: one launch however many axes there are, with
    gradients of the `per_example` arrays for each; `split` over devices, where an output that lacks an axis may be `summed`."""
    return _batched(_opaque(function, split, summed), per_example)


def over_mesh(function: Callable[[AttentionArrays], Any], arrays: AttentionArrays) -> Any:
    """`function(arrays)`, which gives `out` and perhaps `lse`, of operations that the compiler sees into, on a mesh that types may carry."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(arrays)
    (axes,) = _labels(arrays, ())
    given = lambda outs: tuple(
        _label(x.shape, axes, arrays) for x, axes in zip(jax.tree.leaves(outs), (_OUT_AXES, _LSE_AXES))
    )
    return over_explicit_mesh(mesh, function, arrays, axes, given, ("H", "K"))


def _batched(function: F, per_example: tuple[str, ...] = ()) -> F:
    """Folds every `jax.vmap` into the leading axes: one launch, however many axes are mapped.

    An array that is not mapped gets an axis of size one where the kernel can broadcast it (all but `q`, `k`, `v`, the seeds, and
    those whose gradient is wanted per example).
    """

    def call(arrays: AttentionArrays, *rest: Array) -> Any:
        replaced: list[Callable[[], None]] = []

        @custom_vmap
        def one(arrays: AttentionArrays, *rest: Array) -> Any:
            with replaceable() as take_back:
                replaced.append(take_back)
                return function(arrays, *rest)

        @one.def_vmap
        def rule(size: int, in_batched: list[Any], arrays: AttentionArrays, *rest: Array) -> tuple[Any, Any]:
            for take_back in replaced:
                take_back()
            result = call(*widen(size, in_batched, arrays, *rest, per_example=per_example))
            return result, jax.tree.map(lambda _: True, result)

        return one(arrays, *rest)

    return call  # type: ignore[return-value]


def widen(
    size: int, in_batched: list[Any], arrays: AttentionArrays, *rest: Array, per_example: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    """The arguments with the mapped axis in front of all of them."""

    def wide(name: str, any_batched: bool, x: Array, batched: bool) -> Array:
        if batched:
            return x
        grow = size if any_batched or name in _WHOLE or name in per_example else 1
        return jnp.broadcast_to(x, (grow, *x.shape))

    fields = {}
    for name, value, batched in zip(AttentionArrays._fields, arrays, in_batched[0], strict=True):
        # The three arrays of `rows` keep one shape.
        fields[name] = jax.tree.map(
            functools.partial(wide, name, any(jax.tree.leaves(batched))), value, batched
        )
    others = [wide("q", True, x, batched) for x, batched in zip(rest, in_batched[1:], strict=True)]
    return AttentionArrays(**fields), *others


def _opaque(function: F, split: Split, summed: bool) -> F:
    """A kernel that the compiler cannot see into: folds the leading axes to one and, on several devices, says how to split it."""

    def folded(arrays: AttentionArrays, *rest: Array) -> Any:
        return _fold(function, arrays, rest)

    if split is Split.NOWHERE:
        return folded  # type: ignore[return-value]

    def call(arrays: AttentionArrays, *rest: Array) -> Any:
        axes = _labels(arrays, rest)
        outs = output_shapes(folded, arrays, *rest)
        out_axes = _output_labels(outs, arrays)
        return partitioned(
            folded,
            (arrays, *rest),
            axes,
            outs,
            out_axes,
            split=_is_leading,
            group=("H", "K"),
            meshes=split,
            summed=summed,
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
            None if x is None else jax.tree.map(Axes, a, is_leaf=_is_letters)
            for x, a in zip(arrays, _AXES, strict=True)
        )
    )  # type: ignore[arg-type]


def _is_leading(letter: str) -> bool:
    return letter.startswith("b") or letter == "H"


def _is_letters(value: Any) -> bool:
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def _label(shape: tuple[int, ...], axes: Any, arrays: AttentionArrays) -> "Axes":
    letters = tuple(axes.letters if isinstance(axes, Axes) else axes)
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
    return Axes(tuple(split))


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
    """Calls a function of one batch axis with all leading axes merged into it, and splits its results again.

    An array over the scores keeps its size: the function is told how many rows of the batch in a row read one of its rows.
    """
    lead = _leading(arrays)
    own = {name: _long_axes(getattr(arrays, name), lead) for name in ("bias", "mask")}
    order = _order(lead, own["bias"], own["mask"])

    def merge(name: str, x: Array, rank: int) -> Array:
        return _merge(lead, order, x, rank, whole=name not in own)

    flat = AttentionArrays._make(
        (
            jax.tree.map(functools.partial(merge, name), x, _ranks(axes, x))
            for name, x, axes in zip(arrays._fields, arrays, _AXES, strict=True)
        )
    )
    others = [merge("q", x, 3 if i % 2 == 0 else 2) for i, x in enumerate(rest)]
    runs = {f"{name}_run": _run(lead, order, axes) for name, axes in own.items()}
    result = function(flat, *others, **runs)
    if isinstance(result, AttentionGrads):
        return AttentionGrads._make(
            (
                None if g is None else _split_grad(g, getattr(arrays, n), lead, order)
                for n, g in zip(result._fields, result, strict=True)
            )
        )
    return jax.tree.map(lambda x: _split(x, lead, order), result)


def _ranks(axes: Any, value: Any) -> Any:
    return None if value is None else jax.tree.map(len, axes, is_leaf=_is_letters)


def _long_axes(x: Array | None, lead: tuple[int, ...]) -> set[int]:
    """The leading axes that an array does not broadcast."""
    return set() if x is None else {i for i, size in enumerate(lead) if x.shape[i] == size != 1}


def _order(lead: tuple[int, ...], first: set[int], second: set[int]) -> tuple[int, ...]:
    """The leading axes in an order in which those of either set follow one another."""
    axes = tuple(range(len(lead)))
    long = [i for i in axes if lead[i] != 1]
    if all(_follow(long, own) for own in (first, second)):
        return axes
    return tuple(
        sorted(axes, key=lambda i: (i not in first | second, i not in first, (i in first) == (i in second)))
    )


def _follow(axes: Sequence[int], own: set[int]) -> bool:
    places = [place for place, axis in enumerate(axes) if axis in own]
    return not places or places[-1] - places[0] == len(places) - 1


def _run(lead: tuple[int, ...], order: tuple[int, ...], own: set[int]) -> int:
    """How many merged rows in a row differ only in axes behind those of an array."""
    last = max((place for place, axis in enumerate(order) if axis in own), default=len(order))
    return math.prod(lead[axis] for axis in order[last + 1 :])


def _merge(lead: tuple[int, ...], order: tuple[int, ...], x: Array, rank: int, whole: bool) -> Array:
    """The leading axes of `x` as one: all those of the batch, if `whole` and there are any, else only its own."""
    own, core = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
    if whole and any(size != 1 for size in own):
        own, x = lead, jnp.broadcast_to(x, (*lead, *core))
    x = jnp.transpose(x, (*order, *range(len(own), x.ndim)))
    return x.reshape((math.prod(own), *core))


def _split(x: Array, lead: tuple[int, ...], order: tuple[int, ...]) -> Array:
    """Undoes `_merge`."""
    x = x.reshape((*(lead[axis] for axis in order), *x.shape[1:]))
    return jnp.transpose(x, (*(order.index(axis) for axis in range(len(order))), *range(len(order), x.ndim)))


def _split_grad(grad: Array, array: Array, lead: tuple[int, ...], order: tuple[int, ...]) -> Array:
    """A gradient of merged axes, summed over those that its array broadcasts."""
    own = array.shape[: len(lead)]
    if grad.shape[0] == math.prod(own):
        return _split(grad, own, order)
    return _sum_broadcast(_split(grad, lead, order), array)


def like(grad: Array, array: Array) -> Array:
    return match_sharding(_sum_broadcast(grad, array), array)


def _sum_broadcast(grad: Array, array: Array) -> Array:
    axes = tuple(i for i, (size, own) in enumerate(zip(grad.shape, array.shape, strict=True)) if size != own)
    return jnp.sum(grad, axis=axes, keepdims=True) if axes else grad


def per_row(arrays: AttentionArrays) -> AttentionArrays:
    """Slopes and sinks repeated for every batch row, so that a kernel split over rows need not sum their gradients."""

    def widen(x: Array | None) -> Array | None:
        return None if x is None else jnp.broadcast_to(x, (*_leading(arrays), x.shape[-1]))

    return arrays._replace(alibi_slopes=widen(arrays.alibi_slopes), sinks=widen(arrays.sinks))
