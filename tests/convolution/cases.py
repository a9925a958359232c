"""Problems of the causal convolution: used by the tests on a CPU and on a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.convolution.arguments import resolve
from ejkernel_eqx.convolution.core import CONVOLVE
from ejkernel_eqx.convolution.spec import as_called, by_head, ConvSpec
from ejkernel_eqx.core.workload import exact_results, Inputs
from tests.arrays import array
from tests.attention.dense import quick

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    T: int = 9
    W: int = 4
    B: int = 2
    C: int = 5
    packed: tuple[Any, ...] | None = None  # ids of each row, or offsets
    initial: bool = True
    bias: bool = True
    activation: str | None = "silu"
    dtype: str = "float32"
    norm: int | None = None

    @property
    def offsets(self) -> np.ndarray | None:
        is_offsets = self.packed is not None and isinstance(self.packed[0], int)
        return np.array(self.packed, np.int32) if is_offsets else None

    @property
    def ids(self) -> np.ndarray | None:
        return None if self.packed is None or self.offsets is not None else np.array(self.packed, np.int32)

    @property
    def real(self) -> np.ndarray:
        """Which tokens are no padding, `[*, T]`."""
        if self.offsets is not None:
            tokens = np.arange(self.T)
            return (tokens >= self.offsets[0]) & (tokens < self.offsets[-1])
        return np.ones((self.B, self.T), bool) if self.ids is None else self.ids >= 0

    @property
    def packing(self) -> Named:
        given = {"cu_seqlens": self.offsets, "segment_ids": self.ids}
        return {name: None if x is None else jnp.asarray(x) for name, x in given.items()}


def make(case: Case, seed: int = 0) -> tuple[Named, tuple[Any, Any]]:
    """The float inputs of a call by name, and cotangents of its results."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    lead = () if case.offsets is not None else (case.B,)
    states = (len(case.offsets) - 1,) if case.offsets is not None else lead
    state = (*states, case.W - 1, case.C)
    inputs = {"x": normal(*lead, case.T, case.C), "weight": normal(case.C, case.W)}
    if case.bias:
        inputs["bias"] = normal(case.C)
    if case.initial:
        inputs["initial_state"] = normal(*state)
    like = lambda name: case.dtype if name in ("x", "initial_state") else "float32"
    inputs = {name: array(x, like(name)) for name, x in inputs.items()}
    dout, dfinal = (jnp.asarray(normal(*shape), case.dtype) for shape in (inputs["x"].shape, state))
    return inputs, (dout, dfinal)


def poison(case: Case, inputs: Named) -> Named:
    """NaN in all that is padding."""
    return inputs | {"x": jnp.where(case.real[..., None], inputs["x"], jnp.nan)}


@quick
def results(operation: ejx.CausalConv1d, inputs: Named, packing: Named, cotangents: Any) -> Named:
    """All results by name, gradients under the names of their inputs."""
    call = lambda inputs: operation(**{"bias": None, **inputs}, **packing)
    (out, final), pull = jax.vjp(call, inputs)
    return {"out": out, "final_state": final} | pull(cotangents)[0]


def exact(case: Case, inputs: Named, cotangents: Any) -> Named:
    """The same by the reference in float64."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64), np.float64) for name, x in inputs.items()}
        call = resolve(
            wide["x"], wide["weight"], wide.get("bias"), wide.get("initial_state"), *case.packing.values()
        )
        dout, dfinal = (jnp.asarray(np.asarray(x, np.float64), np.float64) for x in cotangents)
        axis = () if case.offsets is not None else -3
        named = {"out": dout, "final_state": jnp.expand_dims(dfinal, axis)}
        spec = ConvSpec(case.activation, case.norm)
        found = _reference(spec, Inputs(by_head(call.arrays, spec), as_called(named, spec)))
        like = inputs | {"out": cotangents[0], "final_state": cotangents[1]}
        return {name: np.asarray(x).reshape(np.shape(like[name])) for name, x in found.items()}


_reference = functools.partial(quick, static_argnums=0)(functools.partial(exact_results, CONVOLVE))


IDS = {
    "right padding": ((0,) * 6 + (-1,) * 3, (0,) * 9),
    "left padding": ((-1,) * 4 + (0,) * 5, (-1,) + (0,) * 8),
    "padding inside": ((0, 0, -1, -1, 0, 1, -1, 1, 1), (-1, 2, -1, 2, -1, -1, 2, 2, 2)),
    "short segments": ((0, 1, 2, 2, 3, 4, 4, 4, 4), (5, 5, 6, 7, 7, 7, 0, 0, 1)),
    "nothing but padding": ((-1,) * 9, (3,) * 9),
}
CASES = {
    "plain": Case(),
    "no state": Case(T=17, initial=False, bias=False, activation=None, C=19),
    "one token": Case(T=1),
    "two tokens": Case(T=2, dtype="bfloat16"),
    "W - 1 tokens": Case(T=3, activation=None),
    "one block": Case(T=8, W=2, dtype="float16"),
    "wide": Case(T=11, W=6, initial=False),
    "width 1": Case(T=7, W=1),
    "offsets": Case(T=12, packed=(0, 5, 5, 6, 10)),
    "offsets from 2": Case(T=9, W=3, packed=(2, 3, 9), activation=None),
    "heads": Case(T=17, C=8, norm=4),
    "heads without a state": Case(T=11, C=24, norm=8, initial=False, bias=False, activation=None),
    "heads, 16 bits": Case(T=10, C=4, norm=4, dtype="bfloat16"),
    "heads, offsets": Case(T=12, C=8, norm=2, packed=(0, 5, 5, 6, 10)),
    "heads, padding inside": Case(C=8, norm=4, packed=IDS["padding inside"]),
} | {
    name: Case(packed=ids, initial=n % 2 == 0 or "left" in name) for n, (name, ids) in enumerate(IDS.items())
}
