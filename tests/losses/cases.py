"""Problems of the cross entropy, for its tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.losses.arguments import resolve
from ejkernel_eqx.losses.core import CROSS_ENTROPY
from ejkernel_eqx.losses.xla import XlaConfig
from tests.attention.dense import quick

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """`lead` tokens with 8 features; `ignored` have no label, and NaN as features."""

    lead: tuple[int, ...] = (2, 9)
    vocabulary: int = 11
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    bias: bool = False
    weighted: bool = False
    ignored: int = 0
    chunk: int = 4

    def operation(self, **more: Any) -> ejx.LinearCrossEntropy:
        return ejx.LinearCrossEntropy(**dict(self.options), config=XlaConfig(self.chunk), **more)

    @property
    def reduction(self) -> str:
        return dict(self.options).get("reduction", "mean")


def make(case: Case, seed: int = 0) -> tuple[Named, np.ndarray, Any]:
    """The float inputs of a call by name, the labels, and a cotangent."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, case.vocabulary, case.lead)
    x = rng.standard_normal((*case.lead, 8))
    for at in rng.choice(labels.size, case.ignored, replace=False):
        place = np.unravel_index(at, case.lead)
        labels[place], x[place] = -1 - at % 2, np.nan
    inputs = {"x": x, "weight": rng.standard_normal((case.vocabulary, 8)) / 2}
    inputs = {name: jnp.asarray(x, case.dtype) for name, x in inputs.items()}
    if case.bias:
        inputs["bias"] = jnp.asarray(rng.standard_normal(case.vocabulary), "float32")
    if case.weighted:
        inputs["token_weights"] = jnp.asarray(rng.uniform(0, 2, case.lead), "float32")
    shape = case.lead if case.reduction == "none" else ()
    return inputs, labels, jnp.asarray(rng.uniform(0.5, 2, shape), "float32")


@quick
def results(operation: ejx.LinearCrossEntropy, inputs: Named, labels: Any, dout: Any) -> Named:
    """The loss, and gradients under the names of their inputs."""
    out, pull = jax.vjp(lambda inputs: operation(labels=labels, **inputs), inputs)
    return {"out": out} | pull(dout.astype(out.dtype))[0]


def exact(case: Case, inputs: Named, labels: Any, dout: Any) -> Named:
    """The same by the reference in float64."""
    options = case.operation().options
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64), np.float64) for name, x in inputs.items()}
        arrays = resolve(
            options, wide["x"], labels, wide["weight"], wide.get("bias"), wide.get("token_weights")
        )
        shape = arrays.labels.shape if case.reduction == "none" else ()
        cotangent = jnp.asarray(np.asarray(dout, np.float64)).reshape(shape)
        found = _reference(options.spec, Inputs(arrays, {"out": cotangent}))
        shapes = inputs | {"out": dout}
        return {name: np.asarray(x).reshape(np.shape(shapes[name])) for name, x in found.items()}


_reference = functools.partial(quick, static_argnums=0)(functools.partial(exact_results, CROSS_ENTROPY))


def _case(*lead: int, **given: Any) -> Case:
    fields = {field.name for field in dataclasses.fields(Case)}
    options = tuple((name, x) for name, x in given.items() if name not in fields)
    rest = {name: x for name, x in given.items() if name in fields}
    return Case(lead, options=options, **rest) if lead else Case(options=options, **rest)


CASES = {
    "mean": _case(ignored=4),
    "everything": _case(
        *(3, 7), bias=True, weighted=True, ignored=5, logits_soft_cap=2.0, label_smoothing=0.2, z_loss=0.1
    ),
    "sum": _case(5, reduction="sum", dtype="bfloat16", vocabulary=40),
    "none": _case(2, 2, 3, reduction="none", ignored=3, weighted=True, bias=True, z_loss=0.05),
    "none, half": _case(13, reduction="none", dtype="float16", label_smoothing=1.0),
    "one chunk": _case(chunk=64, weighted=True, dtype="float16", logits_soft_cap=5.0),
    "one token": _case(1, vocabulary=2),
    "smooth": _case(6, label_smoothing=0.5, weighted=True, reduction="sum", chunk=1),
    "all ignored": _case(3, ignored=3, weighted=True, bias=True),
}
