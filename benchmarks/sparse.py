"""Block-sparse attention compared with PyTorch's compiled `flex_attention`, if installed, and with our own dense attention.

    python -m benchmarks sparse --json sparse.json --plot sparse.png
    python -m benchmarks sparse --problems 'causal|map' --time-limit 300
    python -m benchmarks sparse --render sparse.json --plot sparse.png --markdown sparse.md

The reference is dense attention. The peer is timed as a CUDA graph where it can be; its mask of blocks is made beforehand. `a tile`: the time over
that of dense attention on the same platform, divided by the visible share of tiles of 128 by 128; 1 if hidden tiles cost nothing and visible ones as
much as in dense attention.
"""

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, runner
from benchmarks.attention import by_key_head
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, BOTH, Inputs, Others, Row
from ejkernel_eqx import Mask
from ejkernel_eqx.attention.spec import AttentionSpec

BLOCK = 128  # queries and keys of a block of the maps, and of the tiles that are counted
DOCUMENTS, GLOBAL = 12, 128
DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class SparseProblem(problems.Problem):
    """Self-attention over `B` rows of `S` tokens.

    `form`: what is visible. `share` is that of the blocks of a map; `window` the keys of a window.
    """

    form: str
    B: int
    S: int
    H: int
    D: int
    K: int = 0
    share: float = 0.0
    window: int = 1024

    @property
    def kv_heads(self) -> int:
        return self.K or self.H

    def words(self) -> list[str]:
        heads = f"H{self.H}" + (f" KV{self.K}" if self.K else "")
        words = [self.form, f"B{self.B} S{self.S} {heads} D{self.D}"]
        words += [f"{self.share:.0%}"] if self.share else []
        return [*words, str(self.window) if self.form in ("window", "local and global") else ""]

    @property
    def blocks(self) -> int:
        return -(-self.S // BLOCK)


PROBLEMS = problems.load("sparse", SparseProblem)


class Form(NamedTuple):
    """A form of visibility: our mask; the same as a function of query and key in numpy, JAX or PyTorch, given the module's tables on its device;
    and arguments of a call besides the mask."""

    mask: Callable[[SparseProblem], Mask]
    sees: Callable[[SparseProblem, Any, Any, Any], Any]
    arguments: Callable[[SparseProblem], dict[str, Any]] = lambda problem: {}


def documents(problem: SparseProblem) -> np.ndarray:
    """Document of each token."""
    cuts = np.random.default_rng(3).choice(problem.S - 1, DOCUMENTS - 1, replace=False) + 1
    return np.searchsorted(np.sort(cuts), np.arange(problem.S), side="right").astype(np.int32)


@functools.cache
def block_map(problem: SparseProblem) -> np.ndarray:
    """`[blocks, blocks]`: the diagonal, and others at random up to the share."""
    size = problem.blocks
    rank = np.random.default_rng(1).random((size, size))
    np.fill_diagonal(rank, -1.0)
    return rank <= np.sort(rank, axis=None)[round(problem.share * size * size) - 1]


def _in_map(problem: SparseProblem, table: Any, q: Any, k: Any) -> Any:
    return table[q // BLOCK, k // BLOCK]


def _after_prefix(p: SparseProblem, table: Any, q: Any, k: Any) -> Any:
    return (k <= q) | (k < p.S // 4)


FORMS: Mapping[str, Form] = {
    "causal": Form(lambda p: Mask.causal(), lambda p, table, q, k: k <= q),
    "window": Form(
        lambda p: Mask.causal() & Mask.sliding_window(p.window - 1),
        lambda p, table, q, k: (k <= q) & (q - k < p.window),
    ),
    "documents": Form(
        lambda p: Mask.causal(),
        lambda p, table, q, k: (k <= q) & (table[q] == table[k]),
        lambda p: {"segment_ids": jnp.broadcast_to(jnp.asarray(documents(p)), (p.B, p.S))},
    ),
    "prefix": Form(lambda p: Mask.prefix(p.S // 4), _after_prefix),
    "prefix, as a function": Form(
        lambda p: Mask.causal() | Mask.from_function(_Prefix(p.S // 4)), _after_prefix
    ),
    "local and global": Form(
        lambda p: Mask.causal() & (Mask.sliding_window(p.window - 1) | Mask.global_tokens(GLOBAL)),
        lambda p, table, q, k: (k <= q) & ((q - k < p.window) | (q < GLOBAL) | (k < GLOBAL)),
    ),
    "map": Form(lambda p: Mask.from_blocks(block_map(p), BLOCK), _in_map),
    "map as data": Form(lambda p: Mask(), _in_map, lambda p: {"block_map": jnp.asarray(block_map(p))}),
}


@dataclasses.dataclass(frozen=True)
class _Prefix:
    length: int

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        return key < self.length


def table_of(problem: SparseProblem) -> np.ndarray | None:
    """Table that `Form.sees` reads."""
    if problem.form == "documents":
        return documents(problem)
    return block_map(problem) if problem.form.startswith("map") else None


def sees(problem: SparseProblem, q: Any, k: Any) -> Any:
    return FORMS[problem.form].sees(problem, table_of(problem), q, k)


@functools.cache
def visible(problem: SparseProblem) -> tuple[float, float]:
    """The visible share of pairs, and of tiles of 128 by 128."""
    k, pairs, tiles = np.arange(problem.S), 0, 0
    for first in range(0, problem.S, BLOCK):
        rows = np.arange(first, min(first + BLOCK, problem.S))[:, None]
        seen = np.broadcast_to(sees(problem, rows, k), (len(rows), problem.S))
        pairs += int(seen.sum())
        tiles += int(np.add.reduceat(seen.any(0), np.arange(0, problem.S, BLOCK)).astype(bool).sum())
    return pairs / problem.S**2, tiles / problem.blocks**2


def flops(problem: SparseProblem, backward: bool) -> float:
    """Operations of the products over visible pairs; 3.5 times that with the backward pass."""
    scores = problem.B * problem.H * problem.S**2 * visible(problem)[0]
    return 4 * scores * problem.D * (3.5 if backward else 1)


def make_inputs(problem: SparseProblem, seed: int = 0) -> Inputs:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
    heads = {"q": problem.H, "k": problem.kv_heads, "v": problem.kv_heads, "out": problem.H}
    made = {
        name: jax.random.normal(key, (problem.B, problem.S, n, problem.D), jnp.dtype(problem.dtype))
        for key, (name, n) in zip(keys, heads.items())
    }
    return Inputs({name: made[name] for name in "qkv"}, made["out"], {})


@prepare.reference
def expected_results(problem: SparseProblem, inputs: Inputs) -> Arrays:
    """Output and gradients of the reference in float32."""
    table, index = table_of(problem), jnp.arange(problem.S)
    table = None if table is None else jnp.asarray(table)
    seen = FORMS[problem.form].sees(problem, table, index[:, None], index[None])[None, None]
    return by_key_head(problem, inputs, AttentionSpec(scale=problem.D**-0.5), mask=seen)


def flex(problem: SparseProblem) -> Callable[[Tensors], Any]:
    """PyTorch's `flex_attention`, compiled. The mask of blocks is made once, outside the measured time."""

    @functools.cache
    def block_mask() -> Any:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        torch.compiler.reset()  # after eight other masks it would not compile this one
        table = table_of(problem)
        tensor = None if table is None else torch.from_numpy(table).cuda()

        def visible(batch: Any, head: Any, q: Any, k: Any) -> Any:
            return FORMS[problem.form].sees(problem, tensor, q, k)

        return create_block_mask(visible, None, None, problem.S, problem.S, device="cuda", BLOCK_SIZE=BLOCK)

    def run(tensors: Tensors) -> Any:
        q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
        grouped = problem.H != problem.kv_heads
        return _flex_attention()(q, k, v, block_mask=block_mask(), enable_gqa=grouped).transpose(1, 2)

    return run


@functools.cache
def _flex_attention() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


class Sparse(runner.Family):
    name, title, description, lists = "sparse", "Block-sparse attention", __doc__, PROBLEMS
    extremes = (runner.Extreme("most time a tile", runner.entry("a_tile"), max),)

    def ours(self, problem: SparseProblem, platform: Any) -> Callable[[Arrays, Arrays], Array]:
        form = FORMS[problem.form]
        operation: Any = ejx.BlockSparseAttention(form.mask(problem), block_size=BLOCK, platform=platform)
        arguments = form.arguments(problem)
        return lambda learned, constants: operation(**learned, **arguments)

    def beside(self, problem: SparseProblem, options: Namespace, direction: str) -> Others:
        """Our dense attention, which computes every tile, on the platform whose kernels run lists."""
        platform: Any = "xla" if jax.default_backend() == "cpu" else "triton"
        dense = lambda learned, constants: ejx.FlashAttention(platform=platform)(**learned)
        yield self.in_jax(problem, DENSE, dense, BASELINE, is_checked=False)

    def peers(self, problem: SparseProblem) -> Iterator[TorchPeer]:
        yield TorchPeer("flex_attention", "torch", flex(problem))

    def complete(self, problem: SparseProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        share, whole = visible(problem)[1], prepare.fastest(rows, BASELINE)
        runner.rate((row for row in rows if row.role != BASELINE), flops=flops(problem, direction == BOTH))
        for row in rows:
            row.numbers["visible_tiles"] = 1.0 if row.role == BASELINE else share
            known = row.ms and whole and row.role != BASELINE
            row.numbers["a_tile"] = row.ms / (share * whole) if known else None
            row.numbers.setdefault("tflop_per_s", None)


FAMILY = Sparse(make_inputs=make_inputs, expected=expected_results)
