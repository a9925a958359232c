"""The description of a causal convolution once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `T` tokens,
`C` channels, `W` width, `K = W - 1` inputs held by a state, `N` packed sequences (1 without offsets).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec

from ..core import Named
from ..core.letters import Letters
from ..parallel.layout import mesh_axes
from ..parallel.mesh import explicit_mesh, gathered, resharded, spec_of

ACTIVATIONS = (None, "silu")


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """The static half of a call."""

    activation: str | None = None
    norm_size: int | None = None
    """Channels that are scaled together to length 1 after the activation; with it, arrays and results have the axes `H D` instead of `C`."""


class Places(NamedTuple):
    """The locations of the tokens of packed or padded rows. Kernels see a row's real tokens contiguously: place `p` of a row is its
    `p`-th real token, and the places after the last one are padding. All int32."""

    order: Array  # [*, T]: the token at each place
    first: Array  # [*, T]: the place where its sequence begins; -1 for padding
    enter: Array  # [*, T]: the initial state (0 to N) that its sequence begins with; -1 for zeros
    leave: Array  # [*, T]: its entry (0 to N K) in the final states; -1 for none
    spans: Array  # [*, N, 4]: places where the sequence that a state enters begins and ends, and the one that it leaves


class ConvArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all except `weight` and `bias`, which have none (or, mapped by
    `jax.vmap`, all of them). Values at padding are never read. The last five are given together."""

    x: Array  # [*, T, C]
    weight: Array  # [C, W], any float dtype
    bias: Array | None = None  # [C]
    initial_state: Array | None = None  # [*, N, K, C], oldest first, in the dtype of x
    order: Array | None = None
    first: Array | None = None
    enter: Array | None = None
    leave: Array | None = None
    spans: Array | None = None

    @property
    def places(self) -> Places | None:
        return None if self.order is None else Places(*self[4:])  # pyright: ignore[reportArgumentType]


PLACES = dict.fromkeys(("order", "first", "enter", "leave"), "T") | {"spans": "N four"}


def _letters(channels: str, heads: str) -> Letters:
    tokens, states = f"T {channels}", f"N K {channels}"
    axes = {"x": tokens, "weight": f"{channels} W", "bias": channels, "initial_state": states, **PLACES}
    return Letters.of(axes | {"out": tokens, "final_state": states}, heads)


LETTERS, HEADS = _letters("C", "C"), _letters("H D", "H")
LEARNED = ("x", "weight", "bias", "initial_state")
SHARED = frozenset({"weight", "bias"})
RESULTS = ("out", "final_state")  # [*, T, C] and [*, N, K, C], in the dtype of x


def letters_of(spec: ConvSpec) -> Letters:
    return LETTERS if spec.norm_size is None else HEADS


def by_head(arrays: ConvArrays, spec: ConvSpec) -> ConvArrays:
    """The arrays of a call, from those with one axis of channels: a mesh then splits no head that is normalised."""
    return arrays._replace(**as_called(_given(arrays), spec))


def merged(arrays: ConvArrays, spec: ConvSpec) -> ConvArrays:
    """The arrays of a call with one axis of channels."""
    return arrays._replace(**merged_results(_given(arrays), spec))


def merged_results(results: Mapping[str, Array], spec: ConvSpec) -> Named:
    """Results, their cotangents, or arrays by name, with one axis of channels."""
    if spec.norm_size is None:
        return dict(results)
    return {name: _merge(x, _channels(name, x) - 1) for name, x in results.items()}


def as_called(results: Mapping[str, Array], spec: ConvSpec) -> Named:
    """Results, or arrays or their gradients by name, with the axes of the call."""
    size = spec.norm_size
    if size is None:
        return dict(results)
    return {name: split_heads(x, _channels(name, x), size) for name, x in results.items()}


def _channels(name: str, x: Array) -> int:
    """The axis of an array or a result that the channels are; of those by head, the channels of a head."""
    return x.ndim - (2 if name == "weight" else 1)


def _given(arrays: ConvArrays) -> Named:
    """The arrays with channels by name."""
    return {name: x for name in LEARNED if (x := getattr(arrays, name)) is not None}


def split_heads(x: Array, axis: int, size: int) -> Array:
    """An axis of channels as two, of heads and of the channels of one. Where a mesh in the type of `x` splits heads, every device has all of them."""
    spec = spec_of(x)
    if spec[axis]:
        mesh: Any = jax.typeof(x).sharding.mesh
        if (x.shape[axis] // size) % math.prod(mesh.shape[name] for name in mesh_axes(spec[axis])):
            x = gathered(x, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def split_of(arrays: ConvArrays) -> Any:
    """Over which mesh axes the types split channels: the first array that does so decides, as in calls without a norm."""
    entries = (spec_of(x)[_channels(name, x)] for name, x in _given(arrays).items())
    return next((entry for entry in entries if entry), None)


def channels_as(result: Array, split: Any) -> Array:
    """A result whose last axis, of channels, is split over these mesh axes, unless others of its axes are."""
    mesh, spec = explicit_mesh(result), spec_of(result)
    taken = {name for entry in spec[:-1] if entry for name in mesh_axes(entry)}
    if mesh is None or not split or spec[-1] == split or mesh_axes(split) & taken:
        return result
    return resharded(result, mesh, PartitionSpec(*spec[:-1], split))


def _merge(x: Array, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
