"""The tuner's view of a loss: representative work, and problems for the command line."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import kind_of, LETTERS, problem_of, TEACHERS
from .spec import DIVERGENCES, letters_of, LossArrays, LossSpec, SHARED

_CAP, _TEMPERATURE, _SMOOTHING, _Z_LOSS = 30.0, 0.7, 0.1, 1e-4


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = spec_of(problem)
    size = {"F": 0, **dict(problem.dims)}
    logits = 2.0 * size["B"] * size["M"] * size["N"] * size["V"]
    own, both = logits * size["E"], logits * (size["E"] + size["F"])
    kind, make = kind_of(spec.has_statistics, False), functools.partial(make_arrays, problem)
    return workload_of(kind, implementation, spec, make, flops=both, backward=2 * own / both)


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
        divergence=flag("divergence") or None,
        teacher_soft_cap=value_of("teacher_soft_cap", _CAP, None),
    )


def make_arrays(problem: Problem, seed: int) -> LossArrays:
    """Random values; the logits have a variance of about one, and one token in 16 is ignored."""
    size = {LETTERS[name]: size for name, size in problem.dims}
    shapes = _shapes(size, str(problem.dtype("x")), problem.flag)
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes) + 1))

    def make(name: str, x: Any) -> Array:
        key = next(keys)
        if name == "labels":
            return jax.random.randint(key, x.shape, 0, size["V"], x.dtype)
        if name == "teacher_indices":
            first = jax.random.randint(key, (*x.shape[:-1], 1), 0, size["V"] - size["K"] + 1, x.dtype)
            return first + jnp.arange(size["K"], dtype=x.dtype)
        if name == "token_weights":
            return jax.random.uniform(key, x.shape, x.dtype)
        values = jax.random.normal(key, x.shape, x.dtype)
        if name == "teacher_log_probs":
            return jax.nn.log_softmax(values)
        return values / jnp.asarray(x.shape[-1] ** 0.5, x.dtype) if name.endswith("weight") else values

    arrays = LossArrays(**{name: make(name, x) for name, x in shapes.items()})
    ignored = jax.random.bernoulli(next(keys), 1 / 16, arrays.labels.shape)
    return arrays._replace(labels=jnp.where(ignored, -1, arrays.labels))


_SWITCHES = {
    "linear_cross_entropy": "label_smoothing z_loss statistics",
    "linear_divergence": "teacher_soft_cap teacher_bias",
}


def _shapes(size: Mapping[str, int], dtype: str, flag: Callable[[str], Any]) -> dict[str, Any]:
    names = ["x", "labels", "weight", *TEACHERS.get(str(flag("teacher")), ())]
    dtypes = {name: "int32" if name in ("labels", "teacher_indices") else dtype for name in names}
    wide = [name for name in ("bias", "token_weights", "teacher_bias") if flag(name)]
    return letters_of(LossSpec()).shapes(size, dtypes | dict.fromkeys(wide, wide_dtype(dtype)), SHARED)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: `N` tokens, `E` features, a vocabulary of `V`; rows of tokens `M` and the leading axes `B` default to 1. Of a teacher `K` words, or
        `F` features, which default to `E`.
    - `dtype`: the dtype of features, weight and teacher; biases and weights of tokens are float32 (float64 with float64).
    - `flags`: `reduction` (`sum` by default, also for a mean, or `none`); `soft_cap`, `temperature`, `bias`, `token_weights` (default false). Of
        `linear_cross_entropy` `label_smoothing`, `z_loss`, `statistics`; of `linear_divergence` `divergence` (`forward_kl` by default), `teacher`
        (`features` by default, `logits`, `top_k`), `teacher_soft_cap`, `teacher_bias`.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "M": 1, "N": None, "E": None, "V": None, "K": 1, "F": dims.get("E", 1)})
    switches = f"soft_cap temperature bias token_weights {_SWITCHES[operation]}"
    words: Any = {"reduction": ("sum", "none"), **dict.fromkeys(switches.split(), SWITCH)}
    if operation == "linear_divergence":
        words |= {"divergence": DIVERGENCES, "teacher": ("features", "logits", "top_k")}
    options = read_flags(flags, words)
    size = {letter: size[name] for name, letter in LETTERS.items()}
    arrays = LossArrays(**_shapes(size, dtype, options.get))
    return problem_of(operation, arrays, _spec(options["reduction"], options.get))
