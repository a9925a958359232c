"""The one list of problems of the selective scan: tests of every platform draw on it."""

import dataclasses
import functools
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ejkernel_eqx.selective_scan import reference, samples
from ejkernel_eqx.selective_scan.example import example_problem
from ejkernel_eqx.selective_scan.spec import FLOATS, PART, ScanArrays, ScanSpec, SHARED
from tests.arrays import array
from tests.recurrence import cases as recurrences
from tests.tolerances import assert_close

__all__ = ["PART", "SHARED", "example_problem", "samples"]  # what the room's tests share, too
RATES = (-1e-6, -1.0, -50.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem; `rates` is one number for all, "usual", or "mixed" (each of RATES, anywhere)."""

    name: str = "plain"
    B: int = 2
    T: int = 21
    I: int = 12
    N: int = 5
    G: int = 1
    softplus: bool = False
    D: bool = False
    z: bool = False
    dt_bias: bool = False
    rates: str | float = "usual"
    packing: str | None = None  # "segments", "offsets", or "many": more sequences than tokens
    initial_state: bool = False
    state_dtype: str = "float32"
    dtype: str = "float32"

    @property
    def spec(self) -> ScanSpec:
        return ScanSpec(self.softplus, self.state_dtype)


Result = recurrences.Result


def make(case: Case, seed: int = 0) -> tuple[ScanArrays, ScanSpec]:
    """The problem's arrays, the same for the same case and seed."""
    rng = np.random.default_rng([seed, zlib.crc32(repr(case).encode())])
    wide = "float64" if case.dtype == "float64" else "float32"

    def normal(*shape: int, dtype: str = case.dtype) -> Array:
        return jnp.asarray(rng.standard_normal(shape).astype(dtype), dtype)

    tokens = (case.B, case.T, case.I)
    steps = normal(*tokens) if case.softplus else jnp.abs(normal(*tokens)) / 2
    arrays = ScanArrays(
        x=normal(*tokens),
        dt=steps,
        A=jnp.asarray(_rates(case, rng), wide),
        B=normal(case.B, case.T, case.G, case.N),
        C=normal(case.B, case.T, case.G, case.N),
        D=normal(case.I, dtype=wide) if case.D else None,
        z=normal(*tokens) if case.z else None,
        dt_bias=normal(case.I, dtype=wide) / 4 if case.dt_bias else None,
    )
    if arrays.dt_bias is not None and not case.softplus:
        # A step below zero would let the state grow from token to token.
        arrays = arrays._replace(dt_bias=jnp.abs(arrays.dt_bias))
    if case.packing == "segments":
        arrays = arrays._replace(starts=recurrences.starts_of(case, rng))
    elif case.packing is not None:
        arrays = arrays._replace(offsets=recurrences.offsets_of(case, rng))
    if case.initial_state:
        arrays = arrays._replace(initial_state=normal(*state_shape(case, arrays), dtype=case.state_dtype))
    return arrays, case.spec


def state_shape(case: Case, arrays: ScanArrays) -> tuple[int, ...]:
    count = () if arrays.offsets is None else (arrays.offsets.shape[-1] - 1,)
    return case.B, *count, case.I, case.N


def _rates(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = case.I, case.N
    if case.rates == "usual":
        return -rng.gamma(1.0, 1.0, shape)
    if case.rates == "mixed":
        return rng.choice(RATES, shape)
    assert not isinstance(case.rates, str), case.rates
    return np.full(shape, case.rates)


def in_sequence(case: Case, arrays: ScanArrays) -> np.ndarray:
    """`[B, T, 1]`: the tokens whose outputs count. What a kernel gives for the others is masked by its caller."""
    return recurrences.in_sequence(case, arrays)[..., 0]


def padded(case: Case, arrays: ScanArrays) -> ScanArrays:
    """As the operation gives them: tokens of no sequence are padding."""
    seen = jnp.asarray(in_sequence(case, arrays))
    hide = lambda x, value=0.0: jnp.where(
        seen.reshape(*seen.shape, *(1,) * (x.ndim - 3)), x, jnp.asarray(value, x.dtype)
    )
    z = None if arrays.z is None else hide(arrays.z)
    return arrays._replace(
        x=hide(arrays.x), dt=hide(arrays.dt, -jnp.inf), B=hide(arrays.B), C=hide(arrays.C), z=z
    )


def cotangents(case: Case, seed: int = 1) -> tuple[Array, Array]:
    """For the output and for the final state."""
    rng = np.random.default_rng(seed)
    arrays, _ = make(case)
    dout = rng.standard_normal(arrays.x.shape) * in_sequence(case, arrays)
    dstate = rng.standard_normal(state_shape(case, arrays))
    return array(dout, case.dtype), array(dstate, case.state_dtype)


def differentiated(function: Any, arrays: ScanArrays, dout: Array, dstate: Array) -> Result:
    """Results and gradients of `function(arrays) -> (out, final_state)` by JAX."""
    floats = {name: x for name in FLOATS if (x := getattr(arrays, name)) is not None}
    (out, state), pull = jax.vjp(lambda floats: function(arrays._replace(**floats)), floats)
    return Result(out, state, pull((dout, dstate))[0])


@functools.partial(jax.jit, static_argnums=3)
def _run_reference(arrays: ScanArrays, dout: Array, dstate: Array, spec: ScanSpec) -> Result:
    return differentiated(lambda arrays: reference.scan(arrays, spec), arrays, dout, dstate)


def run_reference(case: Case) -> Result:
    """The oracle, in float64 whatever the problem's dtype."""
    arrays, spec = make(case)
    given = (padded(case, arrays), *cotangents(case))
    with jax.enable_x64(True):
        double = lambda x: x if x.dtype == jnp.int32 else jnp.asarray(np.asarray(x, np.float64), np.float64)
        wide = jax.tree.map(double, given)
        result = _run_reference(*wide, dataclasses.replace(spec, state_dtype="float64"))
        return jax.tree.map(np.asarray, result)


def only(seen: np.ndarray, x: Any) -> np.ndarray:
    """`x` where it is looked at, else zero. Elsewhere stands what the memory held before: no conversion of such bits may be tried, as
    those of a signaling NaN are an invalid operation."""
    x = np.asarray(x)
    return np.where(seen, x, np.zeros((), x.dtype))


def assert_agrees(case: Case, actual: Result) -> None:
    """Every result within the tolerance table; 16-bit states count as such."""
    arrays, exact = make(case)[0], run_reference(case)
    seen = in_sequence(case, arrays)
    states = case.dtype if case.state_dtype == "float32" else case.state_dtype
    assert actual.out.dtype == case.dtype and actual.final_state.dtype == case.state_dtype
    assert_close(only(seen, actual.out), only(seen, exact.out), case.dtype, "forward", name="out")
    assert_close(actual.final_state, exact.final_state, states, "forward", name="final state")
    assert actual.grads.keys() == exact.grads.keys()
    for name, x in actual.grads.items():
        assert x.shape == getattr(arrays, name).shape and x.dtype == getattr(arrays, name).dtype, name
        dtype = states if name == "initial_state" else case.dtype
        if name in ("x", "dt", "z", "B", "C"):
            x = only(seen.reshape(*seen.shape, *(1,) * (x.ndim - 3)), x)
        assert_close(x, exact.grads[name], dtype, "gradient", name=f"gradient of {name}")


ALL: Any = dict(softplus=True, D=True, z=True, dt_bias=True, initial_state=True)
PLAIN = Case()
EVERYTHING = Case("everything", **ALL)
CASES = (
    PLAIN,
    EVERYTHING,
    Case("segments", packing="segments", **ALL),
    Case("segments, plain", packing="segments", dt_bias=True, T=40),
    Case("offsets", packing="offsets", B=1, T=40, **ALL),
    Case("many sequences", packing="many", initial_state=True, T=6),
    Case("groups", G=3, N=4, z=True),
    Case("groups of packed", G=2, packing="offsets", D=True, initial_state=True),
    Case("one state", N=1, softplus=True, dt_bias=True),
    Case("many states", N=33, I=3, B=1, initial_state=True),
    Case("no decay", rates=-1e-6, initial_state=True, D=True),
    Case("strong decay", rates=-50.0, initial_state=True, T=9),
    Case("mixed decay", rates="mixed", initial_state=True, z=True),
    Case("bias without softplus", dt_bias=True, D=True, packing="offsets"),
    Case("bfloat16", dtype="bfloat16", **ALL),
    Case("float16", dtype="float16", **ALL),
    Case("bfloat16 states", dtype="bfloat16", state_dtype="bfloat16", packing="offsets", **ALL),
)


def over(cases: Iterable[Case], *quick: str) -> Any:
    """Over these cases; all but the quick ones where time is no matter."""
    slow = lambda case: () if case.name in quick else pytest.mark.slow
    return pytest.mark.parametrize("case", [pytest.param(c, marks=slow(c), id=c.name) for c in cases])


def named(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in names]


def lengths(chunk: int) -> tuple[Case, ...]:
    """Around the edges of a chunk."""
    edges = (1, 2, 3, chunk - 1, chunk, chunk + 1, 2 * chunk + 3)
    return tuple(Case(f"T{t}", B=1, T=t, I=3, N=2, initial_state=True) for t in edges)
