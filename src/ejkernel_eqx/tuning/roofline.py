"""The roofline: a lower bound on an operation's time, from the documented peaks of a device."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..dispatch import Backend, Cost, DeviceFacts, Problem


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The peaks of a device: arithmetic operations per second in matrix products, and bytes per second of its memory."""

    flops: float
    bytes: float
    source: str


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A cost compared with a device's peaks.

    - `flops`, `bytes`: the cost; `intensity`: operations per byte.
    - `bound_ms`: the time in ms at the device's peaks, and `bound_by`, `"compute"` or `"memory"`, whichever takes longer; `None` if
      the peaks are unknown.
    - `ms`: the measured time; `fraction`: `bound_ms / ms`, which is 1 at the bound. It may exceed 1 if the arrays stay in the
      device's cache.
    """

    flops: float
    bytes: float
    bound_ms: float | None = None
    bound_by: str | None = None
    ms: float | None = None

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def fraction(self) -> float | None:
        return self.bound_ms / self.ms if self.bound_ms is not None and self.ms else None

    def to_dict(self) -> dict[str, float | str | None]:
        """All fields and both properties as JSON values; `intensity` is `None` if no bytes are moved."""
        intensity = self.intensity if self.bytes else None
        return dataclasses.asdict(self) | {"intensity": intensity, "fraction": self.fraction}


def roofline(cost: Cost, peaks: Peaks | None, ms: float | None = None) -> Roofline:
    """The roofline of a cost, with the measured time if given; without peaks it has no bound."""
    if peaks is None:
        return Roofline(cost.flops, cost.bytes, ms=ms)
    side = "compute" if cost.flops / peaks.flops >= cost.bytes / peaks.bytes else "memory"
    return Roofline(cost.flops, cost.bytes, bound_ms(cost, peaks), side, ms)


def bound_ms(cost: Cost, peaks: Peaks) -> float:
    """The lower bound in ms: the longer of arithmetic and memory traffic, which overlap."""
    return 1e3 * max(cost.flops / peaks.flops, cost.bytes / peaks.bytes)


def matrix_dtype(problem: Problem) -> str:
    """The narrowest floating-point dtype among a problem's arrays, in which matrix products are fastest."""
    names = [name for _, name in problem.dtypes if "float" in name]
    return min(names, key=lambda name: (_width(name), name), default="float32")


def _width(name: str) -> int:
    """The number of bits of a dtype such as `"bfloat16"` or `"float8_e4m3fn"`."""
    digits = name.partition("float")[2].partition("_")[0]
    return int(digits) if digits.isdigit() else 64


def device_peaks(device: DeviceFacts, dtype: str) -> Peaks | None:
    """The peaks of a device for matrix products in `dtype`; `None` if neither documents nor the driver state them. Nothing is timed.

    NVIDIA GPUs: clock, multiprocessors and memory bus as reported by the driver, times the documented operations of the
    dense tensor cores per clock. This is the peak at the highest clock of the device. It may exceed the data sheet's
    (H200: 1980 MHz and 1070 TFLOP/s in bfloat16, against 1830 MHz and 989). It is not sustained under load. TPUs:
    Google's documents, per JAX device. float32 means the accuracy of float32: three passes in tf32, or the float32
    units if they are faster; on TPUs, six passes in bfloat16.
    """
    if device.backend is Backend.TPU:
        return _tpu_peaks(device.kind, dtype)
    if device.backend is Backend.GPU and device.vendor == "nvidia":
        return _nvidia_peaks(device, dtype)
    return None


# Per multiprocessor and clock, by compute capability: dense operations of the tensor cores in bfloat16 (from NVIDIA's architecture
# papers), and of the plain float32 units.
_TENSOR_FLOPS: Mapping[str, tuple[int, int]] = {
    "8.0": (2048, 128),
    "8.7": (2048, 256),
    "9.0": (4096, 256),
    **dict.fromkeys(("8.6", "8.9", "12.0"), (1024, 256)),
    **dict.fromkeys(("10.0", "10.3"), (8192, 256)),
}
_FIRST_WITH_FLOAT8 = (8, 9)


def _nvidia_peaks(device: DeviceFacts, dtype: str) -> Peaks | None:
    per_clock = _flops_per_clock(device, dtype)
    clocks = _read_clocks(device.compute_capability, device.num_multiprocessors) if per_clock else None
    if per_clock is None or clocks is None:
        return None
    core_hz, memory_bytes = clocks
    source = f"{device.num_multiprocessors} multiprocessors at {core_hz / 1e6:.0f} MHz, the highest clock"
    return Peaks(per_clock * device.num_multiprocessors * core_hz, memory_bytes, source)


def _flops_per_clock(device: DeviceFacts, dtype: str) -> float | None:
    tensor, plain = _TENSOR_FLOPS.get(device.compute_capability, (0, 0))
    rates = {"bfloat16": tensor, "float16": tensor, "float32": max(tensor / 2 / 3, plain)}
    if dtype.startswith("float8_") and device.capability >= _FIRST_WITH_FLOAT8:
        return 2 * tensor or None
    return rates.get(dtype) or None


# Attributes of cuDeviceGetAttribute; clocks are in kHz, the bus width in bits.
_CLOCK, _MULTIPROCESSORS, _MEMORY_CLOCK, _BUS_WIDTH, _MAJOR, _MINOR = 13, 16, 36, 37, 75, 76


@functools.cache
def _read_clocks(compute_capability: str, num_multiprocessors: int) -> tuple[float, float] | None:
    """The clock in hertz and the memory bandwidth in bytes per second of the first such device of the driver; `None` if there is none."""
    for ask in _driver_devices():
        result = f"{ask(_MAJOR)}.{ask(_MINOR)}", ask(_MULTIPROCESSORS)
        core, memory, bus = ask(_CLOCK), ask(_MEMORY_CLOCK), ask(_BUS_WIDTH)
        if result == (compute_capability, num_multiprocessors) and min(core, memory, bus) > 0:
            return core * 1e3, memory * 1e3 * 2 * bus / 8  # two transfers a clock, eight bits a byte
    return None


def _driver_devices() -> list[Callable[[int], int]]:
    """Lists, for every NVIDIA device, a function from an attribute to its value, which is 0 if the driver does not report it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [functools.partial(_attribute, driver, ordinal) for ordinal in range(count.value)]


def _attribute(driver: Any, ordinal: int, attribute: int) -> int:
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    known = driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    known = known and driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0
    return value.value if known else 0


# By JAX device: bfloat16 operations and bytes per second, from Google Cloud's page of each generation. A device of v7 is one of the
# two TensorCores of a chip.
_TPU_PEAKS: Mapping[str, tuple[float, float]] = {
    "TPU v4": (275e12, 1.2e12),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), (197e12, 819e9)),
    **dict.fromkeys(("TPU v5", "TPU v5p"), (459e12, 2765e9)),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), (918e12, 1640e9)),
    "TPU7x": (2307e12 / 2, 7380e9 / 2),
}
_TPU_PASSES = {"bfloat16": 1, "float32": 6}


def _tpu_peaks(kind: str, dtype: str) -> Peaks | None:
    if kind not in _TPU_PEAKS or dtype not in _TPU_PASSES:
        return None
    flops, bandwidth = _TPU_PEAKS[kind]
    return Peaks(flops / _TPU_PASSES[dtype], bandwidth, f"{kind}, the vendor's documents")
