"""The roofline: documented peaks, the driver's clocks, and nothing where neither tells."""

import ctypes
import dataclasses
from typing import Any

import pytest

from ejkernel_eqx import Backend, Cost, DeviceFacts, Problem
from ejkernel_eqx.tuning import roofline

H200 = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132)
# Of the driver: clock in kHz, multiprocessors, memory clock in kHz, bus width in bits, compute capability.
H200_DRIVER = {13: 1_980_000, 16: 132, 36: 3_201_000, 37: 6144, 75: 9, 76: 0}
A100_DRIVER = {13: 1_410_000, 16: 108, 36: 1_593_000, 37: 5120, 75: 8, 76: 0}
ADA_DRIVER = {13: 2_520_000, 16: 128, 36: 10_501_000, 37: 384, 75: 8, 76: 9}


class Driver:
    """The few functions of libcuda that are asked."""

    def __init__(self, *devices, ready=0):
        self.devices, self.ready = devices, ready

    def cuInit(self, flags):
        return self.ready

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.devices[device.value].get(attribute, 0)
        return 0 if attribute in self.devices[device.value] else 1


@pytest.fixture
def peaks_of(monkeypatch):
    """The peaks of a device where the driver shows some, or cannot be loaded."""

    def peaks_of(facts, dtype, *devices, **state) -> Any:
        library = Driver(*devices, **state) if devices != ("absent",) else None

        def load(name):
            if library is None:
                raise OSError(f"{name}: cannot open shared object file")
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)
        roofline._read_clocks.cache_clear()
        return roofline.device_peaks(facts, dtype)

    yield peaks_of
    roofline._read_clocks.cache_clear()


PEAKS = [
    # From the data sheets at their boost clocks: A100 80 GB 312, RTX 4090 330 (f16 accumulated in f16) TFLOP/s.
    (A100_DRIVER, "bfloat16", 312e12, 2039e9),
    (A100_DRIVER, "float16", 312e12, 2039e9),
    (A100_DRIVER, "float32", 156e12 / 3, 2039e9),
    (ADA_DRIVER, "bfloat16", 330.3e12, 1008e9),
    (ADA_DRIVER, "float32", 82.6e12, 1008e9),  # the plain units are faster than three passes
    (ADA_DRIVER, "float8_e4m3fn", 660.6e12, 1008e9),
    (H200_DRIVER, "bfloat16", 1070.5e12, 4917e9),
    (H200_DRIVER, "float8_e5m2", 2141e12, 4917e9),
    (H200_DRIVER, "float32", 178.4e12, 4917e9),
]


def facts_of(attributes):
    capability = f"{attributes[75]}.{attributes[76]}"
    return DeviceFacts(Backend.GPU, "GPU", "nvidia", capability, attributes[16])


@pytest.mark.parametrize("attributes, dtype, flops, bandwidth", PEAKS)
def test_peaks_of_gpus(peaks_of, attributes, dtype, flops, bandwidth):
    peaks = peaks_of(facts_of(attributes), dtype, H200_DRIVER, attributes)
    assert peaks.flops == pytest.approx(flops, rel=2e-3) and peaks.bytes == pytest.approx(bandwidth, rel=2e-3)
    assert f"{attributes[16]} multiprocessors at {attributes[13] // 1000} MHz" in peaks.source


UNKNOWN: dict[str, tuple[DeviceFacts, str, tuple[Any, ...]]] = {
    "dtype": (H200, "float64", (H200_DRIVER,)),
    "integers": (H200, "int8", (H200_DRIVER,)),
    "8 bits": (facts_of(A100_DRIVER), "float8_e4m3fn", (A100_DRIVER,)),
    "vendor": (dataclasses.replace(H200, vendor="amd"), "bfloat16", (H200_DRIVER,)),
    "backend": (dataclasses.replace(H200, backend=Backend.CPU), "bfloat16", (H200_DRIVER,)),
    "capability": (dataclasses.replace(H200, compute_capability="99.0"), "bfloat16", (H200_DRIVER,)),
    "no capability": (dataclasses.replace(H200, compute_capability=""), "bfloat16", (H200_DRIVER,)),
    "another device": (dataclasses.replace(H200, num_multiprocessors=114), "bfloat16", (H200_DRIVER,)),
    "a clock of 0": (H200, "bfloat16", ({**H200_DRIVER, 36: 0},)),
    "no clock": (H200, "bfloat16", ({name: x for name, x in H200_DRIVER.items() if name != 13},)),
    "no device": (H200, "bfloat16", ()),
    "no driver": (H200, "bfloat16", ("absent",)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_peaks_are_never_invented(peaks_of, name):
    facts, dtype, devices = UNKNOWN[name]
    assert peaks_of(facts, dtype, *devices) is None


def test_a_driver_that_is_not_ready(peaks_of):
    assert peaks_of(H200, "bfloat16", H200_DRIVER, ready=100) is None


def test_peaks_of_tpus():
    def peaks(kind, dtype="bfloat16") -> Any:
        return roofline.device_peaks(DeviceFacts(Backend.TPU, kind), dtype)

    assert (peaks("TPU v5 lite").flops, peaks("TPU v5 lite").bytes) == (197e12, 819e9)
    assert peaks("TPU v5p").flops == 459e12 and peaks("TPU v4").bytes == 1.2e12
    assert peaks("TPU v6e", "float32").flops == 918e12 / 6
    assert peaks("TPU7x").flops == 2307e12 / 2
    assert peaks("TPU v99") is None and peaks("TPU v4", "float16") is None


def test_the_roofline_of_a_cost():
    peaks = roofline.Peaks(100.0, 10.0, "a table")
    compute, memory = (roofline.roofline(Cost(50.0, read), peaks, ms=4000.0) for read in (1.0, 20.0))
    assert (compute.bound_ms, compute.bound_by, compute.fraction, compute.intensity) == (
        500,
        "compute",
        0.125,
        50,
    )
    assert (memory.bound_ms, memory.bound_by, memory.fraction, memory.intensity) == (2000, "memory", 0.5, 2.5)
    unmeasured = roofline.roofline(Cost(1.0, 0.0), peaks).to_dict()
    assert unmeasured["bound_ms"] == 10
    assert {name for name, x in unmeasured.items() if x is None} == {"ms", "intensity", "fraction"}
    dtypes = {"x": "bfloat16", "state": "float32", "ids": "int8"}
    problem = Problem.make("op", dims={}, dtypes=dtypes, flags={}, lengths=set())
    assert roofline.matrix_dtype(problem) == "bfloat16"
