"""What tests of workloads share: a platform's results beside the reference's, and what it launches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry, Problem, Workload
from ejkernel_eqx.launch import compile_ahead
from tests.attention.dense import quick
from tests.compiled import DEVICES
from tests.tolerances import errors

__all__ = ["BOTH", "FORWARD"]  # for costs


class Run(NamedTuple):
    work: Workload
    reference: dict[str, Any]


def work_of(operation: str, platform: str, problem: Problem) -> Workload:
    work = kernel_registry.get(operation, platform).make_workload(problem)
    assert work is not None
    return work


def assert_agrees(
    operation: str, platform: str, problem: Problem, config: Any = None, whole: bool = True
) -> Run:
    """All results of a platform, by default with its own configuration, are within the tuner's tolerances. `whole`: they are all that the
    reference has."""
    pytest.importorskip("triton")
    work = work_of(operation, platform, problem)
    if config is None:
        config = kernel_registry.get(operation, platform).load().default_config(problem, DEVICES["sm_90"])
    inputs = work.make_inputs(3)
    actual, reference = quick(work.run, static_argnums=1)(inputs, config), work.reference(inputs)
    assert set(actual) == set(work.tolerances) <= set(reference)
    assert not whole or set(reference) == set(work.tolerances)
    for name, allowed in work.tolerances.items():
        measured = errors(actual[name], reference[name])
        assert measured.rms <= allowed.rms and measured.peak <= allowed.peak, (name, measured)
    return Run(work, reference)


def launches(operation: str, problem: Problem, config: Any) -> list[Any]:
    """What forward and backward of the Triton platform launch, in order."""
    found = work_of(operation, "triton", problem).launches
    assert found is not None
    return list(found(config))


def assert_defaults_fit(operation: str, problem: Problem, target: str) -> list[Any]:
    """The Triton platform takes the problem, and its default fits the device; what the compiler says of forward and backward kernel."""
    found = launches(operation, problem, configs_of(operation, problem, target)[0])
    assert {launch.function.fn.__name__ for launch in found} == {"forward_kernel", "backward_kernel"}
    reports = [compile_ahead(launch, target) for launch in found]
    assert all(report.fits for report in reports), reports
    return reports


def configs_of(operation: str, problem: Problem, target: str) -> list[Any]:
    """The candidates of the Triton platform, which takes the problem: distinct ones, the default first."""
    kernels, device = kernel_registry.get(operation, "triton").load(), DEVICES[target]
    assert kernels.unsupported(problem, device) is None
    configs = kernels.candidates(problem, device)
    assert configs[0] == kernels.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    return configs


def refusals(
    operation: str, make: Callable[..., Problem], cases: Sequence[tuple[Any, Any, str | Sequence[str]]]
) -> Callable[..., None]:
    """A test that sizes and flags of an operation are refused, with the words of the message."""

    @pytest.mark.parametrize("dims, flags, words", cases)
    def test(dims, flags, words):
        with pytest.raises(ValueError) as caught:
            make(operation, dims, "float32", flags)
        for word in (words,) if isinstance(words, str) else words:
            assert word in str(caught.value), str(caught.value)

    return test
