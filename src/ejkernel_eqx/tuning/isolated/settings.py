"""The settings of JAX under which a program means the same elsewhere: in another thread, in another process."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

# What a `with` statement may have set for one thread alone.
_OF_THREAD: dict[str, Callable[[Any], Any]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
}
_OF_PROCESS = (
    "jax_platforms",
    "jax_num_cpu_devices",
    "jax_threefry_partitionable",
    "jax_compilation_cache_dir",
)
_DEVICE = "jax_default_device"


def thread_settings() -> dict[str, Any]:
    """What holds in this thread, for `applied` in another one."""
    return {name: getattr(jax.config, name) for name in _OF_THREAD}


@contextlib.contextmanager
def applied(settings: Mapping[str, Any]) -> Iterator[None]:
    """While it is open, the settings hold in this thread."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_OF_THREAD[name](value))
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While it is open, nothing holds in this thread that helps to debug a program: it would stop candidates that are right."""
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield


def process_settings() -> dict[str, Any]:
    """What holds in this thread and process, as plain data for another process."""
    settings = {name: getattr(jax.config, name, None) for name in (*_OF_THREAD, *_OF_PROCESS)}
    device = settings[_DEVICE]
    if device is not None and not isinstance(device, str):
        settings[_DEVICE] = (device.platform, device.id)
    return settings


def apply_to_process(settings: Mapping[str, Any]) -> None:
    """Undoes `process_settings` in another process, before JAX has looked for devices."""
    for name, value in settings.items():
        if name != _DEVICE and getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
    device = settings[_DEVICE]
    if isinstance(device, tuple):
        platform, number = device
        device = next(device for device in jax.devices(platform) if device.id == number)
    if device is not None:
        jax.config.update(_DEVICE, device)
