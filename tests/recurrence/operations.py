"""The cases that the tests of the operations share: a module, its arguments, and its formula."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.recurrence import xla
from tests.recurrence import formulas

# Several chunks in a few tokens.
CONFIG = xla.XlaConfig(4)

H, D, V = 4, 6, 5
PER_TOKEN = ("q", "k", "v", "g", "gk", "gv", "beta", "x", "dt", "B", "C", "z")
PER_TOKEN += ("a", "b", "r", "w", "kappa", "eta", "trap", "angles")


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[..., Any]
    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Of the arguments in the order of the call: the axes behind the tokens, or the whole shape of a parameter."""
    state: Any
    formula: Callable[..., Any]
    keywords: tuple[str, ...] = ()

    def module(self, **options: Any) -> Any:
        return self.build(**self.options, **{"config": CONFIG, **options})

    def make(self, *over_tokens: int, dtype: Any = jnp.float64, seed: int = 0) -> dict[str, Any]:
        """Arguments by name; `over_tokens` are the axes before the heads."""
        rng = np.random.default_rng(seed)
        full = {n: (*over_tokens, *shape) if n in PER_TOKEN else shape for n, shape in self.shapes.items()}
        return {n: jnp.asarray(self._value(n, rng.normal(size=shape)), dtype) for n, shape in full.items()}

    def _value(self, name: str, x: np.ndarray) -> np.ndarray:
        if name in ("g", "gk", "gv", "g_gamma", "A") and self.options.get("gate", "log") == "log":
            return -np.abs(x)
        # Transitions of rank one that let the state grow would make all results large.
        x = 0.4 * x if name in ("a", "b", "kappa") else x
        return np.abs(x) if name in ("slopes", "dt") or self.normalized else x

    @property
    def normalized(self) -> bool:
        """Sums of weights that are divided by: all arguments are positive then."""
        return self.options.get("normalize", False)

    def make_state(self, *lead: int, dtype: Any = jnp.float64, seed: int = 1) -> Any:
        rng = np.random.default_rng(seed)
        one = lambda shape: jnp.asarray(rng.normal(size=(*lead, *shape)), dtype)
        if isinstance(self.state[0], int):
            return one(self.state)
        return tuple(abs(one(shape)) if self.normalized else one(shape) for shape in self.state)

    def call(
        self, function: Callable[..., Any], arrays: dict[str, Any], *positional: Any, **extra: Any
    ) -> Any:
        """The module, or its `step` with the state as the last positional argument."""
        first = [arrays[name] for name in self.shapes if name not in self.keywords]
        return function(*first, *positional, **{n: arrays[n] for n in self.keywords}, **extra)

    def run(self, module: Any, **extra: Any) -> Callable[..., Any]:
        """The module's call as a function of its arguments and initial state."""
        return lambda arrays, state: self.call(module, arrays, initial_state=state, **extra)


_QKV = {"q": (H, D), "k": (2, D), "v": (2, V)}


_KDA = {"q": (1, D), "k": (2, D), "v": (H, V), "g": (2, D), "beta": (H,), "A_log": (2,), "dt_bias": (2, D)}
_GATED = {"q": (2, D), "k": (2, D), "v": (H, V), "g": (H,), "beta": (H,), "A_log": (H,), "dt_bias": (H,)}
_PRODUCT = {"q": (2, D), "k": (3, 2, D), "v": (3, H, V), "beta": (3, H)}
_SSD = {"x": (H, V), "dt": (H,), "A": (H,), "B": (2, D), "C": (2, D)}
_SSD_ALL = _SSD | {"D": (H,), "z": (H, V), "dt_bias": (H,), "norm_weight": (H, V)}
_MAMBA3 = {"x": (H, V), "dt": (H,), "g": (H,), "B": (1, 2, D), "C": (1, 2, D), "trap": (H,), "angles": (H, 3)}
_MIMO = {"B": (3, 2, D), "C": (3, 2, D), "angles": (1, 2), "mimo_x": (H, 3, V), "D": (H,)}
_MIMO |= {"B_bias": (H, 3, D), "C_bias": (H, 3, D)}
_GATE = ("A_log", "dt_bias")


def _without(shapes: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: shape for name, shape in shapes.items() if name not in names}


def _linear(decay: dict[str, Any], heads: int = 2, **options: Any) -> Case:
    state: Any = ((2, D, V), (2, D)) if options.get("normalize") else (heads, D, V)
    return Case(ejx.LinearAttention, options, _QKV | decay, state, formulas.linear(**options), tuple(decay))


def _delta(build: Any, shapes: dict[str, Any], keywords: tuple[str, ...] = (), **options: Any) -> Case:
    heads = max(shape[0] for name, shape in shapes.items() if name in ("k", "v", "g", "beta"))
    return Case(build, options, shapes, (heads, D, V), formulas.delta(**options), keywords)


def _ssd(shapes: dict[str, Any], **options: Any) -> Case:
    keywords = tuple(name for name in shapes if name not in _SSD)
    return Case(ejx.StateSpaceV2, options, shapes, (H, V, D), formulas.state_space(**options), keywords)


