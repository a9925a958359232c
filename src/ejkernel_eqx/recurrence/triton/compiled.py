"""Platform `triton`: support, configurations, and the choice of kernels for a call."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax

from ...core import Named
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ..before import moved, moved_back
from ..spec import heads_of, KEY, RecurrenceArrays, RecurrenceSpec, VALUE
from . import delta_host, delta_tile_sizes, key_host, linear_host, rank_one_host, step_kernel, tile_sizes
from .call import Call, first_copies, in_first_copies, make_call, repeated, sum_copies
from .tile_sizes import TritonConfig

OPAQUE = True
VERSION = 2
MAX_HEAD_DIM, MAX_RANK_ONE_DIM = 256, 128
PARTS = {
    "chunk_size": BOTH,
    "splits": BOTH,
    "scores": FORWARD,
    "wy": BOTH,
    "states": BOTH,
    "out": FORWARD,
    "dstates": BOTH,
    "gradients": BOTH,
}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
config_type = TritonConfig
config_unsupported = tile_sizes.config_unsupported


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return _tiles(problem).default_config(problem, device)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    return _tiles(problem).candidates(problem, device)


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """Keeps the tiles, except for the single kernel that computes the outputs: whether it is used, and with which tile, depends on the
    number of programs, as do the splits of sequences."""
    fit = default_config(problem, device)
    if config.single or fit.single:
        config = dataclasses.replace(config, single=fit.single, out=fit.out)
    return dataclasses.replace(config, splits=fit.splits)


def _tiles(problem: Problem) -> ModuleType:
    mixes = problem.flag("delta") or problem.flag("rank_one")
    return delta_tile_sizes if mixes and not problem.flag("step") else tile_sizes


unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64" or problem.dtype("state") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("step"):
        return None
    if problem.flag("before") and problem.flag("skip"):
        return "does not support a skip with outputs that read the state before their token"
    if problem.flag("rank_one"):
        if problem.flag("decay") != KEY:
            return "supports transitions of rank one, a and b, with a decay per key channel only"
        if problem.flag("delta") or problem.flag("beta") or problem.flag("skip"):
            return "does not support delta rules, write strengths or a skip with transitions of rank one"
        if problem.dim("D") > MAX_RANK_ONE_DIM:
            most = f"takes key dims up to {MAX_RANK_ONE_DIM} with transitions of rank one"
            return f"{most}, not D {problem.dim('D')}"
    if problem.flag("decay") == VALUE:
        return "does not support a decay per value channel"
    if problem.flag("delta") and problem.flag("skip"):
        return "does not support a skip with delta rules"
    if problem.dim("D") > MAX_HEAD_DIM:
        return f"takes key dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')}"
    return None


def _member(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> ModuleType:
    """The host side of a member of the family. Its `forward` returns outputs, the final state and residuals, its `backward` gradients of the call's
    arrays and of the initial state; states are those of the call's heads."""
    if arrays.a is not None:
        return rank_one_host
    return delta_host if spec.delta else key_host if spec.decay == KEY else linear_host


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of the residuals that the forward pass keeps for the backward pass."""
    return _member(arrays, spec).saved_axes(arrays, spec)


def _call(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig) -> Call:
    """The call as the kernels see it, with a state head for every query head."""
    if _member(arrays, spec) is key_host:
        arrays = key_host.weighted(arrays, spec, config)
    return make_call(repeated(arrays, spec), spec, config)


def forward(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, *, save: bool = True
) -> Named:
    """`out`, `final_state` and the residuals of `saved_axes`, from arrays with one leading axis. Saving costs no time, since one kernel
    passes the residuals to the next anyway."""
    if spec.before:
        results = forward(moved(arrays), dataclasses.replace(spec, before=False), config)
        return results | {"out": moved_back(arrays, spec, results["out"])}
    call = _call(arrays, spec, config)
    out, final, saved = _member(arrays, spec).forward(call, arrays)
    copies = call.sizes[0] // heads_of(arrays, spec).state
    return {"out": out.astype(arrays.v.dtype), "final_state": first_copies(final, copies), **saved}


def backward(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """Gradients of all float arrays of the call; bitwise repeatable, as every sum has a fixed order."""
    if spec.before:
        return _backward_before(arrays, spec, config, saved, cotangents)
    # States are computed again from the arrays alone. Bound to the cotangents, so that no compiler does so early and holds them until here.
    arrays, saved, cotangents = lax.optimization_barrier((arrays, saved, cotangents))
    call = _call(arrays, spec, config)
    copies = call.sizes[0] // heads_of(arrays, spec).state
    dout = cotangents["out"].astype(call.arrays.q.dtype)
    dfinal = in_first_copies(cotangents["final_state"], copies)
    grads, dinitial = _member(arrays, spec).backward(call, arrays, saved, dout, dfinal)
    if arrays.initial_state is not None:
        grads["initial_state"] = sum_copies(dinitial, copies)
    return grads


def _backward_before(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    read = {name: x for name in ("q", "initial_state") if (x := getattr(arrays, name)) is not None}
    shifted, pull = jax.vjp(lambda q: moved(arrays._replace(q=q)).q, arrays.q)
    # Outputs are linear in those of the call that runs: these need not be known.
    back = lambda read, out: moved_back(arrays._replace(**read), spec, out)
    _, pull_back = jax.vjp(back, read, jnp.zeros_like(cotangents["out"]))
    first, dout = pull_back(cotangents["out"])
    inner = arrays._replace(q=shifted, skip=None), dataclasses.replace(spec, before=False)
    grads = backward(*inner, config, saved, cotangents | {"out": dout})
    grads["q"] = pull(grads["q"].astype(arrays.q.dtype))[0]
    return grads | {name: grads[name] + x.astype(grads[name].dtype) for name, x in first.items()}


step = step_kernel.step


_TILE = tile_sizes.Tile(32, 32, 4, 1)
_SMALL = TritonConfig(32, _TILE, _TILE, _TILE, _TILE, _TILE, _TILE)
interpreted = Interpreted(__name__, _SMALL, float32_dot="ieee")
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
