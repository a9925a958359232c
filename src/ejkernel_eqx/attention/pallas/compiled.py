"""Platform `pallas` on TPU: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ...core.platforms import InterpretedPallas
from ...dispatch import DeviceFacts, FORWARD, Problem
from ...launch.by_name import LOG2E
from ...launch.fields import Checked, Lanes
from ...launch.sizes import rows_of
from ..cotangents import clean_cotangent, row_terms, sinks_gradient, sum_batch
from ..masks.call_lists import without_lists
from ..spec import AttentionArrays, AttentionGrads, AttentionSpec, LEARNED
from . import launches, tile_sizes
from .launches import Call
from .operands import Rows

OPAQUE = True
NOTE = "interpreted and compiled without a TPU; it has never run on one"
PARTS = {"forward": FORWARD, "key_gradient": "k v", "query_gradient": "q bias alibi_slopes sinks"}
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class TileConfig(Checked):
    """One kernel's tile of scores: `block_q` queries by `block_k` keys, multiples of 128."""

    block_q: Lanes
    block_k: Lanes


@dataclasses.dataclass(frozen=True)
class PallasConfig:
    """`forward`, and the backward kernels of the key side (`dk`, `dv`) and the query side (`dq`, bias)."""

    forward: TileConfig
    key_gradient: TileConfig
    query_gradient: TileConfig


config_type = PallasConfig


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16, not {problem.dtype('qkv')}"
    if problem.flag("log_forget"):
        return "takes no log_forget"
    if problem.flag("score_mod"):
        return "takes a score_mod only if it is cap * tanh(score / cap) + slope[head] * (key - query), or one of the two"
    if max(problem.dim("D"), problem.dim("V")) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')} and V {problem.dim('V')}"
    tile = tile_sizes.fitting("forward", problem, device)[0]
    return tile_sizes.tile_unsupported("forward", problem, tile, device)


def default_config(problem: Problem, device: DeviceFacts) -> PallasConfig:
    """The first preferred tile of each kernel that fits the device's vector memory."""
    return PallasConfig(
        *(TileConfig(*tile_sizes.fitting(kernel, problem, device)[0]) for kernel in tile_sizes.KERNELS)
    )


def candidates(problem: Problem, device: DeviceFacts) -> list[PallasConfig]:
    """Configurations worth timing, the heuristic first. Each takes the next tile of every kernel."""
    columns = [tile_sizes.fitting(kernel, problem, device) for kernel in tile_sizes.KERNELS]
    return [PallasConfig(*(TileConfig(*tile) for tile in row)) for row in rows_of(columns)]


def config_unsupported(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why tiles cannot fit the device's vector memory or the table of steps, by an estimate."""
    for kernel in tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        reason = tile_sizes.tile_unsupported(kernel, problem, _sizes(tile), device)
        if reason is not None:
            return reason
    return None


def forward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: PallasConfig,
    *,
    k_rope: Array | None = None,
) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`. `k_rope [B, S, R]`: keys that all heads share, of the last channels of the queries."""
    if _is_empty(arrays):  # no grid: sinks alone are in the denominator
        (batch, queries, heads, _), values = arrays.q.shape, arrays.v.shape[-1]
        lse = jnp.full((batch, heads, queries), -jnp.inf)
        if arrays.sinks is not None:
            lse = jnp.broadcast_to(arrays.sinks.astype(jnp.float32)[..., None], lse.shape)
        return jnp.zeros((batch, queries, heads, values), arrays.q.dtype), lse
    return launches.forward(Call(arrays, spec, k_rope), _sizes(config.forward))


def backward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: PallasConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
) -> AttentionGrads:
    """All gradients, from the results and their cotangents; bitwise repeatable, as every sum has one fixed order."""
    return gradients(arrays, spec, config, out, lse, dout, dlse)[0]


def gradients(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: PallasConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    k_rope: Array | None = None,
) -> tuple[AttentionGrads, Array | None]:
    """Works as `backward`, and the gradient of `k_rope` (see `forward`), in float32."""
    delta, empty = row_terms(arrays, out, lse, dout, dlse)
    dbias, dsinks = None, sinks_gradient(arrays, lse, delta)
    if _is_empty(arrays):
        zeros = jax.tree.map(jnp.zeros_like, {name: getattr(arrays, name) for name in LEARNED})
        drope = None if k_rope is None else jnp.zeros(k_rope.shape, jnp.float32)
        return AttentionGrads(**zeros | {"sinks": dsinks}), drope
    # A bias of minus infinity also hides entries, though no mask does.
    do = clean_cotangent(dout, empty).astype(arrays.q.dtype)
    rows = Rows(do, jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E), delta)
    call, query_tile = Call(arrays, spec, k_rope), _sizes(config.query_gradient)
    dk, dv, dk_rope = launches.key_gradient(call, _sizes(config.key_gradient), rows)
    dq, dslopes = launches.query_gradient(call, query_tile, rows)
    if dslopes is not None and arrays.alibi_slopes is not None:
        dslopes = sum_batch(dslopes, arrays.alibi_slopes)
    if arrays.bias is not None:
        if spec.listed:  # every tile of the bias has a gradient, of hidden ones zero
            call = Call(*without_lists(arrays, spec), k_rope)
        dbias = launches.bias_gradient(call, query_tile, rows)
    return AttentionGrads(dq, dk, dv, dbias, dslopes, dsinks), dk_rope


def _sizes(tile: TileConfig) -> tuple[int, int]:
    return tile.block_q, tile.block_k


def _is_empty(arrays: AttentionArrays) -> bool:
    return 0 in (arrays.q.shape[1], arrays.k.shape[1])


_TILE = TileConfig(128, 128)
interpreted = InterpretedPallas(__name__, PallasConfig(_TILE, _TILE, _TILE))
"""The same kernels, simulated on the host with small tiles: platform `pallas-interpret`."""
