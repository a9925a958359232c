"""The problems of attention over pages that are measured: sizes, inputs, work, float32 results and targets."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, report
from benchmarks.prepare import FORWARD
from ejkernel_eqx.paged import reference
from ejkernel_eqx.paged.cache.quantise import dequantise, LARGEST, quantise
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec

DECODE, LATENT, QUANTISED, PREFILL = KINDS = ("decode", "latent", "8-bit pages", "prefill")


@dataclasses.dataclass(frozen=True)
class DecodeProblem(problems.Problem):
    """`N` sequences of `S` keys in pages of `p`, with one query each or, to `prefill`, a query at every key.

    `H` query heads on `K` key heads of `D` channels. With `rope`, the pages hold a latent of `D` channels, one head, and `rope` more
    channels for the scores. `pages`: their dtype if it differs from that of the queries, with a scale for each `"token"` and head, or for
    each `"head"`. `ragged`: lengths from a quarter of `S` keys to `S`.
    """

    N: int
    S: int
    p: int = 16
    H: int = 32
    K: int = 8
    D: int = 128
    rope: int = 0
    prefill: bool = False
    pages: str | None = None
    scales: str | None = None
    ragged: bool = False
    directions: ClassVar = (FORWARD,)

    def __post_init__(self):
        assert self.K == 1 or not self.rope, "a latent is one head"
        assert (self.pages in LARGEST) == (self.scales is not None)
        assert not (self.prefill and (self.ragged or self.rope or self.scales))

    @property
    def kind(self) -> str:
        if self.prefill:
            return PREFILL
        return QUANTISED if self.scales else LATENT if self.rope else DECODE

    def words(self) -> list[str]:
        heads = f"H{self.H} KV{self.K} D{self.D}"
        return [
            "prefill" if self.prefill else "decode",
            f"N{self.N} S{self.S} p{self.p}",
            f"latent H{self.H} D{self.D}+{self.rope}" if self.rope else heads,
            "ragged" if self.ragged else "",
            f"{self.pages} {self.scales}" if self.scales else "",
        ]

    @property
    def stored(self) -> Any:
        return jnp.dtype(self.pages or self.dtype)

    @property
    def scale(self) -> float:
        return (self.D + self.rope) ** -0.5

    @property
    def tokens(self) -> int:
        """The number of queries of all sequences."""
        return self.N * (self.S if self.prefill else 1)

    def lengths(self) -> np.ndarray:
        """int32 `[N]`."""
        if not self.ragged:
            return np.full(self.N, self.S, np.int32)
        result = np.random.default_rng(0).integers(self.S // 4, self.S + 1, self.N)
        result[0] = self.S
        return result.astype(np.int32)

    def flops(self) -> float:
        """The operations of both products, over pairs of a query and a visible key."""
        lengths = self.lengths().astype(np.int64)
        pairs = int((lengths * (lengths + 1) // 2 if self.prefill else lengths).sum())
        return 2.0 * pairs * self.H * (2 * self.D + self.rope)

    def bytes(self) -> int:
        """The minimum bytes read and written: visible keys and values with their scales, queries, results and tables."""
        size, keys = jnp.dtype(self.dtype).itemsize, int(self.lengths().sum())
        a_key = (self.D + self.rope if self.rope else 2 * self.K * self.D) * self.stored.itemsize
        a_key += 8 * self.K if self.scales == "token" else 0
        tables = 4 * (int((-(-self.lengths() // self.p)).sum()) + self.N)
        return keys * a_key + self.tokens * self.H * (2 * self.D + self.rope) * size + tables


class Inputs(NamedTuple):
    """Queries `[tokens, H, D]` (`D + rope` for a latent), the bound cache, and where each sequence's queries begin and end."""

    q: Array
    cache: ejx.PagedKVCache | ejx.PagedLatentCache
    query_start_loc: Array


