"""The plan that a module creates when it is built, and what simulated kernels, which a plan may ask for, keep a caller from."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._kernel import as_inputs, Kernel, kernels_of, make_plan, Plan, settle
from ..dispatch import PlatformLike

R = TypeVar("R")


def plan_of(
    cls: type[Kernel], module: Kernel, platform: PlatformLike | None, config: Any | None, tune_for: Any | None
) -> Plan:
    """The plan of a module of class `cls` whose `__init__` has set every other field."""
    plan = make_plan(cls.operation, platform=platform, config=config)
    if tune_for is None:
        return plan
    probe = object.__new__(cls)
    for name, value in {**vars(module), "plan": plan}.items():
        object.__setattr__(probe, name, value)
    return settle(probe, as_inputs(tune_for))


def has_simulated(tree: Any) -> bool:
    """Returns whether a module holds an operation whose plan `is_simulated`."""
    return any([kernel.plan.is_simulated for kernel in kernels_of(tree)])


def again_for_gradients(function: Callable[..., R], modules: Any, policy: Any = None) -> Callable[..., R]:
    """`jax.checkpoint` of a function that calls these modules. With simulated kernels, of whose effects `jax.checkpoint` takes none, all is kept."""
    return function if has_simulated(modules) else jax.checkpoint(function, policy=policy)
