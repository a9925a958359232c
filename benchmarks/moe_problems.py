"""The grouped matmuls that are measured: sizes, inputs, the operation and its peers in JAX, and float32 results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks.prepare import UNTUNED
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.matmul import reference
from ejkernel_eqx.matmul.spec import GroupedArrays, GroupedSpec, PAIR
from ejkernel_eqx.paged.cache.quantise import quantise
from ejkernel_eqx.tuning.check import all_errors

Arrays = dict[str, Array]
LEFT, RIGHT = "d_lhs", "d_rhs"
DIRECTIONS = ("forward", LEFT, RIGHT)


@dataclasses.dataclass(frozen=True)
class MoeProblem:
    """`M` rows in `E` groups by right sides `[E, K, N]`.

    `skewed`: the first group has half of the rows. `gated`: SwiGLU of two right sides. `top_k`: the rows are gathered from `M / top_k` tokens.
    `stored`: the dtype of right sides in 8 bits. `decode`: every group has a row, and only the forward pass is measured.
    """

    M: int
    K: int
    N: int
    E: int
    skewed: bool = False
    gated: bool = False
    top_k: int = 0
    stored: str = ""
    decode: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        words = [f"M{self.M} K{self.K} N{self.N} E{self.E}"]
        words += [word for word in ("skewed", "gated") if getattr(self, word)]
        words += [f"gathered by {self.top_k}"] if self.top_k else []
        return " ".join(
            [*words, *filter(None, (self.stored, "" if self.dtype == "bfloat16" else self.dtype))]
        )

    @property
    def is_plain(self) -> bool:
        """Whether peers have it: one right side, rows in order, nothing stored in 8 bits."""
        return not (self.gated or self.top_k or self.stored)

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[:1] if self.decode or self.stored else DIRECTIONS

    @property
    def flops(self) -> float:
        """Of any one direction."""
        return 2.0 * self.M * self.K * self.N * (2 if self.gated else 1)


class Inputs(NamedTuple):
    """`learned`: `lhs`, `rhs` and perhaps `up`; `constants`: sizes, indices, and right sides in 8 bits with scales; the cotangent of the output."""

    learned: Arrays
    constants: Arrays
    cotangent: Array


def make_inputs(problem: MoeProblem, seed: int = 0) -> Inputs:
    p, keys = problem, iter(jax.random.split(jax.random.key(seed), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    rng = np.random.default_rng(seed)
    rows = p.M // p.top_k if p.top_k else p.M
    learned = {"lhs": normal(rows, p.K).astype(p.dtype)}
    constants = {"group_sizes": jnp.asarray(group_sizes(p, rng))}
    for name in ("rhs", "up") if p.gated else ("rhs",):
        w = normal(p.E, p.K, p.N) * p.K**-0.5
        if p.stored:
            stored, constants[f"{name}_scale"] = quantise(jnp.swapaxes(w, 1, 2), p.stored)
            constants[name] = jnp.swapaxes(stored, 1, 2)
        else:
            learned[name] = w.astype(p.dtype)
    if p.top_k:
        constants["row_indices"] = jnp.asarray(rng.permutation(np.arange(p.M) % rows).astype(np.int32))
    return Inputs(learned, constants, normal(p.M, p.N).astype(p.dtype))


def group_sizes(problem: MoeProblem, rng: np.random.Generator) -> np.ndarray:
    """All rows are in a group."""
    rows, count = problem.M, problem.E
    if problem.decode:
        sizes = np.bincount(np.arange(rows) % count, minlength=count)
    elif problem.skewed:
        sizes = np.concatenate([[rows // 2], np.full(count - 1, (rows - rows // 2) // (count - 1))])
        sizes[-1] += rows - sizes.sum()
    else:
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(count, 16.0)))
    return sizes.astype(np.int32)


Forward = Callable[[Arrays, Arrays], Array]


def ours(problem: MoeProblem, platform: ejx.PlatformLike | None) -> Forward:
    """Our operation as a function of the learned inputs and the constants."""
    operation = ejx.GroupedMatmul("silu" if problem.gated else None, platform=platform)
    return lambda learned, constants: operation(**learned, **constants)


def ragged_dot(learned: Arrays, constants: Arrays) -> Array:
    """JAX's own."""
    return lax.ragged_dot(learned["lhs"], learned["rhs"], constants["group_sizes"])


