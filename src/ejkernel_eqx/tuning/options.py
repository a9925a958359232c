"""How much effort tuning may take."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """How much effort tuning one problem may take.

    - `time_budget`: seconds for each problem. The heuristic, and what is begun, is finished; the rest is left out.
    - `max_candidates`: how many candidates of each part to try, the heuristic included.
    - `samples`, `sample_ms`: how many samples decide between the best candidates, and how many milliseconds each lasts.
    - `isolate`: whether candidates run in another process, which a crash ends in place of this one. `None`: where the kernels are
        compiled outside XLA (Triton, Pallas, vendor libraries) and another process can import what it needs.
    - `candidate_timeout`: seconds that a candidate may take to compile, and to run once, before its process is ended. Without effect in this
        process.
    - `jobs`: compilations at once; `None`: one for each processor, up to 8.
    - `progress`: whether to show a progress bar.
    - `target`: a `launch.Target`, or the name of one, that candidates must fit; `None`: the device itself.
    """

    time_budget: int | float = 60.0
    max_candidates: int = 12
    samples: int = 5
    sample_ms: int | float = 30.0
    isolate: bool | None = None
    candidate_timeout: int | float = 120.0
    jobs: int | None = None
    progress: bool = True
    target: Any = None

    def __post_init__(self) -> None:
        for name in ("time_budget", "sample_ms", "candidate_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"TuneOptions.{name}: expected a number > 0, received {getattr(self, name)!r}."
                )
        for name in ("max_candidates", "samples", "jobs"):
            value = getattr(self, name)
            if not (value is None and name == "jobs") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"TuneOptions.{name}: expected an int >= 1, received {value!r}.")

    @property
    def workers(self) -> int:
        return self.jobs or min(8, os.cpu_count() or 1)


_OPTIONS: ContextVar[TuneOptions | None] = ContextVar("ejkernel_eqx_tune_options", default=None)


def current_options() -> TuneOptions:
    """The options of the innermost `tuning_options`, else the defaults."""
    return _OPTIONS.get() or TuneOptions()


@contextlib.contextmanager
def tuning_options(**changes: Any) -> Iterator[TuneOptions]:
    """While it is open, tuning uses the current options with these changes: `with tuning_options(time_budget=10): ...`"""
    options = dataclasses.replace(current_options(), **changes)
    token = _OPTIONS.set(options)
    try:
        yield options
    finally:
        _OPTIONS.reset(token)
