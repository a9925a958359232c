"""The one list of problems of the linear-time core: tests of every platform, benchmarks and the tuner's checks draw on it."""

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel_eqx.recurrence import reference, samples
from ejkernel_eqx.recurrence.core import problem_of, step_problem_of
from ejkernel_eqx.recurrence.example import example_problem
from ejkernel_eqx.recurrence.spec import (
    CONSTANT,
    FLOATS,
    heads_of,
    KEY,
    letters_of,
    NONE,
    RecurrenceArrays,
    RecurrenceSpec,
    SCALAR,
    sizes_of,
    StepArrays,
    VALUE,
)
from tests.attention.cases import all_pairs
from tests.tolerances import assert_close

# What the room's tests share, too.
__all__ = ["RecurrenceSpec", "StepArrays", "example_problem", "problem_of", "samples"]
__all__ += ["letters_of", "sizes_of", "step_problem_of"]
LOG_DECAYS = (0.0, -1e-6, -1.0, -50.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. `Hg` and `Hb` count where there is a decay and a beta."""

    name: str = "plain"
    B: int = 2
    T: int = 65
    Hq: int = 2
    Hk: int = 2
    Hv: int = 2
    Hg: int = 2
    Hb: int = 2
    D: int = 32
    V: int = 32
    decay: str = NONE
    delta: bool = False
    # One number for all, "usual" (a tenth or so), "mixed" (each of LOG_DECAYS, anywhere) or "closed" (minus infinity here and there).
    log_decays: str | float = "usual"
    beta: float | None = None  # uniform between 0 and this
    keys: str = "unit"  # "normal", "unit" (length 1) or "correlated" (length 1, cosines about 0.9)
    # "segments", "offsets", or "many" sequences, more than tokens if those are few.
    packing: str | None = None
    initial_state: bool = False
    skip: bool = False
    rank_one: float | None = None  # directions of length 1 that are read, and this part of them written
    before: bool = False
    state_dtype: str = "float32"
    dtype: str = "float32"

    @property
    def spec(self) -> RecurrenceSpec:
        return RecurrenceSpec(self.D**-0.5, self.decay, self.delta, self.state_dtype, before=self.before)


class Result(NamedTuple):
    """Of one call, forward and backward; the gradients by name."""

    out: Any
    final_state: Any
    grads: dict[str, Any]


def make(case: Case, seed: int = 0) -> tuple[RecurrenceArrays, RecurrenceSpec]:
    """The problem's arrays, the same for the same case and seed."""
    rng = np.random.default_rng([seed, zlib.crc32(repr(case).encode())])
    wide = "float64" if case.dtype == "float64" else "float32"
    rows = case.B, case.T

    def cast(x: np.ndarray | None, dtype: str) -> Any:
        return None if x is None else jnp.asarray(np.asarray(x).astype(dtype), dtype)

    q = rng.standard_normal((*rows, case.Hq, case.D))
    k = _keys(case, rng)
    v = rng.standard_normal((*rows, case.Hv, case.V))
    g = _log_decays(case, rng)
    beta = None if case.beta is None else rng.uniform(0, case.beta, (*rows, case.Hb))
    arrays = RecurrenceArrays(
        *(cast(x, case.dtype) for x in (q, k, v)), g=cast(g, wide), beta=cast(beta, wide)
    )
    if case.rank_one is not None:
        a, eta = _keys(case, rng), rng.uniform(0, 1, (*rows, case.Hg, case.D))
        b = case.rank_one * np.repeat(a, case.Hg // case.Hk, 2) * eta
        arrays = arrays._replace(a=cast(-a, case.dtype), b=cast(b, case.dtype))
    state_heads = heads_of(arrays, case.spec).state
    if case.skip:
        arrays = arrays._replace(skip=cast(rng.standard_normal((case.B, state_heads, case.V)), wide))
    if case.packing == "segments":
        arrays = arrays._replace(starts=starts_of(case, rng))
    elif case.packing is not None:
        arrays = arrays._replace(offsets=offsets_of(case, rng))
    if case.initial_state:
        count = () if arrays.offsets is None else (arrays.offsets.shape[-1] - 1,)
        state = rng.standard_normal((case.B, *count, state_heads, case.D, case.V))
        arrays = arrays._replace(initial_state=cast(state, case.state_dtype))
    return arrays, case.spec


def _keys(case: Case, rng: np.random.Generator) -> np.ndarray:
    k = rng.standard_normal((case.B, case.T, case.Hk, case.D))
    if case.keys == "correlated":
        k = 3 * rng.standard_normal((case.B, 1, case.Hk, case.D)) + k
    return k if case.keys == "normal" else k / np.linalg.norm(k, axis=-1, keepdims=True)


def _log_decays(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    if case.decay == NONE:
        return None
    shape = {
        CONSTANT: (case.B, case.Hg),
        SCALAR: (case.B, case.T, case.Hg),
        KEY: (case.B, case.T, case.Hg, case.D),
        VALUE: (case.B, case.T, case.Hg, case.V),
    }[case.decay]
    if case.log_decays == "usual":
        return -rng.gamma(0.5, 0.2, shape)
    if case.log_decays == "mixed":
        return rng.choice(LOG_DECAYS, shape, p=(0.3, 0.3, 0.3, 0.1))
    if case.log_decays == "closed":
        return _closed(case, -rng.gamma(0.5, 0.2, shape))
    assert not isinstance(case.log_decays, str), case.log_decays
    return np.full(shape, case.log_decays)


def _closed(case: Case, g: np.ndarray) -> np.ndarray:
    """Gates closed, and as good as closed, at single tokens (the first, the last, on both sides of chunks' borders), for whole heads, and, of
    channels, for some of them."""
    if case.decay in (CONSTANT, SCALAR):
        g[..., -1] = -np.inf
    else:
        g[:, :, -1] = -np.inf
    if case.decay == CONSTANT:
        return g
    for n, token in enumerate((0, 7, 15, 16, 17, 31, 32, case.T - 1)):
        g[:, min(token, case.T - 1), :1] = (-np.inf, -3e38, -np.inf, -1e4)[n % 4]
    if case.decay in (KEY, VALUE):
        g[:, :, :, 1] = -np.inf
        g[:, 20 : case.T : 9, :, 3:7] = -np.inf
    return g


def starts_of(case: Any, rng: np.random.Generator) -> Array:
    """About three segments a row, at different places in each; the second row has only one."""
    begins = rng.random((case.B, case.T)) < 2.5 / max(case.T, 1)
    begins[1:2] = False
    begins[:, :1] = False
    starts = np.where(begins, np.arange(case.T), -1)
    return jnp.asarray(np.maximum.accumulate(starts, 1) if case.T else starts, jnp.int32)


def offsets_of(case: Any, rng: np.random.Generator) -> Array:
    """Sequences of any length, some empty; the first starts past the row's start, the last ends before its end."""
    count = 5 if case.packing == "offsets" else case.T + 3 if case.T < 8 else 9
    inner = rng.integers(min(2, case.T), max(case.T - 2, min(2, case.T)) + 1, (case.B, count + 1))
    inner[:, 2] = inner[:, 1]
    return jnp.asarray(np.sort(inner, 1), jnp.int32)


def in_sequence(case: Any, arrays: Any) -> np.ndarray:
    """`[B, T, 1, 1]`: the tokens whose outputs count. What a kernel gives for the others is masked by its caller."""
    tokens = np.arange(case.T)
    if arrays.offsets is None:
        return np.ones((1, case.T, 1, 1), bool)
    offsets = np.asarray(arrays.offsets)
    return ((tokens >= offsets[:, :1]) & (tokens < offsets[:, -1:]))[..., None, None]


def cotangents(case: Case, seed: int = 1) -> tuple[Array, Array]:
    """For the output and for the final state."""
    rng = np.random.default_rng(seed)
    arrays, spec = make(case)
    heads = heads_of(arrays, spec)
    count = () if arrays.offsets is None else (arrays.offsets.shape[-1] - 1,)
    dout = rng.standard_normal((case.B, case.T, heads.out, case.V)) * in_sequence(case, arrays)
    dstate = rng.standard_normal((case.B, *count, heads.state, case.D, case.V))
    return jnp.asarray(dout, case.dtype), jnp.asarray(dstate, case.state_dtype)


def floats_of(arrays: RecurrenceArrays) -> dict[str, Array]:
    """The arrays that gradients are taken in."""
    return {name: x for name in FLOATS if (x := getattr(arrays, name)) is not None}


def differentiated(function, arrays: RecurrenceArrays, dout: Array, dstate: Array) -> Result:
    """Results and gradients of `function(arrays) -> (out, final_state)` by JAX."""
    (out, state), pull = jax.vjp(lambda floats: function(arrays._replace(**floats)), floats_of(arrays))
    return Result(out, state, pull((dout, dstate))[0])


def by_kernels(platform: Any, arrays: RecurrenceArrays, dout: Array, dstate: Array, spec: Any, config: Any):
    """Results and gradients of a platform's kernels, with what the forward pass keeps for the backward one."""
    results = dict(platform.forward(arrays, spec, config))
    out, final = results.pop("out"), results.pop("final_state")
    grads = platform.backward(arrays, spec, config, results, {"out": dout, "final_state": dstate})
    return Result(out, final, {name: grads[name].astype(x.dtype) for name, x in floats_of(arrays).items()})


def check(case: Case, platform: Any, config: Any) -> None:
    """A platform's kernels give what the reference gives."""
    arrays, spec = make(case)
    given = cotangents(case)
    actual = by_kernels(platform, arrays, *given, spec, config)
    assert_agrees(case, actual, run_reference(arrays, *given, spec))


@functools.partial(jax.jit, static_argnums=3)
def _run_reference(arrays: RecurrenceArrays, dout: Array, dstate: Array, spec: RecurrenceSpec) -> Result:
    return differentiated(lambda arrays: reference.recur(arrays, spec), arrays, dout, dstate)


def assert_agrees(
    case: Case, actual: Result, exact: Result, scales: Mapping[str, float] | None = None
) -> None:
    """Every result within the tolerance table; 16-bit states count as such. `scales` are those of gradients that cancel, by their names."""
    arrays, _ = make(case)
    seen = in_sequence(case, arrays)
    states = case.dtype if case.state_dtype == "float32" else case.state_dtype
    assert actual.out.dtype == case.dtype and actual.final_state.dtype == case.state_dtype
    # Elsewhere stands what the memory held before; bits of a signaling NaN may not be converted, so they go first.
    out = np.asarray(actual.out)
    out = np.where(seen, out, np.zeros((), out.dtype))
    assert_close(out, np.where(seen, exact.out, 0), case.dtype, "forward", name="out")
    assert_close(actual.final_state, exact.final_state, states, "forward", name="final state")
    assert actual.grads.keys() == floats_of(arrays).keys()
    for name, x in actual.grads.items():
        assert x.shape == getattr(arrays, name).shape and x.dtype == getattr(arrays, name).dtype, name
        dtype = states if name == "initial_state" else case.dtype
        if name in ("q", "k", "v", "beta", "a", "b") or (name == "g" and case.decay != CONSTANT):
            x = np.asarray(x)
            x = np.where(seen.reshape(*seen.shape[:2], *(1,) * (x.ndim - 2)), x, np.zeros((), x.dtype))
        scale = (scales or {}).get(name)
        assert_close(x, exact.grads[name], dtype, "gradient", scale, name=f"gradient of {name}")


def scale_of_constant(arrays: RecurrenceArrays, dout: Array, dstate: Array, spec: RecurrenceSpec) -> float:
    """How large the parts are, one a token, whose sum is the gradient of a constant decay, and may be nearly nothing."""
    assert arrays.g is not None and spec.decay == CONSTANT
    each = jnp.broadcast_to(arrays.g[:, None], (*arrays.q.shape[:2], arrays.g.shape[-1]))
    parts = run_reference(arrays._replace(g=each), dout, dstate, dataclasses.replace(spec, decay=SCALAR))
    return float(np.sqrt(np.mean(np.abs(parts.grads["g"]).sum(1) ** 2)))


def run_reference(arrays: RecurrenceArrays, dout: Array, dstate: Array, spec: RecurrenceSpec) -> Result:
    """The oracle, in float64 whatever the problem's dtype."""
    host = jax.tree.map(np.asarray, (arrays, dout, dstate))
    spec = dataclasses.replace(spec, state_dtype="float64")
    with jax.enable_x64(True):
        double = [
            x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in jax.tree.leaves(host)
        ]
        tree = jax.tree.unflatten(jax.tree.structure(host), [jnp.asarray(x, x.dtype) for x in double])
        return jax.tree.map(np.asarray, _run_reference(*tree, spec))


_HEADS = (
    (2, 2, 2, 2, 2),
    (1, 1, 4, 4, 4),  # few keys, many values: state spaces, gated delta rules
    (4, 2, 2, 2, 2),  # few states, many queries
    (2, 2, 4, 1, 4),
    (4, 1, 2, 2, 1),
    (2, 3, 6, 3, 2),  # counts that do not divide one another
)
"""Of q, k, v, g and beta."""
_FLAGS: dict[str, tuple] = {
    "heads": _HEADS,
    "length": (65, 64, 1, 131, 2, 63, 3),
    "log_decays": ("usual", "mixed", *LOG_DECAYS),
    "decay": (NONE, CONSTANT, SCALAR, KEY, VALUE),
    "size": ((32, 32), (16, 48), (64, 32), (40, 24)),
    "packing": (None, "segments", "offsets", "many"),
    "dtype": ("float32", "float32", "bfloat16", "float16"),
    "beta": (None, 1.0, 2.0),
    "keys": ("unit", "correlated"),
    "delta": (False, True),
    "initial_state": (False, True),
    "skip": (False, True),
    "state_dtype": ("float32", "bfloat16"),
    "B": (1, 2),
}


def _forbidden(row) -> bool:
    """A skip connection is for as many values as outputs and states; without a decay there are no log-decays to choose."""
    chosen = dict(zip(_FLAGS, row, strict=True))
    pick = lambda name: None if chosen[name] is None else _FLAGS[name][chosen[name]]
    heads, skip = pick("heads"), pick("skip")
    if skip and heads is not None and heads[2] != max(heads):
        return True
    return pick("decay") == NONE and chosen["log_decays"] not in (None, 0)


def _pairwise() -> list[Case]:
    cases = []
    for n, row in enumerate(all_pairs([len(choices) for choices in _FLAGS.values()], _forbidden)):
        flags = {name: choices[i] for (name, choices), i in zip(_FLAGS.items(), row, strict=True)}
        names = dict(zip(("Hq", "Hk", "Hv", "Hg", "Hb"), flags.pop("heads"), strict=True))
        dim, values = flags.pop("size")
        case = Case(T=flags.pop("length"), D=dim, V=values, **names, **flags)
        cases.append(dataclasses.replace(case, name=f"{n:02d}-{_describe(case)}"))
    return cases


def _describe(case: Case) -> str:
    heads = "".join(str(x) for x in (case.Hq, case.Hk, case.Hv, case.Hg, case.Hb))
    words = [f"B{case.B}T{case.T}H{heads}D{case.D}V{case.V}", case.dtype, case.decay]
    words += [f"log{case.log_decays}"] if case.decay != NONE else []
    words += [f"beta{case.beta:g}"] if case.beta is not None else []
    words += [case.packing] if case.packing is not None else []
    words += [name for name in ("delta", "initial_state", "skip") if getattr(case, name)]
    words += ["correlated"] if case.keys == "correlated" else []
    words += ["bf16-state"] if case.state_dtype == "bfloat16" else []
    return "-".join(words)


MEMBERS = (
    Case(name="linear"),
    Case(name="lightning", decay=CONSTANT, log_decays=-0.3),
    Case(name="scalar", decay=SCALAR),
    Case(name="gla", decay=KEY),
    Case(name="value", decay=VALUE),
    Case(name="ssd", decay=SCALAR, Hq=1, Hk=1, Hv=4, Hg=4, Hb=4, beta=1.0, skip=True, keys="normal"),
    Case(name="delta", delta=True, beta=1.0),
    Case(name="gated-delta", decay=SCALAR, delta=True, beta=1.0, Hq=1, Hk=1),
    Case(name="kda", decay=KEY, delta=True, beta=1.0),
)
"""One problem for each member of the family, with nothing particular about it."""
_CORRELATED: dict[str, Any] = dict(T=131, delta=True, beta=2.0, keys="correlated")
HARD = (
    Case("delta-correlated", D=64, V=64, **_CORRELATED),
    Case("gated-delta-correlated", D=64, V=64, decay=SCALAR, **_CORRELATED),
    Case("kda-correlated", D=64, V=64, decay=KEY, **_CORRELATED),
    Case("kda-mixed", decay=KEY, log_decays="mixed", **_CORRELATED),
    Case("scalar-mixed", T=131, decay=SCALAR, log_decays="mixed"),
    Case("gla-mixed", T=131, decay=KEY, log_decays="mixed"),
    Case("scalar-strong", T=131, decay=SCALAR, log_decays=-50.0),
    Case("gla-strong", T=131, decay=KEY, log_decays=-50.0),
)
"""What a careless kernel gets wrong."""
_CLOSED: dict[str, Any] = dict(T=40, D=16, V=16, log_decays="closed")
_DELTA: dict[str, Any] = dict(delta=True, beta=1.0)
CLOSED = (
    Case("lightning-closed", decay=CONSTANT, initial_state=True, **_CLOSED),
    Case("scalar-closed", decay=SCALAR, initial_state=True, **_CLOSED),
    Case("gla-closed", decay=KEY, initial_state=True, **_CLOSED),
    Case("value-closed", decay=VALUE, initial_state=True, **_CLOSED),
    Case("ssd-closed", decay=SCALAR, Hq=1, Hk=1, beta=1.0, packing="segments", **_CLOSED),
    Case("gated-delta-closed", decay=SCALAR, initial_state=True, **_DELTA, **_CLOSED),
    Case("kda-closed", decay=KEY, initial_state=True, **_DELTA, **_CLOSED),
    Case("value-delta-closed", decay=VALUE, **_DELTA, **_CLOSED),
)
"""Gates that are closed: log-decays of minus infinity."""
EMPTY = (
    Case(name="no-tokens", T=0, decay=SCALAR, initial_state=True),
    Case(name="no-tokens-packed", T=0, B=1, decay=KEY, packing="offsets", initial_state=True),
    Case(name="no-tokens-no-state", T=0, delta=True),
)
_RANK_ONE: dict[str, Any] = dict(decay=KEY, rank_one=1.0)
DPLR = (
    Case(name="dplr", dtype="bfloat16", initial_state=True, **_RANK_ONE),
    Case("dplr-heads", T=131, Hq=4, Hk=1, Hv=4, Hg=2, packing="segments", initial_state=True, **_RANK_ONE),
    Case("dplr-offsets", B=1, T=63, V=48, packing="offsets", initial_state=True, **_RANK_ONE),
    Case("dplr-correlated", T=131, D=64, V=64, keys="correlated", decay=KEY, rank_one=2.0),
    Case("dplr-mixed", T=131, log_decays="mixed", keys="correlated", **_RANK_ONE),
    Case("dplr-strong", T=131, log_decays=-50.0, **_RANK_ONE),
    Case("dplr-closed", initial_state=True, **_RANK_ONE, **_CLOSED),
)
"""Transitions of rank one that Triton's kernels take."""
BEFORE = (
    Case("gla-before", T=131, decay=KEY, before=True, Hq=4, packing="segments", initial_state=True),
    Case("gla-before-mixed", decay=KEY, before=True, log_decays="mixed", initial_state=True),
    Case("linear-before", before=True, packing="offsets", initial_state=True),
    Case("kda-before", decay=KEY, delta=True, beta=1.0, before=True),
    Case("dplr-before", before=True, initial_state=True, **_RANK_ONE),
)
"""Outputs that read the state before their token."""
RANK_ONE = (
    *DPLR,
    *BEFORE,
    Case("dplr-skip", skip=True, beta=1.0, decay=SCALAR, rank_one=1.0, packing="many"),
    Case("iplr", rank_one=1.0, initial_state=True, packing="segments", state_dtype="bfloat16"),
    Case("dplr-value", T=21, decay=VALUE, rank_one=1.0, packing="segments"),
)
"""All of both; what is not above, XLA alone computes."""
PAIRWISE = _pairwise()
CASES = [*MEMBERS, *HARD, *PAIRWISE]
NAMED = {case.name: case for case in (*CASES, *CLOSED, *EMPTY, *RANK_ONE)}


def with_every_option() -> list[Case]:
    """Some of the pairs, that have every option among them: each next one has the most that none before has."""
    left, chosen, seen = list(PAIRWISE), [], set[Any]()
    of = lambda case: {item for item in dataclasses.asdict(case).items() if item[0] != "name"}
    while left and of(best := max(left, key=lambda case: len(of(case) - seen))) - seen:
        chosen.append(best)
        seen |= of(best)
    return chosen
