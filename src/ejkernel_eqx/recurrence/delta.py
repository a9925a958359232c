"""What the delta rules share: their options, and their operands before the gate."""

import dataclasses
from typing import Any

from jax import Array

from ..core.arguments import fitting
from .arguments import Frame, Operands
from .gates import check_gate, l2norm, LOG, log_decay, write_strength
from .spec import KEY, NONE, SCALAR


@dataclasses.dataclass(frozen=True)
class DeltaOptions:
    """What a delta rule makes of its operands before it runs. `check` first."""

    use_qk_l2norm: bool = False
    beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    gate: str = LOG
    lower_bound: float | None = None

    def check(self) -> "DeltaOptions":
        return dataclasses.replace(self, lower_bound=check_gate(self.gate, self.lower_bound))


@dataclasses.dataclass(frozen=True, eq=False)
class GateInputs:
    """The arguments of a call that say what is forgotten."""

    g: Any
    A_log: Any
    dt_bias: Any


def delta_operands(
    frame: Frame, options: DeltaOptions, scale: float | None, qkv: tuple[Any, Any, Any], beta: Any
) -> Operands:
    """The operands of a delta rule that forgets nothing."""
    q, k, v = frame.qkv(*qkv)
    if options.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    beta = frame.operand("beta", beta, (None,), "H")
    beta = frame.mask(write_strength(beta, options.beta_sigmoid, options.allow_neg_eigval))
    return Operands(q, k, v, scale, beta=beta, delta=True)


def with_gate(
    frame: Frame, options: DeltaOptions, operands: Operands, inputs: GateInputs, kind: str
) -> Operands:
    """The same with a decay of this kind, a number a head or a key channel."""
    assert operands.decay == NONE and kind in (SCALAR, KEY)
    channels, letters = ((), "H") if kind == SCALAR else ((operands.q.shape[-1],), "H D")
    raw = frame.operand("g", inputs.g, (None, *channels), letters)
    heads = raw.shape[-1 - len(channels)]
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    if options.gate == LOG:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(
                    f"{name}: expected None with gate='log', received an array; gate='softplus' or 'bounded' makes decays of it."
                )
    elif A_log is None:
        raise ValueError(f"A_log: expected an array [H] with gate={options.gate!r}, received None.")
    else:
        A_log = fitting("A_log", A_log, (heads,), "H").reshape(heads, *(1 for _ in channels))
        dt_bias = None if dt_bias is None else fitting("dt_bias", dt_bias, (heads, *channels), letters)
    g = _masked_decay(frame, options, raw, A_log, dt_bias)
    return dataclasses.replace(operands, g=g, decay=kind)


def _masked_decay(
    frame: Frame, options: DeltaOptions, raw: Array, A_log: Array | None, dt_bias: Array | None
) -> Array:
    return frame.mask(log_decay(options.gate, options.lower_bound, raw, A_log, dt_bias))
