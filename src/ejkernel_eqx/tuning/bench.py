"""The work of one problem on this device: inputs, reference results, compiled programs, and failures of candidates."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._errors import TuningError
from ..dispatch import BOTH, FORWARD, Workload
from . import check, measure
from .result import Status
from .threads import attempted

Names = tuple[str, ...]
Program = Callable[[Any], Mapping[str, Any]]
Refusal = tuple[Status, str]
MEMORY = "out of device memory"


class Bench:
    """Caches everything: inputs and reference results by seed, and programs by configuration, results and number of runs."""

    def __init__(self, name: str, workload: Workload):
        self._name, self.workload = name, workload
        self.inputs = functools.cache(workload.make_inputs)
        self.expected = functools.cache(self._expected)
        self.floor = functools.cache(lambda: measure.launch_floor(self.inputs(0)))
        self._programs: dict[tuple[Any, Names, int], Program] = {}
        self.names: Names = tuple(self.expected(0))
        if missing := sorted(set(self.names) - set(workload.tolerances)):
            raise TuningError(f"{self._name}: the workload has no tolerances for {', '.join(missing)}.")

    def _expected(self, seed: int) -> Mapping[str, Any]:
        inputs = self.inputs(seed)
        with jax.default_matmul_precision("highest"):
            expected = jax.block_until_ready(self.workload.reference(inputs))
        # No candidate can match a NaN, which is not the candidates' fault.
        if undefined := [name for name, result in expected.items() if check.has_nan(result)]:
            raise TuningError(
                f"{self._name}: the reference returns NaN in {', '.join(undefined)} for the tuning inputs (seed {seed}); provide inputs "
                "for which it is defined."
            )
        return expected

    @functools.cached_property
    def directions(self) -> dict[str, Names]:
        """The results that are timed together: the forward results only, and all results if there are gradients."""
        forward = tuple(name for name in self.names if name in self.workload.forward)
        entries = {FORWARD: forward, BOTH: self.names if len(forward) < len(self.names) else ()}
        return {direction: names for direction, names in entries.items() if names}

    @functools.cached_property
    def input_sets(self) -> list[tuple[Any]]:
        size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self.inputs(0)))
        return [(self.inputs(seed),) for seed in range(measure.input_set_count(size))]

    def program(self, config: Any, names: Names, runs: int = 1) -> Program:
        """A compiled program for some of the results; the compiler removes everything else."""
        key = (config, names, runs)
        if key not in self._programs:

            def compute(inputs: Any) -> dict[str, Any]:
                results = self.workload.run(inputs, config)
                return {name: results[name] for name in names}

            function = jax.jit(measure.repeated(compute, runs))
            self._programs[key] = function.lower(self.inputs(0)).compile()
        return self._programs[key]

    def forget(self) -> None:
        """Releases the programs."""
        self._programs.clear()

    def verify(self, program: Program, seed: int) -> tuple[dict[str, float], str | None]:
        """The errors of a program's results by name, and why it must not be used."""
        first, second = (jax.block_until_ready(program(self.inputs(seed))) for _ in range(2))
        errors, reason = check.all_errors(first, self.expected(seed), self.workload.tolerances)
        if reason is None and not check.same_bits(first, second):
            reason = "is not repeatable: two runs on the same inputs differ"
        return errors, reason


def failure(error: BaseException | None) -> Refusal:
    """Classifies a candidate that raised. Lack of device memory, or of other machine resources such as disk space, does not count
    against it; lack of shared memory does."""
    text = attempted(lambda: str(error).strip())
    text = "" if isinstance(text, Exception) else text
    line = (text.splitlines() or [""])[0][:200]
    lower = text.lower()
    lacking = any(word in lower for word in ("resource_exhausted", "out of memory", "out_of_memory"))
    if isinstance(error, MemoryError) or (lacking and "shared" not in lower):
        return Status.SKIPPED, MEMORY
    if isinstance(error, OSError):
        return Status.SKIPPED, f"raises {type(error).__name__}: {line}"
    return Status.DENIED, f"raises {type(error).__name__}: {line}"


def device_works() -> bool:
    """Tells whether the device still works after a candidate failed, since some failures make it unusable for the whole process."""
    try:
        return int(jax.numpy.arange(4).sum()) == 6
    except jax.errors.JaxRuntimeError:
        return False
