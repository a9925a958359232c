"""Functions known to users of ejKernel, implemented by recording, tuning and JAX's own transformations."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._kernel import Inputs
from .models import tune_invocations
from .options import TuneOptions
from .recording import Invocation, invocations_of
from .replace import with_kernel_config

_recorded: dict[Invocation, None] = {}


def record_invocation(model: Any, *args: Any, **kwargs: Any) -> tuple[Invocation, ...]:
    """Traces `model(*args, **kwargs)` with shapes only, and records its choices for `autotune_recorded`.

    **Arguments:**

    - `model`: a module, a model or a function.
    - `args`, `kwargs`: the arguments of its call: arrays or `jax.ShapeDtypeStruct`s.

    **Returns:**

    The distinct choices of this call, in order. Exceptions of the call itself propagate.
    """
    calls = invocations_of(model, Inputs(args, kwargs))
    _recorded.update(dict.fromkeys(calls))
    return tuple(calls)


def get_invocations() -> tuple[Invocation, ...]:
    """The distinct choices that `record_invocation` has recorded in this process, in order."""
    return tuple(_recorded)


def clear_invocations() -> None:
    """Clears the choices recorded by `record_invocation`."""
    _recorded.clear()


def autotune_recorded(*, options: TuneOptions | None = None, force: bool = False) -> tuple[Invocation, ...]:
    """Tunes everything that `record_invocation` has recorded, each distinct problem once.

    Modules built from now on use the winners; existing modules are unchanged until `ejx.replan(model)`. For a model,
    [`ejkernel_eqx.tune`][] does all of this at once.

    **Arguments:**

    - `options`, `force`: as for `ejx.tune`.

    **Returns:**

    The recorded choices as they are made now. Raises `TuningError` as `ejx.tune` does.
    """
    return tune_invocations(get_invocations(), options=options, force=force)


def vmap_with_config(kernel: Any, config: Any | None = None, **options: Any) -> Callable[..., Any]:
    """`eqx.filter_vmap(kernel, **options)` with one configuration for the whole batch.

    A mapped kernel is a single launch with a single choice anyway; `config` fixes it, as if the kernel had been built with `config=`.

    **Arguments:**

    - `kernel`: an operation.
    - `config`: the configuration; by default the kernel's choice.
    - `options`: `in_axes`, `out_axes`, `axis_name`, `axis_size` of `eqx.filter_vmap`.

    **Returns:**

    The mapped function. Raises `ValueError` for a configuration of another kernel.
    """
    return eqx.filter_vmap(with_kernel_config(kernel, config), **options)


def pmap_with_config(
    kernel: Any, config: Any | None = None, *, mesh: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` of a kernel with one configuration on all devices.

    Every device runs the kernel on its part of the arrays and makes the same choice; `config` fixes it.

    **Arguments:**

    - `kernel`: an operation.
    - `config`: the configuration; by default the kernel's choice.
    - `mesh`, `in_specs`, `out_specs`: as for `jax.shard_map`, with one specification per positional argument.

    **Returns:**

    A function of the whole arrays. Raises `ValueError` for a configuration of another kernel.
    """
    chosen = with_kernel_config(kernel, config)
    return jax.shard_map(lambda *args: chosen(*args), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
