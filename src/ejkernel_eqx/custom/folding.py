"""Any number of batch axes, where a kernel sees one: merged into it, mapped by JAX, or folded in by the rule of `vmap`.

Every function here takes mappings of arrays by name (inputs; or inputs, outputs and cotangents) and gives one. A gradient of a
shared input is whole, or has batch axes of its own in front ("rows"), over which it is summed in the end.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from ..dispatch import replaceable
from ..parallel import Axes, explicit_mesh, output_shapes, over_explicit_mesh, partitioned, Split
from .declaration import Arrays, Declaration, widened

Function = Callable[..., Arrays]


def folded(function: Function, declaration: Declaration) -> Function:
    """A function of one batch axis as one of any number, all merged into it: for a kernel that nothing can look into."""

    def call(*args: Arrays) -> Arrays:
        lead = declaration.batch_shape(args[0])

        def merge(name: str, x: Array) -> Array:
            rows = (math.prod(lead), *x.shape[len(lead) :])
            return x.reshape(rows) if declaration.by_name[name].batched else x

        result = function(*({name: merge(name, x) for name, x in group.items()} for group in args))
        return {
            name: x.reshape(lead + x.shape[1:]) if _has_rows(declaration, name, x) else x
            for name, x in result.items()
        }

    return call


def mapped(function: Function, declaration: Declaration) -> Function:
    """The same for plain JAX: maps the function over all batch axes but the last, and merges none, as they may be sharded."""

    def call(*args: Arrays) -> Arrays:
        count = len(declaration.batch_shape(args[0]))
        if count == 0:
            result = function(*(_each_batched(declaration, group, lambda x: x[None]) for group in args))
            return _each_batched(declaration, result, lambda x: x[0])
        if count == 1:
            return function(*args)
        axes = tuple(
            {name: 0 if declaration.by_name[name].batched else None for name in group} for group in args
        )
        result = jax.vmap(call, in_axes=axes)(*args)
        shared = {
            name: jnp.sum(widened(result[name]), axis=0) for name in declaration.shared if name in result
        }
        return {**result, **shared}

    return call


def sum_rows(gradients: Arrays, like: Arrays) -> Arrays:
    """Gradients of the shapes of their arrays: those of shared arrays summed over their rows, in float32 or wider."""

    def total(x: Array, rows: int) -> Array:
        return jnp.sum(widened(x), axis=tuple(range(rows))) if rows else x

    return {name: total(x, x.ndim - like[name].ndim) for name, x in gradients.items()}


def batched(function: Function, declaration: Declaration, shapes: Function) -> Function:
    """Turns every `jax.vmap` into one more batch axis: one launch, however many axes are mapped.

    Where an input without batch axes is mapped, or its gradient is wanted per example and does not come as rows, the calls are made
    one after the other. `shapes` is the function for asking the shapes of its results.
    """

    def call(*args: Arrays) -> Arrays:
        replaced: list[Callable[[], None]] = []

        @custom_vmap
        def one(*args: Arrays) -> Arrays:
            with replaceable() as take_back:
                replaced.append(take_back)
                return function(*args)

        @one.def_vmap
        def rule(size: int, in_batched: list[Any], *args: Arrays) -> tuple[Any, Any]:
            # The unmapped call was traced, but is never launched.
            for take_back in replaced:
                take_back()
            return _mapped_result(call, declaration, shapes, size, in_batched, args)

        return one(*args)

    return call


def _mapped_result(
    call: Function,
    declaration: Declaration,
    shapes: Function,
    size: int,
    in_batched: list[Any],
    args: tuple[Arrays, ...],
) -> tuple[Any, Any]:
    is_mapped = in_batched[0]

    def widen(name: str, x: Array, is_batched: bool) -> Array:
        whole = is_batched or not declaration.by_name[name].batched
        return x if whole else jnp.broadcast_to(x, (size, *x.shape))

    wide = [
        {name: widen(name, x, flags[name]) for name, x in group.items()}
        for group, flags in zip(args, in_batched, strict=True)
    ]
    if any(is_mapped[name] for name in declaration.shared) or not _all_rows(declaration, shapes, wide):
        result = _one_by_one(call, args, in_batched)
    else:
        result = call(*wide)
    return result, jax.tree.map(lambda _: True, result)


def over_mesh(function: Function, arrays: Arrays, declaration: Declaration) -> Arrays:
    """A function that the compiler sees into, on a mesh that the types of the arrays may carry."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(arrays)

    def axes(group: Any) -> dict[str, Axes]:
        named = {name: (x.ndim, declaration.by_name[name].letters) for name, x in group.items()}
        return {
            name: Axes((*(f"batch {i}" for i in range(ndim - len(letters))), *letters))
            for name, (ndim, letters) in named.items()
        }

    return over_explicit_mesh(mesh, function, arrays, axes(arrays), axes, ())


def split(function: Function, declaration: Declaration, meshes: Split) -> Function:
    """Lets the compiler split a folded function over a mesh along its batch axes."""

    def call(*args: Arrays) -> Arrays:
        lead = declaration.batch_shape(args[0])

        def axes(group: Any) -> dict[str, Axes]:
            return {name: Axes(letters(name, x)) for name, x in group.items()}

        def letters(name: str, x: Any) -> tuple[str | None, ...]:
            rows = len(lead) if _has_rows(declaration, name, x) else 0
            return (*(f"b{i}" for i in range(rows)), *(None,) * (x.ndim - rows))

        outs = output_shapes(function, *args)
        in_axes = tuple(map(axes, args))
        return partitioned(
            function,
            args,
            in_axes,
            outs,
            axes(outs),
            split=_everything,
            group=(),
            meshes=meshes,
            summed=len(args) > 1,
        )

    return call


def _everything(letter: str) -> bool:
    return True


def _has_rows(declaration: Declaration, name: str, x: Any) -> bool:
    declared = declaration.by_name[name]
    return declared.batched or x.ndim > len(declared.letters)


def _each_batched(declaration: Declaration, group: Arrays, change: Callable[[Array], Array]) -> Arrays:
    return {name: change(x) if declaration.by_name[name].batched else x for name, x in group.items()}


def _all_rows(declaration: Declaration, shapes: Function, args: list[Arrays]) -> bool:
    """Whether every result has the batch axes of the arguments."""
    if len(args) == 1 or not declaration.shared:
        return True
    result = output_shapes(shapes, *args)
    return all(_has_rows(declaration, name, x) for name, x in result.items())


def _one_by_one(call: Function, args: tuple[Arrays, ...], in_batched: list[Any]) -> Arrays:
    flat, treedef = jax.tree.flatten(args)
    flags = jax.tree.leaves(tuple(in_batched))

    def one(mapped_leaves: list[Array]) -> Arrays:
        taken = iter(mapped_leaves)
        leaves = [next(taken) if flag else x for x, flag in zip(flat, flags, strict=True)]
        return call(*jax.tree.unflatten(treedef, leaves))

    return jax.lax.map(one, [x for x, flag in zip(flat, flags, strict=True) if flag])
