"""Representative inputs of attention over pages, made from a problem's description: batches as on a server, with pages in random order."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.arguments import accumulator
from ..core.workload import bytes_of
from ..dispatch import Problem
from .cache.quantise import LARGEST
from .spec import LETTERS, page_dtypes, PagedArrays, PagedSpec, SCALES, STORED

SOFT_CAP = 30.0
WINDOW = 4  # the longest sequence spans this many windows


class Batch(NamedTuple):
    """int32 `[N]` each, on the host."""

    q_start: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray
    kv_start: np.ndarray

    def seen(self, spec: PagedSpec) -> np.ndarray:
        """The number of keys that each sequence's queries see in total."""
        first = self.kv_len - self.q_len if spec.left is None else self.kv_len - self.q_len - spec.left
        low = np.maximum(self.kv_start, 0 if spec.left is None else first)
        return np.where(self.q_len > 0, np.maximum(self.kv_len - low, 0), 0)

    def pairs(self, spec: PagedSpec) -> int:
        """The number of pairs of a query and a visible key, per head."""
        total = 0
        for q_len, kv_len, start in zip(self.q_len, self.kv_len, self.kv_start, strict=True):
            i = kv_len - q_len + np.arange(q_len, dtype=np.int64)
            low = np.maximum(i - spec.left, start) if spec.left is not None else start
            total += int(np.maximum(i + 1 - low, 0).sum())
        return total


def spec_of(problem: Problem) -> PagedSpec:
    """The static half of a call, from its problem."""
    return spec_from(dict(problem.dims), dict(problem.flags))


