"""The roofline: documented peaks, the driver's clocks, and nothing where neither tells."""

import ctypes
import dataclasses
from typing import Any

import pytest

from ejkernel_eqx.dispatch import Backend, Cost, DeviceFacts, Problem
from ejkernel_eqx.tuning.report import roofline as roofline_module
from ejkernel_eqx.tuning.report.roofline import bound_ms, device_peaks, matrix_dtype, Peaks, roofline

H200 = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132)
# Of the driver: clock in kHz, multiprocessors, memory clock in kHz, bus width in bits, compute capability.
H200_DRIVER = {13: 1_980_000, 16: 132, 36: 3_201_000, 37: 6144, 75: 9, 76: 0}
A100_DRIVER = {13: 1_410_000, 16: 108, 36: 1_593_000, 37: 5120, 75: 8, 76: 0}
ADA_DRIVER = {13: 2_520_000, 16: 128, 36: 10_501_000, 37: 384, 75: 8, 76: 9}


@pytest.fixture
def driver(monkeypatch):
    """The attributes of the devices that the driver shows."""
    shown = [H200_DRIVER]
    monkeypatch.setattr(
        roofline_module, "_driver_devices", lambda: [lambda name, d=d: d.get(name, 0) for d in shown]
    )
    roofline_module._read_clocks.cache_clear()
    yield shown
    roofline_module._read_clocks.cache_clear()


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
def test_peaks_of_gpus(driver, attributes, dtype, flops, bandwidth):
    driver.append(attributes)
    peaks: Any = device_peaks(facts_of(attributes), dtype)
    assert peaks.flops == pytest.approx(flops, rel=2e-3) and peaks.bytes == pytest.approx(bandwidth, rel=2e-3)
    assert f"{attributes[16]} multiprocessors at {attributes[13] // 1000} MHz" in peaks.source


def test_peaks_are_never_invented(driver):
    assert device_peaks(H200, "bfloat16") is not None
    assert device_peaks(H200, "float64") is None and device_peaks(H200, "int8") is None
    assert device_peaks(facts_of(A100_DRIVER), "float8_e4m3fn") is None
    for changes in (
        {"vendor": "amd"},
        {"backend": Backend.CPU},
        {"compute_capability": "99.0"},
        {"compute_capability": ""},
        {"num_multiprocessors": 114},  # the driver shows another device
    ):
        assert device_peaks(dataclasses.replace(H200, **changes), "bfloat16") is None
    roofline_module._read_clocks.cache_clear()
    driver[:] = [{**H200_DRIVER, 36: 0}]  # the driver does not tell
    assert device_peaks(H200, "bfloat16") is None


def test_peaks_of_tpus():
    def peaks(kind, dtype="bfloat16") -> Any:
        return device_peaks(DeviceFacts(Backend.TPU, kind), dtype)

    assert (peaks("TPU v5 lite").flops, peaks("TPU v5 lite").bytes) == (197e12, 819e9)
    assert peaks("TPU v5p").flops == 459e12 and peaks("TPU v4").bytes == 1.2e12
    assert peaks("TPU v6e", "float32").flops == 918e12 / 6
    assert peaks("TPU7x").flops == 2307e12 / 2
    assert peaks("TPU v99") is None and peaks("TPU v4", "float16") is None


class Driver:
    """The few functions of libcuda that are asked."""

    def __init__(self, devices, ready=0):
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


def test_the_driver_is_asked(monkeypatch):
    def peaks(library) -> Any:
        monkeypatch.setattr(ctypes, "CDLL", library)
        roofline_module._read_clocks.cache_clear()
        found = device_peaks(H200, "bfloat16")
        roofline_module._read_clocks.cache_clear()
        return found

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    unclocked = {name: value for name, value in H200_DRIVER.items() if name != 13}
    assert peaks(lambda _: Driver([A100_DRIVER, H200_DRIVER])).flops == 4096 * 132 * 1.98e9
    assert peaks(lambda _: Driver([unclocked])) is None
    assert peaks(lambda _: Driver([H200_DRIVER], ready=100)) is None
    assert peaks(lambda _: Driver([])) is None and peaks(absent) is None


def test_the_roofline_of_a_cost():
    peaks = Peaks(100.0, 10.0, "a table")
    assert bound_ms(Cost(50.0, 1.0), peaks) == 500.0 and bound_ms(Cost(50.0, 20.0), peaks) == 2000.0
    memory = roofline(Cost(50.0, 20.0), peaks, ms=4000.0)
    assert (memory.bound_by, memory.fraction, memory.intensity) == ("memory", 0.5, 2.5)
    assert roofline(Cost(1.0, 0.0), peaks).to_dict() == {
        "flops": 1.0,
        "bytes": 0.0,
        "bound_ms": 10.0,
        "bound_by": "compute",
        "ms": None,
        "intensity": None,
        "fraction": None,
    }
    dtypes = {"x": "bfloat16", "state": "float32", "ids": "int8"}
    assert matrix_dtype(Problem.make("op", dims={}, dtypes=dtypes, flags={}, lengths=set())) == "bfloat16"
