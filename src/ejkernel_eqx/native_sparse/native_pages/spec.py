"""A call of native sparse attention over pages after every layout, option and default has been resolved.

Letters are those of `paged/spec.py`, and `n` for the blocks that a query chooses. Page `i` of the compressed keys holds the `p // stride` whose last
token lies in page `i` of the keys: compressed key `c` of a sequence is at slot `c + first_slot`. So only the sequence that writes a page of keys
writes its compressed keys, and sequences may share the pages before.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ...core.letters import Letters
from ...paged.spec import PagedArrays, PagedSpec
from ..spec import NativeSpec


@dataclasses.dataclass(frozen=True)
class PagedNativeSpec:
    """The static half of a call."""

    sparse: NativeSpec
    max_query_len: int = 1
    """The maximum number of queries per sequence; queries beyond it are ignored."""

    @property
    def first_slot(self) -> int:
        """The slot of a sequence's compressed key 0; those before are unused. A query with `n` keys up to its own sees the slots before
        `n // stride`."""
        return self.sparse.span // self.sparse.stride - 1

    @property
    def sliding(self) -> PagedSpec:
        """That of the sliding branch, which is attention over pages."""
        return dataclasses.replace(self.whole, left=self.sparse.window - 1)

    @property
    def whole(self) -> PagedSpec:
        """That of attention to whole sequences."""
        return PagedSpec(self.sparse.scale, max_query_len=self.max_query_len, return_lse=True)


class PagedNativeArrays(NamedTuple):
    """The arrays of a call. Pages have no leading axes or, mapped by `jax.vmap`, all of them; the others have all. Whatever no query sees
    may hold NaN. A page number outside `0 .. P - 1` stands for a missing page, whose keys are not visible."""

    q: Array  # [*, T, H, D]
    gates: Array  # [*, T, H, 3]: of the compressed, the selected and the sliding branch
    k: Array  # [P, p, K, D]
    v: Array  # [P, p, K, V]
    compressed_k: Array  # [P, p // stride, K, D]
    compressed_v: Array  # [P, p // stride, K, V]
    page_table: Array  # int32 [*, N, M]
    q_start: Array  # int32 [*, N]: index of the sequence's first query; never decreasing
    q_len: Array  # int32 [*, N]
    kv_len: Array  # int32 [*, N]: keys, those of the queries included
    indices: Array | None = None  # int32 [*, T, K, n]: distinct blocks of the query's sequence, -1 for none

    @property
    def given(self) -> dict[str, Array]:
        """The arrays that are present, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    @property
    def main(self) -> PagedArrays:
        """Attention to the keys."""
        return PagedArrays(self.q, self.k, self.v, self.page_table, self.q_start, self.q_len, self.kv_len)

    @property
    def compressed(self) -> PagedArrays:
        """Attention to the compressed keys."""
        return self.main._replace(k=self.compressed_k, v=self.compressed_v)


SHARED = frozenset({"k", "v", "compressed_k", "compressed_v"})
RESULTS = ("out", "indices")
INTS = ("page_table", "q_start", "q_len", "kv_len")
_AXES = {"q": "T H D", "gates": "T H three", "k": "P p K D", "v": "P p K V"}
_AXES |= {"compressed_k": "P c K D", "compressed_v": "P c K V", **dict(zip(INTS, ("N M", "N", "N", "N")))}
LETTERS = Letters.of({**_AXES, "indices": "T K n", "out": "T H V"}, heads="H K")


def unmapped(arrays: PagedNativeArrays) -> frozenset[str]:
    """The pages without leading axes, which all rows share."""
    return frozenset(name for name in SHARED if getattr(arrays, name).ndim == 4)


def most_blocks(arrays: PagedNativeArrays, spec: PagedNativeSpec) -> int:
    """The blocks of the longest sequence that the tables can hold."""
    keys = arrays.page_table.shape[-1] * arrays.k.shape[-3]
    return -(-keys // spec.sparse.block)
