"""The kernels of attention over pages for `tpu_static.py`, beside JAX's own: paged attention for decodes, ragged paged attention for both."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from benchmarks.tpu_static import Case, Program
from ejkernel_eqx.launch.tpu_ahead import facts_of
from ejkernel_eqx.paged.example import example_problem
from ejkernel_eqx.paged.pallas import compiled
from ejkernel_eqx.paged.pallas.block_sizes import decode_tile, prefill_tile
from ejkernel_eqx.paged.pallas.compiled import PallasConfig
from ejkernel_eqx.paged.samples import make_arrays, spec_of
from ejkernel_eqx.paged.spec import PagedSpec

_DECODE = dict(N=64, S=4096, H=32, K=8, D=128, p=16)
_PROMPTS = dict(N=16, T=2048, Q=512, S=4096, H=32, K=8, D=128, p=16)
_LATENT = dict(N=64, S=4096, H=16, D=576, V=512, p=64)
_PAGES = 2048
_UNIT = 128
"""Keys, with all their heads."""
_PARTLY = {1: "partly visible"}


def cases(generation: str) -> list[Case]:
    return [
        _decode(generation, "decode bfloat16", _DECODE, {}, _paged, "paged_attention"),
        _decode(generation, "decode bfloat16, beside ragged", _DECODE, {}, _ragged, "ragged_paged_attention"),
        _decode(generation, "decode D256 K4", _DECODE | dict(D=256, K=4), {}, _paged, "paged_attention"),
        _decode(generation, "decode int8", _DECODE, dict(kv="int8", scales="token")),
        _decode(generation, "decode latent", _LATENT, dict(latent=True)),
        _prompts(generation),
    ]


def _program(generation: str, dims: Mapping[str, int], flags: Mapping[str, Any]) -> tuple[Any, ...]:
    """The problem, the heuristic's configuration, the call and its arrays."""
    operation = "ragged_paged_attention" if "T" in dims else "paged_attention"
    problem = example_problem(operation, dims, "bfloat16", flags)
    config = compiled.default_config(problem, facts_of(generation))
    arrays = jax.eval_shape(functools.partial(make_arrays, problem, 0))
    return problem, config, functools.partial(_forward, spec_of(problem), config), arrays


def _forward(spec: PagedSpec, config: PallasConfig, arrays: Any) -> Any:
    return compiled.forward(arrays, spec, config)


def _decode(
    generation: str,
    name: str,
    dims: Mapping[str, int],
    flags: Mapping[str, Any],
    peer: Any = None,
    peer_name: str = "",
) -> Case:
    problem, config, call, arrays = _program(generation, dims, flags)
    units = decode_tile(problem, config).keys / _UNIT
    ours = Program(call, (arrays,), "paged.decode", units, others=_PARTLY, turn=True)
    size = {name: problem.dim(name) for name in "HKDV"}
    key = sum(
        x.size * x.dtype.itemsize / x.shape[0] / x.shape[1]
        for x in (arrays.k, arrays.v, arrays.rope)
        if x is not None
    )
    flops = 2.0 * _UNIT * size["H"] * (size["D"] + size["V"])
    return Case(name, f"{_UNIT} keys", ours, peer and peer(dims), peer_name, flops, _UNIT * key)


def _prompts(generation: str) -> Case:
    problem, config, call, arrays = _program(generation, _PROMPTS, {})
    block = prefill_tile(problem, config)
    units = block.keys * block.queries / _UNIT**2
    ours = Program(call, (arrays,), "paged.prefill", units, others=_PARTLY, turn=True)
    flops = 4.0 * _UNIT**2 * _PROMPTS["H"] * _PROMPTS["D"]
    moved = 2.0 * 2 * _UNIT * _PROMPTS["K"] * _PROMPTS["D"] * _UNIT / block.queries
    memory = facts_of(generation).vmem
    assert memory is not None
    # By itself it has 16 MiB, which is not enough on all of them.
    peer = _ragged(_PROMPTS, block.queries, block.keys, _UNIT**2, memory * 4 // 5)
    return Case(
        "prompts bfloat16",
        f"{_UNIT} queries x {_UNIT} keys",
        ours,
        peer,
        "ragged_paged_attention",
        flops,
        moved,
    )


def _paged(dims: Mapping[str, int]) -> Program:
    """JAX's kernel for decodes does one key head of a block in a step."""
    n, heads, kv_heads, dim, page = (dims[name] for name in "NHKDp")
    shape = jax.ShapeDtypeStruct
    pages = shape((kv_heads, _PAGES, page, dim), jnp.bfloat16)
    table = shape((n, dims["S"] // page), jnp.int32)
    arrays = shape((n, heads, dim), jnp.bfloat16), pages, pages, shape((n,), jnp.int32), table
    keys = 256
    call = functools.partial(paged_attention, pages_per_compute_block=keys // page)
    return Program(call, arrays, "paged_attention", keys / _UNIT, times=kv_heads)


def _ragged(
    dims: Mapping[str, int], queries: int = 8, keys: int = 256, unit: int = _UNIT, memory: int | None = None
) -> Program:
    """JAX's kernel for both. Its blocks of queries hold those of several sequences; a decode takes all of a block."""
    n, heads, kv_heads, dim, page = (dims[name] for name in "NHKDp")
    shape = jax.ShapeDtypeStruct
    integers = lambda *size: shape(size, jnp.int32)
    arrays = (
        shape((dims.get("T", n), heads, dim), jnp.bfloat16),
        shape((_PAGES, page, 2 * kv_heads, dim), jnp.bfloat16),
        integers(n),
        integers(n, dims["S"] // page),
        integers(n + 1),
        integers(1),
    )
    call = functools.partial(
        ragged_paged_attention,
        num_kv_pages_per_block=keys // page,
        num_queries_per_block=queries,
        vmem_limit_bytes=memory,
    )
    work = keys * queries if unit > _UNIT else keys
    return Program(call, arrays, "ragged_paged_attention", work / unit)
