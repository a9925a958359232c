"""The tuner's view of a grouped matmul: representative work, and problems for the command line."""

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
from ..quantised.format import form_of, SCALES, word_of
from ..quantised.numbers import bits_of
from ..quantised.quantise import format_for, KINDS
from .core import GROUPED, problem_of
from .spec import ACTIVATIONS, GATED, GroupedArrays, GroupedSpec, letters_of, PAIR, SHARED, STORED_DTYPES

LIMIT, UP_SHIFT = 7.0, 1.0
"""GPT-OSS's: they are not part of a problem, but whether there are any is."""


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = spec_of(problem)
    size = {name: problem.dim(name) for name in "BMKN"}
    flops = 2.0 * size["B"] * size["M"] * size["K"] * size["N"] * (1 if spec.gated is None else 2)
    make = functools.partial(make_arrays, problem, spec)
    return workload_of(GROUPED, implementation, spec, make, flops=flops)


def spec_of(problem: Problem) -> GroupedSpec:
    activation, gated = problem.flag("activation"), problem.flag("gated")
    word = problem.flag("format")
    return GroupedSpec(
        problem.dtype("out"),
        None if activation is None else str(activation),
        None if gated is None else str(gated),
        bool(problem.flag("transpose_rhs")),
        limit=LIMIT if problem.flag("limit") else None,
        up_shift=UP_SHIFT if problem.flag("up_shift") else 0.0,
        form=form_of(str(word)) if word else None,
    )


def make_arrays(problem: Problem, spec: GroupedSpec, seed: int) -> GroupedArrays:
    """Random values, and groups of different sizes."""
    shapes = _shapes(problem, spec)
    keys = dict(zip(shapes, jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))))
    rng = np.random.default_rng(seed)

    def value(name: str, shape: Any) -> Any:
        if name == "sizes":
            return random_sizes(shape.shape, problem.dim("M"), rng)
        if name == "rows":
            return jnp.asarray(rng.integers(0, problem.dim("L"), shape.shape, np.int32))
        if name in ("scale", "up_scale", "factor", "up_factor"):
            return jax.random.uniform(keys[name], shape.shape, shape.dtype, 0.005, 0.015)
        if shape.dtype == jnp.int8:
            return jax.random.randint(keys[name], shape.shape, -127, 128, jnp.int8)
        if shape.dtype in (jnp.uint8, jnp.uint16, jnp.uint32):
            return _coded(name.removeprefix("up_"), keys[name], shape, spec.form)
        # Stored numbers of float8 use their range.
        spread = 32.0 if name in ("stored", "up_stored") else 1.0
        return (spread * jax.random.normal(keys[name], shape.shape, jnp.float32)).astype(shape.dtype)

    return GroupedArrays(**{name: value(name, shape) for name, shape in shapes.items()})


def _coded(name: str, key: Any, shape: Any, form: Any) -> Any:
    """Random codes, none of which is NaN; scales of about 0.01, which are powers of two or have a factor in 8 bits; zero points."""
    if name == "scales" and form.scale != "float8_e8m0fnu":
        size = 1.0 if form.scale == "float8_e4m3fn" else 0.01
        return bits_of(jax.random.uniform(key, shape.shape, jnp.float32, size / 2, size), form.scale)
    if name != "codes":
        first, last = (5, 11) if name == "zeros" else (119, 122)
        return jax.random.randint(key, shape.shape, first, last).astype(jnp.uint8)
    kept = {"float8_e4m3fn": 0xF7, "float8_e5m2": 0xBB}.get(form.element, 0xFF)
    return jax.random.bits(key, shape.shape, jnp.uint8) & kept


def random_sizes(shape: tuple[int, ...], rows: int, rng: np.random.Generator) -> jax.Array:
    """Sizes of groups `[B, E]` of as many rows."""
    return jnp.asarray(np.stack([_group_sizes(rows, shape[-1], rng) for _ in range(shape[0])]))


