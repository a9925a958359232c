"""Compiling what a platform launches ahead of time, for devices that need not be there."""

import re
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_eqx import Backend, DeviceFacts
from ejkernel_eqx.dispatch.device import shared_memory_limit
from ejkernel_eqx.launch import executing

DEVICES = {
    "sm_80": DeviceFacts(Backend.GPU, "A100", "nvidia", "8.0", 108, shared_memory_limit("nvidia", "8.0")),
    "sm_90": DeviceFacts(Backend.GPU, "H100", "nvidia", "9.0", 132, shared_memory_limit("nvidia", "9.0")),
    "sm_100": DeviceFacts(Backend.GPU, "B200", "nvidia", "10.0", 148, shared_memory_limit("nvidia", "10.0")),
    "gfx942": DeviceFacts(Backend.GPU, "MI300X", "amd", "9.4.2", 304, shared_memory_limit("amd", "gfx942")),
}


def executed(function: Callable[..., Any], execute: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose launches are left to `execute`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with executing(execute):
            return function(*args, **kwargs)

    return call


def launches_of(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What `function(*args)` would launch, by the kernel's name; nothing is run."""
    found: dict[str, Any] = {}

    def record(launch: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        found[launch.function.fn.__name__] = launch
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    jax.eval_shape(executed(function, record), *args)
    return found


def waits(launch: Any) -> list[str]:
    """Warnings of NVIDIA's assembler that products run one after the other."""
    from triton import knobs

    from ejkernel_eqx.launch.compile import compiled, TARGETS

    ptx = compiled(launch, TARGETS["sm_90"]).asm["ptx"]
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "/dev/stdin", "-o", "/dev/null"]
    assembled = subprocess.run(command, input=ptx, text=True, capture_output=True)
    assert assembled.returncode == 0, assembled.stderr
    return re.findall(r"C75\d\d", assembled.stderr + assembled.stdout)
