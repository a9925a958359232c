"""Facts about the device that kernels are chosen for, queried from the runtime."""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

import jax

from .platform import Backend

Device = Any  # `jax.Device`, which is a variable to type checkers

# Limits per thread block by compute capability, if the runtime does not report them (CUDA programming guide, "Technical
# specifications per compute capability"); for others, the smallest limit among a vendor's supported GPUs.
_SHARED_MEMORY = {"8.0": 166_912, "8.7": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
_SAFE_SHARED_MEMORY = {"nvidia": 101_376, "amd": 65_536}

# By JAX's device kind, since devices have no attribute for it; as in JAX's own `pallas.tpu.get_tpu_info`, which covers only the default device.
_VMEM_MIB = {
    **dict.fromkeys(("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite"), 16),
    **dict.fromkeys(("TPU v5", "TPU v5p", "TPU7", "TPU7x"), 64),
    **dict.fromkeys(("TPU v5e", "TPU v5 lite", "TPU v6e", "TPU v6 lite"), 128),
    "TPU8i": 192,
}

_OF_THE_DEVICE = "kind backend vendor compute_capability num_multiprocessors shared_memory".split()


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """The facts about a device that dispatch uses. They are stored in every plan, so nothing is queried after construction.

    `shared_memory` is the largest amount of shared memory that one program of a GPU may use. `vmem` is the vector
    memory of a TPU core. Both are in bytes, and 0 if there is none or it is unknown. `count` is the number of devices
    that JAX sees. `cudnn` is the version of cuDNN, empty if there is none or it is unknown.
    """

    backend: Backend
    kind: str
    vendor: str = ""
    compute_capability: str = ""
    num_multiprocessors: int = 0
    shared_memory: int = 0
    memory: int = 0
    runtime: str = ""
    count: int = 1
    vmem: int = 0
    cudnn: tuple[int, ...] = ()

    @property
    def capability(self) -> tuple[int, int]:
        """`compute_capability` as numbers; `(0, 0)` if there is none or it has another form."""
        major, _, minor = self.compute_capability.partition(".")
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)

    @property
    def slug(self) -> str:
        """The folder name of this device's tuned tables: `nvidia_h200`."""
        return "".join(c if c.isalnum() else "_" for c in self.kind.lower()).strip("_")

    def to_dict(self) -> dict[str, Any]:
        """The facts of the device itself, as stored in the header of its tables, without those of the machine or process."""
        return {name: getattr(self, name) for name in _OF_THE_DEVICE} | {"backend": self.backend.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DeviceFacts":
        """The inverse of `to_dict`; facts of the machine or process have their defaults."""
        facts: dict[str, Any] = {name: data[name] for name in _OF_THE_DEVICE}
        return cls(**{**facts, "backend": Backend(data["backend"])})


def device_facts(device: Device | None = None) -> DeviceFacts:
    """The facts of `device`, by default the one that JAX would place a computation on."""
    return _facts(_default_device() if device is None else device)


def other_device_facts(device: DeviceFacts) -> tuple[DeviceFacts, ...]:
    """The facts of one device of every other kind in this process, since a module built under `jax.default_device` of one kind may be
    called on another."""
    found = {place_of(device): device}
    for other in (*jax.local_devices(), *_local_devices("cpu")):
        found.setdefault((_backend(other.platform), other.device_kind), _facts(other))
    return tuple(found.values())[1:]


Place = tuple[Backend, str]
"""What a choice is made for: the backend and the kind of a device."""


def place_of(device: DeviceFacts) -> Place:
    return device.backend, device.kind


def place_of_calls() -> Place:
    """Returns what a call made here is compiled for, as known while tracing: the devices of the current mesh, else the default device. Both are
    part of the keys of JAX's trace caches."""
    of_mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if of_mesh is not None:
        return _backend(of_mesh.platform), of_mesh.device_kind
    device = _default_device()
    return _backend(device.platform), device.device_kind


def facts_of_calls() -> DeviceFacts:
    """The facts of a device that a call made here is compiled for, as known while tracing; of the default device if none like it is here."""
    backend, kind = place_of_calls()
    default = _default_device()
    candidates = [default, *_local_devices(backend.value)] if backend is not Backend.ANY else [default]
    like = (
        device for device in candidates if (_backend(device.platform), device.device_kind) == (backend, kind)
    )
    return _facts(next(like, default))


def _default_device() -> Device:
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def _local_devices(backend: str) -> list[Device]:
    """The devices of a backend; empty if JAX was started without it."""
    try:
        return jax.local_devices(backend=backend)
    except RuntimeError:
        return []


def _backend(platform: str) -> Backend:
    if platform in ("gpu", "cuda", "rocm"):
        return Backend.GPU
    return Backend.TPU if platform == "tpu" else Backend.CPU if platform == "cpu" else Backend.ANY


@functools.lru_cache(maxsize=64)
def _facts(device: Device) -> DeviceFacts:
    backend, runtime = _backend(device.platform), _runtime(device)
    facts: dict[str, Any] = {"memory": _memory(device), "runtime": runtime}
    if backend is not Backend.GPU:
        vmem = vmem_capacity(device.device_kind) if backend is Backend.TPU else 0
        facts |= {"count": jax.device_count(device.platform), "vmem": vmem}
        return DeviceFacts(backend, device.device_kind, **facts)
    vendor = "amd" if "rocm" in runtime.lower() or device.platform == "rocm" else "nvidia"
    shared = getattr(device, "shared_memory_per_block_optin", None)
    capability = str(getattr(device, "compute_capability", ""))
    return DeviceFacts(
        backend,
        device.device_kind,
        vendor,
        capability,
        num_multiprocessors=int(getattr(device, "core_count", 0) or 0),
        shared_memory=int(shared or shared_memory_limit(vendor, capability)),
        count=jax.device_count(),
        cudnn=_cudnn() if vendor == "nvidia" else (),
        **facts,
    )


def _cudnn() -> tuple[int, ...]:
    """The version of the cuDNN that JAX has loaded, else of the installed wheel; empty if there is neither."""
    try:
        number = int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
        return number // 10_000, number // 100 % 100, number % 100
    except (OSError, AttributeError):
        pass
    for wheel in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(wheel))[:3]))
        except importlib.metadata.PackageNotFoundError:
            pass
    return ()


