"""Prepares the implementations of a problem, checks them against the reference and times them in turn. A row keeps the reason of a failure."""

import argparse
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import processes
from benchmarks.measure import StateWork, time_whole
from ejkernel_eqx.dispatch import on_selection, Selection, to_json
from ejkernel_eqx.tuning.measure import input_set_count, JaxWork, repeated, Work

I = TypeVar("I")
Arrays = dict[str, Array]
DIRECTIONS = FORWARD, BOTH = ("forward", "forward+backward")
OURS, PEER, BASELINE = "ours", "peer", "baseline"
FAILURES = (*processes.FAILURES, ejx.EjkernelError)
"""Errors that an implementation or a candidate of any of the libraries may raise for a problem that it does not support."""

UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Compiler options of a reference. It runs once, so searching for the fastest matrix products would take longer than it saves."""


@dataclasses.dataclass
class Row:
    """One implementation of one problem in one direction.

    - `role`: ours, a peer, or a baseline, which is no competitor: a copy, other inputs, a part of the work.
    - `reason`: why there is no time.
    - `ratio`: the time of the fastest peer divided by this one's.
    - `errors`: `None` where they are not finite.
    - `numbers`: entries of the JSON row besides these, by name.
    """

    problem: str
    direction: str
    implementation: str
    role: str = OURS
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
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.problem}, {self.direction}, {self.implementation}"

    @property
    def memory(self) -> float | None:
        """Temporary memory divided by that of inputs and results."""
        size = self.numbers.get("bytes")
        return None if self.temporary_bytes is None or not size else self.temporary_bytes / size

    def to_json(self) -> dict[str, Any]:
        entries = dataclasses.asdict(self)
        return entries | entries.pop("numbers")


class Inputs(NamedTuple):
    """Inputs: what has a gradient, the cotangent of the output, other arguments, and the state that a step starts from."""

    learned: Arrays
    cotangent: Array
    constants: Arrays
    state: Any = None


class Prepared(NamedTuple):
    """Work that is ready to be checked and timed; `make` takes the number of runs per launch and returns the work to time."""

    results: Arrays
    make: Callable[[int], Work]
    selection: Selection | None = None
    temporary_bytes: int | None = None


class Implementation(NamedTuple):
    """An implementation that is compared.

    - `make_ready(sets, direction)`: prepares it for sets of inputs.
    - `is_checked`: whether its results are those of the problem.
    - `failures`: errors that are kept as a row's reason; others are bugs.
    """

    name: str
    make_ready: Callable[[Sequence[Any], str], Prepared]
    role: str = OURS
    is_checked: bool = True
    failures: tuple[type[Exception], ...] = FAILURES


Others = Iterable[Implementation]

# Preparing


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def input_sets(make: Callable[[int], I], least: int = 0) -> list[I]:
    """Several sets of inputs from a seed, so many that a launch does not find its inputs in the cache; on a GPU of at least so many bytes in all."""
    first = make(0)
    count = input_set_count(nbytes(first))
    if jax.default_backend() != "cpu":
        count = max(count, -(-least // nbytes(first)))
    return [first, *(make(seed) for seed in range(1, count))]


def directed(
    forward: Callable[[Arrays, Arrays], Array], direction: str, with_out: bool = False
) -> Callable[[Inputs], Arrays]:
    """The measured function, from `forward(learned, constants) -> out`: the output; or the gradients of everything learned, and `with_out`."""

    def run(inputs: Inputs) -> Arrays:
        call = lambda learned: forward(learned, inputs.constants)
        if direction == FORWARD:
            return {"out": call(inputs.learned)}
        out, pull = jax.vjp(call, inputs.learned)
        return ({"out": out} if with_out else {}) | pull(inputs.cotangent)[0]

    return run


def wide(tree: I) -> I:
    """Floating-point arrays of 16 bits and more in float32."""

    def cast(x: Array) -> Array:
        is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
        return x.astype(jnp.float32) if is_wide else x

    return jax.tree.map(cast, tree)


def reference(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Compiles `function(problem, inputs)`, the reference of a family, for each problem, with exact products. It gets inputs in float32."""

    @functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
    def program(problem: Any, inputs: Any) -> Arrays:
        return function(problem, wide(inputs))

    @functools.wraps(function)
    def run(problem: Any, inputs: Any) -> Arrays:
        with jax.default_matmul_precision("highest"):
            with processes.released():
                compiled = program.lower(problem, inputs).compile()
            return compiled(inputs)

    return run


def compiled(program: Callable[[int], Any]) -> tuple[Any, Selection | None, int | None]:
    """Compiles a program of one run by a function of the number of runs; returns it, its selection, and its temporary memory."""
    selections: list[Selection] = []
    with on_selection(selections.append, selections.remove), processes.released():
        once = program(1)
    memory = once.memory_analysis()
    return once, selections[0] if selections else None, None if memory is None else memory.temp_size_in_bytes


