"""Prepares the implementations of a problem, checks them against the reference and times them in turn. A row keeps the reason of a failure."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import turns
from benchmarks.measure import input_set_count, JaxWork, repeated, time_whole, Work
from ejkernel_eqx.dispatch import on_selection, Selection, to_json

try:
    from triton.errors import TritonError
except ImportError:  # Triton has no wheels for this machine
    TritonError = RuntimeError


DIRECTIONS = ("forward", "forward+backward")
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    NotImplementedError,
    AssertionError,
    MemoryError,
    ejx.EjkernelError,
    TritonError,
)
"""Errors that an implementation or a candidate of any of the libraries may raise for a problem that it does not support."""

UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Compiler options of a reference. It runs once, so searching for the fastest matrix products would take longer than it saves."""


@dataclasses.dataclass(kw_only=True)
class Measured:
    """The fields of an implementation that the JSON rows of all benchmarks have. `reason` is set if there is no time."""

    platform: str | None = None
    config: str | None = None
    config_from: str | None = None
    ms: float | None = None
    spread: float | None = None
    samples_ms: tuple[float, ...] = ()
    launches: int | None = None
    temporary_bytes: int | None = None
    ratio: float | None = None
    reason: str | None = None


@dataclasses.dataclass
class PeerRow(Measured):
    """One implementation of one problem in one direction. `ratio` is the time of the fastest peer divided by this one's; `errors` are None where they
    are not finite."""

    problem: str
    direction: str
    implementation: str
    is_peer: bool
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.problem}, {self.direction}, {self.implementation}"

    @property
    def is_ours(self) -> bool:
        return not self.is_peer

    @property
    def over_peer(self) -> str:
        return f", {self.ratio:.2f} of the fastest peer's speed" if self.ratio else ""


class Row(Protocol):
    """The interface of a JSON row that `measure_rows` and the command need."""

    problem: str
    implementation: str
    platform: str | None
    config: str | None
    config_from: str | None
    ms: float | None
    spread: float | None
    samples_ms: tuple[float, ...]
    launches: int | None
    temporary_bytes: int | None
    ratio: float | None
    reason: str | None

    @property
    def label(self) -> str:
        """Problem, direction if there are several, and implementation."""
        ...

    @property
    def is_ours(self) -> bool: ...

    @property
    def speed(self) -> str:
        """The times as text, for a line of progress."""
        ...


I = TypeVar("I")


class Prepared(NamedTuple):
    """Work that is ready to be checked and timed; `make` takes the number of runs per launch and returns the work to time."""

    results: dict[str, Array]
    make: Callable[[int], Work]
    selection: Selection | None = None
    temporary_bytes: int | None = None


class Attempt(NamedTuple):
    """A row and how to prepare its implementation. `failures` are kept as the row's reason; other errors are bugs."""

    row: Any
    prepare: Callable[[], Prepared]
    failures: tuple[type[Exception], ...] = FAILURES


# Preparing


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def input_sets(make: Callable[[int], I]) -> list[I]:
    """Several sets of inputs from a seed, so many that a launch does not find its inputs in the cache."""
    first = make(0)
    return [first, *(make(seed) for seed in range(1, input_set_count(nbytes(first))))]


def compiled(program: Callable[[int], Any]) -> tuple[Any, Selection | None, int | None]:
    """For a function that compiles a program of so many runs: the program of one run, its selection, and its temporary memory."""
    found: list[Selection] = []
    with on_selection(found.append, found.remove), turns.released():
        once = program(1)
    memory = once.memory_analysis()
    return once, found[0] if found else None, None if memory is None else memory.temp_size_in_bytes


def prepare(function: Callable[[I], dict[str, Array]], sets: Sequence[I]) -> Prepared:
    """Compiles a function of inputs and computes the first of the sets."""

    @functools.cache
    def program(runs: int) -> Any:
        return jax.jit(repeated(function, runs)).lower(sets[0]).compile()

    once, selection, temporary = compiled(program)

    def make(runs: int) -> Work:
        return JaxWork(program(runs), [(inputs,) for inputs in sets])

    return Prepared(once(sets[0]), make, selection, temporary)


def selected_platform(function: Callable[..., Any], *inputs: Any) -> str:
    """The platform that our operation chooses for inputs of these shapes."""
    found: list[Selection] = []
    with on_selection(found.append, found.remove):
        jax.eval_shape(function, *inputs)
    return found[0].platform.value


# Checking and timing


def measure_rows(
    attempts: Iterable[Attempt],
    check: Callable[[Any, dict[str, Array]], str | None],
    options: argparse.Namespace,
    floor: float = 0.0,
) -> list[Any]:
    """Checks every result, then times all correct implementations in turn. Names of implementations are unique.

    `check(row, results)` returns the error, if any. Work as short as a launch (`floor`, in milliseconds) runs several times per launch.
    """
    rows, makers = [], {}
    for attempt in attempts:
        rows.append(attempt.row)
        if make := _checked(attempt, check):
            makers[attempt.row.implementation] = make
    timed = [row for row in rows if row.implementation in makers]
    try:
        timings = time_whole(makers, floor, options.samples, options.sample_ms)
    except FAILURES as error:
        for row in timed:
            row.reason = f"timing: {reason_of(error)}"
        return rows
    for row in timed:
        row.ms, row.spread, row.samples_ms, row.launches = timings[row.implementation]
    return rows


def _checked(attempt: Attempt, check: Callable[[Any, dict[str, Array]], str | None]) -> Any:
    """The work to time, by the number of runs per launch; `None` if the row has a reason instead."""
    row = attempt.row
    try:
        prepared = attempt.prepare()
        _note(row, prepared)
        wrong = check(row, prepared.results)
        row.reason = wrong and f"wrong: {wrong}"
        make = functools.cache(prepared.make)
        if row.reason is None:
            make(1).sample(1)
            return make
    except attempt.failures as error:
        row.reason = reason_of(error)
    return None


def _note(row: Row, prepared: Prepared) -> None:
    """The facts that are known before timing."""
    if (chosen := prepared.selection) is not None:
        row.platform, row.config = chosen.platform.value, to_json(chosen.config)
        row.config_from = chosen.tier.value
    row.temporary_bytes = prepared.temporary_bytes


def reason_of(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, ejx.UnsupportedError):
        return "; ".join(f"{platform} {reason}" for platform, reason in error.reasons.items())
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def finite(errors: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers as JSON values, with `None` for those that are not finite."""
    return {name: error if error < float("inf") else None for name, error in errors.items()}


def fastest(rows: Iterable[Row]) -> float | None:
    """The milliseconds of the fastest row that was timed."""
    return min((row.ms for row in rows if row.ms), default=None)


def ratio(ms: float | None, row: Row) -> float | None:
    """The speed of a row relative to one that takes `ms`."""
    return ms / row.ms if ms and row.ms else None


def worst(rows: Iterable[Row]) -> dict[str, Any] | None:
    """The lowest ratio, and the problem."""
    known = [(row.ratio, row.problem) for row in rows if row.ratio is not None]
    value, problem = min(known, key=lambda pair: pair[0], default=(None, None))
    return None if problem is None else {"value": value, "problem": problem}
