"""The tuner's view of native sparse attention over pages: representative work, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._tolerances import TOLERANCES
from ...core.letters import wide_dtype
from ...core.words import read_sizes
from ...dispatch import Cost, FORWARD, Implementation, Problem, Workload
from ...paged import samples
from ...paged.example import example_problem as example_of_pages
from ...paged.workload import work_of
from ..problems import sparse_of
from ..spec import NativeSpec
from ..workload import read_parts
from . import reference
from .core import problem_of
from .spec import INTS, LETTERS, PagedNativeArrays, PagedNativeSpec

_PAGES = ("k", "v", "compressed_k", "compressed_v")


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms. Where blocks are chosen, rounding decides between two that are almost as good: those of a
    sequence are alike, so that it does not matter."""
    tolerances, costs = {"out": TOLERANCES[problem.dtype("qkv")]["forward"]}, {FORWARD: Cost(*_cost(problem))}
    make = functools.partial(make_arrays, problem)
    return work_of(implementation, spec_of(problem), make, reference.attend, tolerances, costs)


def spec_of(problem: Problem) -> PagedNativeSpec:
    """The static half of a call, from its problem."""
    return PagedNativeSpec(sparse_of(problem), problem.dim("Q"))


def make_arrays(problem: Problem, seed: int) -> PagedNativeArrays:
    """The arrays of a call, with one leading axis of size one: a batch as on a server, with pages in random order."""
    tables = samples.make_arrays(_plain(problem), seed)
    keys = iter(jax.random.split(jax.random.key(seed + 1, impl="rbg"), len(_PAGES) + 1))
    shapes = _shapes(dict(problem.dims) | {"P": tables.k.shape[0]}, problem.dtype("qkv"), spec_of(problem))
    random = lambda x: jax.random.normal(next(keys), x.shape, x.dtype)
    pages = {name: random(getattr(shapes, name)) for name in _PAGES}
    gates = jax.nn.sigmoid(jax.random.normal(next(keys), (*tables.q.shape[:-1], 3), problem.dtype("gates")))
    own = {name: getattr(tables, name) for name in INTS}
    arrays = PagedNativeArrays(tables.q, gates, **pages, **own)
    if problem.flag("given"):
        return arrays._replace(indices=_blocks(problem, arrays, seed))
    # Page `m` of every sequence holds the same keys, those of its place in a block.
    table, (count, page), block = arrays.page_table[0], arrays.k.shape[:2], spec_of(problem).sparse.block
    begin = jnp.broadcast_to(jnp.arange(table.shape[1], dtype=jnp.int32)[None] * page, table.shape)
    first = jnp.zeros(count, jnp.int32).at[jnp.where(table >= 0, table, count)].set(begin, mode="drop")
    at = (first[:, None] + jnp.arange(page, dtype=jnp.int32)[None]) % block
    alike = lambda x: x.reshape(-1, *x.shape[2:])[at % (count * page)]
    return arrays._replace(k=alike(arrays.k), v=alike(arrays.v))


def _plain(problem: Problem) -> Problem:
    """Attention over the same pages."""
    dims = {name: problem.dim(name) for name in "NTHKDVpQ"} | {"S": problem.dim("M") * problem.dim("p")}
    return example_of_pages("ragged_paged_attention", dims, problem.dtype("qkv"), {})


