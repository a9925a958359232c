"""Representative work of selective scans for the tuner, and its cost."""

import functools
import math

from ..core.workload import step_workload_of, workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import SCAN, STEP
from .example import example_problem as example_problem
from .samples import make_inputs, make_step_inputs, spec_of

_FLOPS = 7.0  # per state and token: an exponential (counted as two), the decay, the write and the read


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms of this family."""
    spec = spec_of(problem)
    if problem.flag("step"):
        make, flops = functools.partial(make_step_inputs, problem), _flops(problem, "BIN")
        return step_workload_of(STEP, implementation, problem, spec, make, flops=flops)
    make, flops = functools.partial(make_inputs, problem), _flops(problem, "BTIN")
    return workload_of(SCAN, implementation, spec, make, flops=flops)


def _flops(problem: Problem, axes: str) -> float:
    return _FLOPS * math.prod(problem.dim(name) for name in axes)
