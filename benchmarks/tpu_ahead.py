"""Programs for TPUs, lowered and compiled on a machine that has none."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

from ejkernel_eqx._errors import not_installed
from ejkernel_eqx.dispatch import Backend, DeviceFacts
from ejkernel_eqx.dispatch.device import vmem_capacity

TOPOLOGIES = {
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "tpu7x": ("tpu7x:2x2x1", "TPU7x"),
}
"""A small machine of each generation, by the name that libtpu knows, and the kind of its devices."""

# Read when libtpu is loaded: it must not ask a cloud's metadata server for the machine that it is on, and several processes may load it.
_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def libtpu_unavailable() -> str | None:
    """The reason why nothing can be compiled for TPUs here; `None` if it can."""
    if importlib.util.find_spec("libtpu") is None:
        return not_installed("libtpu")
    return None


def facts_of(generation: str) -> DeviceFacts:
    """The facts of one device of a generation, `"v4"` to `"tpu7x"`, as dispatch knows them."""
    kind = TOPOLOGIES[generation][1]
    return DeviceFacts(Backend.TPU, kind, vmem=vmem_capacity(kind))


def lower_for_tpu(function: Callable[..., Any], *arrays: Any, generation: str = "v5e") -> Any:
    """The lowered program of a call for TPUs, for which nothing but JAX is needed. `arrays`: arrays or `jax.ShapeDtypeStruct`s."""
    with _as_if_on(generation):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",))


def compile_for_tpu(
    generation: str, function: Callable[..., Any], *arrays: Any, donate: tuple[int, ...] = (), **options: Any
) -> Any:
    """The program of a call, compiled by libtpu for one device of a generation. `donate`: arguments whose memory results may take. `options` are
    those of XLA's compiler.

    **Raises:** what the compiler does, `jax.errors.JaxRuntimeError` if the program does not fit the device.
    """
    sharding = jax.sharding.SingleDeviceSharding(_device(generation))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with _as_if_on(generation):
        lowered = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(place, arrays)).lower()
    return lowered.compile(compiler_options=options or None)


def _as_if_on(generation: str) -> Any:
    """A context in which Pallas asks for the facts of this generation, not for those of the default device."""
    device = jax.sharding.AbstractDevice(TOPOLOGIES[generation][1], 1, "tpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@functools.cache
def _device(generation: str) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation][0])
    return described.devices[0]
