"""Names that users of ejKernel know, over recording, tuning and JAX's own transformations."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._inputs import Inputs
from .models import tune_invocations
from .options import TuneOptions
from .recording import Invocation, invocations_of
from .replace import with_kernel_config

_recorded: dict[Invocation, None] = {}


def record_invocation(model: Any, *args: Any, **kwargs: Any) -> tuple[Invocation, ...]:
    """Traces `model(*args, **kwargs)`, with shapes only, and remembers the choices it makes for `autotune_recorded`.

    **Arguments:**

    - `model`: a module, a model or a function.
    - `args`, `kwargs`: its call: arrays or `jax.ShapeDtypeStruct`s.

    **Returns:**

    The choices of this call, distinct, in order. What the call itself raises is passed on.
    """
    calls = invocations_of(model, Inputs(args, kwargs))
    _recorded.update(dict.fromkeys(calls))
    return tuple(calls)


def get_invocations() -> tuple[Invocation, ...]:
    """What `record_invocation` has remembered in this process, distinct, in order."""
    return tuple(_recorded)


def clear_invocations() -> None:
    """Forgets what `record_invocation` has remembered."""
    _recorded.clear()


def autotune_recorded(*, options: TuneOptions | None = None, force: bool = False) -> tuple[Invocation, ...]:
    """Tunes all that `record_invocation` has remembered, each distinct problem once.

    Modules that exist keep what they have (`ejx.replan(model)` gives them the winners); those built from now on get the winners. For a
    model, [`ejkernel_eqx.tune`][] does all of it at once.

    **Arguments:**

    - `options`, `force`: as for `ejx.tune`.

    **Returns:**

    The recorded choices as they are made now. `TuningError` as for `ejx.tune`.
    """
    return tune_invocations(get_invocations(), options=options, force=force)


def vmap_with_config(kernel: Any, config: Any | None = None, **options: Any) -> Callable[..., Any]:
    """`eqx.filter_vmap(kernel, **options)` with one configuration for the whole batch.

    A mapped kernel is one launch and makes one choice as it is; `config` says which (as if the kernel had been built with `config=`).

    **Arguments:**

    - `kernel`: an operation.
    - `config`: the configuration; default what the kernel chooses.
    - `options`: `in_axes`, `out_axes`, `axis_name`, `axis_size` of `eqx.filter_vmap`.

    **Returns:**

    The mapped function. `ValueError` for a configuration of another kernel.
    """
    return eqx.filter_vmap(with_kernel_config(kernel, config), **options)


def pmap_with_config(
    kernel: Any, config: Any | None = None, *, mesh: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` of a kernel with one configuration on all devices.

    Every device runs the kernel on its part of the arrays and makes the same choice; `config` says which.

    **Arguments:**

    - `kernel`: an operation.
    - `config`: the configuration; default what the kernel chooses.
    - `mesh`, `in_specs`, `out_specs`: as for `jax.shard_map`, one specification for each positional argument.

    **Returns:**

    The function over the whole arrays. `ValueError` for a configuration of another kernel.
    """
    chosen = with_kernel_config(kernel, config)
    return jax.shard_map(lambda *args: chosen(*args), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
