"""The Pallas kernels that `tpu_static.py` looks at, by family, beside JAX's own with the same tiles: splash attention, megablox, paged attention and
ragged paged attention. JAX has no kernel of latent attention or of linear attention."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from benchmarks import problems
from benchmarks.tpu_ahead import facts_of
from benchmarks.tpu_static import Case, PARTLY, PASSES, Program
from ejkernel_eqx.attention.core import problem_of as attention_problem
from ejkernel_eqx.attention.pallas import compiled as attention_kernels
from ejkernel_eqx.attention.pallas.compiled import PallasConfig
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from ejkernel_eqx.latent.core import problem_of as latent_problem
from ejkernel_eqx.latent.pallas import compiled as latent_kernels
from ejkernel_eqx.latent.spec import LatentArrays
from ejkernel_eqx.matmul.core import problem_of as matmul_problem
from ejkernel_eqx.matmul.pallas import compiled as matmul_kernels
from ejkernel_eqx.matmul.pallas.products_kernel import CHUNK, chunks_together
from ejkernel_eqx.matmul.pallas.tile_sizes import TpuTile
from ejkernel_eqx.matmul.spec import GroupedArrays, GroupedSpec, PAIR
from ejkernel_eqx.paged.example import example_problem
from ejkernel_eqx.paged.pallas import compiled as paged_kernels
from ejkernel_eqx.paged.pallas.block_sizes import page_of
from ejkernel_eqx.paged.pallas.call import block_pages
from ejkernel_eqx.paged.samples import make_arrays, spec_of
from ejkernel_eqx.recurrence.core import problem_of as recurrence_problem
from ejkernel_eqx.recurrence.pallas import compiled as recurrence_kernels
from ejkernel_eqx.recurrence.spec import RecurrenceArrays, RecurrenceSpec

shape: Any = jax.ShapeDtypeStruct
BODIES = {1: PARTLY}


def precision(dtype: Any) -> Any:
    """JAX's kernels multiply float32 in one pass of bfloat16 unless they are told otherwise; ours never do."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


# Softmax attention, and latent attention in its expanded form. Units are 512 by 512 scores.

_TOKENS, _HEADS = 2048, 2
_SCORES = 512 * 512
_SPLASH = {"forward": "mha_fwd", "key_gradient": "mha_dkv", "query_gradient": "mha_dq"}


def attention(generation: str) -> list[Case]:
    """Causal calls' kernels."""
    bf16, f32 = jnp.bfloat16, jnp.float32
    sizes = ((64, 64, bf16), (128, 128, bf16), (256, 256, bf16), (192, 128, bf16), (128, 128, f32))
    cases = []
    for dim, values, dtype in sizes:
        wide = lambda width, dtype=dtype: shape((1, _TOKENS, _HEADS, width), dtype)
        arrays = AttentionArrays(wide(dim), wide(dim), wide(values))
        name = f"{f'D{dim}' if dim == values else f'D{dim} V{values}'} {jnp.dtype(dtype).name}"
        spec = AttentionSpec(dim**-0.5, right=0)
        problem = attention_problem("flash_attention", arrays, spec)
        cases += _softmax(generation, attention_kernels, problem, arrays, spec, name, peer=dim == values)
    return cases


def latent(generation: str) -> list[Case]:
    nope, rope, values = 128, 64, 128
    of = lambda *sizes: shape((1, _TOKENS, *sizes), jnp.bfloat16)
    arrays = LatentArrays(of(_HEADS, nope + rope), of(_HEADS, nope), of(rope), of(_HEADS, values))
    spec, name = AttentionSpec((nope + rope) ** -0.5, right=0), f"{nope} and {rope} V{values}"
    problem = latent_problem("multi_head_latent_attention", arrays, spec)
    return _softmax(generation, latent_kernels, problem, arrays, spec, name, peer=False)


