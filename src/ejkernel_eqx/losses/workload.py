"""The tuner's view of a loss: representative work, and problems for the command line."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import kind_of, LETTERS, problem_of
from .spec import letters_of, LossArrays, LossSpec, SHARED

_CAP, _TEMPERATURE, _SMOOTHING, _Z_LOSS = 30.0, 0.7, 0.1, 1e-4


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = spec_of(problem)
    flops = 2.0 * problem.dim("B") * problem.dim("M") * problem.dim("N") * problem.dim("E") * problem.dim("V")
    make = functools.partial(make_arrays, problem)
    return workload_of(kind_of(spec), implementation, spec, make, flops=flops)


def spec_of(problem: Problem) -> LossSpec:
    """The static half of the problem's calls."""
    return _spec(str(problem.flag("reduction")), problem.flag)


def _spec(reduction: str, flag: Callable[[str], Any]) -> LossSpec:
    value_of = lambda name, value, other: value if flag(name) else other
    return LossSpec(
        reduction,
        value_of("soft_cap", _CAP, None),
        value_of("temperature", _TEMPERATURE, 1.0),
        value_of("label_smoothing", _SMOOTHING, 0.0),
        value_of("z_loss", _Z_LOSS, 0.0),
        bool(flag("statistics")),
    )


def make_arrays(problem: Problem, seed: int) -> LossArrays:
    """Random values; the logits have a variance of about one, and one token in 16 is ignored."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 6)
    *lead, features, size = (problem.dim(name) for name in "BMNEV")
    dtype = jnp.dtype(problem.dtype("x"))
    wide = wide_dtype(dtype.name)
    labels = jax.random.randint(keys[1], lead, 0, size, jnp.int32)
    ignored = jax.random.bernoulli(keys[2], 1 / 16, labels.shape)
    weight = jax.random.normal(keys[3], (size, features), dtype) / jnp.asarray(features**0.5, dtype)
    return LossArrays(
        jax.random.normal(keys[0], (*lead, features), dtype),
        jnp.where(ignored, -1, labels),
        weight,
        jax.random.normal(keys[4], (size,), wide) if problem.flag("bias") else None,
        jax.random.uniform(keys[5], lead, wide) if problem.flag("token_weights") else None,
    )


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: `N` tokens, `E` features, a vocabulary of `V`; rows of tokens `M` and the leading axes `B` default to 1.
    - `dtype`: the dtype of features and weight; bias and weights of tokens are float32 (float64 with float64).
    - `flags`: `reduction` (`sum` by default, also for a mean, or `none`); `soft_cap`, `temperature`, `label_smoothing`, `z_loss`, `statistics`,
        `bias`, `token_weights` (default false).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "M": 1, "N": None, "E": None, "V": None})
    names = ("soft_cap", "temperature", "label_smoothing", "z_loss", "statistics", "bias", "token_weights")
    options = read_flags(flags, {"reduction": ("sum", "none"), **dict.fromkeys(names, SWITCH)})
    dtypes = {"x": dtype, "labels": "int32", "weight": dtype}
    dtypes |= {name: wide_dtype(dtype) for name in ("bias", "token_weights") if options[name]}
    spec = _spec(options["reduction"], options.get)
    size = {letter: size[name] for name, letter in LETTERS.items()}
    arrays = LossArrays(**letters_of(spec).shapes(size, dtypes, SHARED))
    return problem_of(operation, arrays, spec)
