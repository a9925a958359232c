"""Problems of the norm of a sum, for its tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.normalization.core import KINDS
from ejkernel_eqx.normalization.spec import NormArrays, NormSpec
from tests.arrays import array
from tests.attention.dense import quick

Named = dict[str, Any]
SPEC = NormSpec(readers=1)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (2, 5, 12)
    dtype: str = "float32"
    branch: bool = True
    weight: bool = True


CASES = {
    "whole": Case(),
    "half": Case((3, 7), "bfloat16"),
    "no branch": Case((2, 3, 2, 8), branch=False, dtype="float16"),
    "no weight": Case((9, 16), weight=False),
    "one row": Case((33,)),
    "plain": Case((2, 3), branch=False, weight=False),
}


def make(case: Case, seed: int = 0) -> tuple[Named, tuple[Any, Any]]:
    """The float inputs of a call by name, and cotangents of the norm and the sum."""
    rng = np.random.default_rng(seed)
    row = lambda: array(rng.standard_normal(case.shape), case.dtype)
    inputs = {"x": row()} | ({"branch": row()} if case.branch else {})
    if case.weight:
        inputs["weight"] = jnp.asarray(rng.standard_normal(case.shape[-1]), "float32")
    return inputs, (row(), row())


@quick
def results(op: ejx.ResidualRMSNorm, inputs: Named, cotangents: Any) -> Named:
    """Norm and sum, and gradients under the names of their inputs."""
    (out, total), pull = jax.vjp(lambda inputs: op(**inputs), inputs)
    return {"out": out, "sum": total} | {f"d{name}": x for name, x in pull(cotangents)[0].items()}


def exact(inputs: Named, cotangents: Any) -> Named:
    """The same by the reference in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64), np.float64)
        shape = inputs["x"].shape
        rows = {name: wide(x).reshape(-1, shape[-1]) for name, x in inputs.items() if name != "weight"}
        weight = wide(inputs["weight"]) if "weight" in inputs else None
        given = {name: wide(x).reshape(-1, shape[-1]) for name, x in zip(("out", "sum"), cotangents)}
        found = _reference(SPEC, Inputs(NormArrays(**rows, weight=weight), given))
        like = {"out": shape, "sum": shape} | {name: x.shape for name, x in inputs.items()}
        return {
            name if name in ("out", "sum") else f"d{name}": np.asarray(x).reshape(like[name])
            for name, x in found.items()
        }


_reference = functools.partial(quick, static_argnums=0)(functools.partial(exact_results, KINDS[SPEC.readers]))
