"""What the tests of a device share: references beside it, and the configurations that it has for a problem."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.tuning.explain import example_problem_of


def on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """The float64 reference runs on the CPU, beside the device under test."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*arguments)


def example_problem(operation: str, dims: dict[str, int], dtype: str, flags: dict[str, Any]) -> Any:
    """A problem by its sizes and flags, as commands describe it."""
    return example_problem_of(operation)(operation, dims, dtype, flags)


def candidates(operation: str, problem: Any) -> list[Any]:
    """The configurations of Triton's kernels that are tried on this device."""
    return kernel_registry.get(operation, "triton").load().candidates(problem, device_facts())


def default_config(operation: str, problem: Any) -> Any:
    """The configuration of Triton's kernels on this device; a problem that they do not support is skipped."""
    implementation = kernel_registry.get(operation, "triton")
    reason = implementation.unsupported(problem, device_facts())
    if reason is not None:
        pytest.skip(reason)
    return implementation.load().default_config(problem, device_facts())


def work_of(operation: str, problem: Any) -> Any:
    """What the tuner runs and checks for a problem."""
    work = kernel_registry.get(operation, "triton").make_workload(problem)
    assert work is not None
    return work
