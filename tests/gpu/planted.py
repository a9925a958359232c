"""A Triton kernel with configurations that only a GPU can show to be bad; importable by the tuner's other process."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax

import ejkernel_eqx as ejx

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

if triton is not None:

    @triton.jit
    def double_kernel(
        x_ptr,
        out_ptr,
        N: tl.constexpr,
        BLOCK: tl.constexpr,
        FAULT: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        for start in tl.range(0, N, BLOCK):  # pyright: ignore
            i = start + tl.arange(0, BLOCK)
            inside = i < N
            x = tl.load(x_ptr + row * N + i, mask=inside, other=0.0)
            value = 2.0 * x
            if FAULT == "zeros":
                value = 0.0 * x
            if FAULT == "drifts":  # the clock of the multiprocessor: never twice the same
                clock = tl.inline_asm_elementwise(
                    "mov.u32 $0, %clock;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
                value += 1e-7 * (clock & 0xF).to(tl.float32)
            if FAULT == "slow":
                for _ in tl.range(0, 400):  # pyright: ignore
                    value = tl.sin(value) * 0.0 + 2.0 * x
            tl.store(out_ptr + row * N + i, value, mask=inside)
            if FAULT == "outside":
                tl.store(out_ptr + (1 << 44) + row * N + i, value, mask=inside)


@dataclasses.dataclass(frozen=True)
class Planted:
    block_n: int
    fault: str = ""


class Double(ejx.CustomKernel):
    """`out = 2 x`."""

    operation: ClassVar = "tests.double"
    inputs: ClassVar = {"x": "... N"}
    outputs: ClassVar = {"out": "... N"}
    config_types: ClassVar = {ejx.Platform.TRITON: Planted}

    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, *, platform=None, config=None):
        self.plan = self.make_plan(platform=platform, config=config)

    def __call__(self, x):
        return self.launch(x=x)

    def reference(self, x):
        return 2 * x

    def run_triton(self, arrays, config, launch):
        x = arrays["x"]
        inputs = {"x_ptr": x}
        constants = {"N": x.shape[1], "BLOCK": config.block_n, "FAULT": config.fault}
        outputs = {"out_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype)}
        results = launch(
            double_kernel, grid=(x.shape[0],), inputs=inputs, outputs=outputs, constants=constants
        )
        return {"out": results["out_ptr"]}

    def candidates(self, platform, problem, device):
        faults = ("slow", "zeros", "outside", "drifts", "", "slow")
        return [Planted(128 if n == 0 else 1024, fault) for n, fault in enumerate(faults)]
