"""One token per row in Triton: each state is read once and written once, in place if donated."""

import dataclasses
import math
from typing import Any

import triton
import triton.language as tl
from jax import Array

from ...launch import given, Launcher, result_like
from ...launch.constants import LOG2E
from ...launch.fields import Checked, Power, Warps
from ...launch.sizes import cdiv, padded
from ..spec import ScanSpec, StepArrays
from .steps import sigmoid, time_step


@dataclasses.dataclass(frozen=True)
class StepTile(Checked):
    """A program processes `block_i` channels (a power of two) of one row."""

    block_i: Power
    num_warps: Warps


@triton.jit
def step_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr,  # x, dt, z [rows, I], a [I, N], b, c [rows, GROUPS, N], d, bias [I]
    indices_ptr, state_ptr, ROWS, SLOTS,  # [rows]; [slots, I, N], aliased with the new state
    new_state_ptr, out_ptr,  # [slots, I, N], [rows, I]
    I: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, BI: tl.constexpr, BLOCK_N: tl.constexpr,
    A_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    # A program: a row, a block of channels (fastest).
    blocks: tl.constexpr = (I + BI - 1) // BI
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    batch = row // ROWS
    i = pid % blocks * BI + tl.arange(0, BI)  # [BI]
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = i < I  # [BI]
    slot, used = row, True
    # The output of a row without a slot is 0, and nothing is written.
    if POOL:
        index = tl.load(indices_ptr + row)
        slot, used = batch * SLOTS + index, (index >= 0) & (index < SLOTS)
    if used:
        whole = inside[:, None] & (n[None, :] < N)  # [BI, BLOCK_N]
        x = tl.load(x_ptr + row * I + i, mask=inside, other=0.0).to(tl.float32)  # [BI]
        raw = tl.load(dt_ptr + row * I + i, mask=inside, other=0.0).to(tl.float32)  # [BI]
        bias = tl.zeros([BI], tl.float32)  # [BI]
        if BIAS:
            bias = tl.load(bias_ptr + batch * BIAS_STRIDE + i, mask=inside, other=0.0).to(tl.float32)  # [BI]
        dt = tl.sum(time_step(raw[None, :], bias, SOFTPLUS), axis=0)  # [BI]
        a = tl.load(a_ptr + batch * A_STRIDE + i[:, None] * N + n[None, :], mask=whole, other=0.0).to(tl.float32)  # [BI, BLOCK_N]  # fmt: skip
        at = (slot * I + i[:, None]) * N + n[None, :]  # [BI, BLOCK_N]
        state = tl.load(new_state_ptr + at, mask=whole, other=0.0).to(tl.float32)  # [BI, BLOCK_N]
        # With one group all channels read the same row; with several, each reads its own.
        if GROUPS == 1:
            b = tl.load(b_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]  # [1, BLOCK_N]
            c = tl.load(c_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]  # [1, BLOCK_N]
        else:
            own = (row * GROUPS + i[:, None] // (I // GROUPS)) * N + n[None, :]  # [BI, BLOCK_N]
            b = tl.load(b_ptr + own, mask=whole, other=0.0).to(tl.float32)  # [BI, BLOCK_N]
            c = tl.load(c_ptr + own, mask=whole, other=0.0).to(tl.float32)  # [BI, BLOCK_N]
        # h = e^(dt A) h + dt x B, y = (h C + D x) silu(z).
        state = tl.exp2(dt[:, None] * (a * LOG2E)) * state + (dt * x)[:, None] * b  # [BI, BLOCK_N]
        tl.store(new_state_ptr + at, state.to(new_state_ptr.dtype.element_ty), mask=whole)
        # The output reads the new state.
        y = tl.sum(state * c, axis=1)  # [BI]
        if SKIP:
            y += x * tl.load(d_ptr + batch * D_STRIDE + i, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            z = tl.load(z_ptr + row * I + i, mask=inside, other=0.0).to(tl.float32)  # [BI]
            y *= z * sigmoid(z)  # [BI]
        tl.store(out_ptr + row * I + i, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + row * I + i, tl.zeros([BI], out_ptr.dtype.element_ty), mask=inside)


def strides(**parameters: Array | None) -> dict[str, int]:
    """Strides between the rows of the batch, by parameter name; 0 for arrays that the rows share."""
    ranks = {"A": 2}
    return {
        f"{name}_STRIDE": 0 if x is None or x.ndim == ranks.get(name, 1) else math.prod(x.shape[1:])
        for name, x in parameters.items()
    }


def step(arrays: StepArrays, spec: ScanSpec, config: Any) -> tuple[Array, Array]:
    """`out [*, B, I]` in the dtype of `x` and the states (the whole pool), from arrays with exactly one leading axis."""
    x, state, tile = arrays.x, arrays.state, config.step
    lead, rows, channels = x.shape
    parameters = {"a": arrays.A, "b": arrays.B, "c": arrays.C, "d": arrays.D, "bias": arrays.dt_bias}
    sizes = {"I": channels, "N": state.shape[-1], "GROUPS": arrays.B.shape[-2], "BI": tile.block_i}
    numbers = {
        **(sizes | {"ROWS": rows, "SLOTS": state.shape[1]}),
        "BLOCK_N": padded(state.shape[-1], 1),
        "SOFTPLUS": spec.softplus,
        **strides(A=arrays.A, BIAS=arrays.dt_bias, D=arrays.D),
        **given(BIAS=arrays.dt_bias, SKIP=arrays.D, GATE=arrays.z, POOL=arrays.indices),
    }
    results = Launcher("selective_scan", arrays._asdict() | parameters, numbers, x)(
        step_kernel,
        tile,
        {"new_state": result_like(state), "out": result_like(x)},
        cdiv(channels, tile.block_i) * rows * lead,
        aliases={"state": "new_state"},
        name="step",
    )
    return results["out"], results["new_state"]
