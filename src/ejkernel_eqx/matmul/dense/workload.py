"""The tuner's view of a matmul of rows: representative work, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.letters import wide_dtype
from ...core.words import read_flags, read_sizes, SWITCH
from ...core.workload import workload_of
from ...dispatch import Implementation, Problem, Workload
from ...quantised import QuantFormat
from ...quantised.format import form_of, LARGEST, SCALES, word_of
from ...quantised.numbers import bits_of
from ...quantised.quantise import format_for
from ...quantised.quantise import KINDS as KINDS_OF_CODES
from ..spec import ACTIVATIONS
from .core import KINDS, problem_of
from .spec import (
    BIASES,
    CODED,
    columns_of,
    letters_of,
    MatmulArrays,
    MatmulSpec,
    RIGHTS,
    SHARED,
)


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec, size = spec_of(problem), dict(problem.dims)
    flops = 2.0 * size["B"] * size["M"] * size["K"] * sum(columns_of(problem))
    make = functools.partial(make_arrays, problem, spec)
    return workload_of(KINDS[spec.count], implementation, spec, make, flops=flops)


def spec_of(problem: Problem) -> MatmulSpec:
    """The static half of the problem's calls."""
    activation, gated = problem.flag("activation"), bool(problem.flag("gated"))
    return MatmulSpec(
        None if activation is None else str(activation),
        gated,
        eps=1e-6 if problem.flag("norm") else None,
        count=1 if gated else len(columns_of(problem)),
        format=None if problem.flag("weights") is None else form_of(str(problem.flag("weights"))),
    )


def make_arrays(problem: Problem, spec: MatmulSpec, seed: int) -> MatmulArrays:
    shapes = _shapes(problem, spec)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    values = {name: jax.random.normal(key, x.shape, x.dtype) for key, (name, x) in zip(keys, shapes.items())}
    # Results as large as what they are added to.
    values |= {name: values[name] * problem.dim("K") ** -0.5 for name in RIGHTS if name in values}
    if spec.format is not None:
        for i, fields in enumerate(CODED[: len(columns_of(problem))]):
            values |= _random_codes(
                values.pop(RIGHTS[i]), fields, spec.format, jax.random.fold_in(keys[0], i)
            )
    return MatmulArrays(**values)


def _random_codes(right: Array, fields: tuple[str, ...], form: QuantFormat, key: Array) -> dict[str, Array]:
    """The arrays of a quantised right side by their names, of any codes that are numbers."""
    codes, scales, zeros, _ = fields
    rows, columns = right.shape
    bits = jax.random.bits(key, (rows, columns * form.bits // 8), jnp.uint8)
    # Floats without the codes of NaN and infinities.
    bits = bits & 0x77 if form.element.startswith("float8") else bits
    blocks = form.blocks(rows, columns)
    scale = 1 / (LARGEST[form.element] * columns**0.5)
    scale = 120 if form.scale == "float8_e8m0fnu" else bits_of(jnp.asarray(scale), form.scale)
    values = {codes: bits, scales: jnp.full(blocks, scale, f"uint{SCALES[form.scale]}")}
    return values | ({zeros: jnp.full(blocks, 7, jnp.uint8)} if form.zeros else {})


def _shapes(problem: Problem, spec: MatmulSpec) -> dict[str, Any]:
    dtype, count = problem.dtype("x"), len(columns_of(problem))
    wide = wide_dtype(dtype)
    dtypes = {"x": dtype} | dict.fromkeys(RIGHTS[:count], dtype)
    dtypes |= dict.fromkeys(BIASES[:count], wide) if problem.flag("bias") else {}
    dtypes |= {"norm": wide} if problem.flag("norm") else {}
    dtypes |= {"residual": dtype} if problem.flag("residual") else {}
    sizes = {f"b{name}": n for name, n in problem.dims} | dict(problem.dims)
    return letters_of(spec, False).shapes(sizes, dtypes, SHARED)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `M` rows, `K` features and `N` columns of the first result; `N1` and `N2` of others; the leading axes `B` default to 1.
    - `dtype`: the dtype of all arrays but biases and the weight of the norm, which are float32 (float64 with float64).
    - `flags`: `activation` (none by default, `silu`, `gelu`, `gelu_tanh`, `relu`), `gated`, `norm`, `bias` and `residual`; `weights`, the
      format of quantised right sides: none by default, or a name that `ejkernel_eqx.quantise` takes.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    gated = flags.get("gated") in (True, "true")
    others = {name: dims[name] for name in ("N1", "N2") if name in dims}
    size = read_sizes(dims, {"B": 1, "M": None, "K": None, "N": None, **others})
    switches = dict.fromkeys(("gated", "norm", "bias", "residual"), SWITCH)
    options = read_flags(flags, {"activation": ACTIVATIONS, **switches, "weights": ("none", *KINDS_OF_CODES)})
    kind = options.pop("weights")
    if kind != "none":
        options["weights"] = word_of(format_for(kind, size["K"], None))
    if (gated or options["residual"]) and others:
        raise ValueError("dims: expected no N1 or N2 with gated or residual, which have one result.")
    columns = [size["N"], *([size["N"]] if gated else others.values())]
    sizes = {name: size[name] for name in "BMK"} | {f"N{i}": n for i, n in enumerate(columns)}
    problem = Problem.make(operation, dims=sizes, dtypes={"x": dtype}, flags=options, lengths=set())
    spec = spec_of(problem)
    arrays = MatmulArrays(**_shapes(problem, spec))
    if spec.format is not None:
        arrays = jax.eval_shape(lambda: make_arrays(problem, spec, 0))
    return problem_of(operation, arrays, spec)