def shared_memory_limit(vendor: str, capability: str) -> int:
    """The vendor's documented limit per program for an architecture; the smallest known one for an unknown architecture."""
    return _SHARED_MEMORY.get(capability, _SAFE_SHARED_MEMORY.get(vendor, 49_152))


def vmem_capacity(kind: str) -> int:
    """Vector memory of one TPU core in bytes; the smallest known for an unknown kind."""
    return _VMEM_MIB.get(kind, min(_VMEM_MIB.values())) * 2**20


def _memory(device: Device) -> int:
    stats = device.memory_stats()
    return int(stats.get("bytes_limit", 0)) if stats else 0


def _runtime(device: Device) -> str:
    return " ".join(str(device.client.platform_version).split())


def device_kind() -> str:
    """The default device's name as reported by its runtime, such as `"NVIDIA H200"`."""
    return device_facts().kind


def device_platform() -> str:
    """`"gpu"`, `"tpu"` or `"cpu"`."""
    return device_facts().backend.value


def device_fingerprint(facts: DeviceFacts | None = None) -> str:
    """A short stable string that differs between devices that must not share tuned tables."""
    facts = facts or device_facts()
    fields = (facts.kind, facts.compute_capability, str(facts.num_multiprocessors), str(facts.shared_memory))
    return f"{facts.slug}-{hashlib.sha256('|'.join(fields).encode()).hexdigest()[:8]}"
