"""Native sparse attention over pages, on XLA and by its Triton kernels, interpreted: against dense native sparse attention, query by query."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET, normal, quick
from tests.native_sparse.cases import by_hand
from tests.native_sparse.cases import Case as Dense
from tests.native_sparse.test_native_sparse import assert_best
from tests.tolerances import assert_close


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] = (37, 5, 0, 23)
    queries: tuple[int, ...] = (1, 1, 1, 1)
    H: int = 4
    K: int = 2
    D: int = 16
    V: int = 16
    page: int = 8
    block: int = 4
    count: int = 3
    window: int = 5
    span: int = 4
    stride: int = 4
    scale: float | None = None
    dtype: str = "float32"
    rest: int = 0  # tokens of no sequence
    missing: tuple[tuple[int, int], ...] = ()  # (sequence, page of its table) without a page

    def operation(self, platform: Any = None, **more: Any) -> ejx.PagedNativeSparseAttention:
        return ejx.PagedNativeSparseAttention(
            self.block, self.count, self.window, compression_size=self.span, compression_stride=self.stride,
            softmax_scale=self.scale, platform=platform, **more,
        )  # fmt: skip

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.queries)])

    @property
    def tokens(self) -> int:
        return sum(self.queries) + self.rest


CASES = {
    "decodes": Case(queries=(1, 1, 0, 1)),
    "mixed": Case(queries=(9, 1, 0, 23), rest=2),
    "overlapping": Case(queries=(3, 5, 0, 1), block=8, span=4, stride=2, V=8, scale=0.3),
    "long spans": Case(queries=(1, 2, 0, 6), block=4, span=8, stride=4, H=3, K=1),
    "large blocks": Case(lengths=(70, 31), queries=(2, 1), block=24, count=2, span=8, stride=8, page=16),
    "one key a page": Case(queries=(1, 1, 0, 1), page=4, window=40, D=12),
    "bf16": Case(queries=(1, 1, 0, 4), dtype="bfloat16"),
}


def make(case: Case, seed: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The dense arrays of each sequence, and the arguments of the call: pages in random order, and NaN wherever nothing is stored."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    q = normal(0, case.tokens, case.H, case.D, dtype=dtype)
    gates = jax.nn.sigmoid(normal(1, case.tokens, case.H, 3))
    pages = max(-(-n // case.page) for n in case.lengths) + 1
    table = np.full((len(case.lengths), pages), -1)
    free = iter(rng.permutation(sum(-(-n // case.page) for n in case.lengths) + 2))
    for row, length in zip(table, case.lengths):
        for m in range(-(-length // case.page)):
            row[m] = next(free)
    total, parts = sum(-(-n // case.page) for n in case.lengths) + 2, case.page // case.stride
    pools = {
        "k": np.full((total, case.page, case.K, case.D), np.nan),
        "v": np.full((total, case.page, case.K, case.V), np.nan),
        "ck": np.full((total, parts, case.K, case.D), np.nan),
        "cv": np.full((total, parts, case.K, case.V), np.nan),
    }
    dense = []
    for n, length in enumerate(case.lengths):
        count = max(0, (length - case.span) // case.stride + 1)
        own: dict[str, Any] = {
            "k": normal(10 + n, length, case.K, case.D, dtype=dtype),
            "v": normal(20 + n, length, case.K, case.V, dtype=dtype),
            "compressed_k": normal(30 + n, count, case.K, case.D, dtype=dtype),
            "compressed_v": normal(40 + n, count, case.K, case.V, dtype=dtype),
        }
        take = slice(case.starts[n], case.starts[n + 1])
        dense.append({"q": q[take], "gates": gates[take], **own})
        for name, x in zip(pools, own.values()):
            size = pools[name].shape[1]
            for j, row in enumerate(np.asarray(x.astype(jnp.float32))):
                pools[name][table[n, j // size], j % size] = row
    for n, m in case.missing:
        table[n, m] = -1
    given = {name: jnp.asarray(x, jnp.float32).astype(dtype) for name, x in pools.items()}
    cache = ejx.PagedKVCache(given["k"], given["v"], jnp.asarray(table), jnp.asarray(case.lengths))
    compressed = ejx.PagedKVCache(given["ck"], given["cv"])
    call = {"q": q, "gates": gates, "cache": cache, "compressed": compressed}
    if set(case.queries) != {1} or case.rest:
        call["query_start_loc"] = jnp.asarray(case.starts)
    return dense, call


def run(op: ejx.PagedNativeSparseAttention, call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    out, indices = quick(lambda call: op(**call, return_indices=True))(call)
    return np.asarray(out.astype(jnp.float32)), np.asarray(indices)


def sequences(case: Case):
    """Each sequence that has queries, and its dense call."""
    for n, (length, queries) in enumerate(zip(case.lengths, case.queries)):
        if queries:
            own = Dense(
                T=queries, S=length, B=1, H=case.H, K=case.K, D=case.D, V=case.V, block=case.block, count=case.count, window=case.window,
                span=case.span, stride=case.stride, means=False, scale=case.scale, dtype=case.dtype,
            )  # fmt: skip
            yield n, slice(case.starts[n], case.starts[n + 1]), own


@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy(platform, name):
    """For the blocks that were chosen, which are the best. Whatever is not stored is NaN; tokens of no sequence give 0."""
    if platform == INTERPRET:
        pytest.importorskip("triton")
    case = CASES[name]
    dense, call = make(case)
    out, indices = run(case.operation(platform), call)
    for n, rows, own in sequences(case):
        arrays = {key: x[None] for key, x in dense[n].items()}
        if not own.compressed():  # an axis must not be empty
            arrays |= {
                key: jnp.zeros((1, 1, *x.shape[2:]), x.dtype)
                for key, x in arrays.items()
                if "compressed" in key
            }
        place, first = own.starts()
        expected = by_hand(own, arrays, indices[None, rows], np.zeros((1, own.T, case.H, case.V)))
        assert_close(out[None, rows], expected["out"], case.dtype, name=f"sequence {n}")
        assert_best(own, arrays, indices[None, rows], place, first)
    nobody = slice(case.starts[-1], None)
    assert not out[nobody].any() and (indices[nobody] == -1).all()
