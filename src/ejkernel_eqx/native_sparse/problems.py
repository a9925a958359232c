"""The problem of a call, and those of its two branches that are softmax attention."""

import dataclasses
import functools
from typing import Any

import jax

from ..attention import core as attention
from ..dispatch import Problem
from . import branches
from .spec import LETTERS, NativeArrays, NativeSpec, num_blocks

COMPRESSED, SLIDING = "compressed", "sliding"
FIELDS = ("block", "window", "span", "stride")


def problem_of(operation: str, arrays: NativeArrays, spec: NativeSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    size = LETTERS.sizes(arrays)
    dims = {name: size[name] for name in "BTSHKDVC"} | {"n": spec.count, "M": num_blocks(arrays, spec)}
    flags: dict[str, Any] = {name: getattr(spec, name) for name in FIELDS}
    flags |= {
        "placed": arrays.position is not None,
        "packed": arrays.begin is not None,
        "given": spec.given,
        "top_left": spec.offset == 0,
    }
    return Problem.make(
        operation,
        dims=dims,
        dtypes={"qkv": arrays.q.dtype, "gates": arrays.gates.dtype},
        flags=flags,
        lengths={"B", "T", "S", "C", "M"},
        counts={"H", "K"},
        requirements={"given"},
    )


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
    main, ints = problem.dtype("qkv"), []
    if problem.flag("given"):
        ints += ["indices"]
    if problem.flag("placed"):
        ints += ["position"]
    if problem.flag("packed"):
        ints += ["first", "seen", "base", "begin"]
    dtypes = dict.fromkeys(("q", "k", "v", "compressed_k", "compressed_v"), main)
    size = dict(problem.dims) | {"three": 3}
    own = dtypes | {"gates": problem.dtype("gates")} | dict.fromkeys(ints, "int32")
    return NativeArrays(**LETTERS.shapes(size, own))


@functools.lru_cache(maxsize=256)
def of_branch(problem: Problem, name: str) -> Problem:
    """The problem of softmax attention that a branch is."""
    spec, make = spec_of(problem), getattr(branches, name)
    found: list[Problem] = []

    def look(arrays: NativeArrays) -> None:
        found.append(attention.problem_of("flash_attention", *make(arrays, spec)))

    jax.eval_shape(look, shapes_of(problem))
    return found[0]
