"""Calls of operations whose tokens are split over a mesh axis, made outside of `shard_map`: devices run what they would run inside one.

Which axis of which array is what is read from the annotations of the call. On an explicit mesh the types of the arrays say how they are
split, and JAX differentiates what devices do. On an automatic one only the compiler knows; there the backward computes the forward again.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from .._kernel import replaced
from ..dispatch import Platform
from ..parallel import explicit_mesh, how_split, output_shapes, Split
from ..parallel.leading import under_vmap
from ..parallel.mesh import inside_manual_mesh
from ..parallel.tokens import TOKENS, TokenSplit
from .kind import is_float, reverse_only, reversible

F = TypeVar("F", bound=Callable[..., Any])
Named = dict[str, Array]
_HEADS, _CHANNELS = frozenset("HRG"), frozenset("CI")
_NOT_SPLIT = ("cu_seqlens", "state_indices")
"""Arguments with which a call is that of all tokens."""
_FORWARD_MODE = "Use an explicit mesh or jax.shard_map, or build it without sequence_axis, for forward mode and second derivatives."


def over_sequence_axis(mixes_heads: Callable[[Any], bool] = lambda operation: False) -> Callable[[F], F]:
    """Decorates the `__call__` of an operation that has a `sequence_axis`. `mixes_heads`: whether devices cannot have some of its heads each."""

    def decorate(call: F) -> F:
        signature = inspect.signature(call)
        letters = {name: letters_in(x) for name, x in call.__annotations__.items()}

        @functools.wraps(call)
        def split(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.sequence_axis is None or inside_manual_mesh() or self.plan.device.count == 1:
                return call(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs).arguments
            given = {name: x for name, x in given.items() if x is not None and name != "self"}
            if any(name in given for name in _NOT_SPLIT):
                return call(self, *args, **kwargs)
            return _Call(call, letters, mixes_heads(self)).run(self, given)

        return typing.cast(F, split)

    return decorate


def letters_in(annotation: Any) -> tuple[str, ...]:
    """The letters of an annotated array, `("*B T H D",)`; of several arrays, those of each."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return annotation.__metadata__
    parts = [letters_in(x) for x in inside]
    if origin is tuple:
        return tuple(x for part in parts for x in part)
    # One array, or a pair from some callers.
    return max(parts, key=len, default=()) if origin in (typing.Union, types.UnionType) else ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    call: Callable[..., Any]
    letters: dict[str, tuple[str, ...]]
    mixes_heads: bool

    def run(self, operation: Any, given: dict[str, Any]) -> Any:
        arrays, structure = self._arrays(given)
        of_results: list[Any] = []

        def by_name(operation: Any, arrays: Named) -> Named:
            results = self.call(operation, **_restored(arrays, structure))
            flat, treedef = jax.tree.flatten(results)
            of_results[:] = [treedef]
            return {str(n): x for n, x in enumerate(flat)}

        function = functools.partial(by_name, operation)
        whole = functools.partial(by_name, replaced(operation, sequence_axis=None))
        outs = output_shapes(whole, arrays)  # raises the errors of invalid arguments
        main = next(iter(given))
        lead = arrays[main].ndim - len(self.letters[main][0].split()) + 1
        if "segment_ids" in arrays:
            ids = arrays["segment_ids"]
            arrays["segment_ids"] = jnp.broadcast_to(ids, (*arrays[main].shape[:lead], ids.shape[-1]))
        of_arguments = {
            name: letters for key, every in self.letters.items() for name, letters in _parts(key, every)
        }
        # Groups of channels, which some callers have.
        grouped = any(
            "*G" in (words := of_arguments[name].split()) and x.ndim == lead + len(words) - 1
            for name, x in arrays.items()
        )
        spell = functools.partial(self._axes, lead, grouped)
        axes = {name: spell(of_arguments[name], x.shape) for name, x in arrays.items()}
        returned = zip(outs.items(), self.letters["return"])
        result_axes = {name: spell(letters, x.shape) for (name, x), letters in returned}
        split = TokenSplit(operation.sequence_axis, axes, result_axes, _CHANNELS)
        call = functools.partial(_over_devices, operation.plan, split, function, whole, outs)
        return jax.tree.unflatten(of_results[0], list(jax.jit(call)(arrays).values()))

    def _arrays(self, given: dict[str, Any]) -> tuple[Named, dict[str, Sequence[str]]]:
        """The arrays by name, and the names of those of each argument."""
        arrays, structure = {}, {}
        for name, x in given.items():
            pair = len(self.letters[name]) > 1 and isinstance(x, tuple | list)
            parts = list(x) if pair else [x]
            names = [own for own, _ in _parts(name, parts)]
            arrays |= {own: jnp.asarray(part) for own, part in zip(names, parts)}
            structure[name] = names
        return arrays, structure

    def _axes(self, lead: int, grouped: bool, letters: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """The names of the axes of an array: leading ones, tokens, heads by their number, and channels."""
        words = letters.split()
        has_lead = words[0] in ("*B", "...")
        words, first = (words[1:], lead) if has_lead else (words, 0)
        if len(shape) - first < len(words):  # without axes that only some callers have
            words = [word for word in words if not word.startswith("*")]

        def name(word: str, size: int) -> str | None:
            word = word.removeprefix("*")
            if word in _HEADS and not self.mixes_heads:
                return f"H{size}"
            return word if word == TOKENS or (word in _CHANNELS and not grouped) else None

        return (*(f"b{n}" for n in range(first)), *map(name, words, shape[first:]))


def _parts(name: str, parts: Sequence[Any]) -> list[tuple[str, Any]]:
    """The parts of an argument by name."""
    return [(name if n == 0 else f"{name} {n}", part) for n, part in enumerate(parts)]


def _restored(arrays: Named, structure: dict[str, Sequence[str]]) -> dict[str, Any]:
    return {
        name: arrays[own[0]] if len(own) == 1 else tuple(arrays[part] for part in own)
        for name, own in structure.items()
    }


def _over_devices(plan: Any, split: TokenSplit, function: Any, whole: Any, outs: Any, arrays: Named) -> Named:
    mesh = explicit_mesh(arrays)
    if mesh is not None:
        runs = split.is_split(mesh, arrays)
        return split.over_types(mesh, function, arrays, outs) if runs else whole(arrays)
    platform = plan.snapshot.requested or Platform.XLA
    if how_split(platform, plan.device) is not Split.EVERYWHERE:
        return whole(arrays)
    arrays = reverse_only(arrays, plan.operation, platform, _FORWARD_MODE)
    learned = frozenset(name for name, x in arrays.items() if is_float(x))

    def each(whole: Callable[[Any], Named]) -> Callable[[int, Any, Any], Named]:
        axes = lambda is_mapped: jax.tree.map(lambda mapped: 0 if mapped else None, is_mapped)
        return lambda size, is_mapped, given: jax.vmap(whole, (axes(is_mapped),), axis_size=size)(given)

    def forward(arrays: Named) -> Named:
        return under_vmap(lambda given: split.over_devices(function, whole, given, outs), each(whole))(arrays)

    def backward(arrays: Named, saved: Named, cotangents: Named) -> Named:
        def of_whole(given: Any) -> Named:
            inputs = {name: given["arrays"][name] for name in learned}
            _, pull = jax.vjp(lambda inputs: whole(given["arrays"] | inputs), inputs)
            return pull(given["cotangents"])[0]

        def of_parts(given: Any) -> Named:
            return split.gradient(function, whole, given["arrays"], given["cotangents"], learned)

        return under_vmap(of_parts, each(of_whole))({"arrays": arrays, "cotangents": cotangents})

    return reversible(forward, lambda arrays: (forward(arrays), {}), backward, learned)(arrays)
