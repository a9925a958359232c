"""Problems of pooling: used by the tests on a CPU and on a GPU."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from tests.arrays import array
from tests.attention.dense import quick

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    reduction: str = "mean"
    T: int = 13
    B: int = 2
    C: int = 10
    chunk: int | None = None
    normalize: bool = False
    masked: bool = False
    lengths: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None
    segments: int | None = None
    most: int | None = None  # chunks of packed rows
    are_sorted: bool = False
    ties: bool = False
    dtype: str = "float32"

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.offsets is not None else (self.B,)

    @property
    def options(self) -> Named:
        return {
            "reduction": self.reduction,
            "chunk_size": self.chunk,
            "normalize": self.normalize,
            "num_segments": self.segments,
            "max_chunks": self.most,
            "indices_are_sorted": self.are_sorted,
        }

    def operation(self, platform: Any = None) -> ejx.MeanPooling:
        return ejx.MeanPooling(**self.options, platform=platform)

    def mask(self) -> np.ndarray:
        """A third of the tokens is left out, and all of the last chunk."""
        mask = np.random.default_rng(7).random((*self.lead, self.T)) < 2 / 3
        mask[..., 3 * self.T // 4 :] = False
        return mask

    def tables(self) -> Named:
        """What the operation is told about its tokens, as arrays."""
        given = {"lengths": self.lengths, "cu_seqlens": self.offsets, "segment_ids": self.ids}
        arrays = {name: jnp.asarray(x, jnp.int32) for name, x in given.items() if x is not None}
        return arrays | ({"mask": jnp.asarray(self.mask())} if self.masked else {})

    def members(self) -> list[list[np.ndarray]]:
        """The tokens of each result, for every row."""
        return [self._members(row) for row in range(self.B if self.lead else 1)]

    def _members(self, row: int) -> list[np.ndarray]:
        tokens = np.arange(self.T)
        if self.offsets is not None:
            whole = [tokens[a:b] for a, b in itertools.pairwise(self.offsets)]
        elif self.ids is not None:
            ids = np.array(self.ids[row])
            whole = [np.flatnonzero(ids == n) for n in range(self.segments or int(np.max(self.ids)) + 1)]
        else:
            whole = [tokens]
        if self.chunk is not None:
            cut = [w[a : a + self.chunk] for w in whole for a in range(0, len(w), self.chunk)]
            if self.offsets is not None or self.ids is not None:
                most = self.T // self.chunk + len(whole) if self.most is None else self.most
                cut += [tokens[:0]] * (most - len(cut))
            whole = cut
        real = np.ones(self.T, bool)
        if self.lengths is not None:
            real &= tokens < self.lengths[row]
        if self.masked:
            real &= self.mask().reshape(-1, self.T)[row]
        return [w[real[w]] for w in whole]

    def padding(self) -> np.ndarray:
        """Which tokens are in no segment, `[*, T]`."""
        found = np.ones((len(self.members()), self.T), bool)
        for row, members in zip(found, self.members(), strict=True):
            row[np.concatenate([*members, np.zeros(0, int)]).astype(int)] = False
        return found.reshape(*self.lead, self.T)

    def empty(self) -> np.ndarray:
        """Which results have no tokens, `[*, S]`."""
        return np.array([[len(m) == 0 for m in row] for row in self.members()])


def make(case: Case, seed: int = 0) -> tuple[Any, Any]:
    """The tokens, and a cotangent of the result."""
    rng = np.random.default_rng(seed)
    shape = (*case.lead, case.T, case.C)
    x = rng.integers(-2, 3, shape) if case.ties else rng.standard_normal(shape)
    dout = rng.standard_normal(result_shape(case))
    return array(x, case.dtype), array(dout, case.dtype)


def result_shape(case: Case) -> tuple[int, ...]:
    is_row = case.chunk is None and case.offsets is None and case.ids is None
    return (*case.lead, *(() if is_row else (len(case.members()[0]),)), case.C)


@quick
def results(operation: ejx.MeanPooling, x: Any, tables: Named, dout: Any) -> Named:
    """The result, and the gradient of the tokens."""
    out, pull = jax.vjp(lambda x: operation(x, **tables), x)
    return {"out": out, "x": pull(dout)[0]}


def by_hand(case: Case, x: Any, dout: Any) -> Named:
    """The same in numpy, segment by segment, in float64."""
    x = np.asarray(x, np.float64).reshape(-1, case.T, case.C)
    members = case.members()
    douts = np.asarray(dout, np.float64).reshape(len(x), -1, case.C)
    out, dx = np.zeros_like(douts), np.zeros_like(x)
    for row, s in np.ndindex(out.shape[:2]):
        tokens = members[row][s]
        if len(tokens) == 0:
            continue
        values, d = x[row][tokens], douts[row, s]
        first = {
            "mean": np.full((len(tokens), 1), 1 / len(tokens)),
            "sum": np.ones((len(tokens), 1)),
            "max": np.arange(len(tokens))[:, None] == values.argmax(0),
            "last": np.arange(len(tokens))[:, None] == len(tokens) - 1,
        }
        weights = first[case.reduction].astype(np.float64)
        y = (weights * values).sum(0)
        if case.normalize:
            norm = max(np.linalg.norm(y), 1e-12)
            y = y / norm
            d = (d - y * (y @ d)) / norm
        out[row, s], dx[row, tokens] = y, weights * d
    return {"out": out.reshape(np.shape(dout)), "x": dx.reshape(*case.lead, case.T, case.C)}


_MIXED = ((0, 2, 0, -1, 3, 3, 0, 2, -1, 2, 2, 0, -3), (-1,) * 13)
_RISING = ((-1, 0, 0, -1, 0, 1, 1, 3, 3, 3, -1, 3, -1), (0,) * 6 + (4,) * 7)
CASES = {
    "rows": Case(),
    "rows, long": Case(T=37, C=19, dtype="bfloat16"),
    "rows, one token": Case("max", T=1, B=3),
    "mask": Case(masked=True),
    "lengths": Case(lengths=(13, 0), normalize=True),
    "lengths and mask": Case("sum", lengths=(9, 5), masked=True, dtype="float16"),
    "chunks": Case(chunk=4),
    "chunks of one": Case("max", chunk=1, T=5),
    "chunks, longer than a row": Case("sum", chunk=50),
    "chunks, long": Case(chunk=16, T=40, C=33, normalize=True, dtype="bfloat16"),
    "chunks and mask": Case("max", chunk=4, masked=True),
    "chunks and lengths": Case("last", chunk=3, lengths=(0, 7)),
    "offsets": Case(offsets=(0, 5, 5, 6, 11)),
    "offsets from 2": Case("max", offsets=(2, 3, 9, 13), normalize=True),
    "offsets, long": Case("sum", T=50, C=17, offsets=(0, 1, 47, 47, 50), dtype="float16"),
    "offsets and mask": Case("last", offsets=(0, 5, 5, 6, 13), masked=True),
    "chunks of offsets": Case(chunk=3, offsets=(1, 4, 4, 9, 11)),
    "chunks of offsets, few": Case("max", chunk=3, offsets=(0, 4, 4, 9, 13), most=6, masked=True),
    "chunks of offsets, long": Case("max", T=50, chunk=12, offsets=(0, 1, 40, 50), dtype="bfloat16"),
    "ids": Case(ids=_MIXED, segments=5),
    "ids, number unsaid": Case("max", ids=_MIXED),
    "ids, last": Case("last", ids=_MIXED, segments=4, masked=True),
    "rising ids": Case("sum", ids=_RISING, segments=5, are_sorted=True, normalize=True),
    "chunks of ids": Case(chunk=2, ids=_MIXED, segments=4, masked=True),
    "chunks of rising ids": Case("max", chunk=3, ids=_RISING, segments=5, are_sorted=True, most=9),
    "ties": Case("max", chunk=6, ties=True),
    "ties of ids": Case("max", ids=_MIXED, segments=4, ties=True, dtype="float16"),
    "ties of long offsets": Case("max", T=50, C=7, offsets=(0, 2, 50), ties=True),
}
