"""Representative inputs of attention over pages, made from a problem's description alone: batches as a server has them, pages in any order."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.workload import bytes_of
from ..dispatch import Problem
from .spec import PagedArrays, PagedSpec

SOFT_CAP = 30.0
WINDOW = 4  # a window holds such a part of the longest sequence


class Batch(NamedTuple):
    """int32 `[N]` each, on the host."""

    q_start: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray
    kv_start: np.ndarray

    def seen(self, spec: PagedSpec) -> np.ndarray:
        """The keys that each sequence's queries see together."""
        first = self.kv_len - self.q_len if spec.left is None else self.kv_len - self.q_len - spec.left
        low = np.maximum(self.kv_start, 0 if spec.left is None else first)
        return np.where(self.q_len > 0, np.maximum(self.kv_len - low, 0), 0)

    def pairs(self, spec: PagedSpec) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        total = 0
        for q_len, kv_len, start in zip(self.q_len, self.kv_len, self.kv_start, strict=True):
            i = kv_len - q_len + np.arange(q_len, dtype=np.int64)
            low = np.maximum(i - spec.left, start) if spec.left is not None else start
            total += int(np.maximum(i + 1 - low, 0).sum())
        return total


def spec_of(problem: Problem) -> PagedSpec:
    """The static half of a call of this problem."""
    scales = problem.flag("scales")
    keys = problem.dim("M") * problem.dim("p")
    return PagedSpec(
        scale=problem.dim("D") ** -0.5,
        logits_soft_cap=SOFT_CAP if problem.flag("soft_cap") else None,
        left=max(keys // WINDOW, 1) - 1 if problem.flag("window") else None,
        max_query_len=problem.dim("Q"),
        latent=bool(problem.flag("latent")),
        scales=None if scales is None else str(scales),
        return_lse=bool(problem.flag("lse")),
    )


def make_batch(problem: Problem, seed: int) -> Batch:
    """Decodes alone where no sequence may have more queries. Else some padding behind, and for prefilling chunks of like lengths, for
    the other operations as many whole chunks as there are tokens, and decodes."""
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
        kv_len[rng.integers(count)] = keys
    kv_start = rng.integers(0, keys // 4 + 1, count) if problem.flag("ranged") else np.zeros(count)
    q_start = np.cumsum(q_len) - q_len
    return Batch(*(x.astype(np.int32) for x in (q_start, q_len, kv_len, kv_start)))


def make_arrays(problem: Problem, seed: int) -> PagedArrays:
    """The arrays of a call, with one leading axis of size one: lengths, and so shapes, are the same for every seed; tables and values are
    fresh."""
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(problem: Problem, pages: int, key: Array) -> dict[str, Array]:
    keys = iter(jax.random.split(key, 12))
    size = {**dict(problem.dims), "P": pages, "1": 1}
    size["R"] = size["D"] - size["V"]
    stored, dtype = jnp.dtype(problem.dtype("kv")), jnp.dtype(problem.dtype("q"))
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32

    def normal(axes: str, dtype: Any = wide) -> Array:
        return jax.random.normal(next(keys), tuple(size[axis] for axis in axes), dtype)

    latent = bool(problem.flag("latent"))
    widths = {"k": "V", "rope": "R"} if latent else {"k": "D", "v": "V"}
    arrays = {"q": normal("1THD", dtype)}
    for name, width in widths.items():
        if stored == jnp.int8:
            shape = tuple(size[axis] for axis in f"PpK{width}")
            arrays[name] = jax.random.randint(next(keys), shape, -127, 128, jnp.int32).astype(jnp.int8)
        else:
            arrays[name] = normal(f"PpK{width}").astype(stored)
        if problem.flag("scales"):
            axes = "PpK" if problem.flag("scales") == "token" else "K"
            unit = 1 / 64 if stored == jnp.int8 else 1.0
            arrays[f"{name}_scale"] = unit * jnp.exp(0.2 * normal(axes, jnp.float32))
    if problem.flag("sinks"):
        arrays["sinks"] = normal("H")
    if problem.flag("alibi_slopes"):
        arrays["slopes"] = 2.0 ** (-8.0 * jnp.arange(1, size["H"] + 1, dtype=wide) / size["H"])
    if problem.flag("qq_bias"):
        arrays["qq_bias"] = normal("QQ")
    return arrays


def moved_bytes(problem: Problem, spec: PagedSpec) -> float:
    """Queries, results and tables once, and each sequence's keys that are seen."""
    shapes = jax.eval_shape(lambda: make_arrays(problem, 0))
    a_key = sum(bytes_of(x) / math.prod(x.shape[:2]) for x in _over_keys(shapes))
    seen = int(make_batch(problem, 0).seen(spec).astype(np.int64).sum())
    rest = sum(bytes_of(x) for x in shapes if x is not None) - sum(bytes_of(x) for x in _over_keys(shapes))
    tokens, heads = problem.dim("T"), problem.dim("H")
    lse = 8 if problem.dtype("q") == "float64" else 4
    results = tokens * heads * (problem.dim("V") * jnp.dtype(problem.dtype("q")).itemsize + lse)
    return float(seen * a_key + rest + results)


def _over_keys(arrays: PagedArrays) -> list[Any]:
    names = ("k", "v", "rope", "k_scale", "v_scale", "rope_scale")
    return [x for x in (getattr(arrays, name) for name in names) if x is not None and x.ndim > 1]