def _blocks(problem: Problem, arrays: PagedNativeArrays, seed: int) -> Array:
    """Random blocks, no two of a query alike; those after it count for nothing."""
    blocks = -(-problem.dim("M") * problem.dim("p") // int(str(problem.flag("block"))))
    shape = (1, problem.dim("T"), problem.dim("K"), max(blocks, problem.dim("n")))
    # Sorting random numbers gives distinct blocks, as a query counts none twice.
    order = np.random.default_rng(seed).random(shape).argsort(-1)[..., : problem.dim("n")]
    return jnp.asarray(np.where(order < blocks, order, -1), jnp.int32)


def _cost(problem: Problem) -> tuple[float, float]:
    """The operations of the products, and the bytes with each key that a sequence's queries must see read once by each query."""
    sparse, batch = sparse_of(problem), samples.make_batch(_plain(problem), 0)
    pairs, read = 0, 0
    for q_len, kv_len in zip(batch.q_len, batch.kv_len, strict=True):
        i = kv_len - q_len + np.arange(q_len, dtype=np.int64)
        compressed = np.maximum((i + 1 - sparse.span) // sparse.stride + 1, 0)
        near = np.minimum(i + 1, sparse.window)
        chosen = np.minimum(i + 1, sparse.count * sparse.block)
        pairs += int((compressed + near + chosen).sum())
        if q_len:
            read += int(compressed.max() + min(kv_len, sparse.window + q_len) + min(kv_len, chosen.sum()))
    width = problem.dim("D") + problem.dim("V")
    tokens = problem.dim("T") * problem.dim("H") * width
    itemsize = jnp.dtype(problem.dtype("qkv")).itemsize
    moved = (read * problem.dim("K") * width + tokens) * itemsize
    return 2.0 * pairs * problem.dim("H") * width, float(moved)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: required are `S`, the keys of the longest sequence, `H` query heads and `D` channels. Optional are `N` sequences (default 1), `T` tokens
      (default `N`), `K` key heads (`H`), `V` value channels (`D`), `p` tokens per page (64), `Q`, the maximum number of queries per sequence (1 if
      `T` is not given, else `T`), and `n`, the blocks that a query chooses (16).
    - `dtype`: the dtype of queries and pages.
    - `flags`: the ints `block` (64), `window` (512), `span` and `stride` (those of the blocks), and `p`; `given`: the blocks are.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    flags, dims = dict(flags), dict(dims)
    if "p" in flags and "p" not in dims:  # `explain` accepts only capital letters as sizes
        dims["p"] = flags.pop("p")
    same = {"K": dims.get("H", 1), "V": dims.get("D", 1), "T": dims.get("N", 1), "Q": dims.get("T", 1)}
    size = read_sizes(dims, {"S": None, "H": None, "D": None, "N": 1, "p": 64, "n": 16, **same})
    ints, given = read_parts(flags, ("given",))
    if size["H"] % size["K"]:
        raise ValueError(f"dims: expected H to be a multiple of K, received H={size['H']}, K={size['K']}.")
    if size["Q"] > size["T"]:
        raise ValueError(f"dims: expected Q to be at most T={size['T']}, received {size['Q']}.")
    # A page of compressed keys holds those of one page of tokens, so the stride divides it.
    if size["p"] % ints["stride"]:
        raise ValueError(
            f"dims: expected p to be a multiple of stride={ints['stride']}, received {size['p']}."
        )
    # Pages for the longest sequence, the last of them perhaps not full.
    size |= {"M": -(-size["S"] // size["p"])}
    sparse = NativeSpec(size["D"] ** -0.5, count=size["n"], given=bool(given["given"]), **ints)
    spec = PagedNativeSpec(sparse, size["Q"])
    return problem_of(operation, _shapes(size | {"P": 1}, dtype, spec), spec)


def shapes_of(problem: Problem) -> PagedNativeArrays:
    """The shapes of the problem's arrays."""
    return _shapes(dict(problem.dims) | {"P": 1}, problem.dtype("qkv"), spec_of(problem))


def _shapes(size: dict[str, int], dtype: str, spec: PagedNativeSpec) -> PagedNativeArrays:
    size |= {"c": size["p"] // spec.sparse.stride, "three": 3}
    ints = (*INTS, "indices") if spec.sparse.given else INTS
    dtypes: dict[str, str] = dict.fromkeys(("q", *_PAGES), dtype)
    dtypes |= {"gates": wide_dtype(dtype), **dict.fromkeys(ints, "int32")}
    return PagedNativeArrays(**LETTERS.shapes(size, dtypes, lead=""))
