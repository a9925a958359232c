"""Other implementations of attention over pages: JAX's Pallas kernel and ejKernel, if available, and dense attention on gathered keys."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from benchmarks.decode_problems import DecodeProblem, gathered, Inputs, ours, plain_pages

_SPLITS = 16  # Pallas' default


class Peer(NamedTuple):
    """`convert` converts the inputs to the layout of `run`, and is not timed. A baseline is our own implementation on other inputs."""

    name: str
    convert: Callable[[Inputs], Any]
    run: Callable[[Any], Array]
    is_baseline: bool = False


def missing() -> list[str]:
    """The packages required by peers that are not installed."""
    return [name for name in ("ejkernel",) if importlib.util.find_spec(name) is None]


def peers_of(problem: DecodeProblem, gpu: bool) -> Iterator[Peer]:
    """The peers that support this problem, on a GPU including those that need one."""
    yield from baselines_of(problem, gpu)
    yield gather_and_attend(problem, "xla")
    if not gpu:
        return
    if not problem.rope:
        yield gather_and_attend(problem, "cudnn")
    if not problem.rope and not problem.prefill and problem.scales != "head":
        yield pallas(problem)
        yield pallas(problem, fitted=True)
    if problem.kind == "decode" and "ejkernel" not in missing():
        yield ejkernel(problem)


def baselines_of(problem: DecodeProblem, gpu: bool) -> Iterator[Peer]:
    """FlashAttention on the dense keys of a prefill; 16-bit pages, or those of the queries' dtype, for 8-bit ones."""
    if problem.prefill:
        platform = "triton" if gpu else None

        def dense(inputs: Inputs) -> tuple[Array, ...]:
            return rows(problem, inputs.q), *gathered(problem, inputs)

        def attend(x: tuple[Array, ...]) -> Array:
            flash = ejx.FlashAttention(causal=True, softmax_scale=problem.scale, platform=platform)
            return flash(*x).reshape(-1, problem.H, problem.D)

        yield Peer("FlashAttention", dense, attend, True)
    if problem.scales:
        yield Peer(f"{problem.dtype} pages", plain_pages, ours(problem, None), True)


def rows(problem: DecodeProblem, q: Array) -> Array:
    """Queries in the layout of dense attention, `[N, queries, H, D]`."""
    return q.reshape(problem.N, -1, *q.shape[1:])


# Keys are gathered in every call, as is necessary without attention over pages.


def gather_and_attend(problem: DecodeProblem, implementation: str) -> Peer:
    """`jax.nn`, or plain JAX if values and keys have different channels, which `jax.nn` does not support."""

    def attend(inputs: Inputs) -> Array:
        k, v = gathered(problem, inputs)
        q, lengths = rows(problem, inputs.q), inputs.cache.lengths
        if problem.rope:
            out = _plain(problem, q[:, 0], k[:, :, 0], v[:, :, 0], lengths)
        else:
            options: dict[str, Any] = {"scale": problem.scale, "implementation": implementation}
            options |= {"is_causal": True} if problem.prefill else {"key_value_seq_lengths": lengths}
            out = jax.nn.dot_product_attention(q, k, v, **options)
        return out.reshape(-1, problem.H, problem.D)

    what = "XLA" if problem.rope else f"jax.nn {implementation}"
    return Peer(f"gather + {what}", lambda inputs: inputs, attend)


def _plain(problem: DecodeProblem, q: Array, k: Array, v: Array, lengths: Any) -> Array:
    """One query `[N, H, D + rope]` on one head of keys `[N, S, D + rope]`."""
    scores = problem.scale * jnp.einsum("nhd,nsd->nhs", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None] < lengths[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nhs,nsd->nhd", weights.astype(v.dtype), v)


# Third-party kernels


def pallas(problem: DecodeProblem, fitted: bool = False, interpret: bool = False) -> Peer:
    """JAX's sample kernel, with its defaults or with enough splits to fill the device and blocks of 128 keys. It does not scale the
    scores; the pages of a head are contiguous."""

    def convert(inputs: Inputs) -> tuple[Any, ...]:
        cache = inputs.cache
        assert isinstance(cache, ejx.PagedKVCache) and cache.page_table is not None
        pages = [jnp.moveaxis(x, 2, 0) for x in (cache.k, cache.v)]
        scales = [None if x is None else jnp.moveaxis(x, 2, 0) for x in (cache.k_scale, cache.v_scale)]
        count = cache.page_table.shape[1]
        splits = pallas_splits(problem, count) if fitted else _SPLITS
        # Pads to a whole number of blocks per split; the padding is never read.
        block = pallas_block(problem.p) if fitted else 8
        width = -count % (splits * min(block, max(1, -(-count // splits))))
        table = jnp.pad(jnp.maximum(cache.page_table, 0), ((0, 0), (0, width)))
        return inputs.q, *pages, table, cache.lengths, *scales

    def run(x: tuple[Any, ...]) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from JAX 0.12 on, where it still works
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        q, k, v, table, lengths, *scales = x
        options: dict[str, Any] = {"interpret": interpret}
        if fitted:
            splits = pallas_splits(problem, -(-problem.S // problem.p))
            options |= {"k_splits": splits, "pages_per_compute_block": pallas_block(problem.p)}
            options |= {"num_warps": 4}
        q = (q * problem.scale).astype(q.dtype)
        return paged_attention(q, k, v, table, lengths, *scales, **options)

    return Peer("Pallas, fitted" if fitted else "Pallas", convert, run)


def pallas_block(page: int) -> int:
    """The number of pages in a block of at most 128 keys; a power of two."""
    return max(1, 128 // page)


def pallas_splits(problem: DecodeProblem, pages: int) -> int:
    """The number of splits, a power of two, for about a thousand programs with at least one block each."""
    splits, programs = 1, problem.N * problem.K
    while splits * programs < 1024 and 2 * splits * pallas_block(problem.p) <= pages:
        splits *= 2
    return splits


def ejkernel(problem: DecodeProblem) -> Peer:
    """Its Triton kernel, with its own choice of splits. Heads come before the tokens of a page."""

    def convert(inputs: Inputs) -> tuple[Any, ...]:
        cache = inputs.cache
        assert isinstance(cache, ejx.PagedKVCache) and cache.page_table is not None
        pages = (jnp.swapaxes(x, 1, 2) for x in (cache.k, cache.v))
        return inputs.q, *pages, cache.lengths, jnp.maximum(cache.page_table, 0)

    def run(x: tuple[Any, ...]) -> Array:
        from ejkernel.kernels._triton.page_attention import (  # pyright: ignore[reportMissingImports]
            page_attention,
        )

        return page_attention(*x, attn_scale=problem.scale, max_context_len=problem.S)

    return Peer("ejKernel", convert, run)
