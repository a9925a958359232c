"""The tuner's view of native sparse attention: representative work, and problems for the command line."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._take import take_along
from ..core import Named
from ..core.exact import compiled
from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import exact_results, Inputs, workload_of
from ..dispatch import device_facts, Implementation, kernel_registry, Platform, Problem, Workload
from . import blocks
from .core import ATTEND
from .problems import problem_of, shapes_from, shapes_of, spec_of
from .spec import LEARNED, NativeArrays, NativeSpec, num_blocks, places

_MOST_SCORES = 2**26  # of a head in the dense reference
_INTS = ("position", "first", "seen", "base", "begin")


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms. The blocks that are chosen are not compared, as rounding decides between two that are almost
    as good: all blocks of a sequence are alike, so that it does not matter."""
    spec = spec_of(problem)
    length, keys = problem.dim("T"), problem.dim("S")
    # Keys that a query sees on average.
    seen = min(problem.dim("n") * spec.block, keys) + min(spec.window, keys)
    seen += problem.dim("C") * (1 - length / (2 * keys))
    flops = 2.0 * problem.dim("B") * length * problem.dim("H") * (problem.dim("D") + problem.dim("V")) * seen
    make = functools.partial(make_arrays, problem, spec)
    work_on = functools.partial(workload_of, ATTEND, spec=spec, make=make, flops=flops, backward=2.5)
    work = work_on(implementation)
    reference = functools.partial(compiled, _by_group, spec)
    if length * keys > _MOST_SCORES:
        reference = functools.partial(_by_xla, problem, work_on)
    if spec.given:
        return dataclasses.replace(work, reference=reference)
    # A block that was chosen instead of another changes which of them has a part of its gradient, but not their sum.
    parts = (dataclasses.replace(part, results=_compared(part.results)) for part in work.parts)
    return dataclasses.replace(
        work,
        run=functools.partial(_run, work.run, spec.block),
        reference=lambda inputs: _summed(reference(inputs), inputs.arrays, spec.block),
        tolerances={name: work.tolerances[name] for name in _compared(work.tolerances)},
        forward=_compared(work.forward),
        parts=tuple(parts),
    )


def _compared(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "indices")


def _run(run: Callable[..., Named], block: int, inputs: Inputs, config: Any) -> Any:
    found = run(inputs, config)
    return _summed({name: found[name] for name in _compared(found)}, inputs.arrays, block)


def _summed(found: Named, arrays: NativeArrays, block: int) -> Named:
    """The gradients of keys and values summed over the blocks of a sequence, `[B, block, K, C]`."""
    at = _places(arrays)[..., None] % block == jnp.arange(block)[None, None]

    def total(x: Array) -> Array:
        return jnp.einsum(
            "bskc,bsj->bjkc", x.astype(jnp.float32), at.astype(jnp.float32), precision="highest"
        )

    return {name: total(x) if name in ("k", "v") else x for name, x in found.items()}


def _places(arrays: NativeArrays) -> Array:
    """The place of each key in its sequence, `[B, S]`."""
    batch, keys = arrays.k.shape[:2]
    place = jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32)[None], (batch, keys))
    return place if arrays.first is None else place - arrays.first  # keys are queries, as the call is packed


def _by_xla(problem: Problem, work_on: Callable[..., Workload], inputs: Inputs) -> Named:
    """Those of platform `xla` in float32, for rows whose scores would not fit into memory."""
    platform = kernel_registry.get(problem.operation, Platform.XLA)
    widen = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    run = jax.jit(work_on(platform).run, static_argnums=1)
    return run(jax.tree.map(widen, inputs), platform.load().default_config(problem, device_facts()))


def _by_group(spec: NativeSpec, inputs: Inputs) -> Named:
    """Results and gradients of the reference, one batch row and key head after the other, so that the scores of a whole call are never in memory
    at once."""
    arrays, dout = inputs.arrays, inputs.cotangents["out"]
    batch, kv_heads = arrays.q.shape[0], arrays.k.shape[2]

    def apart(x: Array) -> Array:
        """`[B * K, 1, L, heads, C]` from `[B, L, heads, C]`."""
        x = x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3])
        return jnp.moveaxis(x, 2, 1).reshape(batch * kv_heads, 1, x.shape[1], *x.shape[3:])

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(batch, kv_heads, *x.shape[2:]), 1, 2)
        return x.reshape(batch, x.shape[1], -1, x.shape[-1])

    rows = lambda x: jnp.repeat(x, kv_heads, 0)[:, None]
    present = {name: x for name, x in arrays._asdict().items() if x is not None}
    each = {name: rows(x) if name in _INTS else apart(x) for name, x in present.items()}
    one = lambda pair: exact_results(ATTEND, spec, Inputs(NativeArrays(**pair[0]), {"out": pair[1]}))
    return {name: joined(x) for name, x in lax.map(one, (each, apart(dout))).items()}


