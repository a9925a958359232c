"""`StateSpaceV3`: the state space model of Mamba-3."""

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._broadcast import like
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import accumulator, check_flags, fitting, wide
from ..core.plans import again_for_gradients
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from ..parallel.mesh import explicit_mesh, gathered
from ..sequences.tokens import from_slots, to_slots
from .arguments import Frame, log_decays, Operands, read_pair, step_frame_of
from .core import KEPT
from .heads import repeat_heads
from .neighbours import neighbours_of, turned, whole
from .operation import Recurrence
from .spec import SCALAR

StateAndLast = tuple[Float[AnyArray, "... H P N"], Float[AnyArray, "... H L"]]
FinalStateAndLast = tuple[Float[Array, "... H P N"], Float[Array, "... H L"]]

_Inputs = namedtuple("_Inputs", "x dt g B C trap angles B_bias C_bias D mimo_x")
"""The operands of a call on sequences or of a step, all but for `x` by the names of the call."""


class StateSpaceV3(Recurrence):
    r"""The state space model of Mamba-3: a state of $P \times N$ per head, discretised by the trapezoidal rule. Angles that depend on the tokens
    rotate $B$ and $C$, and a head has any number $M$ of inputs and outputs (MIMO).

    $$\theta_t = \theta_{t-1} + \Delta_t \omega_t, \qquad \tilde B_{t,m} = R(\theta_t) (B_{t,m} + b_m), \qquad
      \tilde C_{t,m} = R(\theta_t) (C_{t,m} + c_m), \qquad x_{t,m} = x_t \odot u_m$$
    $$h_t = e^{g_t} h_{t-1} + \sum_m \big( (1 - \lambda_t) \Delta_t e^{g_t}\, x_{t-1,m} \tilde B_{t-1,m}^\top
      + \lambda_t \Delta_t\, x_{t,m} \tilde B_{t,m}^\top \big), \qquad y_{t,m} = h_t \tilde C_{t,m} + D\, x_{t,m}$$

    with log-decays $g_t = \Delta_t A_t \le 0$. $R(\theta)$ rotates the first $J$ pairs of the $N$ channels, each by its angle. Head $h$ reads group
    $\lfloor h / (H / G) \rfloor$ of $B$ and $C$, and angles likewise.

    The state of a sequence is a pair: $S_t = h_t - \sum_m \lambda_t \Delta_t\, x_{t,m} \tilde B_{t,m}^\top$ `[..., H, P, N]`, and what the last token
    leaves for the next one, `[..., H, L]` with `L = M * N + P + J + 1`: its $\tilde B$, its $x$, $\lambda \Delta$, and $\theta$ less whole turns.
    $S$ is the state of a recurrence whose keys and values are those of the token before, so the family's kernels run it. `M` tokens of that
    recurrence stand for one.

    Platforms and derivatives: as for [`ejkernel_eqx.GatedLinearAttention`][].

    Source: Lahoti et al., *Mamba-3: Improved Sequence Modeling using State Space Principles* (2026), sections 3.1 to 3.3.
    """

    operation: ClassVar[str] = "state_space_v3"

    interleaved: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        interleaved: bool = True,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `interleaved`: whether a rotated pair is two neighbours, rather than one channel of each half. Published weights have neighbours for
            one rank, and halves for more.
        - `state_dtype`: of `S`; the other part of the state is float32 (float64 for float64).
        - `reverse`, `sequence_axis`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(x, dt, g, B, C, trap, angles)` or [`ejkernel_eqx.inputs`][]`(..., D=D, ...)`: fix the choice for these inputs now.
        """
        check_flags(interleaved=interleaved)
        self.interleaved = bool(interleaved)
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.StateSpaceV3")
    @over_sequence_axis()
    def __call__(
        self,
        x: Float[AnyArray, "*B T H P"],
        dt: Float[AnyArray, "*B T H"],
        g: Float[AnyArray, "*B T H"],
        B: Float[AnyArray, "*B T M G N"],
        C: Float[AnyArray, "*B T M G N"],
        trap: Float[AnyArray, "*B T H"],
        angles: Float[AnyArray, "*B T H J"],
        *,
        B_bias: Float[AnyArray, "H M N"] | None = None,
        C_bias: Float[AnyArray, "H M N"] | None = None,
        D: Float[AnyArray, " H"] | None = None,
        mimo_x: Float[AnyArray, "H M P"] | None = None,
        initial_state: StateAndLast | None = None,
        cu_seqlens: Int[Numbers, " S+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T M H P"], FinalStateAndLast]:
        r"""**Arguments:**

        - `x`: `[..., T, H, P]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `dt`: time steps $\Delta$ of at least 0; `g`: log-decays of at most 0; `trap`: $\lambda$, from 0 to 1: `[..., T, H]`, any float dtype.
        - `B`, `C`: `[..., T, M, G, N]` in the dtype of `x`; `M` is 1 without MIMO, `N` is even and `G` divides `H`.
        - `angles`: $\omega$, radians per unit of time, `[..., T, H, J]` with a head count that divides `H`, and `J` at most `N / 2`; any float dtype.
        - `B_bias`, `C_bias`: $b$ and $c$, `[H, M, N]`; `D`: `[H]`; `mimo_x`: $u$, `[H, M, P]`, default ones; any float dtype.
        - `initial_state`: a pair as above, with one state per sequence with `cu_seqlens`; default zeros.
        - `cu_seqlens`, `segment_ids`, `state_indices`: packed sequences, padding, and a pair of pools of states, as in
            [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(y, final_state)`: `[..., T, M, H, P]` in the dtype of `x`, and the pair after the last token.
        Raises the errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        frame = self._frame(x, cu_seqlens, segment_ids, state_indices, "x", "H P")
        inputs = _Inputs(x, dt, g, B, C, trap, angles, B_bias, C_bias, D, mimo_x)
        return self._call(frame, inputs, "initial_state", initial_state)

    @jax.named_scope("ejkernel_eqx.StateSpaceV3.step")
    def step(
        self,
        x: Float[AnyArray, "*B H P"],
        dt: Float[AnyArray, "*B H"],
        g: Float[AnyArray, "*B H"],
        B: Float[AnyArray, "*B M G N"],
        C: Float[AnyArray, "*B M G N"],
        trap: Float[AnyArray, "*B H"],
        angles: Float[AnyArray, "*B H J"],
        state: StateAndLast,
        *,
        B_bias: Float[AnyArray, "H M N"] | None = None,
        C_bias: Float[AnyArray, "H M N"] | None = None,
        D: Float[AnyArray, " H"] | None = None,
        mimo_x: Float[AnyArray, "H M P"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B M H P"], FinalStateAndLast]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state` is a pair, `state_indices` and
        results as in [`ejkernel_eqx.GatedLinearAttention.step`][]. With more than one rank the token is a sequence of a call."""
        frame = step_frame_of(x, "x", "H P", state_indices)
        inputs = _Inputs(x, dt, g, B, C, trap, angles, B_bias, C_bias, D, mimo_x)
        return self._call(frame, inputs, "state", state)

    def _call(self, frame: Frame, inputs: _Inputs, name: str, state: Any) -> tuple[Array, Any]:
        inputs, axis = _resolved(frame, inputs), len(frame.lead)
        S, last = read_pair(name, state, "(S, last)")
        (heads, channels), (ranks, _, size) = inputs.x.shape[-2:], inputs.B.shape[-3:]
        sizes = heads, ranks * size + channels + 1 + inputs.angles.shape[-1]
        change = lambda f: inputs._replace(**{n: f(getattr(inputs, n), axis) for n in _Inputs._fields[:7]})
        if frame.length is not None:
            # Nothing here is computed from a part of the tokens, other than with a `sequence_axis`.
            inputs = change(gathered)
            states = frame.states(last, sizes, "H L", accumulator(frame.dtype))
            compute = again_for_gradients(functools.partial(self._computed, frame, S), self, KEPT)
            # Zeros that are split over a mesh are made inside of a program only.
            compute = compute if explicit_mesh(inputs.x) is None else jax.jit(compute)
            out, S, last = compute(inputs, states.unchanged(accumulator(frame.dtype)))
            return out, (S, states.leaving(last))
        pool, slots = frame.row_states(last, sizes, "H L")
        if ranks > 1:
            # A token of each row as its sequence.
            frame, inputs = dataclasses.replace(frame, length=1), change(jnp.expand_dims)
        out, S, last = self._computed(frame, S, inputs, wide(from_slots(pool, slots, 0)))
        out = jnp.squeeze(out, axis) if ranks > 1 else out
        out, last = to_slots(out, last.astype(pool.dtype), pool, slots, 0)
        return out, (S, last)

    def _computed(self, frame: Frame, S: Any, inputs: _Inputs, entering: Array) -> tuple[Array, Array, Array]:
        """`y [*, T, M, H, P]` and both parts of the final state, by a recurrence with `B` and `x` of the token before as key and value."""
        x, tokens = inputs.x, neighbours_of(frame, inputs.x)
        (heads, channels), (ranks, _, size) = x.shape[-2:], inputs.B.shape[-3:]
        dt, trap = wide(inputs.dt), wide(inputs.trap)
        g, gamma = wide(inputs.g), trap * dt
        turn = repeat_heads(wide(inputs.angles), -2, heads) * dt[..., None]
        entering, angle = jnp.split(entering, [entering.shape[-1] - turn.shape[-1]], axis=-1)
        ends = lambda angle: tokens.end(tokens.turns(turn, angle), angle)
        angle, last_angle = _passed(frame, ends, angle, turns=True)
        angles = tokens.turns(turn, angle)[..., None, :, :]

        def rotated(x: Array, bias: Array | None) -> Array:
            x = wide(repeat_heads(x, -2, heads))
            x = x if bias is None else x + like(jnp.swapaxes(bias, 0, 1).astype(x.dtype), x)
            return frame.mask(turned(x, angles, self.interleaved).astype(frame.dtype))

        q, k = rotated(inputs.C, inputs.C_bias), rotated(inputs.B, inputs.B_bias)
        parts = [ranks * size, ranks * size + channels]

        def leaving(entering: Array) -> Array:
            own = jnp.swapaxes(k, -3, -2).reshape(*x.shape[:-1], ranks * size), x, gamma[..., None]
            last = [tokens.end(x, e) for x, e in zip(own, jnp.split(entering, parts, axis=-1), strict=True)]
            return jnp.concatenate([wide(x) for x in last], axis=-1)

        entering, last = _passed(frame, leaving, entering, turns=False)
        key, value, weight = jnp.split(entering, parts, axis=-1)
        key = jnp.swapaxes(key.reshape(*key.shape[:-1], ranks, size), -3, -2)
        weight = tokens.shift(gamma[..., None], weight)[..., 0]
        # The later half of a step that ends and the earlier one of a step that begins, both behind the decay.
        beta = jnp.exp(g) * (weight + (1 - trap) * dt)
        # Masked, like values below, because the gradient that a kernel leaves at padding must not reach what all tokens share.
        k_before = wide(tokens.shift(k, key)) * beta[..., None, :, None]
        k_before = frame.mask(k_before.astype(k.dtype))

        def by_rank(x: Array) -> Array:
            x = jnp.broadcast_to(x[..., None, :, :], (*q.shape[:-1], channels))
            if inputs.mimo_x is None:
                return x
            factors = jnp.swapaxes(inputs.mimo_x, 0, 1).astype(wide(x).dtype)
            return frame.mask((wide(x) * like(factors, x)).astype(x.dtype))

        v, v_before = by_rank(x), by_rank(tokens.shift(x, value))
        unrolled = frame if ranks == 1 else frame.repeated(ranks)
        merge = lambda x: x.reshape(*unrolled.over_tokens, *x.shape[len(frame.over_tokens) + 1 :])
        # The first of a token's ranks decays.
        g = jnp.pad(g[..., None, :], [(0, 0)] * (g.ndim - 1) + [(0, ranks - 1), (0, 0)])
        operands = Operands(merge(q), merge(k_before), merge(v_before), 1.0, merge(g))

        def epilogue(out: Array) -> Array:
            """Adds what a token writes itself, and what ranks behind a rank read: the recurrence has written it, but later."""
            skip = 0 if inputs.D is None else like(wide(inputs.D).astype(dt.dtype)[:, None], v) * wide(v)
            own = _read(q, wide(k) * gamma[..., None, :, None], v)
            if ranks > 1:
                later = np.triu(np.ones((ranks, ranks), bool), 1)[..., None]
                own += _read(q, k_before, v_before, later)
            return (wide(out) + (own + skip).reshape(out.shape)).astype(out.dtype)

        operands = dataclasses.replace(operands, decay=SCALAR, transposed=True)
        out, S = self._run(unrolled, operands, S, epilogue)
        out = out.reshape(*frame.over_tokens, ranks, heads, channels)
        # A reversed call has turned the ranks round, too.
        out = jnp.flip(out, -3) if frame.packing.reverse and ranks > 1 else out
        return out, S, jnp.concatenate([last, last_angle], axis=-1)


def _read(q: Array, k: Array, v: Array, chosen: Any = None) -> Array:
    """What queries `[*, M, H, N]` read of the writes of their token, `[*, M, H, P]`; `chosen [M, M, 1]`: which ones."""
    scores = jnp.sum(wide(q)[..., :, None, :, :] * wide(k)[..., None, :, :, :], axis=-1)
    scores = scores if chosen is None else jnp.where(like(jnp.asarray(chosen), scores), scores, 0)
    return jnp.sum(scores[..., None] * wide(v)[..., None, :, :, :], axis=-3)


def _passed(
    frame: Frame, leaving: Callable[[Array], Array], entering: Array, turns: bool
) -> tuple[Array, Array]:
    """What enters the tokens of this device, and what leaves the last of all devices. `leaving`: what leaves the tokens of this one. Angles, of
    `turns`, are added to what enters as long as no segment begins; else it goes on where there are no tokens."""
    along, packing = frame.along, frame.packing
    if along is None or frame.is_empty:
        return entering, leaving(entering)
    keeps = jnp.full((*frame.lead, 1, 1), turns, entering.dtype)
    if packing.real is not None and packing.starts is not None:
        of_rows = packing.starts[..., -1] < 0 if turns else ~packing.real.any(-1)
        keeps = of_rows[..., None, None].astype(entering.dtype)

    def step(own: tuple[Array, Array], state: Array) -> Array:
        state = own[0] + own[1] * state
        return whole(state) if turns else state

    entering, final = along.carry(step, (leaving(jnp.zeros_like(entering)), keeps), entering)
    return entering, along.last(final)


def _resolved(frame: Frame, inputs: _Inputs) -> _Inputs:
    """The operands, checked, with zero padding."""
    x = frame.main("x", inputs.x, (None, None), "H P")
    heads, channels = x.shape[-2:]
    B = frame.main("B", inputs.B, (None, None, None), "M G N")
    ranks, groups, size = B.shape[-3:]
    C = frame.main("C", inputs.C, (ranks, groups, size), "M G N")
    angles = frame.operand("angles", inputs.angles, (None, None), "H J")
    for name, count, layout in (("B", groups, "M, G, N"), ("angles", angles.shape[-2], "H, J")):
        if 0 in (ranks, count) or heads % count:
            raise ValueError(
                f"{name}: expected at least one rank, and a head count that divides the {heads} of x, received {count}; the layout is "
                f"[..., T, {layout}]."
            )
    if size % 2 or angles.shape[-1] > size // 2:
        raise ValueError(
            f"angles: expected at most one for each pair of the channels of B, an even number, received {angles.shape[-1]} for {size}."
        )
    of_tokens = {n: frame.operand(n, getattr(inputs, n), (heads,), "H") for n in ("dt", "g", "trap")}
    log_decays("g", of_tokens["g"])
    bias = (heads, ranks, size), "H M N"
    forms = {
        "B_bias": bias,
        "C_bias": bias,
        "mimo_x": ((heads, ranks, channels), "H M P"),
        "D": ((heads,), "H"),
    }
    given = {name: getattr(inputs, name) for name in forms}
    shared = {name: fitting(name, value, *forms[name]) for name, value in given.items() if value is not None}
    return inputs._replace(x=x, B=B, C=C, angles=angles, **of_tokens, **shared)
