"""The JAX settings under which a program means the same in another thread or process."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

# Settings that a `with` statement may have changed for one thread only.
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
    """The settings of this thread, for `applied` in another one."""
    return {name: getattr(jax.config, name) for name in _OF_THREAD}


@contextlib.contextmanager
def applied(settings: Mapping[str, Any]) -> Iterator[None]:
    """Inside this context the settings apply in this thread."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_OF_THREAD[name](value))
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside this context debug settings are off in this thread, because they would stop correct candidates."""
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield


def process_settings() -> dict[str, Any]:
    """The settings of this thread and process, as plain data for another process."""
    settings = {name: getattr(jax.config, name, None) for name in (*_OF_THREAD, *_OF_PROCESS)}
    device = settings[_DEVICE]
    if device is not None and not isinstance(device, str):
        settings[_DEVICE] = (device.platform, device.id)
    return settings


def apply_to_process(settings: Mapping[str, Any]) -> None:
    """Applies `process_settings` in another process, before JAX initialises its devices."""
    for name, value in settings.items():
        if name != _DEVICE and getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
    device = settings[_DEVICE]
    if isinstance(device, tuple):
        platform, number = device
        device = next(device for device in jax.devices(platform) if device.id == number)
    if device is not None:
        jax.config.update(_DEVICE, device)