def ready(function: Callable[[I], Arrays], sets: Sequence[I], in_turn: bool = False) -> Prepared:
    """Compiles a function of inputs and computes the first of the sets. `in_turn`: several runs of one launch take one set after another, so that
    none is in the cache even in short runs."""

    def several(sets: Sequence[I], runs: int) -> list[Arrays]:
        kept: list[Arrays] = []
        for n in range(runs):
            inputs = sets[n % len(sets)]
            if kept:  # barriers separate and order runs, as in `repeated`
                inputs, kept[-1] = jax.lax.optimization_barrier((inputs, kept[-1]))
            kept.append(function(inputs))
        return kept

    @functools.cache
    def program(runs: int) -> Any:
        if in_turn and runs > 1:
            return jax.jit(functools.partial(several, runs=runs)).lower(tuple(sets)).compile()
        return jax.jit(repeated(function, runs)).lower(sets[0]).compile()

    def make(runs: int) -> JaxWork:
        arguments = [tuple(sets)] if in_turn and runs > 1 else sets
        return JaxWork(program(runs), [(inputs,) for inputs in arguments])

    once, selection, temporary = compiled(program)
    return Prepared(once(sets[0]), make, selection, temporary)


def ready_in_place(
    step: Callable[[Any, Any], tuple[Any, Arrays]], sets: Sequence[Any], state: Any
) -> Prepared:
    """Compiles a step `(inputs, state) -> (state, results)` that updates its state in place: each run takes the state of the one before."""

    def several(runs: int, inputs: Any, state: Any) -> tuple[Any, list[Arrays]]:
        results = []
        for _ in range(runs):
            state, result = step(inputs, state)
            state = jax.lax.optimization_barrier(state)
            results.append(result)
        return state, results

    @functools.cache
    def program(runs: int) -> Any:
        function = jax.jit(functools.partial(several, runs), donate_argnums=1)
        return function.lower(sets[0], state).compile()

    copied = lambda: jax.tree.map(jnp.copy, state)
    once, selection, temporary = compiled(program)
    new, (results,) = once(sets[0], copied())
    make = lambda runs: StateWork(program(runs), copied(), sets)
    return Prepared(
        {**results, **({"state": new} if isinstance(new, Array) else {})}, make, selection, temporary
    )


def selection_of(function: Callable[..., Any], *inputs: Any) -> Selection:
    """The choice that a call makes for inputs of these shapes."""
    selections: list[Selection] = []
    with on_selection(selections.append, selections.remove):
        jax.eval_shape(function, *inputs)
    return selections[0]


# Checking and timing

Check = Callable[[Row, Arrays], str | None]


def measure_rows(
    implementations: Iterable[Implementation],
    problem: str,
    direction: str,
    sets: Sequence[Any],
    check: Check,
    options: argparse.Namespace,
    floor: float = 0.0,
) -> list[Row]:
    """Checks every result, then times all correct implementations in turn, in a random order. Names of implementations are unique.

    `check(row, results)` returns the error, if any. Work as short as a launch (`floor`, in milliseconds) runs several times per launch.
    """
    rows, makers = [], {}
    for one in implementations:
        rows.append(Row(problem, direction, one.name, one.role))
        if make := _checked(rows[-1], one, sets, check):
            makers[one.name] = make
    timed = [row for row in rows if row.implementation in makers]
    order = random.sample(list(makers), len(makers))
    try:
        timings = time_whole(
            {name: makers[name] for name in order}, floor, options.samples, options.sample_ms
        )
    except FAILURES as error:
        for row in timed:
            row.reason = f"timing: {reason_of(error)}"
        return rows
    for row in timed:
        row.ms, row.spread, row.samples_ms, row.launches = timings[row.implementation]
    return rows


def _checked(
    row: Row, one: Implementation, sets: Sequence[Any], check: Check
) -> Callable[[int], Work] | None:
    """The work to time, by the number of runs per launch; `None` if the row has a reason instead."""
    try:
        prepared = one.make_ready(sets, row.direction)
        if (chosen := prepared.selection) is not None:
            row.platform, row.config = chosen.platform.value, to_json(chosen.config)
            row.config_from = chosen.tier.value
        row.temporary_bytes = prepared.temporary_bytes
        wrong = check(row, prepared.results) if one.is_checked else None
        row.reason = wrong and f"wrong: {wrong}"
        make = functools.cache(prepared.make)
        if row.reason is None:
            make(1).sample(1)
            return make
    except one.failures as error:
        row.reason = reason_of(error)
    return None


def reason_of(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, ejx.UnsupportedError):
        return "; ".join(f"{platform} {reason}" for platform, reason in error.reasons.items())
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def finite(errors: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers as JSON values, with `None` for those that are not finite."""
    return {name: error if error < float("inf") else None for name, error in errors.items()}


def fastest(rows: Iterable[Row], role: str | None = None) -> float | None:
    """The milliseconds of the fastest row that was timed, of a role or of all."""
    return min((row.ms for row in rows if row.ms and role in (None, row.role)), default=None)


def ratio(ms: float | None, row: Row) -> float | None:
    """The speed of a row relative to one that takes `ms`."""
    return ms / row.ms if ms and row.ms else None
