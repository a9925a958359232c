"""Problems of the matmul of rows, for its tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.matmul.dense.core import KINDS
from ejkernel_eqx.matmul.dense.spec import BIASES, MatmulArrays, MatmulSpec, RESULTS, RIGHTS
from tests.arrays import array
from tests.attention.dense import quick

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (5, 40)
    columns: tuple[int, ...] = (24,)
    dtype: str = "float32"
    activation: str | None = None
    gated: bool = False
    norm: bool | None = False  # None: without a weight
    bias: bool = False
    residual: bool = False
    options: tuple[tuple[str, Any], ...] = ()


CASES = {
    "plain": Case(),
    "queries keys values": Case((2, 3, 40), (33, 17, 9), norm=True, bias=True),
    "output": Case((7, 48), (19,), "bfloat16", residual=True),
    "gate": Case((3, 50), (21, 21), "bfloat16", "silu", gated=True, norm=True),
    "clipped gate": Case(
        (3, 33), (10, 10), "float32", "silu", True, None, True, True,
        (("alpha", 1.702), ("limit", 1.0), ("up_shift", 1.0)),
    ),
    "activation": Case((1, 64), (32,), "float16", "gelu", bias=True),
    "half": Case((3, 40), (8,), "float16", norm=True),
    "one row": Case((37,), (5, 6), norm=True),
    "tanh": Case((4, 4, 16), (8,), activation="gelu_tanh", norm=True, residual=True),
}  # fmt: skip


def operation(case: Case, **options: Any) -> ejx.Matmul:
    return ejx.Matmul(case.activation, gated=case.gated, **dict(case.options), **options)


def make(case: Case, seed: int = 0) -> tuple[Named, list[Any]]:
    """The float arrays of a call by name, and cotangents of the results."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape, dtype=case.dtype: array(rng.standard_normal(shape), dtype)
    lead, features = case.shape[:-1], case.shape[-1]
    given = {"x": normal(*case.shape)}
    for right, bias, n in zip(RIGHTS, BIASES, case.columns):
        given[right] = normal(n, features) / features**0.5
        given |= {bias: normal(n, dtype="float32")} if case.bias else {}
    given |= {"norm": normal(features, dtype="float32")} if case.norm else {}
    given |= {"residual": normal(*lead, case.columns[0])} if case.residual else {}
    count = 1 if case.gated else len(case.columns)
    return given, [normal(*lead, n) for n in case.columns[:count]]


def call(op: ejx.Matmul, case: Case, given: Named) -> tuple[Any, ...]:
    """The results of a call."""
    rights = [given[name] for name in RIGHTS if name in given]
    biases = [given.get(name) for name in BIASES[: len(rights)]]
    norm = True if case.norm is None else given.get("norm", False)
    if len(rights) > 1 and not case.gated:
        return op.together(given["x"], *rights, biases=biases, norm=norm)
    return (op(given["x"], *rights, biases=biases, norm=norm, residual=given.get("residual")),)


@functools.partial(quick, static_argnums=(0, 1))
def results(op: ejx.Matmul, case: Case, given: Named, cotangents: list[Any]) -> Named:
    """Results, and gradients under the names of their arrays."""
    outs, pull = jax.vjp(lambda given: call(op, case, given), given)
    grads = pull(tuple(cotangents))[0]
    return dict(zip(RESULTS, outs)) | {f"d{name}": x for name, x in grads.items()}


def exact(case: Case, given: Named, cotangents: list[Any]) -> Named:
    """The same by the reference in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64), np.float64)
        rows = lambda x: wide(x).reshape(-1, x.shape[-1])
        arrays = {name: rows(x) if name in ("x", "residual") else wide(x) for name, x in given.items()}
        spec = MatmulSpec(case.activation, case.gated, **dict(case.options))
        eps = None if case.norm is False else 1e-6
        spec = dataclasses.replace(spec, eps=eps, count=len(cotangents))
        found = _reference(spec, Inputs(MatmulArrays(**arrays), dict(zip(RESULTS, map(rows, cotangents)))))
        like = {name: x.shape for name, x in given.items()} | {
            name: x.shape for name, x in zip(RESULTS, cotangents)
        }
        return {
            name if name in RESULTS else f"d{name}": np.asarray(x).reshape(like[name])
            for name, x in found.items()
        }


@functools.partial(quick, static_argnums=0)
def _reference(spec: MatmulSpec, inputs: Inputs) -> Named:
    return exact_results(KINDS[spec.count], spec, inputs)
