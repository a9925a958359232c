"""Problems of attention over pages: the one list, for every platform and device. What no query sees holds NaN."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy learns the names of the narrow dtypes)
import numpy as np

from ejkernel_eqx.paged import core, reference
from ejkernel_eqx.paged.cache.quantise import LARGEST
from ejkernel_eqx.paged.example import example_problem
from ejkernel_eqx.paged.samples import make_arrays, make_batch
from ejkernel_eqx.paged.samples import spec_of as spec_of_problem
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec, PAGES, SCALES, SHARED
from tests.arrays import array
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

__all__ = [
    "core", "example_problem", "LARGEST", "make_arrays", "make_batch", "PagedArrays", "PagedSpec", "PAGES", "reference", "SCALES", "SHARED",
    "spec_of_problem"
]  # fmt: skip
Named = dict[str, Any]
attend_exactly = quick(reference.attend, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    p: int = 4  # tokens a page
    H: int = 4
    K: int = 2
    D: int = 16
    V: int = 16
    rope: int | None = None  # latent pages of D channels, with so many more for the scores
    dtype: str = "float32"
    kv_dtype: str | None = None  # of the pages, where it is not that of the queries
    v_dtype: str | None = None  # of the values, or of a latent's rotary keys, where it is another
    scales: str | None = None
    left: int | None = None
    cap: float | None = None
    sinks: bool = False
    slopes: bool = False
    gates: bool = False
    qq_bias: int | None = None  # its size, at least the longest query length
    kv_start: tuple[int, ...] | None = None
    missing: tuple[tuple[int, int], ...] = ()  # (sequence, page of it) that is not there
    first: int = 0  # tokens of no sequence, before
    tail: int = 0  # and behind
    max_query_len: int | None = None
    batch: int | None = None  # so many rows, each with its own sequences in pages that all share
    seed: int = 0

    @property
    def longest(self) -> int:
        return max(self.q_lens) if self.max_query_len is None else self.max_query_len

    @property
    def checked_dtype(self) -> str:
        """The dtype whose tolerance holds: the coarser of those that are multiplied; quantised pages count as the queries."""
        pages = (self.dtype if dtype in LARGEST else dtype for dtype in self.page_dtypes)
        return max((self.dtype, *pages), key=("float64", "float32", "float16", "bfloat16").index)

    @property
    def page_dtypes(self) -> tuple[str, str]:
        keys = self.kv_dtype or self.dtype
        return keys, self.v_dtype or keys


def make(case: Case) -> tuple[PagedArrays, PagedSpec]:
    """The arrays, with leading axes `(batch,)` or none, and the static half of a call."""
    given = {name: jnp.asarray(x, x.dtype) for name, x in _arrays(case).items()}
    return PagedArrays.of(given), spec_of(case)


def spec_of(case: Case) -> PagedSpec:
    dim = case.D + (case.rope or 0)
    return PagedSpec(
        scale=dim**-0.5,
        logits_soft_cap=case.cap,
        left=case.left,
        max_query_len=case.longest,
        latent=case.rope is not None,
        scales=case.scales,
        return_lse=True,
    )


def with_leading_axis(arrays: PagedArrays) -> PagedArrays:
    """One leading axis of size one on all but what is shared, as opaque platforms get it."""
    given = {name: x for name, x in arrays._asdict().items() if x is not None and name not in SHARED}
    return arrays._replace(**{name: x[None] for name, x in given.items()})


@functools.cache
def run_reference(case: Case) -> dict[str, np.ndarray]:
    """`out` and `lse` by the reference in float64."""
    with jax.enable_x64(True):
        wide = {name: array(_wide(x)) for name, x in _arrays(case).items()}
        results = attend_exactly(PagedArrays.of(wide), spec_of(case))
        return {name: np.asarray(x) for name, x in results.items()}


def assert_agrees(case: Case, results: Named) -> None:
    """Both results against the reference; a leading axis of size one more is no difference."""
    expected, arrays = run_reference(case), _arrays(case)
    out, lse = (np.asarray(results[name]).reshape(expected[name].shape) for name in ("out", "lse"))
    assert results["out"].dtype == case.dtype
    assert results["lse"].dtype == ("float64" if case.dtype == "float64" else "float32")
    assert_close(out, expected["out"], case.checked_dtype, name="out")
    assert_close(lse, expected["lse"], case.checked_dtype, name="lse")
    tokens = np.arange(arrays["q"].shape[-3])[:, None]
    start, length = (arrays[name][..., None, :] for name in ("q_start", "q_len"))
    nobody = ~((start <= tokens) & (tokens < start + length)).any(-1)
    assert (out[nobody] == 0).all() and (lse[nobody] == -np.inf).all(), "tokens of no sequence"


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype in (np.int32, np.int8) else x.astype(np.float64)


@functools.cache
def _arrays(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(case.seed)
    rows, count = case.batch or 1, len(case.q_lens)
    # Every row has the same sequences in another order.
    order = np.stack([np.roll(np.arange(count), row) for row in range(rows)])
    q_len, kv_len = (np.array(x, np.int32)[order] for x in (case.q_lens, case.kv_lens))
    kv_start = None if case.kv_start is None else np.array(case.kv_start, np.int32)[order]
    ends = np.cumsum(q_len, 1, dtype=np.int32) + np.int32(case.first)
    tokens = case.first + sum(case.q_lens) + case.tail
    table, pages = _tables(case, order, kv_len, rng)
    seen = _seen(case, table, pages, q_len, kv_len, kv_start)

    dim = case.D + (case.rope or 0)
    q = rng.standard_normal((rows, tokens, case.H, dim))
    index = np.arange(tokens)[None, :, None]
    real: Any = (((ends - q_len)[:, None] <= index) & (index < ends[:, None])).any(-1)
    arrays: Named = {"q": np.where(real[:, :, None, None], q, np.nan).astype(case.dtype)}
    widths = {"k": case.D, "v": case.V} if case.rope is None else {"k": case.D, "rope": case.rope}
    for (name, width), dtype in zip(widths.items(), case.page_dtypes, strict=True):
        arrays |= _pages(case, name, (width, dtype), seen, rng)
    if case.gates:
        wide = np.float64 if case.dtype == "float64" else np.float32
        stored = np.where(seen[..., None, None], rng.standard_normal((*seen.shape, case.H, 2)), np.nan)
        own = np.where(real[..., None, None], rng.standard_normal((rows, tokens, case.H, 2)), np.nan)
        large = np.array([1000.0, 0.0])  # near sums are alike
        arrays |= {"gates": (stored - large).astype(wide), "own_gates": (own - large).astype(wide)}
    arrays |= {"page_table": table, "q_start": ends - q_len, "q_len": q_len, "kv_len": kv_len}
    if kv_start is not None:
        arrays["kv_start"] = kv_start
    if case.batch is None:
        arrays |= {name: x[0] for name, x in arrays.items() if name not in SHARED}
    wide = np.float64 if case.dtype == "float64" else np.float32
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.H).astype(wide)
        arrays["sinks"][-1] = -np.inf  # no sink after all
    if case.slopes:
        arrays["slopes"] = (2.0 ** -np.arange(1, case.H + 1)).astype(wide)
    if case.qq_bias is not None:
        bias = rng.standard_normal((case.qq_bias, case.qq_bias)).astype(wide)
        # Tree decoding hides queries from one another by minus infinity.
        arrays["qq_bias"] = np.where(np.tril(rng.random(bias.shape) < 0.3, -1), -np.inf, bias)
    return arrays


def _tables(
    case: Case, order: np.ndarray, kv_len: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Permuted pages; behind the last one and where one is missing numbers that must not be followed."""
    need = -(-kv_len // case.p)
    pages, width = int(need.sum()) + 2, int(need.max(initial=0)) + 1
    free = iter(rng.permutation(pages))
    table = rng.choice([-1, pages, pages + 7, -9, 0], (*kv_len.shape, width)).astype(np.int32)
    for row, n in np.ndindex(*kv_len.shape):
        for page in range(need[row, n]):
            table[row, n, page] = (
                next(free) if (order[row, n], page) not in case.missing else (-1, pages)[page % 2]
            )
    return table, pages


def _seen(
    case: Case,
    table: np.ndarray,
    pages: int,
    q_len: np.ndarray,
    kv_len: np.ndarray,
    kv_start: np.ndarray | None,
) -> np.ndarray:
    """The slots that some query sees, `[pages, p]`."""
    seen = np.zeros((pages, case.p), bool)
    for row, n in np.ndindex(*q_len.shape):
        queries = min(q_len[row, n], case.longest)
        first = kv_len[row, n] - q_len[row, n]
        low = max(
            0, 0 if case.left is None else first - case.left, 0 if kv_start is None else kv_start[row, n]
        )
        for j in range(low, first + queries):
            page = table[row, n, j // case.p]
            if 0 <= page < pages:
                seen[page, j % case.p] = True
    return seen


def _pages(case: Case, name: str, kind: tuple[int, str], seen: np.ndarray, rng: np.random.Generator) -> Named:
    width, dtype = kind
    shape = (*seen.shape, case.K, width)
    if dtype == "int8":
        values = np.where(seen[..., None, None], rng.integers(-127, 128, shape), 77)
    else:
        values = np.where(seen[..., None, None], rng.standard_normal(shape), np.nan)
    arrays = {name: values.astype(dtype)}
    if dtype not in LARGEST:
        return arrays
    unit = 1 / 64 if dtype == "int8" else 1.0
    scale = unit * rng.uniform(0.5, 1.5, shape[:-1] if case.scales == "token" else (case.K,))
    scale = np.where(seen[..., None], scale, np.nan) if case.scales == "token" else scale
    return arrays | {f"{name}_scale": scale.astype(np.float32)}


MIXED: Named = dict(q_lens=(1, 5, 0, 3, 1), kv_lens=(9, 5, 6, 11, 1), tail=2)
CASES = {
    "decode": Case((1, 1, 1), (1, 7, 17)),
    "decode, all options": Case((1, 1, 1), (3, 16, 18), left=6, cap=2.0, sinks=True, slopes=True, qq_bias=1),
    "prefill behind keys": Case((6, 9), (14, 21), D=24, V=16),
    "mixed": Case(**MIXED),
    "mixed, all options": Case(
        **MIXED, first=2, left=5, cap=2.0, sinks=True, slopes=True, qq_bias=7, kv_start=(1, 0, 0, 4, 0), K=1
    ),
    "speculative": Case((4, 3, 4), (4, 12, 21), qq_bias=4, tail=1),
    "empty sequences": Case((0, 2, 0, 1, 0), (5, 8, 0, 3, 0), sinks=True, tail=3),
    "no keys": Case((1, 2, 1), (0, 1, 1), sinks=True),
    "nobody": Case((0, 0), (0, 4), tail=3, sinks=True, max_query_len=2),
    "left out": Case((5, 1), (9, 4), max_query_len=3),
    "page of 1": Case((1, 4), (6, 5), p=1),
    "missing pages": Case(
        (1, 5, 1), (15, 18, 9), missing=((0, 1), (1, 0), (1, 3), (2, 0), (2, 1), (2, 2)), sinks=True
    ),
    "freed behind a window": Case((1, 3), (22, 19), left=5, missing=((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))),
    "window of own key": Case((1, 4), (9, 6), left=0),
    "kv_start": Case((1, 1, 1, 3), (9, 12, 6, 10), kv_start=(0, 7, 6, 9)),
    "groups of 1": Case((1, 5), (6, 9), H=2, K=2),
    "D 40, V 24": Case((1, 5), (6, 9), D=40, V=24),
    "latent": Case((1, 4, 1), (5, 11, 8), H=4, K=1, D=32, rope=16),
    "latent, options": Case(
        (1, 4, 2), (5, 11, 8), H=8, K=1, D=24, rope=8, left=4, cap=3.0, sinks=True, tail=1
    ),
    "latent int8": Case((1, 4), (5, 11), K=1, D=32, rope=16, kv_dtype="int8", scales="token"),
    "latent float8, head scales": Case(
        (1, 4), (5, 11), K=1, D=16, rope=8, kv_dtype="float8_e4m3fn", scales="head"
    ),
    "int8": Case((1, 6, 0), (9, 6, 4), kv_dtype="int8", scales="token", tail=1),
    "int8, head scales": Case((1, 6), (9, 13), kv_dtype="int8", scales="head", left=7),
    "float8": Case((1, 6), (9, 13), kv_dtype="float8_e4m3fn", scales="token", dtype="bfloat16"),
    "float8, head scales": Case((1, 6), (9, 6), kv_dtype="float8_e4m3fn", scales="head", missing=((0, 0),)),
    "float8 with infinities": Case((1, 6), (9, 13), kv_dtype="float8_e5m2", scales="token", dtype="float16"),
    "bfloat16 keys, int8 values": Case(
        (1, 6, 0), (9, 6, 4), kv_dtype="bfloat16", v_dtype="int8", scales="token", dtype="bfloat16", tail=1
    ),
    "int8 keys, float32 values, head scales": Case(
        (1, 6), (9, 13), kv_dtype="int8", v_dtype="float32", scales="head", left=7, sinks=True
    ),
    "int8 keys, float8 values": Case(
        (1, 6), (9, 13), kv_dtype="int8", v_dtype="float8_e4m3fn", scales="token"
    ),
    "float32 queries, bfloat16 keys, int8 values": Case(
        (1, 5), (6, 9), kv_dtype="bfloat16", v_dtype="int8", scales="head"
    ),
    "float32 keys, bfloat16 values": Case(
        (1, 5), (6, 9), kv_dtype="float32", v_dtype="bfloat16", dtype="bfloat16"
    ),
    "latent float8, bfloat16 rope": Case(
        (1, 4),
        (5, 11),
        K=1,
        D=32,
        rope=16,
        kv_dtype="float8_e4m3fn",
        v_dtype="bfloat16",
        scales="token",
        dtype="bfloat16",
    ),
    "latent float32, int8 rope, head scales": Case(
        (1, 4), (5, 11), K=1, D=16, rope=8, v_dtype="int8", scales="head", cap=3.0
    ),
    "bfloat16": Case(**MIXED, dtype="bfloat16", sinks=True),
    "float16": Case(**MIXED, dtype="float16", left=4),
    "gates": Case((1, 1, 1), (3, 16, 18), gates=True, left=6, cap=2.0, sinks=True),
    "gates, mixed": Case(**MIXED, gates=True, dtype="bfloat16", missing=((3, 1),)),
    "gates, two rows, int8": Case((1, 4), (6, 9), H=2, batch=2, gates=True, kv_dtype="int8", scales="token"),
    "two rows": Case((1, 4, 1), (6, 9, 3), batch=2, tail=1),
    "two rows, all options": Case(
        (1, 3), (6, 9), batch=2, left=4, cap=2.0, sinks=True, slopes=True, qq_bias=3
    ),
}
