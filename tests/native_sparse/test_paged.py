"""Native sparse attention over pages, on XLA and by its Triton kernels, interpreted: against dense native sparse attention, query by query."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.native_sparse.native_pages import arguments, reference
from tests.attention.dense import INTERPRET, normal, quick
from tests.native_sparse import cases
from tests.native_sparse.test_native_sparse import assert_best
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def _needs_triton(request):
    if INTERPRET in request.node.name:
        pytest.importorskip("triton")


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
    sizes = {"k": (case.page, case.D), "v": (case.page, case.V), "ck": (parts, case.D), "cv": (parts, case.V)}
    pools = {name: np.full((total, size, case.K, dim), np.nan) for name, (size, dim) in sizes.items()}
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
            first = case.span // case.stride - 1 if name in ("ck", "cv") else 0
            for j, row in enumerate(np.asarray(x.astype(jnp.float32)), first):
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
            own = cases.Case(
                T=queries, S=length, B=1, H=case.H, K=case.K, D=case.D, V=case.V, block=case.block, count=case.count, window=case.window,
                span=case.span, stride=case.stride, means=False, scale=case.scale, dtype=case.dtype,
            )  # fmt: skip
            yield n, slice(case.starts[n], case.starts[n + 1]), own


ON_XLA = ("decodes", "mixed", "overlapping", "large blocks")


@pytest.mark.few(2)
@pytest.mark.parametrize("platform, name", [*(("xla", n) for n in ON_XLA), *((INTERPRET, n) for n in CASES)])
def test_agrees_with_numpy(platform, name):
    """For the blocks that were chosen, which are the best. Whatever is not stored is NaN; tokens of no sequence give 0."""
    case = CASES[name]
    dense, call = make(case)
    out, indices = run(case.operation(platform), call)
    assert_agree(case, dense, out, indices)
    nobody = slice(case.starts[-1], None)
    assert not out[nobody].any() and (indices[nobody] == -1).all()


def assert_agree(case: Case, dense: list[dict[str, Any]], out: np.ndarray, indices: np.ndarray) -> None:
    """Each sequence's results against numpy, for the blocks that were chosen, which are the best."""
    for n, rows, own in sequences(case):
        arrays = {key: x[None] for key, x in dense[n].items()}
        if not own.compressed():  # an axis must not be empty
            names = ("compressed_k", "compressed_v")
            arrays |= {key: jnp.zeros((1, 1, *arrays[key].shape[2:]), case.dtype) for key in names}
        place, first = own.starts()
        expected = cases.by_hand(own, arrays, indices[None, rows], np.zeros((1, own.T, case.H, case.V)))
        assert_close(out[None, rows], expected["out"], case.dtype, name=f"sequence {n}")
        assert_best(own, arrays, indices[None, rows], place, first)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_pages(platform):
    """Which pages a table names changes nothing; keys of a page that is missing are not seen, whatever page would stand in its place."""
    case = dataclasses.replace(CASES["mixed"], missing=((0, 1), (3, 0)))
    op = case.operation(platform)
    ours, theirs = make(case, 0)[1], make(case, 1)[1]
    found, again = run(op, ours), run(op, theirs)
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[0], again[0])
    np.testing.assert_array_equal(found[1], again[1])
    reference = quick(lambda: _reference(op, ours, jnp.asarray(found[1])))()
    assert_close(found[0], np.asarray(reference))


def _reference(op, call, indices):
    caches = call["cache"], call["compressed"]
    arrays, spec = arguments.resolve(
        op.options, call["q"], call["gates"], caches, call["query_start_loc"], None, indices
    )
    return reference.attend(arrays, spec)["out"]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_rows(platform):
    """`vmap` over calls with shared pages, with own pages, and with pages of which one kind is shared; and blocks that are given."""
    op, call = CASES["mixed"].operation(platform), make(CASES["mixed"])[1]
    turned = call | {name: call[name][::-1] for name in ("q", "gates")}
    both = jax.tree.map(lambda *x: jnp.stack(x), call, turned)
    queries = {name: both[name] for name in ("q", "gates")}
    run = quick(lambda given: op(**call | given))
    alone, indices = quick(lambda: op(**call, return_indices=True))()
    over = lambda mapped: quick(jax.vmap(lambda given: op(**call | given)))(mapped)
    ways = [
        over(both),
        over(queries),
        over(queries | {"compressed": both["compressed"]}),
        op(**call | queries),
    ]
    for n, expected in enumerate((alone, run(turned))):
        for found in ways:
            assert_close(found[n], np.asarray(expected))
    assert_close(run({"block_indices": jnp.concatenate([indices] * 2, -1)}), np.asarray(alone))
    nothing = run({"block_indices": jnp.full_like(indices, -1)})
    assert np.abs(np.asarray(nothing - alone)).max() > 1e-3


@pytest.mark.slow
def test_bounded_queries():
    """Queries past `max_query_len` give 0 and change no other."""
    case = CASES["mixed"]
    _, call = make(case)
    whole, cut = (case.operation("xla")(**call, max_query_len=most) for most in (None, 4))
    inside = np.concatenate([np.arange(n) < 4 for n in case.queries] + [np.zeros(case.rest, bool)])
    # The fourth query and those before it have other positions, so a call without the others says what they give.
    assert not np.asarray(cut)[~inside].any()
    assert_close(np.asarray(cut)[inside], np.asarray(whole)[inside])


@pytest.mark.slow
def test_nothing_to_attend():
    op, (_, call) = CASES["decodes"].operation("xla"), make(CASES["decodes"])
    empty = {"cache": dataclasses.replace(call["cache"], lengths=jnp.zeros(4, jnp.int32))}
    out, indices = op(**call | empty, return_indices=True)
    assert not np.asarray(out).any() and (np.asarray(indices) == -1).all()


def test_no_gradient():
    _, call = make(CASES["decodes"])
    with pytest.raises(ejx.UnsupportedError, match="NativeSparseAttention"):
        jax.grad(lambda q: CASES["decodes"].operation("xla")(**call | {"q": q}).sum())(call["q"])


def test_errors(unchecked):
    case = CASES["mixed"]
    _, call = make(case)
    small, op = call["compressed"], case.operation()
    part = lambda x, name: dataclasses.replace(x, k=x.k[name], v=x.v[name])
    calls = {
        "gates: expected": {"gates": call["gates"][..., :2]},
        "cache: expected a PagedKVCache": {"cache": None},
        "bound": {"cache": call["cache"].unbind()},
        "num_pages": {"compressed": part(small, slice(1, None))},
        "page_size=2": {"compressed": part(small, np.s_[:, :1])},
        "num_kv_heads": {"compressed": part(small, np.s_[:, :, :1])},
        "dtype of q": {"compressed": jax.tree.map(lambda x: x.astype("bfloat16"), small)},
        "max_query_len": {"query_start_loc": None, "max_query_len": 4},
        "one query for each": {"query_start_loc": None},
        "block_indices": {"block_indices": jnp.zeros((3, 2, 1), int)},
    }
    for word, wrong in calls.items():
        with pytest.raises(ValueError, match=word):
            op(**call | wrong)
    with pytest.raises(ValueError, match="multiple of compression_stride=3"):
        ejx.PagedNativeSparseAttention(3)(**call)