def _trapezoid(more: dict[str, Any], ranks: int = 1, **options: Any) -> Case:
    state: Any = ((H, V, D), (H, ranks * D + V + 1 + more["angles"][1]))
    keywords = tuple(name for name in more if name not in _MAMBA3)
    return Case(ejx.StateSpaceV3, options, _MAMBA3 | more, state, formulas.trapezoid(**options), keywords)


def _lightning(rule: str, **scale: float) -> Case:
    options = dict(slopes=rule, layer_index=1, num_layers=3)
    return Case(ejx.LightningAttention, options, _QKV, (H, D, V), formulas.lightning(rule, 1, 3, **scale))


# What is computed from raw numbers of the call.
_SMALL: dict[str, Any] = dict(use_qk_l2norm=True, beta_sigmoid=True)
_BOUNDED: dict[str, Any] = dict(gate="bounded", lower_bound=-2.0)
CASES = {
    "linear": _linear({}, scale=0.7),
    "linear normalized": _linear({}, normalize=True),
    "linear constant": _linear({"g_gamma": (H,)}, heads=H),
    "linear scalar": _linear({"g": (1,)}),
    "linear key": _linear({"gk": (2, D)}),
    "linear scalar and key": _linear({"g": (H,), "gk": (1, D)}, heads=H),
    "linear value": _linear({"gv": (2, V)}),
    "gated linear": Case(
        ejx.GatedLinearAttention, {}, _QKV | {"g": (H, D)}, (H, D, V), formulas.gated_linear
    ),
    "gated linear bonus": Case(
        ejx.GatedLinearAttention,
        dict(scale=0.6),
        _QKV | {"g": (2, D), "bonus": (H, D)},
        (2, D, V),
        functools.partial(formulas.gated_linear, scale=0.6),
        ("bonus",),
    ),
    "dplr": Case(
        ejx.DPLRDeltaRule,
        {},
        _QKV | {"a": (1, D), "b": (2, D), "g": (2, D)},
        (2, D, V),
        formulas.dplr,
    ),
    "rwkv7": Case(
        ejx.RWKV7,
        {},
        {"r": (2, D), "w": (2, D), "k": (2, D), "v": (H, V), "kappa": (2, D), "eta": (2, D)},
        (H, D, V),
        formulas.rwkv7,
    ),
    "lightning minimax": _lightning("minimax", scale=1.0),
    "lightning fla": _lightning("fla"),
    "lightning given": Case(
        ejx.LightningAttention,
        dict(slopes=None),
        _QKV | {"slopes": (2,)},
        (2, D, V),
        formulas.lightning(),
        ("slopes",),
    ),
    "kernel delta": _delta(ejx.KernelDeltaAttention, _without(_KDA, *_GATE), use_qk_l2norm=True),
    "kernel delta softplus": _delta(ejx.KernelDeltaAttention, _KDA, _GATE, gate="softplus", **_SMALL),
    "kernel delta bounded": _delta(
        ejx.KernelDeltaAttention, _KDA, _GATE, **_BOUNDED, **_SMALL, allow_neg_eigval=True
    ),
    "gated delta": _delta(ejx.GatedDeltaRule, _without(_GATED, *_GATE), use_qk_l2norm=True),
    "gated delta softplus": _delta(ejx.GatedDeltaRule, _GATED, _GATE, gate="softplus", **_SMALL),
    "gated delta bounded": _delta(
        ejx.GatedDeltaRule, _without(_GATED, "dt_bias"), ("A_log",), **_BOUNDED, **_SMALL
    ),
    "delta product": Case(
        ejx.DeltaProduct,
        dict(beta_sigmoid=True, allow_neg_eigval=True, use_qk_l2norm=True),
        _PRODUCT,
        (H, D, V),
        formulas.delta(beta_sigmoid=True, allow_neg_eigval=True, use_qk_l2norm=True),
    ),
    "delta product gated": Case(
        ejx.DeltaProduct,
        dict(gate="softplus", **_SMALL),
        _PRODUCT | {"g": (H,), "A_log": (H,), "dt_bias": (H,)},
        (H, D, V),
        formulas.delta(gate="softplus", **_SMALL),
        ("g", *_GATE),
    ),
    "delta": _delta(ejx.DeltaRule, _without(_GATED, "g", *_GATE), **_SMALL, allow_neg_eigval=True),
    "state space": _ssd(_SSD | {"D": (H, V)}),
    "state space gated": _ssd(_without(_SSD_ALL, "norm_weight"), dt_softplus=True, dt_limit=(0.3, 1.0)),
    "state space norm": _ssd(_SSD_ALL, dt_softplus=True, norm="whole"),
    "state space group norm": _ssd(_SSD_ALL, dt_softplus=True, norm="group", norm_eps=1e-3),
    "trapezoid": _trapezoid({"angles": (H, 3)}),
    "trapezoid ranks": _trapezoid(_MIMO, 3, interleaved=False),
}
# One of each operation, with most options on.
FULL = [
    "linear normalized",
    "linear constant",
    "linear value",
    "gated linear bonus",
    "dplr",
    "rwkv7",
    "lightning given",
    "kernel delta softplus",
    "gated delta bounded",
    "delta",
    "delta product gated",
    "state space group norm",
    "trapezoid",
    "trapezoid ranks",
]