def direction_of(forward: Forward, direction: str) -> Callable[[Inputs], Arrays]:
    """The measured function: the output, or the gradient of one side alone."""

    def only_forward(inputs: Inputs) -> Arrays:
        return {"out": forward(inputs.learned, inputs.constants)}

    def gradient(inputs: Inputs) -> Arrays:
        names = ("lhs",) if direction == LEFT else tuple(n for n in inputs.learned if n != "lhs")
        some = {name: inputs.learned[name] for name in names}
        call = lambda some: forward({**inputs.learned, **some}, inputs.constants)
        return jax.vjp(call, some)[1](inputs.cotangent)[0]

    return only_forward if direction == "forward" else gradient


def expected_results(problem: MoeProblem, inputs: Inputs) -> dict[str, Arrays]:
    """The results of the reference in float32, by direction."""
    with jax.default_matmul_precision("highest"):
        return _expected_results(problem, inputs)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _expected_results(problem: MoeProblem, inputs: Inputs) -> dict[str, Arrays]:
    spec = GroupedSpec("float32", "silu" if problem.gated else None, PAIR if problem.gated else None)
    constants = inputs.constants
    arrays = GroupedArrays(
        inputs.learned["lhs"],
        constants["group_sizes"],
        rows=constants.get("row_indices"),
        stored=constants.get("rhs"),
        scale=constants.get("rhs_scale"),
        up_stored=constants.get("up"),
        up_scale=constants.get("up_scale"),
    )

    def forward(learned: Arrays) -> Array:
        return reference.multiply(arrays._replace(**learned), spec)["out"]

    learned, cotangent = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs.learned, inputs.cotangent))
    out, pull = jax.vjp(forward, learned)
    gradients = pull(cotangent)[0] if len(problem.directions) > 1 else {}
    right = {name: x for name, x in gradients.items() if name != "lhs"}
    return {"forward": {"out": out}, LEFT: {n: x for n, x in gradients.items() if n == "lhs"}, RIGHT: right}


def errors_of(
    problem: MoeProblem, direction: str, results: Mapping[str, Any], expected: Mapping[str, Arrays]
) -> tuple[dict[str, float], str | None]:
    """The relative RMS error of each result, measured as in the tuner, and the reason if one is wrong (otherwise `None`)."""
    kind = "forward" if direction == "forward" else "gradient"
    allowed: dict[str, Tolerance] = dict.fromkeys(results, TOLERANCES[problem.dtype][kind])
    return all_errors(results, expected[direction], allowed)


P = MoeProblem
MIXTRAL, DEEPSEEK = P(16384, 4096, 14336, 8), P(32768, 2048, 1408, 64)
DECODE = P(64, 2048, 1408, 64, decode=True)
ANCHORS = (
    MIXTRAL,
    DEEPSEEK,
    DECODE,
    dataclasses.replace(MIXTRAL, skewed=True),
    dataclasses.replace(DEEPSEEK, skewed=True),
    dataclasses.replace(DEEPSEEK, gated=True),
    dataclasses.replace(DEEPSEEK, gated=True, top_k=8),
    dataclasses.replace(MIXTRAL, gated=True),
    dataclasses.replace(DECODE, gated=True),
    dataclasses.replace(DECODE, stored="int8"),
    dataclasses.replace(DECODE, stored="float8_e4m3fn"),
    P(16384, 2048, 768, 128),
    P(8192, 2880, 2880, 32, gated=True),
)
CPU = (
    P(512, 256, 512, 8, dtype="float32"),
    P(512, 256, 512, 8, skewed=True, dtype="float32"),
    P(512, 256, 512, 8, gated=True, top_k=2, dtype="float32"),
    P(8, 256, 512, 64, decode=True, dtype="float32"),
)
TINY = (
    P(24, 8, 16, 3, dtype="float32"),
    P(24, 8, 16, 3, skewed=True, dtype="float32"),
    P(24, 8, 16, 3, gated=True, top_k=2, dtype="float32"),
    P(4, 8, 16, 4, decode=True, stored="int8", dtype="float32"),
)
