"""Representative work of recurrences for the tuner, and its cost."""

import functools
import math

from ..core.workload import step_workload_of, workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import RECUR, STEP
from .example import example_problem as example_problem
from .samples import make_inputs, make_step_inputs, spec_of

_COST_CHUNK = 64  # operations are counted for chunks of this many tokens


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms of this family."""
    spec = spec_of(problem)
    if problem.flag("step"):
        cells = math.prod(map(problem.dim, ("B", "HS", "D", "V")))
        make = functools.partial(make_step_inputs, problem)
        return step_workload_of(STEP, implementation, problem, spec, make, flops=6.0 * cells)
    make = functools.partial(make_inputs, problem)
    return workload_of(RECUR, implementation, spec, make, flops=_flops(problem), backward=2.5)


def _flops(problem: Problem) -> float:
    """Operations of the matrix products in chunks of 64 tokens."""
    tokens = problem.dim("B") * problem.dim("T")
    dim, values, heads = problem.dim("D"), problem.dim("V"), problem.dim("HS")
    inner = min(_COST_CHUNK, problem.dim("T"))
    # Scores and their use, the state and its use; a delta rule adds its own scores, the use of their inverse, and a second use of the state.
    products = inner * (dim + values) + 4 * dim * values
    if problem.flag("delta"):
        products += 2 * inner * (dim + values) + 2 * dim * values
    if problem.flag("rank_one"):
        # Three more scores, the use of two of them and of the inverse, and the state read and written once more.
        products += inner * (4 * dim + 3 * values) + 4 * dim * values
    return float(tokens * heads * products)