def make_inputs(problem: DecodeProblem, seed: int = 0) -> Inputs:
    """Standard normal inputs, with pages in random order; different for every seed."""
    lengths = problem.lengths()
    need = -(-lengths // problem.p)
    numbers = np.random.default_rng(seed).permutation(int(need.sum())).astype(np.int32)
    table = np.full((problem.N, int(need.max())), -1, np.int32)
    for row, mine in zip(table, np.split(numbers, np.cumsum(need)[:-1]), strict=True):
        row[: len(mine)] = mine
    key = jax.random.key(seed, impl="rbg")
    q, first, second, first_scale, second_scale = _random(problem, len(numbers), key)
    kind = ejx.PagedLatentCache if problem.rope else ejx.PagedKVCache
    cache = kind(first, second, jnp.asarray(table), jnp.asarray(lengths), first_scale, second_scale)
    each = problem.S if problem.prefill else 1
    return Inputs(q, cache, each * jnp.arange(problem.N + 1, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(problem: DecodeProblem, pages: int, key: Array) -> tuple[Array | None, ...]:
    """Queries, then both kinds of pages, then their scales."""
    keys = jax.random.split(key, 3)
    heads, width = () if problem.rope else (problem.K,), problem.D + problem.rope
    widths = (problem.D, problem.rope) if problem.rope else (problem.D, problem.D)
    made = [
        _stored(problem, jax.random.normal(key, (pages, problem.p, *heads, width), jnp.float32))
        for key, width in zip(keys[1:], widths)
    ]
    q = jax.random.normal(keys[0], (problem.tokens, problem.H, width), problem.dtype)
    return q, *(stored for stored, _ in made), *(scale for _, scale in made)


def _stored(problem: DecodeProblem, x: Array) -> tuple[Array, Array | None]:
    if problem.scales is None:
        return x.astype(problem.stored), None
    if problem.scales == "token":
        return quantise(x, problem.stored)
    scale = jnp.max(jnp.abs(x), (0, 1, x.ndim - 1)) / LARGEST[problem.stored.name]
    return quantise(x, problem.stored, scale)[0], scale


def ours(problem: DecodeProblem, platform: str | None) -> Callable[[Inputs], Array]:
    """Our operation on such inputs. The call builds it, and raises if the platform does not support this device."""
    options: dict[str, Any] = {"softmax_scale": problem.scale, "platform": platform}

    def decode(inputs: Inputs) -> Array:
        return ejx.PagedAttention(**options)(inputs.q, inputs.cache)

    def prefill(inputs: Inputs) -> Array:
        attend = ejx.PrefillPagedAttention(**options)
        start = inputs.query_start_loc
        return attend(inputs.q, inputs.cache, query_start_loc=start, max_query_len=problem.S)

    return prefill if problem.prefill else decode


def gathered(problem: DecodeProblem, inputs: Inputs) -> tuple[Array, Array]:
    """Each sequence's dense keys and values, `[N, S, K, D]` (for a latent: with its rotary part, and alone), in the queries' dtype."""
    first, second = inputs.cache.gather(problem.S, dtype=inputs.q.dtype)
    if problem.rope:
        first, second = jnp.concatenate([first, second], -1)[:, :, None], first[:, :, None]
    return first, second


def plain_pages(inputs: Inputs) -> Inputs:
    """Converts pages to the queries' dtype."""
    cache, dtype = inputs.cache, inputs.q.dtype
    names = ("latent", "rope") if isinstance(cache, ejx.PagedLatentCache) else ("k", "v")
    pages = (dequantise(getattr(cache, name), getattr(cache, f"{name}_scale"), dtype) for name in names)
    return inputs._replace(cache=type(cache)(*pages, cache.page_table, cache.lengths))


@prepare.reference
def expected_results(problem: DecodeProblem, inputs: Inputs) -> dict[str, Array]:
    """The result of the reference, in float32."""
    cache, start = inputs.cache, inputs.query_start_loc
    assert cache.page_table is not None and cache.lengths is not None
    if isinstance(cache, ejx.PagedLatentCache):
        scales = {"k_scale": cache.latent_scale, "rope_scale": cache.rope_scale}
        pages: dict[str, Any] = {"k": cache.latent[:, :, None], "v": None, "rope": cache.rope[:, :, None]}
        pages |= {name: None if x is None else x[..., None] for name, x in scales.items()}
    else:
        pages = {"k": cache.k, "v": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
    arrays = PagedArrays(
        q=inputs.q,
        page_table=cache.page_table,
        q_start=start[:-1],
        q_len=jnp.diff(start),
        kv_len=cache.lengths,
        **pages,
    )
    longest = problem.S if problem.prefill else 1
    spec = PagedSpec(
        problem.scale, max_query_len=longest, latent=problem.rope > 0, scales=problem.scales, return_lse=True
    )
    return {"out": reference.attend(arrays, spec)["out"]}


class Bar(NamedTuple):
    """The target for `field` of our rows on one H200: a minimum or, with `at_most`, a maximum. `first`: so many problems of the group."""

    what: str
    group: str
    field: str
    bound: float
    at_most: bool = False
    first: int | None = None

    @property
    def problems(self) -> tuple[DecodeProblem, ...]:
        return PROBLEMS[self.group][: self.first]


PROBLEMS = problems.load("decode", DecodeProblem)
BARS = [Bar(**entries) for entries in report.shown()["bars"]["decode"]]
