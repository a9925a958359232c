"""Problems of recurrent cells, and their formulas written down in numpy: used by the tests on a CPU and on a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.cells.arguments import Parameters, resolve, Tokens
from ejkernel_eqx.cells.core import KINDS
from ejkernel_eqx.cells.spec import CellSpec, GATES
from tests.arrays import array
from tests.attention.dense import quick

Named = dict[str, Any]
FLOATS = ("inputs", "weight_hh", "bias_hh", "weight_ih", "bias_ih", "hidden", "cell")


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str = "lstm"
    T: int = 7
    B: int = 2
    I: int = 5
    H: int = 6
    packed: tuple[Any, ...] | None = None  # ids of each row, or offsets
    lengths: tuple[int, ...] | None = None
    resets: tuple[tuple[int, ...], ...] | None = None  # tokens of each row
    initial: bool = True
    bias: bool = True
    projects: bool = True
    reverse: bool = False
    activation: str = "tanh"
    gate: str = "sigmoid"
    dtype: str = "float32"

    @property
    def offsets(self) -> np.ndarray | None:
        is_offsets = self.packed is not None and isinstance(self.packed[0], int)
        return np.array(self.packed, np.int32) if is_offsets else None

    @property
    def ids(self) -> np.ndarray | None:
        return None if self.packed is None or self.offsets is not None else np.array(self.packed, np.int32)

    @property
    def starts(self) -> np.ndarray | None:
        """Whether each token is reset, `[B, T]`."""
        if self.resets is None:
            return None
        return np.stack([np.isin(np.arange(self.T), row) for row in self.resets])

    @property
    def real(self) -> np.ndarray:
        """Which tokens are no padding, `[*, T]`."""
        tokens = np.arange(self.T)
        if self.offsets is not None:
            return (tokens >= self.offsets[0]) & (tokens < self.offsets[-1])
        real = np.ones((self.B, self.T), bool) if self.ids is None else self.ids >= 0
        return real if self.lengths is None else real & (tokens < np.array(self.lengths)[:, None])

    @property
    def packing(self) -> Named:
        given = {
            "cu_seqlens": self.offsets,
            "segment_ids": self.ids,
            "lengths": None if self.lengths is None else np.array(self.lengths, np.int32),
            "resets": self.starts,
        }
        return {name: None if x is None else jnp.asarray(x) for name, x in given.items()}

    def operation(self, **options: Any) -> ejx.Recurrent:
        return ejx.Recurrent(
            self.kind,
            activation=self.activation,
            gate_activation=self.gate,
            reverse=self.reverse,
            **options,
        )


def make(case: Case, seed: int = 0) -> tuple[Named, tuple[Any, ...]]:
    """The float inputs of a call by name, and cotangents of its results."""
    rng = np.random.default_rng(seed)
    gates = GATES[case.kind] * case.H
    lead = () if case.offsets is not None else (case.B,)
    rows = (len(case.offsets) - 1,) if case.offsets is not None else lead
    features = case.I if case.projects else gates
    shapes = {
        "inputs": (*lead, case.T, features),
        "weight_hh": (gates, case.H),
        "bias_hh": (gates,),
        "weight_ih": (gates, case.I),
        "bias_ih": (gates,),
        "hidden": (*rows, case.H),
        "cell": (*rows, case.H),
    }
    left_out = {
        "bias_hh": not case.bias,
        "bias_ih": not case.bias,
        "weight_ih": not case.projects,
        "hidden": not case.initial,
        "cell": not case.initial or case.kind != "lstm",
    }
    # In the order of the shapes, whatever is left out.
    drawn = {
        name: rng.standard_normal(shape) * (shape[-1] ** -0.5 if "weight" in name else 1.0)
        for name, shape in shapes.items()
    }
    state = "float64" if case.dtype == "float64" else "float32"
    arrays = {
        name: array(x, state if name in ("hidden", "cell") else case.dtype)
        for name, x in drawn.items()
        if not left_out.get(name)
    }
    cotangents = [array(rng.standard_normal((*lead, case.T, case.H)), case.dtype)]
    finals = 2 if case.kind == "lstm" else 1
    cotangents += [jnp.asarray(rng.standard_normal((*rows, case.H)), state) for _ in range(finals)]
    return arrays, tuple(cotangents)


def poison(case: Case, arrays: Named) -> Named:
    """NaN in all that is padding."""
    return arrays | {"inputs": jnp.where(case.real[..., None], arrays["inputs"], jnp.nan)}


def called(operation: Any, arrays: Named, packing: Named) -> tuple[Any, ...]:
    """The output and the final states, in a flat tuple."""
    state = arrays.get("hidden")
    state = (state, arrays["cell"]) if "cell" in arrays else state
    named = {name: arrays.get(name) for name in ("bias_hh", "weight_ih", "bias_ih")}
    out, final = operation(arrays["inputs"], arrays["weight_hh"], **named, initial_state=state, **packing)
    return out, *(final if isinstance(final, tuple) else (final,))


@quick
def results(operation: Any, arrays: Named, packing: Named, cotangents: Any) -> Named:
    """All results by name, gradients under `d_` and the names of their inputs."""
    found, pull = jax.vjp(lambda arrays: called(operation, arrays, packing), arrays)
    gradients = pull(cotangents)[0]
    return dict(zip(("out", "final_hidden", "final_cell"), found)) | {
        f"d_{name}": x for name, x in gradients.items()
    }


def exact(case: Case, arrays: Named, cotangents: Any) -> Named:
    """The same by the reference in float64."""
    with jax.enable_x64(True):
        widen = lambda x: array(x, np.float64)
        wide = jax.tree.map(widen, (arrays, cotangents))
        return {name: np.asarray(x) for name, x in _exact(case, *wide).items()}


@functools.partial(quick, static_argnums=0)
def _exact(case: Case, arrays: Named, cotangents: Any) -> Named:
    spec = CellSpec(case.kind, case.activation, case.gate, "float64")

    def call(arrays: Named) -> tuple[Any, ...]:
        state = arrays.get("hidden")
        state = (state, arrays["cell"]) if "cell" in arrays else state
        parameters = Parameters(*(arrays.get(name) for name in FLOATS[1:5]))
        made = resolve(
            spec, arrays["inputs"], parameters, state, Tokens(**case.packing), reverse=case.reverse
        )
        out, final = made.finish(KINDS[case.kind].reference(made.arrays, spec))
        return out, *(final if isinstance(final, tuple) else (final,))

    found, pull = jax.vjp(call, arrays)
    return dict(zip(("out", "final_hidden", "final_cell"), found)) | {
        f"d_{name}": x for name, x in pull(cotangents)[0].items()
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
    "hard_tanh": lambda x: np.clip(x, -1, 1),
    "silu": lambda x: x * sigmoid(x),
    "identity": lambda x: x,
    "hard_sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
}


def plain(
    case: Case, arrays: Named, inputs: np.ndarray, state: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """By hand, in float64, in the direction of the case: the outputs of one sequence `[T, I]` from its state, and its last state."""
    given = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    features = case.H
    u, b = given["weight_hh"], given.get("bias_hh", np.zeros(given["weight_hh"].shape[0]))
    x = inputs @ given["weight_ih"].T if case.projects else inputs
    x = x + given.get("bias_ih", 0.0)
    act, gate = FUNCTIONS[case.activation], FUNCTIONS[case.gate]
    part = lambda v, n: v[n * features : (n + 1) * features]
    h, c = (*state, np.zeros(features))[:2]
    outs = np.zeros((len(x), features))
    for t in reversed(range(len(x))) if case.reverse else range(len(x)):
        a, r = x[t], u @ h + b
        if case.kind == "lstm":
            i, f, g, o = (part(a, n) + part(r, n) for n in range(4))
            c = gate(f) * c + gate(i) * act(g)
            h = gate(o) * act(c)
        elif case.kind == "gru":
            reset, z = (gate(part(a, n) + part(r, n)) for n in range(2))
            h = (1 - z) * act(part(a, 2) + reset * part(r, 2)) + z * h
        else:
            h = act(a + r)
        outs[t] = h
    return outs, [h, c][: len(state)]


IDS = {
    "padding inside": ((0, 0, -1, -1, 0, 1, -1), (-1, 2, -1, 2, -1, -1, 2)),
    "short segments": ((0, 1, 2, 2, 3, 4, 4), (5, 5, 6, 7, 7, 7, 0)),
    "nothing but padding": ((-1,) * 7, (3,) * 7),
}
CASES = {
    "lstm": Case(),
    "gru": Case("gru", T=9, H=17),
    "rnn": Case("rnn", H=3, activation="relu"),
    "no state": Case("gru", initial=False, bias=False),
    "projected": Case(projects=False, bias=False, initial=False, H=16),
    "one token": Case("gru", T=1),
    "bfloat16": Case(dtype="bfloat16", H=20),
    "float16": Case("gru", dtype="float16"),
    "other activations": Case(activation="silu", gate="hard_sigmoid"),
    "other activations of a GRU": Case("gru", activation="hard_tanh", gate="hard_sigmoid"),
    "a sigmoid": Case("rnn", activation="sigmoid"),
    "identity": Case("rnn", activation="identity", T=3),
    "reverse": Case(reverse=True),
    "lengths": Case("gru", B=4, lengths=(7, 0, 3, 1)),
    "lengths in reverse": Case(B=3, lengths=(5, 0, 7), reverse=True),
    "resets": Case("gru", B=3, resets=((0, 3), (), (2, 3, 6))),
    "resets and lengths": Case(B=3, resets=((0, 3), (5, 6), (1,)), lengths=(6, 6, 4)),
    "resets in reverse": Case("rnn", resets=((0, 3), (6,)), reverse=True),
    "offsets": Case(T=10, packed=(0, 4, 4, 5, 8)),
    "offsets from 2": Case("gru", T=9, packed=(2, 3, 9)),
    "offsets in reverse": Case("gru", T=9, packed=(1, 4, 4, 9), reverse=True),
    "offsets without a state": Case(T=6, packed=(0, 2, 6), initial=False),
} | {name: Case(("lstm", "gru", "rnn")[n], packed=ids) for n, (name, ids) in enumerate(IDS.items())}
