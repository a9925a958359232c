"""The description of a call of native sparse attention once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `T` queries,
`S` keys, `H` query heads, `K` key heads, `D` key dim, `V` value dim, `C` compressed keys, `M` blocks, `n` chosen blocks of a query.

Blocks are numbered over a whole row: without `begin`, block `m` starts at key `m * block`. Packed sequences have their own blocks, the first
of which starts with the sequence.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..core.letters import Letters


@dataclasses.dataclass(frozen=True)
class NativeSpec:
    """The static half of a call. Compressed key `c` of a sequence stands for its tokens `c * stride <= i < c * stride + span`."""

    scale: float
    block: int
    count: int
    """Blocks that a query chooses, `n`."""
    window: int
    """Keys that the sliding branch sees, the query's own included."""
    span: int
    stride: int
    offset: int = 0
    """Position of the first query among the keys, without `position`."""
    given: bool = False
    """Whether the call has `indices`; else they are chosen."""


class NativeArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all. `indices` and what follows it are int32.

    A query whose `position` is before `first` is padding and sees nothing. Keys that no query sees may hold NaN.
    """

    q: Array  # [*, T, H, D]
    k: Array  # [*, S, K, D]
    v: Array  # [*, S, K, V]
    compressed_k: Array  # [*, C, K, D]
    compressed_v: Array  # [*, C, K, V]
    gates: Array  # [*, T, H, 3]: of the compressed, the selected and the sliding branch
    indices: Array | None = None  # [*, T, K, n]: distinct blocks of the query's sequence, -1 for none
    position: Array | None = None  # [*, T]: the position of each query among the keys
    first: Array | None = None  # [*, T]: the first key of its sequence; given together with `seen` and `base`
    seen: Array | None = None  # [*, T]: the first compressed key of its sequence
    base: Array | None = None  # [*, T]: the first block of its sequence
    begin: Array | None = None  # [*, M]: the first key of each block; given for packed sequences


BRANCHES = ("compressed", "selected", "sliding")
"""In the order of the gates."""
_AXES = {"q": "T H D", "k": "S K D", "v": "S K V", "compressed_k": "C K D", "compressed_v": "C K V"}
_AXES |= {"gates": "T H three", "indices": "T K n", "begin": "M"}
_AXES |= dict.fromkeys(("position", "first", "seen", "base"), "T")
_AXES |= dict.fromkeys(("out", *(f"{name}_out" for name in BRANCHES)), "T H V")
_AXES |= dict.fromkeys((f"{name}_lse" for name in BRANCHES), "H T")
LETTERS = Letters.of(_AXES, heads="H K")
LEARNED = ("q", "k", "v", "compressed_k", "compressed_v", "gates")
RESULTS = ("out", "indices")
SAVED = tuple(f"{name}_{what}" for name in BRANCHES for what in ("out", "lse"))


def num_blocks(arrays: NativeArrays, spec: NativeSpec) -> int:
    """`M`."""
    return most_blocks(arrays, spec) if arrays.begin is None else arrays.begin.shape[-1]


def most_blocks(arrays: NativeArrays, spec: NativeSpec) -> int:
    """The blocks of the longest possible sequence, of which a query chooses."""
    return -(-arrays.k.shape[-3] // spec.block)


def positions(arrays: NativeArrays, spec: NativeSpec) -> Array:
    """The position of each query among the keys, `[B or 1, T]`."""
    if arrays.position is not None:
        return arrays.position
    return jnp.arange(arrays.q.shape[-3], dtype=jnp.int32)[None] + spec.offset


def places(arrays: NativeArrays, spec: NativeSpec) -> Array:
    """The place of each query in its sequence, `[B or 1, T]`; negative for padding."""
    return positions(arrays, spec) - of_sequence(arrays.first)


def of_sequence(x: Array | None) -> Array:
    """Returns where the sequence of each query begins, `[B, T]`, or `[1, 1]` if at 0."""
    return jnp.zeros((1, 1), jnp.int32) if x is None else x


def compressed_ranges(arrays: NativeArrays, spec: NativeSpec) -> tuple[Array, Array]:
    """The compressed keys that each query sees, `start <= c < end`, `[B or 1, T]` both: those of tokens up to its own."""
    place = places(arrays, spec)
    # A compressed key is seen once its last token is, so a query never sees a later token.
    whole = jnp.maximum((place + 1 - spec.span) // spec.stride + 1, 0)
    start = of_sequence(arrays.seen)
    # Bounded by the axis, whose size is static, while positions may be data.
    end = jnp.minimum(start + jnp.where(place < 0, 0, whole), arrays.compressed_k.shape[-3])
    return jnp.broadcast_to(start, end.shape), end


def begins(arrays: NativeArrays, spec: NativeSpec) -> Array:
    """The first key of each block, `[B or 1, M]`."""
    if arrays.begin is not None:
        return arrays.begin
    return jnp.arange(num_blocks(arrays, spec), dtype=jnp.int32)[None] * spec.block
