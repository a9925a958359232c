"""One token of every row in Triton: each state is read once and written once, in place where it is donated."""

import dataclasses
import math
from collections.abc import Callable

import jax
import triton
import triton.language as tl
from jax import Array

from ...launch import Launch, run
from ..spec import ScanSpec, StepArrays
from .tile import LOG2E, sigmoid, time_step


@dataclasses.dataclass(frozen=True)
class StepTile:
    """A program takes `block_i` channels (a power of two) of one row."""

    block_i: int
    num_warps: int

    def __post_init__(self):
        if self.block_i < 1 or self.block_i & (self.block_i - 1) or self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(
                f"StepTile: expected block_i a power of two and num_warps 1, 2, 4, 8 or 16, received {self.block_i!r} and {self.num_warps!r}."
            )


@triton.jit
def step_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    bias_ptr,
    indices_ptr,
    state_ptr,
    ROWS,
    SLOTS,
    new_state_ptr,
    out_ptr,
    I: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BI: tl.constexpr,
    BLOCK_N: tl.constexpr,
    A_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    D_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    SKIP: tl.constexpr,
    GATE: tl.constexpr,
    POOL: tl.constexpr,
):
    blocks: tl.constexpr = (I + BI - 1) // BI
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    batch = row // ROWS
    i = pid % blocks * BI + tl.arange(0, BI)
    n = tl.arange(0, BLOCK_N)
    inside = i < I
    slot, used = row, True
    if POOL:
        index = tl.load(indices_ptr + row)
        slot, used = batch * SLOTS + index, (index >= 0) & (index < SLOTS)
    if used:
        whole = inside[:, None] & (n[None, :] < N)
        x = tl.load(x_ptr + row * I + i, mask=inside, other=0.0).to(tl.float32)
        raw = tl.load(dt_ptr + row * I + i, mask=inside, other=0.0).to(tl.float32)
        bias = tl.zeros([BI], tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + batch * BIAS_STRIDE + i, mask=inside, other=0.0).to(tl.float32)
        dt = tl.sum(time_step(raw[None, :], bias, SOFTPLUS), axis=0)
        a = tl.load(a_ptr + batch * A_STRIDE + i[:, None] * N + n[None, :], mask=whole, other=0.0).to(
            tl.float32
        )
        at = (slot * I + i[:, None]) * N + n[None, :]
        state = tl.load(new_state_ptr + at, mask=whole, other=0.0).to(tl.float32)  # [BI, N]
        # Of one group all channels read one row; of several each reads its own.
        if GROUPS == 1:
            b = tl.load(b_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            c = tl.load(c_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        else:
            own = (row * GROUPS + i[:, None] // (I // GROUPS)) * N + n[None, :]
            b = tl.load(b_ptr + own, mask=whole, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + own, mask=whole, other=0.0).to(tl.float32)
        state = tl.exp2(dt[:, None] * (a * LOG2E)) * state + (dt * x)[:, None] * b
        tl.store(new_state_ptr + at, state.to(new_state_ptr.dtype.element_ty), mask=whole)
        y = tl.sum(state * c, axis=1)
        if SKIP:
            y += x * tl.load(d_ptr + batch * D_STRIDE + i, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            z = tl.load(z_ptr + row * I + i, mask=inside, other=0.0).to(tl.float32)
            y *= z * sigmoid(z)
        tl.store(out_ptr + row * I + i, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + row * I + i, tl.zeros([BI], out_ptr.dtype.element_ty), mask=inside)


def step(
    arrays: StepArrays,
    spec: ScanSpec,
    tile: StepTile,
    *,
    execute: Callable[[Launch, dict[str, Array]], dict[str, Array]] = run,
) -> tuple[Array, Array]:
    """`out [*, B, I]` in the dtype of `x` and the states (the whole pool), from arrays with exactly one leading axis."""
    x, state = arrays.x, arrays.state
    lead, rows, channels = x.shape
    stride = lambda p, rank: 0 if p is None or p.ndim == rank else math.prod(p.shape[1:])
    given = {
        "x_ptr": x,
        "dt_ptr": arrays.dt,
        "a_ptr": arrays.A,
        "b_ptr": arrays.B,
        "c_ptr": arrays.C,
        "d_ptr": arrays.D,
        "z_ptr": arrays.z,
        "bias_ptr": arrays.dt_bias,
        "indices_ptr": arrays.indices,
        "state_ptr": state,
    }
    inputs = {name: x if array is None else array for name, array in given.items()}
    launch = Launch(
        step_kernel,
        inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
        outputs={
            "new_state_ptr": jax.ShapeDtypeStruct(state.shape, state.dtype),
            "out_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype),
        },
        scalars={"ROWS": rows, "SLOTS": state.shape[1]},
        constants={
            "I": channels,
            "N": state.shape[-1],
            "GROUPS": arrays.B.shape[-2],
            "BI": tile.block_i,
            "BLOCK_N": triton.next_power_of_2(state.shape[-1]),
            "A_STRIDE": stride(arrays.A, 2),
            "BIAS_STRIDE": stride(arrays.dt_bias, 1),
            "D_STRIDE": stride(arrays.D, 1),
            "BIAS": arrays.dt_bias is not None,
            "SOFTPLUS": spec.softplus,
            "SKIP": arrays.D is not None,
            "GATE": arrays.z is not None,
            "POOL": arrays.indices is not None,
        },
        grid=(-(-channels // tile.block_i) * rows * lead,),
        num_warps=tile.num_warps,
        name="ejkernel_eqx.selective_scan.step",
        aliases={"state_ptr": "new_state_ptr"},
    )
    results = execute(launch, inputs)
    return results["out_ptr"], results["new_state_ptr"]