def _softmax(
    generation: str, kernels: Any, problem: Any, arrays: Any, spec: Any, name: str, peer: bool
) -> list[Case]:
    """The kernels of both directions with the heuristic's tiles."""
    config = kernels.default_config(problem, facts_of(generation))
    dim, values, dtype = arrays.q.shape[-1], arrays.v.shape[-1], arrays.q.dtype
    out, lse = shape((1, _TOKENS, _HEADS, values), dtype), shape((1, _HEADS, _TOKENS), jnp.float32)
    forward = functools.partial(_forward, kernels, spec, config), (arrays,)
    backward = functools.partial(_backward, kernels, spec, config), (arrays, out, lse, out, lse)
    theirs, inputs = _splash(config) if peer else {}, (shape((_HEADS, _TOKENS, dim), dtype),) * 3
    products = (dim + values, 2 * (dim + values), 2 * dim + values)
    size, cases = jnp.dtype(dtype).itemsize, []
    for (kernel, their_kernel), flops in zip(_SPLASH.items(), products):
        tile, direction = getattr(config, kernel), "forward" if kernel == "forward" else "backward"
        units = tile.block_q * tile.block_k / _SCORES
        streamed = tile.block_q if kernel == "key_gradient" else tile.block_k
        ours = forward if kernel == "forward" else backward
        cases.append(
            Case(
                f"{kernel} {name}",
                "512x512 scores",
                Program(*ours, f"attention.{kernel}", units, others=BODIES),
                Program(theirs[direction], inputs, their_kernel, units) if peer else None,
                "splash" if peer else "",
                2.0 * _SCORES * flops * PASSES[size],
                streamed * (dim + values) * size / units,
                f"{tile.block_q}x{tile.block_k}",
            )
        )
    return cases


def _forward(kernels: Any, spec: Any, config: Any, arrays: Any) -> Any:
    return kernels.forward(arrays, spec, config)


def _backward(kernels: Any, spec: Any, config: Any, arrays: Any, *rest: Any) -> Any:
    return kernels.backward(arrays, spec, config, *rest)


