"""Kernels of the leaky integrator: a block of channels a program, token after token."""

import dataclasses
from typing import Any

import triton
import triton.language as tl
from jax import Array

from ejkernel_eqx import Problem
from ejkernel_eqx.launch import Launcher, NOTHING, result, result_like


@triton.jit
def forward_kernel(
    x_ptr, decay_ptr, initial_ptr, T, out_ptr, states_ptr, final_ptr,
    C: tl.constexpr, BLOCK: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    row, channel = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = channel < C
    a = tl.load(decay_ptr + channel, mask=real, other=0.0)
    h = tl.load(initial_ptr + row * C + channel, mask=real, other=0.0)  # [BLOCK]
    for t in range(0, T):
        at = (row * T + t) * C + channel
        if SAVE:
            tl.store(states_ptr + at, h, mask=real)
        h = a * h + tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, h.to(out_ptr.dtype.element_ty), mask=real)
    tl.store(final_ptr + row * C + channel, h, mask=real)


@triton.jit
def backward_kernel(
    decay_ptr, states_ptr, dout_ptr, dfinal_ptr, T, dx_ptr, ddecay_ptr, dinitial_ptr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    row, channel = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = channel < C
    a = tl.load(decay_ptr + channel, mask=real, other=0.0)
    dh = tl.load(dfinal_ptr + row * C + channel, mask=real, other=0.0)  # [BLOCK]: of the state after token t
    da = tl.zeros([BLOCK], tl.float32)
    for back in range(0, T):
        at = (row * T + T - 1 - back) * C + channel
        dh += tl.load(dout_ptr + at, mask=real, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dh.to(dx_ptr.dtype.element_ty), mask=real)
        da += dh * tl.load(states_ptr + at, mask=real, other=0.0)
        dh = a * dh
    tl.store(ddecay_ptr + row * C + channel, da, mask=real)
    tl.store(dinitial_ptr + row * C + channel, dh, mask=real)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    block: int = 4
    num_warps: int = 4


class Triton:
    config_type = TritonConfig

    def unsupported(self, problem: Problem, device: Any) -> str | None:
        return "takes no float64" if problem.dtype("x") == "float64" else None

    def forward(
        self, arrays: Any, spec: None, config: TritonConfig, *, save: bool = True
    ) -> dict[str, Array]:
        return _forward(arrays._asdict(), config, save)

    def backward(self, arrays: Any, spec: None, config: Any, saved: Any, cotangents: Any):
        inputs = arrays._asdict() | saved | {f"d{name}": x for name, x in cotangents.items()}
        row = result(*arrays.initial.shape)
        outputs = {"dx": result_like(arrays.x), "ddecay": row, "dinitial": row}
        grads = _launch(backward_kernel, inputs, outputs, config)
        return {name.removeprefix("d"): x for name, x in grads.items()}

    def step(self, arrays: Any, spec: None, config: TritonConfig) -> Any:
        flat = lambda x: x.reshape((-1, x.shape[-1]))
        inputs = {"x": flat(arrays.x)[:, None], "decay": arrays.decay, "initial": flat(arrays.state)}
        results = _forward(inputs, config, False)
        return results["out"].reshape(arrays.x.shape), results["final"].reshape(arrays.state.shape)


def _forward(inputs: dict[str, Array], config: TritonConfig, save: bool) -> dict[str, Array]:
    outputs = {"out": result_like(inputs["x"]), "final": result_like(inputs["initial"]), "states": NOTHING}
    outputs |= {"states": result(*inputs["x"].shape)} if save else {}
    results = _launch(forward_kernel, inputs, outputs, config, SAVE=save)
    return {name: x for name, x in results.items() if save or name != "states"}


def _launch(kernel: Any, inputs: Any, outputs: Any, config: Any, **constants: Any) -> Any:
    batch, length, channels = inputs["x"].shape
    launch = Launcher("tests", inputs, {"T": length, "C": channels}, inputs["x"])
    return launch(kernel, config, outputs, batch * -(-channels // config.block), **constants)
