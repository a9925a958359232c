"""Whole calls whose tokens a mesh axis splits: every device runs its own, and they exchange what passes between them inside the call."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array, lax

from .layout import heads_among, Layout
from .leading import Arrays
from .mesh import spec_of
from .partition import by_the_compiler, by_types

Letters = Mapping[str, tuple[str | None, ...]]
TOKENS = "T"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tokens of a call, split over a mesh axis. `letters` name the axes of its arguments and of its results, in order; `TOKENS` is the one
    that is split besides leading axes, heads `H<n>`, and `channels`. `summed`: as in `Layout`."""

    axis: str
    letters: Letters
    results: Letters
    channels: frozenset[str]
    summed: bool = False

    def layout(self, names: Any) -> Layout:
        letters, results = tuple(self.letters[name] for name in names), tuple(self.results.values())
        heads = heads_among((*letters, *results))

        def is_split(name: str) -> bool:
            return name in self.channels or name in heads or name.startswith("b")

        return Layout(letters, results, is_split, heads, summed=self.summed, pinned={TOKENS: self.axis})

    def is_split(self, mesh: Any, arrays: Arrays) -> bool:
        """Returns whether the types of arrays on an explicit mesh say that the tokens are split over the axis, which also divides them. An axis of
        one device splits nothing."""
        parts = dict(mesh.shape).get(self.axis)
        if parts == 1:
            return False
        found = False
        for name, x in arrays.items():
            for letter, size, entry in zip(self.letters[name], x.shape, spec_of(x), strict=True):
                if letter == TOKENS:
                    found |= self.axis in (entry if isinstance(entry, tuple) else (entry,))
                    if parts is None or size % parts:
                        return False
        return found

    def over_types(
        self, mesh: Any, function: Callable[[Arrays], Arrays], arrays: Arrays, outs: Mapping[str, Any]
    ) -> Arrays:
        """`function(arrays)` on an explicit mesh, over its devices. JAX differentiates it."""
        layout = self.layout(arrays)
        call, shapes = _flat(function, arrays, outs), _shapes(arrays, outs)
        results = by_types(layout, call, shapes, mesh, list(arrays.values()), differentiated=True)
        return dict(zip(outs, results, strict=True))

    def over_devices(
        self,
        function: Callable[[Arrays], Arrays],
        whole: Callable[[Arrays], Arrays],
        arrays: Arrays,
        outs: Mapping[str, Any],
    ) -> Arrays:
        """`function(arrays)` over the devices of an automatic mesh, whatever it turns out to be; `whole(arrays)` if the mesh lacks the axis or
        does not divide the tokens. JAX does not differentiate it."""
        flat = by_the_compiler(
            self.layout(arrays),
            _flat(whole, arrays, outs),
            _shapes(arrays, outs),
            list(arrays.values()),
            exchanging=_flat(function, arrays, outs),
        )
        return dict(zip(outs, flat, strict=True))

    def gradient(
        self,
        function: Callable[[Arrays], Arrays],
        whole: Callable[[Arrays], Arrays],
        arrays: Arrays,
        cotangents: Arrays,
        learned: frozenset[str],
    ) -> Arrays:
        """The gradients of `over_devices` in the learned arrays; the function is computed again."""
        rest = {name: x for name, x in arrays.items() if name not in learned}
        moved = {f"cotangent {name}": x for name, x in cotangents.items()}
        of_results = {f"cotangent {name}": self.results[name] for name in cotangents}

        def pulled(function: Callable[[Arrays], Arrays], given: Arrays, parts: int) -> Arrays:
            own = {name: given[name] for name in sorted(learned)}
            _, pull = jax.vjp(lambda own: function({**own, **{name: given[name] for name in rest}}), own)
            # Every device has a result without tokens, and the sum over devices would count its cotangent as often.
            every = {name: 1 if TOKENS in self.results[name] else parts for name in cotangents}
            return pull({name: given[f"cotangent {name}"] / n for name, n in every.items()})[0]

        grads = {name: arrays[name] for name in sorted(learned)}
        letters, results = {**self.letters, **of_results}, {name: self.letters[name] for name in grads}
        split = dataclasses.replace(self, letters=letters, results=results, summed=True)
        of_parts = lambda given: pulled(function, given, lax.axis_size(self.axis))
        return split.over_devices(of_parts, lambda given: pulled(whole, given, 1), {**arrays, **moved}, grads)


def _flat(
    function: Callable[[Arrays], Arrays], arrays: Arrays, outs: Mapping[str, Any]
) -> Callable[..., tuple[Array, ...]]:
    def call(*flat: Array) -> tuple[Array, ...]:
        results = function(dict(zip(arrays, flat, strict=True)))
        return tuple(results[name] for name in outs)

    return call


def _shapes(arrays: Arrays, outs: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [x.shape for x in arrays.values()], [x.shape for x in outs.values()]
