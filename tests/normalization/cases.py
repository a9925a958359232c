"""Problems of the gated RMS norm: used by the tests on a CPU and on a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.normalization.arguments import resolve
from ejkernel_eqx.normalization.core import NORMALIZE
from ejkernel_eqx.normalization.spec import NormSpec
from tests.attention.dense import quick

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (2, 5, 12)
    activation: str = "silu"
    norm_before_gate: bool = False
    group_size: int | None = None
    gate: bool = True
    weight: int | None = -1  # its size; -1: all features
    dtype: str = "float32"

    @property
    def spec(self) -> NormSpec:
        return NormSpec(self.activation, self.norm_before_gate)

    def operation(self, platform: ejx.PlatformLike) -> ejx.GatedRMSNorm:
        return ejx.GatedRMSNorm(self.activation, self.norm_before_gate, self.group_size, platform=platform)


def make(case: Case, seed: int = 0) -> tuple[Named, Any]:
    """The float inputs of a call by name, and a cotangent."""
    rng = np.random.default_rng(seed)
    inputs = {"x": rng.standard_normal(case.shape)}
    if case.gate:
        inputs["z"] = 2 * rng.standard_normal(case.shape)
    inputs = {name: jnp.asarray(x, case.dtype) for name, x in inputs.items()}
    if case.weight is not None:
        size = case.shape[-1] if case.weight == -1 else case.weight
        inputs["weight"] = jnp.asarray(rng.standard_normal(size), "float32")
    return inputs, jnp.asarray(rng.standard_normal(case.shape), case.dtype)


@quick
def results(operation: ejx.GatedRMSNorm, inputs: Named, dout: Any) -> Named:
    """The output, and gradients under the names of their inputs."""
    out, pull = jax.vjp(lambda inputs: operation(**inputs), inputs)
    return {"out": out} | pull(dout)[0]


def exact(case: Case, inputs: Named, dout: Any) -> Named:
    """The same by the reference in float64."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64), np.float64) for name, x in inputs.items()}
        arrays = resolve(wide["x"], wide.get("z"), wide.get("weight"), case.group_size)
        cotangent = jnp.asarray(np.asarray(dout, np.float64)).reshape(arrays.x.shape)
        found = _reference(case.spec, Inputs(arrays, {"out": cotangent}))
        shapes = inputs | {"out": dout}
        return {name: _summed(np.asarray(x), np.shape(shapes[name])) for name, x in found.items()}


_reference = functools.partial(quick, static_argnums=0)(functools.partial(exact_results, NORMALIZE))


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A gradient of a weight for each group, where it was one for all."""
    return x.reshape(shape) if x.size == np.prod(shape) else x.sum(0).reshape(shape)


CASES = {
    "gate first": Case(),
    "norm first": Case(norm_before_gate=True),
    "sigmoid": Case(activation="sigmoid", shape=(3, 7), dtype="bfloat16"),
    "norm first, sigmoid": Case((2, 3, 2, 8), "sigmoid", True),
    "groups": Case((2, 5, 24), group_size=8),
    "groups, one weight": Case((5, 24), norm_before_gate=True, group_size=8, weight=8, dtype="float16"),
    "no gate": Case(gate=False),
    "no weight": Case((9, 16), weight=None, norm_before_gate=True),
    "one row": Case((33,)),
    "plain": Case((2, 3), gate=False, weight=None),
}
