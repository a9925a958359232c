"""Problems of the grouped matmul: used by the tests on a CPU and on a GPU."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.matmul.arguments import resolve, RightSide
from ejkernel_eqx.matmul.core import GROUPED
from ejkernel_eqx.matmul.workload import example_problem as example_problem
from ejkernel_eqx.matmul.workload import make_arrays as make_arrays
from ejkernel_eqx.matmul.workload import spec_of as spec_of
from ejkernel_eqx.paged.cache.quantise import quantise
from tests.arrays import array
from tests.attention.dense import quick

Named = dict[str, Any]
CONSTANTS = ("group_sizes", "row_indices", "rhs_scale", "up_scale")


@dataclasses.dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...] | tuple[tuple[int, ...], ...] = (3, 0, 5, 1)
    M: int = 12
    K: int = 10
    N: int = 7
    dtype: str = "float32"
    activation: str | None = None
    gated: str | None = None
    clipped: bool = False
    bias: bool = False
    transpose: bool = False
    gathered: int | None = None  # rows of lhs
    stored: str | None = None
    out: str | None = None

    @property
    def options(self) -> Named:
        found: Named = dict(
            activation=self.activation, transpose_rhs=self.transpose, preferred_element_type=self.out
        )
        found |= dict(gate_up=self.gated) if self.gated in ("halves", "interleaved") else {}
        return found | (dict(alpha=1.702, limit=1.5, up_shift=1.0) if self.clipped else {})

    def operation(self, platform: ejx.PlatformLike, **options: Any) -> ejx.GroupedMatmul:
        return ejx.GroupedMatmul(**self.options, platform=platform, **options)

    @property
    def lead(self) -> tuple[int, ...]:
        return np.shape(self.sizes)[:-1]


def make(case: Case, seed: int = 0) -> tuple[Named, Any]:
    """The arguments of a call by name, and a cotangent."""
    rng = np.random.default_rng(seed)
    sizes, lead = np.asarray(case.sizes, np.int32), case.lead
    count, width = sizes.shape[-1], case.N * (2 if case.gated in ("halves", "interleaved") else 1)
    rows = case.M if case.gathered is None else case.gathered
    normal = lambda *shape: rng.standard_normal(shape)
    wide = "float64" if case.dtype == "float64" else "float32"
    given: Named = {"lhs": array(normal(*lead, rows, case.K), case.dtype)}

    def side(name: str, scale: str, bias: str) -> Named:
        w = normal(count, case.K, width) / np.sqrt(case.K)
        found: Named = {}
        if case.stored is None:
            w = array(w, case.dtype)
        else:
            stored, found[scale] = quantise(jnp.asarray(w.swapaxes(1, 2), jnp.float32), case.stored)
            w = stored.swapaxes(1, 2)
        found[name] = w.swapaxes(1, 2) if case.transpose else w
        return found | ({bias: array(normal(count, width), wide)} if case.bias else {})

    given |= side("rhs", "rhs_scale", "bias")
    given |= side("up", "up_scale", "up_bias") if case.gated == "pair" else {}
    given["group_sizes"] = jnp.asarray(sizes)
    if case.gathered is not None:
        given["row_indices"] = jnp.asarray(rng.integers(0, rows, (*lead, case.M)), jnp.int32)
    return given, array(normal(*lead, case.M, case.N), case.out or case.dtype)


def learned(case: Case, given: Named) -> Named:
    constants = {*CONSTANTS, *(("rhs", "up") if case.stored else ())}
    return {name: x for name, x in given.items() if name not in constants}


@functools.partial(quick, static_argnums=(0, 1))
def results(case: Case, operation: ejx.GroupedMatmul, given: Named, dout: Any) -> Named:
    """The output, and gradients under the names of their arguments."""
    out, pull = jax.vjp(lambda some: operation(**{**given, **some}), learned(case, given))
    return {"out": out} | pull(dout)[0]


def resolved(case: Case, given: Named) -> tuple[Any, Any]:
    """The arrays and the spec of a call, all floats in float64."""
    op = case.operation("xla")
    wide: Any = lambda x: jnp.asarray(x).astype(jnp.float64)
    side = lambda *names: RightSide(*(given.get(name) for name in names))
    arrays, spec = resolve(
        given["lhs"],
        side("rhs", "bias", "rhs_scale"),
        side("up", "up_bias", "up_scale"),
        given["group_sizes"],
        given.get("row_indices"),
        op.spec,
        op.preferred_element_type,
    )
    converted = {
        n: x if n in ("sizes", "rows") else wide(x) for n, x in arrays._asdict().items() if x is not None
    }
    return type(arrays)(**converted), spec


def reference_of(case: Case, given: Named) -> Any:
    """The output by the reference in float64, inside `jax.enable_x64`."""
    arrays, spec = resolved(case, given)
    return GROUPED.reference(arrays, spec)["out"]


def exact(case: Case, given: Named, dout: Any) -> Named:
    """The output and the gradients by the reference in float64."""
    with jax.enable_x64(True):
        arrays, spec = resolved(case, given)
        found = _reference(spec, Inputs(arrays, {"out": array(dout, np.float64)}))
        return {name: np.asarray(x) for name, x in found.items()}


_reference = functools.partial(quick, static_argnums=0)(functools.partial(exact_results, GROUPED))


def formula(case: Case, given: Named) -> np.ndarray:
    """The output as one writes it down, row by row, in numpy and float64."""
    exact = {name: np.asarray(x).astype(np.float64) for name, x in given.items()}
    lead = case.lead
    out = np.zeros((*lead, case.M, case.N))
    for at in np.ndindex(*lead):
        row = 0
        for g, size in enumerate(np.asarray(given["group_sizes"])[at]):
            for m in range(row, row + int(size)):
                place = m if case.gathered is None else int(np.asarray(given["row_indices"])[at][m])
                out[*at, m] = _row(case, exact, exact["lhs"][*at, place], g)
            row += int(size)
    return out


def _row(case: Case, exact: Named, x: np.ndarray, g: int) -> np.ndarray:
    def product(name: str, scale: str, bias: str) -> np.ndarray:
        w = exact[name][g].T if case.transpose else exact[name][g]
        z = x @ w * (exact[scale][g] if scale in exact else 1.0)
        return z + (exact[bias][g] if bias in exact else 0.0)

    z = product("rhs", "rhs_scale", "bias")
    if case.gated is None:
        return _activated(case, z)
    if case.gated == "pair":
        gate, up = z, product("up", "up_scale", "up_bias")
    else:
        gate, up = (z[: case.N], z[case.N :]) if case.gated == "halves" else (z[0::2], z[1::2])
    if case.clipped:
        return _activated(case, np.minimum(gate, 1.5)) * (np.clip(up, -1.5, 1.5) + 1.0)
    return _activated(case, gate) * up


def _activated(case: Case, z: np.ndarray) -> np.ndarray:
    if case.activation == "silu":
        return z / (1 + np.exp(-z * (1.702 if case.clipped else 1.0)))
    if case.activation == "gelu":
        return np.asarray([v * (1 + math.erf(v / np.sqrt(2))) / 2 for v in z])
    if case.activation == "gelu_tanh":
        return z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2
    return np.maximum(z, 0) if case.activation == "relu" else z


CASES = {
    "plain": Case(),
    "bfloat16": Case(dtype="bfloat16", out="float32"),
    "float16": Case(dtype="float16", K=33, activation="relu"),
    "bias": Case(bias=True, activation="gelu_tanh"),
    "transposed": Case(transpose=True, activation="gelu", bias=True),
    "one group has all": Case(sizes=(0, 12, 0)),
    "no group has any": Case(sizes=(0, 0, 0), bias=True),
    "more groups than rows": Case(sizes=(0, 1, 0, 0, 0, 1, 0, 0), M=2),
    "one row": Case(sizes=(0, 0, 1), M=1, activation="silu"),
    "SwiGLU": Case(activation="silu", gated="pair", bias=True),
    "SwiGLU in halves": Case(activation="silu", gated="halves", transpose=True, bias=True),
    "GPT-OSS": Case(activation="silu", gated="interleaved", clipped=True, bias=True, dtype="bfloat16"),
    "clipped pair": Case(activation="silu", gated="pair", clipped=True),
    "bilinear": Case(gated="pair"),
    "gathered": Case(gathered=5, M=14, sizes=(3, 0, 7, 1)),
    "gathered, gated": Case(gathered=20, activation="silu", gated="halves"),
    "int8": Case(stored="int8", bias=True, dtype="bfloat16"),
    "float8": Case(stored="float8_e4m3fn", gated="pair", activation="silu", transpose=True),
    "float8 of five exponents": Case(stored="float8_e5m2", gathered=6, dtype="float16"),
    "float8 with small scales": Case(
        (9, 16, 11, 14, 18, 14), 98, 16, 26, "float16", "silu", "pair", bias=True, stored="float8_e5m2"
    ),
    "leading axes": Case(sizes=((3, 0, 5, 1), (0, 0, 12, 0), (1, 1, 1, 1)), bias=True),
    "leading axes, gathered": Case(
        sizes=((3, 0), (1, 9)), gathered=4, activation="silu", gated="interleaved"
    ),
}
