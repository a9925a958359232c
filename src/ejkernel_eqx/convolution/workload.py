"""The tuner's view of a causal convolution: representative work, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import workload_of
from ..dispatch import Implementation, Problem, Workload
from .arguments import check_heads, resolve
from .core import CONVOLVE, problem_of
from .spec import ACTIVATIONS, by_head, ConvArrays, ConvSpec, letters_of, PLACES, SHARED


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = spec_of(problem)
    flops = 2.0 * problem.dim("B") * problem.dim("T") * problem.dim("C") * problem.dim("W")
    return workload_of(CONVOLVE, implementation, spec, functools.partial(make_arrays, problem), flops=flops)


def spec_of(problem: Problem) -> ConvSpec:
    flag: Any = problem.flag
    return ConvSpec(flag("activation"), flag("norm_size"))


def make_arrays(problem: Problem, seed: int) -> ConvArrays:
    """Random values; packed rows hold documents of various lengths, followed by padding."""
    size = dict(problem.dims)
    size |= {"N": size.get("N", 1), "K": size["W"] - 1}
    arrays = _random(problem, size, seed)
    spec = spec_of(problem)
    if not problem.flag("packed"):
        return by_head(arrays, spec)
    rng = np.random.default_rng(seed)
    rows = [_places(arrays.x[row], arrays.weight, size, rng) for row in range(size["B"])]
    packed = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
    return by_head(arrays._replace(**packed), spec)


def _random(problem: Problem, size: dict[str, int], seed: int) -> ConvArrays:
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 4))

    def normal(axes: str, dtype: str) -> Any:
        return jax.random.normal(next(keys), tuple(size[a] for a in axes), jnp.dtype(dtype))

    weight = problem.dtype("weight")
    return ConvArrays(
        normal("BTC", problem.dtype("x")),
        normal("CW", weight),
        normal("C", weight) if problem.flag("bias") else None,
        normal("BNKC", problem.dtype("x")) if problem.flag("initial_state") else None,
    )


def _places(x: Any, weight: Any, size: dict[str, int], rng: np.random.Generator) -> dict[str, Any]:
    length = size["T"]
    # Each row ends with some padding, as packed rows usually do.
    real = length - length // 16
    if size["N"] > 1:
        cuts = np.sort(rng.integers(0, real + 1, size["N"] - 1))
        offsets, ids = np.concatenate([[0], cuts, [real]]).astype(np.int32), None
    else:
        cuts = np.sort(rng.integers(0, real + 1, 8))
        ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
        offsets, ids = None, np.where(np.arange(length) < real, ids, -1)
    places = resolve(x, weight, None, None, offsets, ids).arrays.places
    assert places is not None
    return places._asdict()


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `T` tokens and `C` channels; `B` defaults to 1, the width `W` to 4, the packed sequences `N` to 1.
    - `dtype`: the dtype of the inputs and the state; weight and bias are float32 (float64 with float64).
    - `flags`: `activation` (`silu` by default, or none), `bias` (default true), `initial_state`, `packed`: segments, or offsets with `N` above 1;
        `norm_size` (none by default, 32, 64 or 128).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "T": None, "C": None, "W": 4, "N": 1})
    choices: dict[str, Any] = {"activation": ACTIVATIONS[::-1], "norm_size": (None, 32, 64, 128)}
    choices |= {"bias": SWITCH[::-1], **dict.fromkeys(("initial_state", "packed"), SWITCH)}
    options = read_flags(flags, choices)
    check_heads(options["norm_size"], size["C"])
    wide = wide_dtype(dtype)
    dtypes = {"x": dtype, "weight": wide} | ({"bias": wide} if options["bias"] else {})
    dtypes |= {"initial_state": dtype} if options["initial_state"] else {}
    dtypes |= dict.fromkeys(PLACES, "int32") if options["packed"] else {}
    spec = ConvSpec(options["activation"], options["norm_size"])
    head = spec.norm_size or size["C"]
    more = {"K": size["W"] - 1, "four": 4, "H": size["C"] // head, "D": head}
    arrays = ConvArrays(**letters_of(spec).shapes({**size, **more}, dtypes, SHARED))
    return problem_of(operation, arrays, spec)
