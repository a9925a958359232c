"""The kernels of softmax attention for `tpu_static.py`, beside JAX's splash attention with the same tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from benchmarks.tpu_static import Case, PARTLY, PASSES, Program
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.pallas import compiled
from ejkernel_eqx.attention.pallas.compiled import PallasConfig
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from ejkernel_eqx.launch.tpu_ahead import facts_of

_TOKENS, _HEADS = 2048, 2
_UNIT = 512 * 512
BODIES = {1: PARTLY}
_SPLASH = {"forward": "mha_fwd", "key_gradient": "mha_dkv", "query_gradient": "mha_dq"}


def cases(generation: str) -> list[Case]:
    found = []
    for dim in (64, 128, 256):
        found += _kernels(generation, dim, dim, jnp.bfloat16)
    found += _kernels(generation, 192, 128, jnp.bfloat16, peer=False)
    return found + _kernels(generation, 128, 128, jnp.float32)


def arrays_of(dim: int, values: int, dtype: Any) -> AttentionArrays:
    shape: Any = lambda width: jax.ShapeDtypeStruct((1, _TOKENS, _HEADS, width), dtype)
    return AttentionArrays(shape(dim), shape(dim), shape(values))


def _kernels(generation: str, dim: int, values: int, dtype: Any, peer: bool = True) -> list[Case]:
    """A causal call's kernels with the heuristic's tiles."""
    arrays, spec = arrays_of(dim, values, dtype), AttentionSpec(dim**-0.5, right=0)
    config = compiled.default_config(problem_of("flash_attention", arrays, spec), facts_of(generation))
    name = f"D{dim}" if dim == values else f"D{dim} V{values}"
    name, size = f"{name} {jnp.dtype(dtype).name}", jnp.dtype(dtype).itemsize
    results = (
        jax.ShapeDtypeStruct((1, _TOKENS, _HEADS, values), dtype),
        jax.ShapeDtypeStruct((1, _HEADS, _TOKENS), jnp.float32),
    )
    given = {"forward": (arrays,), "backward": (arrays, *results, *results)}
    ours = {
        "forward": functools.partial(_forward, spec, config),
        "backward": functools.partial(_backward, spec, config),
    }
    theirs = _splash(config) if peer else {}
    shape = jax.ShapeDtypeStruct((_HEADS, _TOKENS, dim), dtype)
    products = {
        "forward": dim + values,
        "key_gradient": 2 * (dim + values),
        "query_gradient": 2 * dim + values,
    }
    found = []
    for kernel, flops in products.items():
        tile, direction = getattr(config, kernel), "forward" if kernel == "forward" else "backward"
        units = tile.block_q * tile.block_k / _UNIT
        streamed = tile.block_q if kernel == "key_gradient" else tile.block_k
        found.append(
            Case(
                f"{kernel} {name}",
                "512x512 scores",
                Program(ours[direction], given[direction], f"attention.{kernel}", units, others=BODIES),
                Program(theirs[direction], (shape,) * 3, _SPLASH[kernel], units) if peer else None,
                "splash",
                2.0 * _UNIT * flops * PASSES[size],
                streamed * (dim + values) * size / units,
                f"{tile.block_q}x{tile.block_k}",
            )
        )
    return found


def _forward(spec: AttentionSpec, config: PallasConfig, arrays: AttentionArrays) -> Any:
    return compiled.forward(arrays, spec, config)


def _backward(spec: AttentionSpec, config: PallasConfig, arrays: AttentionArrays, *rest: Any) -> Any:
    return compiled.backward(arrays, spec, config, *rest)


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
        # It multiplies float32 in one pass of bfloat16 unless it is told otherwise; ours never does.
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return make(mask)(q, k, v)

    def backward(q: Any, k: Any, v: Any) -> Any:
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return jax.grad(lambda *given: forward(*given).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    return {"forward": forward, "backward": backward}