def _group_sizes(rows: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes of groups. With few rows, one for each of as many groups; with many, around the mean as of a trained router. All rows are in a group."""
    if rows <= 4 * count:
        sizes = np.bincount(rng.permutation(np.arange(rows) % count), minlength=count)
    else:
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(count, 8.0)))
    return sizes.astype(np.int32)


def _shapes(problem: Problem, spec: GroupedSpec) -> dict[str, Any]:
    gathered = bool(problem.flag("gathered"))
    size = dict(problem.dims)
    size["W"] = size["N"] * (2 if spec.gated not in (None, PAIR) else 1)
    size.setdefault("L", size["M"])
    dtype, right = problem.dtype("lhs"), problem.dtype("rhs")
    is_stored, wide = right in STORED_DTYPES, wide_dtype(dtype)
    if spec.form is not None:
        (size["R"], size["S"]), size["C"] = (
            spec.form.blocks(size["W"], size["K"]),
            size["K"] * spec.form.bits // 8,
        )
        side = {"codes": "uint8", "scales": f"uint{SCALES[spec.form.scale]}"}
        side |= {"zeros": "uint8"} if spec.form.zeros else {}
        side |= {"factor": "float32"} if problem.flag("factor") else {}
    else:
        side = {"stored": right, "scale": "float32"} if is_stored else {"rhs": right}
    side |= {"bias": wide} if problem.flag("bias") else {}
    dtypes = {"lhs": dtype, "sizes": "int32"} | side
    if spec.gated == PAIR:
        dtypes |= {"up" if name == "rhs" else f"up_{name}": of for name, of in side.items()}
    dtypes |= {"rows": "int32"} if gathered else {}
    return letters_of(spec, gathered).shapes(size, dtypes, SHARED)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `M` rows, `K` and `N` columns of both sides, and `E` groups; the leading axes `B` default to 1, the rows `L` of a gathered
      left side to half of `M`.
    - `dtype`: the dtype of the left side, the result, and right sides that are not stored in 8 bits; biases are float32 (float64 with
        float64).
    - `flags`: `activation` (none by default, `silu`, `gelu`, `gelu_tanh`, `relu`), `gated` (none by default, `pair`, `halves`,
        `interleaved`), `clipped` (GPT-OSS's limit and shift, with a gate), `transpose_rhs`, `bias`, `gathered`, `stored` (none by default,
        `int8`, `float8_e4m3fn`, `float8_e5m2`), `quantised` (none by default, or a kind of [`ejkernel_eqx.quantise`][], with
        `transpose_rhs`).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(
        dims, {"B": 1, "M": None, "K": None, "N": None, "E": None, "L": max(1, dims.get("M", 2) // 2)}
    )
    switches = dict.fromkeys(("clipped", "transpose_rhs", "bias", "gathered"), SWITCH)
    choices = {"activation": ACTIVATIONS, "gated": GATED, "stored": (None, *STORED_DTYPES), **switches}
    choices |= {"quantised": (None, *KINDS)}
    options = read_flags(flags, choices)
    if options["clipped"] and options["gated"] is None:
        raise ValueError(
            "flags: expected gated with clipped=true, received none; clipped limits gate and up."
        )
    if "L" in dims and not options["gathered"]:
        raise ValueError("dims: expected no L without gathered=true; the left side has M rows.")
    names = ("activation", "gated", "transpose_rhs", "bias", "gathered")
    given: dict[str, Any] = {name: options[name] for name in names}
    given |= {"limit": options["clipped"], "up_shift": options["clipped"]}
    right, kind = options["stored"] or dtype, options["quantised"]
    if kind is not None:
        if options["stored"] or not options["transpose_rhs"]:
            raise ValueError(
                "flags: expected transpose_rhs=true and no stored with quantised, as weights are [out, in] and have their scales."
            )
        form = format_for(kind, size["K"], None)
        right = form.element
        given |= {"format": word_of(form), "factor": kind == "nvfp4"}
    problem = Problem.make(
        operation,
        dims={name: size[name] for name in ("BMLKNE" if options["gathered"] else "BMKNE")},
        dtypes={"lhs": dtype, "rhs": right, "out": dtype},
        flags=given,
        lengths=set(),
    )
    spec = spec_of(problem)
    return problem_of(operation, GroupedArrays(**_shapes(problem, spec)), spec)