def make_arrays(problem: Problem, spec: NativeSpec, seed: int) -> NativeArrays:
    """Random values, packed sequences of various lengths followed by padding, and random blocks before each query."""
    shapes = shapes_of(problem)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 7)
    random = lambda key, x: jax.random.normal(key, x.shape, x.dtype)
    values = {name: random(key, getattr(shapes, name)) for key, name in zip(keys, LEARNED)}
    arrays = NativeArrays(**{**values, "gates": jax.nn.sigmoid(values["gates"])})
    batch, length = arrays.q.shape[:2]
    if shapes.begin is not None:
        arrays = arrays._replace(**_packed(problem, spec, np.random.default_rng(seed)))
    elif shapes.position is not None:
        place = jnp.arange(length, dtype=jnp.int32) + (problem.dim("S") - length)
        arrays = arrays._replace(position=jnp.broadcast_to(place, (batch, length)))
    if shapes.indices is not None:
        return arrays._replace(indices=_blocks(arrays, spec, keys[-1]))
    at = (_places(arrays) % spec.block)[..., None, None]
    alike = lambda x: take_along(x, at, 1)
    return arrays._replace(k=alike(arrays.k), v=alike(arrays.v))


def _packed(problem: Problem, spec: NativeSpec, rng: np.random.Generator) -> Named:
    batch, length = problem.dim("B"), problem.dim("T")
    count = problem.dim("M") - length // spec.block  # of sequences
    end = length - length // 16
    cuts = np.sort(rng.integers(0, end + 1, (batch, count - 1)), -1)
    offsets = np.concatenate([np.zeros((batch, 1), int), cuts, np.full((batch, 1), end)], -1)
    sizes, rows = (length, spec.block, spec.span, spec.stride), jnp.asarray(offsets, jnp.int32)
    tables = [blocks.of_offsets(row, *sizes)._asdict() for row in rows]
    return {name: jnp.stack([table[name] for table in tables]) for name in _INTS}


def _blocks(arrays: NativeArrays, spec: NativeSpec, key: Array) -> Array:
    """Each query's own block, the first, and random ones between; -1 in place of one that was named before."""
    batch, length, kv_heads = (*arrays.q.shape[:2], arrays.k.shape[2])
    place = places(arrays, spec)
    own = jnp.broadcast_to((place // spec.block)[..., None, None], (batch, length, kv_heads, 1))
    some = jax.random.uniform(key, (batch, length, kv_heads, spec.count)) * own.astype(jnp.float32)
    chosen = jnp.concatenate([own, jnp.zeros_like(own), some.astype(jnp.int32)], -1)[..., : spec.count]
    ordered = jnp.sort(chosen, -1)
    again = jnp.pad(ordered[..., 1:] == ordered[..., :-1], [(0, 0)] * 3 + [(1, 0)])
    base = 0 if arrays.base is None else arrays.base[..., None, None]
    return jnp.where(again | (place < 0)[..., None, None], -1, ordered + base)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `T`, `H` and `D`; `S` defaults to `T`, `K` to `H`, `V` to `D`, `B` to 1, and `n`, the blocks that a query chooses, to 16.
      Packed rows have `N` sequences.
    - `dtype`: the dtype of queries, keys and values.
    - `flags`: the ints `block` (64 by default), `window` (512), `span` and `stride` (those of the blocks); `placed`: positions are data; `packed`;
      `given`: the blocks are.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    same = {"S": dims.get("T", 1), "K": dims.get("H", 1), "V": dims.get("D", 1), "n": 16, "N": 1}
    size = read_sizes(dims, {"T": None, "H": None, "D": None, "B": 1, **same})
    ints, given = read_parts(flags, ("placed", "packed", "given"))
    block, span = ints["block"], ints["span"]
    if size["H"] % size["K"]:
        raise ValueError(f"dims: expected H to be a multiple of K, received H={size['H']}, K={size['K']}.")
    if given["packed"] != ("N" in dims) or (given["packed"] and size["S"] != size["T"]):
        raise ValueError(
            f"dims: expected N sequences and S = T with packed=true, and no N without it, received {dict(dims)}."
        )
    spec = NativeSpec(
        size["D"] ** -0.5, block, size["n"], ints["window"], span, ints["stride"], given=bool(given["given"]),
        offset=0 if given["placed"] or given["packed"] else size["S"] - size["T"],
    )  # fmt: skip
    size["C"] = blocks.num_compressed(size["S"], span, ints["stride"], given["packed"])
    size["M"] = size["S"] // block + size["N"]
    flags = given | {"placed": given["placed"] or given["packed"]}
    arrays = shapes_from(size, dtype, wide_dtype(dtype), flags)
    assert not given["packed"] or num_blocks(arrays, spec) == size["M"]
    return problem_of(operation, arrays, spec)


def read_parts(flags: Mapping[str, Any], switches: tuple[str, ...]) -> tuple[dict[str, int], dict[str, Any]]:
    """The sizes of blocks, window and compressed keys among the flags, and the `switches`."""
    block = flags.get("block", 64)
    span = flags.get("span", block)
    ints = {"block": block, "window": flags.get("window", 512), "span": span}
    ints["stride"] = flags.get("stride", span)
    for name, value in ints.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"flags: expected a positive int for {name}, received {value!r}.")
    choices = {name: (value,) for name, value in ints.items()} | dict.fromkeys(switches, SWITCH)
    return ints, read_flags(flags, choices)