def _splash(config: PallasConfig) -> dict[str, Any]:
    """JAX's kernels with the same tiles on the same causal call."""
    forward_tile, keys, queries = config.forward, config.key_gradient, config.query_gradient
    sizes = splash.BlockSizes(
        block_q=forward_tile.block_q,
        block_kv=forward_tile.block_k,
        block_kv_compute=forward_tile.block_k,
        block_q_dkv=keys.block_q,
        block_kv_dkv=keys.block_k,
        block_kv_dkv_compute=keys.block_k,
        block_q_dq=queries.block_q,
        block_kv_dq=queries.block_k,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((_TOKENS, _TOKENS))] * _HEADS)
    make = functools.partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with precision(q.dtype):
            return make(mask)(q, k, v)

    def backward(q: Any, k: Any, v: Any) -> Any:
        with precision(q.dtype):
            return jax.grad(lambda *x: forward(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    return {"forward": forward, "backward": backward}


# Grouped matmuls. Units are 512 by 512 by 512 products.

_ROWS, _SIDE, _GROUPS = 8192, 4096, 8
_CUBE = 512**3


def matmul(generation: str) -> list[Case]:
    gated = _matmul(generation, "bf16 SwiGLU", jnp.bfloat16, GroupedSpec("bfloat16", "silu", PAIR))
    plain = _matmul(generation, "bf16", jnp.bfloat16, GroupedSpec("bfloat16"))
    return [*plain, gated[0], *_matmul(generation, "f32", jnp.float32, GroupedSpec("float32"))]


def _matmul(generation: str, name: str, dtype: Any, spec: GroupedSpec) -> list[Case]:
    """A call's kernels with the heuristic's tiles: of the first two a chunk of the contracted axis, of the last a tile of rows."""
    right, lhs = shape((_GROUPS, _SIDE, _SIDE), dtype), shape((1, _ROWS, _SIDE), dtype)
    sizes = shape((1, _GROUPS), jnp.int32)
    arrays = GroupedArrays(lhs, sizes, right, up=right if spec.gated else None)
    problem = matmul_problem("grouped_matmul", arrays, spec)
    config = matmul_kernels.default_config(problem, facts_of(generation))

    def forward(arrays: GroupedArrays) -> Any:
        return matmul_kernels.forward(arrays, spec, config, save=False)

    def backward(arrays: GroupedArrays, dout: Any) -> Any:
        return matmul_kernels.backward(arrays, spec, config, {}, {"out": dout})

    cases, size = [], jnp.dtype(dtype).itemsize
    for kernel in ("forward", "lhs", "rhs"):
        ours = (forward, (arrays,)) if kernel == "forward" else (backward, (arrays, lhs))
        tile: TpuTile = getattr(config, kernel)
        last = tile.block_k if kernel == "rhs" else min(tile.block_k, CHUNK)
        units = tile.block_m * tile.block_n * last / _CUBE
        is_loop = kernel != "rhs" and tile.block_k > CHUNK
        turn = chunks_together(jnp.dtype(dtype).name) if is_loop else 1
        others = {1: "a group's last rows"} if kernel == "rhs" else {}
        moved = tile.block_m * (last + tile.block_n * (kernel == "rhs")) * size
        cases.append(
            Case(
                f"{kernel} {name}",
                "512x512x512 products",
                Program(*ours, f"matmul.{kernel}", units * turn, others=others),
                _megablox(kernel, tile, last, dtype, units) if spec.gated is None else None,
                "megablox",
                2.0 * _CUBE * (2 if spec.gated else 1) * PASSES[size],
                moved / units,
                f"{tile.block_m}x{tile.block_n}x{tile.block_k}",
            )
        )
    return cases


def _megablox(kernel: str, tile: TpuTile, last: int, dtype: Any, units: float) -> Program:
    rows, right = shape((_ROWS, _SIDE), dtype), shape((_GROUPS, _SIDE, _SIDE), dtype)
    sizes, tiles = shape((_GROUPS,), jnp.int32), (tile.block_m, last, tile.block_n)

    def left(x: Any, w: Any, sizes: Any) -> Any:
        with precision(dtype):
            return gmm(x, w, sizes, dtype, tiles, transpose_rhs=kernel == "lhs")

    def right_gradient(x: Any, y: Any, sizes: Any) -> Any:
        with precision(dtype):
            return tgmm(x.T, y, sizes, dtype, tiles)

    if kernel == "rhs":
        return Program(right_gradient, (rows, rows, sizes), "tgmm", units)
    # Its last step along the contracted axis, which also writes, is a region of its own, and comes first.
    return Program(left, (rows, right, sizes), "gmm", units, step=1, others={0: "the last step"})


# Attention over pages. Units are 128 keys with all their heads, of prompts for 128 queries.

_DECODE = dict(N=64, S=4096, H=32, K=8, D=128, p=16)
_PROMPTS = dict(N=16, T=2048, Q=512, S=4096, H=32, K=8, D=128, p=16)
_LATENT = dict(N=64, S=4096, H=16, D=576, V=512, p=64)
_PAGES = 2048
_KEYS = 128


def paged(generation: str) -> list[Case]:
    wide = _DECODE | dict(D=256, K=4)
    decodes = (
        ("decode bfloat16", _DECODE, {}, _paged, "paged_attention"),
        ("decode bfloat16, beside ragged", _DECODE, {}, _ragged, "ragged_paged_attention"),
        ("decode D256 K4", wide, {}, _paged, "paged_attention"),
        ("decode int8", _DECODE, dict(kv="int8", scales="token"), None, ""),
        ("decode latent", _LATENT, dict(latent=True), None, ""),
    )
    return [*(_decode(generation, *decode) for decode in decodes), _prompts(generation)]


def _program(generation: str, dims: Mapping[str, int], flags: Mapping[str, Any]) -> tuple[Any, ...]:
    """The problem, the heuristic's configuration, the call and its arrays."""
    operation = "ragged_paged_attention" if "T" in dims else "paged_attention"
    problem = example_problem(operation, dims, "bfloat16", flags)
    config = paged_kernels.default_config(problem, facts_of(generation))
    arrays = jax.eval_shape(functools.partial(make_arrays, problem, 0))
    return problem, config, functools.partial(_forward, paged_kernels, spec_of(problem), config), arrays


def _decode(
    generation: str, name: str, dims: Mapping[str, int], flags: Mapping[str, Any], peer: Any, peer_name: str
) -> Case:
    problem, config, call, arrays = _program(generation, dims, flags)
    page = page_of(problem)
    units = block_pages(page, page * problem.dim("K"), config.decode_keys) * page / _KEYS
    ours = Program(call, (arrays,), "paged.decode", units, others=BODIES, turn=True)
    size = {name: problem.dim(name) for name in "HKDV"}
    arguments = (x for x in (arrays.k, arrays.v, arrays.rope) if x is not None)
    key = sum(x.size * x.dtype.itemsize / x.shape[0] / x.shape[1] for x in arguments)
    flops = 2.0 * _KEYS * size["H"] * (size["D"] + size["V"])
    return Case(name, f"{_KEYS} keys", ours, peer and peer(dims), peer_name, flops, _KEYS * key)


def _prompts(generation: str) -> Case:
    problem, config, call, arrays = _program(generation, _PROMPTS, {})
    page, queries = page_of(problem), config.block_q
    keys = block_pages(page, page, config.block_k) * page
    units = keys * queries / _KEYS**2
    ours = Program(call, (arrays,), "paged.prefill", units, others=BODIES, turn=True)
    flops = 4.0 * _KEYS**2 * _PROMPTS["H"] * _PROMPTS["D"]
    moved = 2.0 * 2 * _KEYS * _PROMPTS["K"] * _PROMPTS["D"] * _KEYS / queries
    memory = facts_of(generation).vmem
    assert memory is not None
    # By itself it has 16 MiB, which is not enough on all of them.
    peer = _ragged(_PROMPTS, queries, keys, _KEYS**2, memory * 4 // 5)
    unit = f"{_KEYS} queries x {_KEYS} keys"
    return Case("prompts bfloat16", unit, ours, peer, "ragged_paged_attention", flops, moved)


def _paged(dims: Mapping[str, int]) -> Program:
    """JAX's kernel for decodes does one key head of a block in a step."""
    n, heads, kv_heads, dim, page = (dims[name] for name in "NHKDp")
    pages = shape((kv_heads, _PAGES, page, dim), jnp.bfloat16)
    table = shape((n, dims["S"] // page), jnp.int32)
    arrays = shape((n, heads, dim), jnp.bfloat16), pages, pages, shape((n,), jnp.int32), table
    keys = 256
    call = functools.partial(paged_attention, pages_per_compute_block=keys // page)
    return Program(call, arrays, "paged_attention", keys / _KEYS, times=kv_heads)


def _ragged(
    dims: Mapping[str, int], queries: int = 8, keys: int = 256, unit: int = _KEYS, memory: int | None = None
) -> Program:
    """JAX's kernel for both. Its blocks of queries hold those of several sequences; a decode takes all of a block."""
    n, heads, kv_heads, dim, page = (dims[name] for name in "NHKDp")
    sizes = (n,), (n, dims["S"] // page), (n + 1,), (1,)
    arrays = (
        shape((dims.get("T", n), heads, dim), jnp.bfloat16),
        shape((_PAGES, page, 2 * kv_heads, dim), jnp.bfloat16),
        *(shape(size, jnp.int32) for size in sizes),
    )
    call = functools.partial(
        ragged_paged_attention,
        num_kv_pages_per_block=keys // page,
        num_queries_per_block=queries,
        vmem_limit_bytes=memory,
    )
    work = keys * queries if unit > _KEYS else keys
    return Program(call, arrays, "ragged_paged_attention", work / unit)


# The linear-time family. Units are 64 tokens of a head.

_LENGTH, _DIM, _CHUNK = 4096, 128, 64


def recurrence(generation: str) -> list[Case]:
    members = map(problems.read, problems.lines("tpu-static", "recurrence"))
    return [case for member in members for case in _recurrence(generation, member)]


def _recurrence(generation: str, member: problems.Line) -> list[Case]:
    """Both directions with the heuristic's chunks."""
    heads, width, decay = member.sizes["H"], member.sizes["V"], member.options["decay"]
    beta, delta, shared = (member.options.get(flag, False) for flag in ("beta", "delta", "shared"))
    of = lambda *sizes, dtype=jnp.bfloat16: shape((1, _LENGTH, *sizes), dtype)
    keys, wide = of(1 if shared else heads, _DIM), jnp.float32
    logs = {"none": None, "scalar": of(heads, dtype=wide), "key": of(heads, _DIM, dtype=wide)}
    strength = of(heads, dtype=wide) if beta else None
    arrays = RecurrenceArrays(keys, keys, of(heads, width), logs[decay], strength)
    spec = RecurrenceSpec(_DIM**-0.5, decay, delta)
    problem = recurrence_problem("linear_attention", arrays, spec)
    config = recurrence_kernels.default_config(problem, facts_of(generation))
    forward = functools.partial(_forward, recurrence_kernels, spec, config)

    def backward(arrays: RecurrenceArrays, saved: Any) -> Any:
        results = {name: saved[name] for name in ("out", "final_state")}
        return recurrence_kernels.backward(arrays, spec, config, {"states": saved["states"]}, results)

    saved, cases = jax.eval_shape(forward, arrays), []
    kernels = ("forward", forward, (arrays,)), ("backward", backward, (arrays, saved))
    for kernel, function, shapes in kernels:
        many, chunk = getattr(config, f"{kernel}_heads"), config.chunk_size
        once = 2 if kernel == "forward" else 6
        operands = 2 * (2 * _DIM + 2 * width) + 4 * (_DIM if decay == "key" else 1)
        moved = _CHUNK * operands * (1 if kernel == "forward" else 2) + 2 * _DIM * width * _CHUNK / chunk
        cases.append(
            Case(
                f"{kernel} {member.title}",
                "64 tokens of a head",
                Program(function, shapes, f"recurrence.{kernel}", many * chunk / _CHUNK),
                flops=once * _CHUNK * (2 * _DIM * width + chunk * (_DIM + width)),
                bytes=moved,
                tiles=f"{many}x{chunk}",
            )
        )
    return cases
