"""The effort that tuning may take."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from .._signatures import explained_options
from ..dispatch.overlay import within
from ..launch import Target, TARGETS


@explained_options
@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """The effort that tuning one problem may take.

    - `time_budget`: seconds per problem. The heuristic and candidates already begun are finished; the rest are skipped.
    - `max_candidates`: maximum number of candidates per part, including the heuristic.
    - `samples`, `sample_ms`: number of samples that decide between the best candidates, and their duration in milliseconds.
    - `isolate`: whether candidates run in another process, so that a crash does not end this one. `None` isolates kernels that are
        compiled outside XLA (Triton, Pallas, vendor libraries), if another process can import what it needs.
    - `candidate_timeout`: seconds that a candidate may take to compile, and to run once. Then its process is ended and the search goes on;
        without isolation, where no process can be ended, the search ends with a `TuningError`.
    - `lock_timeout`: seconds to wait for another process that tunes on the same device, before a `TuningError`. Waiting is logged.
    - `jobs`: number of parallel compilations; `None` for one per processor, up to 8.
    - `progress`: whether to show a progress bar, if standard error is a terminal.
    - `target`: a `launch.Target`, or the name of one, that candidates must fit; `None` for the device itself.
    """

    time_budget: int | float = 60.0
    max_candidates: int = 12
    samples: int = 5
    sample_ms: int | float = 30.0
    isolate: bool | None = None
    candidate_timeout: int | float = 120.0
    lock_timeout: int | float = 1800.0
    jobs: int | None = None
    progress: bool = True
    target: Any = None

    def __post_init__(self) -> None:
        times = ("time_budget", "sample_ms", "candidate_timeout", "lock_timeout")
        self._check("a number > 0", _is_positive, *times)
        for name in times:
            object.__setattr__(self, name, float(getattr(self, name)))
        self._check("an int >= 1", _is_count, "max_candidates", "samples")
        self._check("an int >= 1 or None", lambda x: x is None or _is_count(x), "jobs")
        self._check("True or False", lambda x: isinstance(x, bool), "progress")
        self._check("True, False or None", lambda x: x is None or isinstance(x, bool), "isolate")
        known = f"a launch.Target, None, or one of {', '.join(TARGETS)}"
        self._check(known, lambda x: x is None or isinstance(x, Target) or x in TARGETS, "target")

    def _check(self, expected: str, allowed: Callable[[Any], bool], *names: str) -> None:
        for name in names:
            if not allowed(getattr(self, name)):
                raise ValueError(
                    f"TuneOptions.{name}: expected {expected}, received {getattr(self, name)!r}."
                )

    @property
    def workers(self) -> int:
        return self.jobs or min(8, os.cpu_count() or 1)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_OPTIONS: ContextVar[TuneOptions | None] = ContextVar("ejkernel_eqx_tune_options", default=None)


def current_options() -> TuneOptions:
    """The options of the innermost `tuning_options`, else the defaults."""
    return _OPTIONS.get() or TuneOptions()


@contextlib.contextmanager
def tuning_options(**changes: Any) -> Iterator[TuneOptions]:
    """Inside this context, tuning uses the current options with these changes: `with tuning_options(time_budget=10): ...`"""
    options = dataclasses.replace(current_options(), **changes)
    with within(_OPTIONS, options):
        yield options
