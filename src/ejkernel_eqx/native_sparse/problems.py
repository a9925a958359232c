"""The problem of a call, and those of its two branches that are softmax attention."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from ..attention import core as attention
from ..dispatch import Problem
from . import branches
from .spec import LEARNED, LETTERS, NativeArrays, NativeSpec, num_blocks

FIELDS = ("block", "window", "span", "stride")
_INTS = {"given": "indices", "placed": "position", "packed": "first seen base begin"}  # by the flag of a call


def problem_of(operation: str, arrays: NativeArrays, spec: NativeSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    size = LETTERS.sizes(arrays)
    dims = {name: size[name] for name in "BTSHKDVC"} | {"n": spec.count, "M": num_blocks(arrays, spec)}
    flags: dict[str, Any] = {name: getattr(spec, name) for name in FIELDS}
    flags |= {"placed": arrays.position is not None, "packed": arrays.begin is not None}
    flags |= {"given": spec.given, "top_left": spec.offset == 0}
    dtypes = {"qkv": arrays.q.dtype, "gates": arrays.gates.dtype}
    kinds = {"lengths": set("BTSCM"), "counts": set("HK"), "requirements": {"given"}}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags=flags, **kinds)


def spec_of(problem: Problem) -> NativeSpec:
    """The static half of the problem's calls."""
    offset = 0 if problem.flag("top_left") or problem.flag("placed") else problem.dim("S") - problem.dim("T")
    return dataclasses.replace(sparse_of(problem), offset=offset)


def sparse_of(problem: Problem) -> NativeSpec:
    """Returns what a problem says of blocks and compressed keys."""
    number = {name: int(str(problem.flag(name))) for name in FIELDS}
    scale, given = problem.dim("D") ** -0.5, bool(problem.flag("given"))
    return NativeSpec(scale, count=problem.dim("n"), given=given, **number)


def shapes_of(problem: Problem) -> NativeArrays:
    """The shapes of the problem's arrays."""
    return shapes_from(problem.dims, problem.dtype("qkv"), problem.dtype("gates"), dict(problem.flags))


def shapes_from(dims: Any, dtype: Any, gates: Any, flags: Mapping[str, Any]) -> NativeArrays:
    """The shapes of a call's arrays, from sizes by letter, two dtypes and the flags of a problem."""
    ints = [name for flag, names in _INTS.items() if flags[flag] for name in names.split()]
    dtypes = dict.fromkeys(LEARNED, dtype) | {"gates": gates} | dict.fromkeys(ints, "int32")
    return NativeArrays(**LETTERS.shapes(dict(dims) | {"three": 3}, dtypes))


@functools.lru_cache(maxsize=256)
def of_branch(problem: Problem, name: str) -> Problem:
    """The problem of softmax attention that a branch is."""
    spec, make = spec_of(problem), branches.SOFTMAX[name]
    found: list[Problem] = []

    def look(arrays: NativeArrays) -> None:
        found.append(attention.problem_of("flash_attention", *make(arrays, spec)))

    jax.eval_shape(look, shapes_of(problem))
    return found[0]
