"""The kernels of latent attention in its expanded form for `tpu_static.py`. JAX has none to put beside them; the units are those of attention, whose
kernels at 192 and 128 channels they can be compared with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.tpu_attention_cases import BODIES
from benchmarks.tpu_static import Case, Program
from ejkernel_eqx.attention.pallas.compiled import PallasConfig
from ejkernel_eqx.attention.spec import AttentionSpec
from ejkernel_eqx.latent.core import problem_of
from ejkernel_eqx.latent.pallas import compiled
from ejkernel_eqx.latent.spec import LatentArrays
from ejkernel_eqx.launch.tpu_ahead import facts_of

_TOKENS, _HEADS = 2048, 2
_NOPE, _ROPE, _VALUES = 128, 64, 128
_UNIT = 512 * 512


def cases(generation: str) -> list[Case]:
    """A causal call's kernels with the heuristic's tiles."""
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct((1, _TOKENS, *sizes), jnp.bfloat16)
    width = _NOPE + _ROPE
    arrays = LatentArrays(shape(_HEADS, width), shape(_HEADS, _NOPE), shape(_ROPE), shape(_HEADS, _VALUES))
    spec = AttentionSpec(width**-0.5, right=0)
    problem = problem_of("multi_head_latent_attention", arrays, spec)
    config = compiled.default_config(problem, facts_of(generation))
    out, lse = shape(_HEADS, _VALUES), jax.ShapeDtypeStruct((1, _HEADS, _TOKENS), jnp.float32)
    backward = functools.partial(_backward, spec, config), (arrays, out, lse, out, lse)
    given = {
        "forward": (functools.partial(_forward, spec, config), (arrays,)),
        "key_gradient": backward,
        "query_gradient": backward,
    }
    products = {
        "forward": width + _VALUES,
        "key_gradient": 2 * (width + _VALUES),
        "query_gradient": 2 * width + _VALUES,
    }
    found = []
    for kernel, (function, operands) in given.items():
        tile = getattr(config, kernel)
        units = tile.block_q * tile.block_k / _UNIT
        streamed = tile.block_q if kernel == "key_gradient" else tile.block_k
        found.append(
            Case(
                f"{kernel} {_NOPE} and {_ROPE} V{_VALUES}",
                "512x512 scores",
                Program(function, operands, f"attention.{kernel}", units, others=BODIES),
                flops=2.0 * _UNIT * products[kernel],
                bytes=streamed * (width + _VALUES) * 2 / units,
                tiles=f"{tile.block_q}x{tile.block_k}",
            )
        )
    return found


def _forward(spec: AttentionSpec, config: PallasConfig, arrays: LatentArrays) -> Any:
    return compiled.forward(arrays, spec, config)


def _backward(spec: AttentionSpec, config: PallasConfig, arrays: LatentArrays, *rest: Any) -> Any:
    return compiled.backward(arrays, spec, config, *rest)