def spec_from(size: Mapping[str, int], flags: Mapping[str, Any]) -> PagedSpec:
    """The static half of a call, from sizes by letter and the flags of a problem."""
    cap = SOFT_CAP if flags.get("soft_cap") else None
    left = max(size["M"] * size["p"] // WINDOW, 1) - 1 if flags.get("window") else None
    kinds = {"latent": bool(flags.get("latent")), "scales": flags.get("scales")}
    return PagedSpec(size["D"] ** -0.5, cap, left, size["Q"], **kinds, return_lse=bool(flags.get("lse")))


def make_batch(problem: Problem, seed: int) -> Batch:
    """A batch of decodes if sequences have at most one query. Otherwise some trailing padding and, for prefilling, chunks of similar lengths; for
    the other operations, decodes and as many whole chunks as the tokens allow."""
    rng = np.random.default_rng(seed)
    count, tokens, longest = (problem.dim(name) for name in "NTQ")
    keys = problem.dim("M") * problem.dim("p")
    most = min(longest, keys)
    q_len = np.zeros(count, np.int64)
    if longest == 1 or count * most <= tokens:
        q_len[:tokens] = most
    elif problem.operation == "prefill_paged_attention":
        part = rng.uniform(0.5, 1.0, count) * tokens / count
        q_len = np.clip(part.astype(np.int64), min(1, tokens // count), most)
    else:
        left = tokens - tokens // 16
        q_len[:left] = 1
        left -= int(q_len.sum())
        for n in rng.permutation(count):
            more = min(most - 1, left)
            q_len[n] += more
            left -= more
    low = np.maximum(q_len, keys // 2)
    kv_len = rng.integers(low, keys + 1)
    if count:
        # One sequence has the full length, so that the whole width of the table is in use.
        kv_len[rng.integers(count)] = keys
    kv_start = rng.integers(0, keys // 4 + 1, count) if problem.flag("ranged") else np.zeros(count)
    q_start = np.cumsum(q_len) - q_len
    return Batch(*(x.astype(np.int32) for x in (q_start, q_len, kv_len, kv_start)))


def make_arrays(problem: Problem, seed: int) -> PagedArrays:
    """The arrays of a call, with one leading axis of size one. Lengths, and so shapes, are the same for every seed; tables and values depend
    on it."""
    batch, rng = make_batch(problem, 0), np.random.default_rng(seed)
    need = -(-batch.kv_len // problem.dim("p"))
    table = np.full((problem.dim("N"), problem.dim("M")), -1, np.int32)
    numbers = rng.permutation(int(need.sum())).astype(np.int32)
    for row, mine in zip(table, np.split(numbers, np.cumsum(need)[:-1]), strict=True):
        row[: len(mine)] = mine
    tables = {"page_table": table, **batch._asdict()}
    if not problem.flag("ranged"):
        del tables["kv_start"]
    values = _random(problem, max(len(numbers), 1), jax.random.key(seed, impl="rbg"))
    return PagedArrays.of(values | {name: jnp.asarray(x)[None] for name, x in tables.items()})


def shapes_from(
    size: Mapping[str, int], dtype: Any, kv: tuple[Any, Any], flags: Mapping[str, Any], pages: int = 1
) -> PagedArrays:
    """The shapes of a call's arrays without leading axes, from sizes by letter, the dtypes of queries and of both kinds of pages, and the flags
    of a problem."""
    is_latent, wide = bool(flags.get("latent")), accumulator(jnp.dtype(dtype))
    size = {**size, "P": pages, "Q2": size["Q"], "Dk": size["V" if is_latent else "D"]}
    size["Dr"], size["two"] = size["D"] - size["V"], 2
    dtypes = {"q": dtype, **dict.fromkeys(("page_table", "q_start", "q_len", "kv_len"), "int32")}
    for name, of_pages in zip(("k", "rope" if is_latent else "v"), kv, strict=True):
        dtypes[name] = of_pages
        dtypes |= {f"{name}_scale": "float32"} if str(of_pages) in LARGEST else {}
    optional = {"kv_start": ("ranged", "int32"), "sinks": ("sinks", wide)}
    optional |= {"slopes": ("alibi_slopes", wide), "qq_bias": ("qq_bias", wide)}
    optional |= dict.fromkeys(("gates", "own_gates"), ("log_forget", wide))
    dtypes |= {name: own for name, (flag, own) in optional.items() if flags.get(flag)}
    return PagedArrays.of(LETTERS[flags.get("scales")].shapes(size, dtypes, lead=""))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(problem: Problem, pages: int, key: Array) -> dict[str, Array]:
    dtype, kv = problem.dtype("q"), page_dtypes(problem)
    shapes = shapes_from(dict(problem.dims), dtype, kv, dict(problem.flags), pages).given
    keys = iter(jax.random.split(key, len(shapes)))

    def value(name: str, x: Any) -> Array:
        if x.dtype == jnp.int8:
            return jax.random.randint(next(keys), x.shape, -127, 128, jnp.int32).astype(jnp.int8)
        if name == "slopes":
            return 2.0 ** (-8.0 * jnp.arange(1, x.size + 1, dtype=x.dtype) / x.size)
        if name in SCALES:
            unit = 1 / 64 if shapes[name.removesuffix("_scale")].dtype == jnp.int8 else 1.0
            return unit * jnp.exp(0.2 * jax.random.normal(next(keys), x.shape, x.dtype))
        return jax.random.normal(next(keys), x.shape, accumulator(jnp.dtype(dtype))).astype(x.dtype)

    arrays = {name: value(name, x) for name, x in shapes.items() if x.dtype != jnp.int32}
    return arrays | {name: arrays[name][None] for name in arrays.keys() & {"q", "own_gates"}}


def moved_bytes(problem: Problem, spec: PagedSpec) -> float:
    """The bytes of queries, results and tables, once each, and of each sequence's visible keys."""
    shapes = jax.eval_shape(lambda: make_arrays(problem, 0))
    a_key = sum(bytes_of(x) / math.prod(x.shape[:2]) for x in _over_keys(shapes))
    seen = int(make_batch(problem, 0).seen(spec).astype(np.int64).sum())
    rest = sum(bytes_of(x) for x in shapes if x is not None) - sum(bytes_of(x) for x in _over_keys(shapes))
    tokens, heads = problem.dim("T"), problem.dim("H")
    lse = 8 if problem.dtype("q") == "float64" else 4
    results = tokens * heads * (problem.dim("V") * jnp.dtype(problem.dtype("q")).itemsize + lse)
    return float(seen * a_key + rest + results)


def _over_keys(arrays: PagedArrays) -> list[Any]:
    return [x for name, x in arrays.given.items() if name in STORED and x.ndim > 1]
