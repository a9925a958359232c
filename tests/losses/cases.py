"""Problems of the cross entropy, for its tests, and the formula that they are compared with."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.losses.xla import XlaConfig as XlaConfig
from tests.attention.dense import quick

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """`lead` tokens; `ignored` have no label, and NaN as features."""

    lead: tuple[int, ...] = (2, 9)
    vocabulary: int = 11
    dtype: str = "float32"
    options: Named = dataclasses.field(default_factory=dict)
    bias: bool = False
    weighted: bool = False
    ignored: int = 0
    chunk: int = 4
    features: int = 8

    def operation(self, platform: Any = "xla") -> ejx.LinearCrossEntropy:
        return ejx.LinearCrossEntropy(
            **self.options, platform=platform, config=config_of(platform, self.chunk)
        )


def config_of(platform: str, chunk: int) -> Any:
    """So many tokens in a chunk; of Triton's, small tiles."""
    if platform == "xla":
        return XlaConfig(chunk)
    from ejkernel_eqx.losses.triton.compiled import TritonConfig

    return TritonConfig(chunk + 1, chunk, 128, 1)


def make(case: Case, seed: int = 0) -> tuple[Named, np.ndarray, Any]:
    """The float inputs of a call by name, the labels, and a cotangent."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, case.vocabulary, case.lead)
    x = rng.standard_normal((*case.lead, case.features))
    for at in rng.choice(labels.size, case.ignored, replace=False):
        place = np.unravel_index(at, case.lead)
        labels[place], x[place] = -1 - at % 2, np.nan
    inputs = {
        "x": x,
        "weight": rng.standard_normal((case.vocabulary, case.features)) * (2 / case.features) ** 0.5,
    }
    inputs = {name: jnp.asarray(x, case.dtype) for name, x in inputs.items()}
    if case.bias:
        inputs["bias"] = jnp.asarray(rng.standard_normal(case.vocabulary), "float32")
    if case.weighted:
        inputs["token_weights"] = jnp.asarray(rng.uniform(0, 2, case.lead), "float32")
    shape = case.lead if case.options.get("reduction") == "none" else ()
    return inputs, labels, jnp.asarray(rng.uniform(0.5, 2, shape), "float32")


def results(operation: Any, inputs: Named, labels: Any, dout: Any) -> Named:
    """The loss, and gradients under the names of their inputs."""

    @quick
    def both(inputs, dout):
        out, pull = jax.vjp(lambda inputs: operation(labels=labels, **inputs), inputs)
        return {"out": out} | pull(dout.astype(out.dtype))[0]

    return both(inputs, dout)


def exact(case: Case, inputs: Named, labels: Any, dout: Any) -> Named:
    """The same by the formula in float64."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in inputs.items()}
        formula = functools.partial(_formula, **case.options)
        found = results(formula, wide, labels, jnp.asarray(np.asarray(dout, np.float64)))
        return {name: np.asarray(x) for name, x in found.items()}


def _formula(
    x,
    weight,
    labels,
    bias=0.0,
    token_weights=1.0,
    reduction="mean",
    logits_soft_cap=None,
    label_smoothing=0.0,
    z_loss=0.0,
) -> Any:
    real = labels >= 0
    logits = jnp.where(real[..., None], x, 0) @ weight.T + jnp.broadcast_to(
        bias, (*labels.shape, len(weight))
    )
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, jnp.where(real, labels, 0)[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * label - label_smoothing * logits.mean(-1) + z_loss * lse**2
    weights = jnp.where(real, token_weights, 0.0)
    if reduction == "none":
        return weights * losses
    total = jnp.sum(weights * losses)
    return total / jnp.where(real.any(), weights.sum(), 1.0) if reduction == "mean" else total


_EVERYTHING = dict(logits_soft_cap=2.0, label_smoothing=0.2, z_loss=0.1)
_NONE, _SMOOTH = dict(reduction="none", z_loss=0.05), dict(label_smoothing=0.5, reduction="sum")
CASES = {
    "mean": Case(ignored=4),
    "everything": Case((3, 7), bias=True, weighted=True, ignored=5, options=_EVERYTHING),
    "sum": Case((5,), options=dict(reduction="sum"), dtype="bfloat16", vocabulary=40),
    "none": Case((2, 2, 3), options=_NONE, ignored=3, weighted=True, bias=True),
    "none, half": Case((13,), options=dict(reduction="none", label_smoothing=1.0), dtype="float16"),
    "one chunk": Case(chunk=64, weighted=True, dtype="float16", options=dict(logits_soft_cap=5.0)),
    "one token": Case((1,), vocabulary=2),
    "smooth": Case((6,), options=_SMOOTH, weighted=True, chunk=1),
    # The kernel's loop over them is not unrolled.
    "many features": Case((5,), features=2056, ignored=1, dtype="bfloat16"),
    "all ignored": Case((3,), ignored=3, weighted=True, bias=True),
}
