"""One token per row in Triton: each state is read once and written once, in place if donated."""

import dataclasses
import math
from typing import Any

import triton
import triton.language as tl
from jax import Array

from ...launch import given, Launcher, result, result_like
from ...launch.fields import Checked, Power, Warps
from ...launch.sizes import cdiv, padded
from ..spec import KEY, NONE, RecurrenceSpec, SCALAR, StepArrays, VALUE

_KINDS = {NONE: 0, SCALAR: 1, KEY: 2, VALUE: 3}
_SCALAR, _KEY, _VALUE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@dataclasses.dataclass(frozen=True)
class StepTile(Checked):
    """A program processes all key channels and `block_v` value channels (a power of two) of one state."""

    block_v: Power
    num_warps: Warps


def default_tile(dim: int, values: int, state_bytes: int = 4) -> StepTile:
    """64 elements per thread, with as many warps as keep a program's state at about 32 KiB in float32 and 8 KiB in 16 bits."""
    num_warps = 4 if state_bytes == 4 else 2
    block_v = min(padded(values, 1), num_warps * 32 * 64 // padded(dim, 1))
    return StepTile(max(block_v, 8), num_warps)


# fmt: off
@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, skip_ptr, indices_ptr, state_ptr, B, S, a_ptr, b_ptr,
    new_state_ptr, out_ptr,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, HS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr, SLOTS: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_V: tl.constexpr,
    HA: tl.constexpr, HW: tl.constexpr, RANK_ONE: tl.constexpr, BEFORE: tl.constexpr,
):
    # A program: a row, a state head, a tile of value channels (fastest). BD is `BLOCK_D`, all key channels, BV is `BLOCK_V`.
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = pid // tiles % HS
    row = (pid // (tiles * HS)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)  # [BD]
    c = pid % tiles * BLOCK_V + tl.arange(0, BLOCK_V)  # [BV]
    in_d, in_v = d < D, c < V  # [BD], [BV]
    out_at = out_ptr + (row * (HS * GROUP) + head * GROUP) * V + c  # [BV]

    # A row's state is its own or in a slot of a pool; the output of a row without a slot is zero.
    slot, used = row, True
    if SLOTS:
        index = tl.load(indices_ptr + row)
        slot, used = row // B * S + index, (index >= 0) & (index < S)
    if used:
        # The state is read and written in one place.
        at = (slot * HS + head) * (D * V) + d[:, None] * STRIDE_D + c[None, :] * STRIDE_V  # [BD, BV]; the state may be stored transposed
        inside = in_d[:, None] & in_v[None, :]  # [BD, BV]
        state = tl.load(new_state_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BD, BV]
        k = tl.load(k_ptr + (row * HK + head * HK // HS) * D + d, mask=in_d, other=0.0).to(tl.float32)  # [BD]
        v = tl.load(v_ptr + (row * HV + head * HV // HS) * V + c, mask=in_v, other=0.0).to(tl.float32)  # [BV]
        gate = row * HG + head * HG // HS
        # What a transition of rank one reads, and outputs that read before their token: the state before its decay.
        before, read = state, v  # [BD, BV], [BV]
        if RANK_ONE:
            a = tl.load(a_ptr + (row * HA + head * HA // HS) * D + d, mask=in_d, other=0.0).to(tl.float32)  # [BD]
            read = tl.sum(state * a[:, None], 0)  # [BV]
        # S <- a S, then S <- S + b k u^T with u = v, or v - S^T k of a delta rule.
        if DECAY == _SCALAR:
            state *= tl.exp(tl.load(g_ptr + gate).to(tl.float32))  # one number
        if DECAY == _KEY:
            state *= tl.exp(tl.load(g_ptr + gate * D + d, mask=in_d, other=0.0).to(tl.float32))[:, None]  # one a row, [BD, 1]
        if DECAY == _VALUE:
            state *= tl.exp(tl.load(g_ptr + gate * V + c, mask=in_v, other=0.0).to(tl.float32))[None, :]  # one a column, [1, BV]
        # A delta rule writes what the state lacks of the value.
        written = v  # [BV]
        if DELTA:
            written -= tl.sum(state * k[:, None], 0)  # [BV]
        if BETA:
            k *= tl.load(beta_ptr + row * HB + head * HB // HS).to(tl.float32)  # [BD]
        state += k[:, None] * written[None, :]  # [BD, BV]
        if RANK_ONE:
            b = tl.load(b_ptr + (row * HW + head * HW // HS) * D + d, mask=in_d, other=0.0).to(tl.float32)  # [BD]
            state += b[:, None] * read[None, :]
        tl.store(new_state_ptr + at, state.to(new_state_ptr.dtype.element_ty), mask=inside)
        # o = scale S^T q + skip v, for each of the query heads that read this state.
        extra = tl.zeros([BLOCK_V], tl.float32)  # [BV]
        if SKIP:
            extra = v * tl.load(skip_ptr + (row // B * HS + head) * V + c, mask=in_v, other=0.0).to(tl.float32)  # [BV]
        if BEFORE:
            state = before
        for j in range(GROUP):
            reader = (head * GROUP + j) * HQ // (HS * GROUP)
            q = tl.load(q_ptr + (row * HQ + reader) * D + d, mask=in_d, other=0.0).to(tl.float32)  # [BD]
            out = SCALE * tl.sum(state * q[:, None], 0) + extra  # [BV]
            tl.store(out_at + j * V, out.to(out_ptr.dtype.element_ty), mask=in_v)
    else:
        for j in range(GROUP):
            tl.store(out_at + j * V, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=in_v)
# fmt: on


def step(arrays: StepArrays, spec: RecurrenceSpec, config: Any) -> tuple[Array, Array]:
    """`out [*, B, R, V]` in the dtype of `v`, and the states (the whole pool), with any leading axes. The tile is
    `config.step`, if set."""
    q, k, v, state = arrays.q, arrays.k, arrays.v, arrays.state
    lead, (rows, q_heads, dim), values = q.shape[:-3], q.shape[-3:], v.shape[-1]
    heads = state.shape[-3]
    out_heads = max(heads, q_heads)
    tile = getattr(config, "step", None) or default_tile(dim, values, state.dtype.itemsize)
    count = lambda x, axis: 1 if x is None else x.shape[axis]
    gates = count(arrays.g, -1 if spec.decay == SCALAR else -2)
    counts = {"HQ": q_heads, "HK": k.shape[-2], "HV": v.shape[-2], "HG": gates, "HB": count(arrays.beta, -1)}
    counts |= {"HA": count(arrays.a, -2), "HW": count(arrays.b, -2)}
    sizes = {"HS": heads, "GROUP": out_heads // heads, "D": dim, "V": values, "BLOCK_D": padded(dim, 1)}
    kind = {"SCALE": spec.scale, "DECAY": _KINDS[spec.decay], "DELTA": spec.delta, "BEFORE": spec.before}
    numbers = {
        **(counts | sizes | kind | {"B": rows, "S": state.shape[-4]}),
        **given(BETA=arrays.beta, SKIP=arrays.skip, SLOTS=arrays.indices, RANK_ONE=arrays.a),
        "STRIDE_D": 1 if spec.transposed else values,
        "STRIDE_V": dim if spec.transposed else 1,
    }
    results = Launcher("recurrence", arrays._asdict(), numbers, q)(
        step_kernel,
        tile,
        {"new_state": result_like(state), "out": result(*lead, rows, out_heads, values, dtype=v.dtype)},
        cdiv(values, tile.block_v) * heads * rows * math.prod(lead),
        aliases={"state": "new_state"},
        name="step",
    )
    return results["out"], results["new_state"]
