"""Device times of asynchronous work, measured so that competitors have the same conditions."""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .options import TuneOptions
from .tracing import refuse_trace

K = TypeVar("K", bound=Hashable)

CACHE_BYTES = 64 * 2**20
"""At least the size of the last-level cache of the GPUs measured so far (60 MB on an H200)."""

_BOUND = 4.0  # a launch shorter than this many empty ones is timed in a program that runs it several times
_MOST_RUNS = 16


class Timing(NamedTuple):
    """Milliseconds of one launch: the median of the samples, and (largest - smallest) / median."""

    ms: float
    spread: float
    samples: tuple[float, ...]
    launches: int


@runtime_checkable
class Work(Protocol):
    """Something that can be launched many times."""

    def sample(self, launches: int) -> float:
        """Seconds for this many launches, from an idle device to an idle device."""
        ...


class JaxWork:
    """A compiled JAX function: launches are enqueued without waiting, followed by a wait for the last one.

    A GPU processes them in order. A CPU may overlap them, so there each launch is awaited.
    """

    def __init__(self, function: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]]):
        self.function, self.input_sets = function, list(input_sets)
        self.in_order = jax.default_backend() != "cpu"

    def sample(self, launches: int) -> float:
        result = None
        start = time.perf_counter()
        for inputs in itertools.islice(itertools.cycle(self.input_sets), launches):
            result = self.function(*inputs)
            if not self.in_order:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return time.perf_counter() - start


def input_set_count(input_bytes: int) -> int:
    """The number of input sets to rotate so that a launch does not find its inputs in the cache."""
    if jax.default_backend() == "cpu":
        return 1
    return min(8, max(1, math.ceil(2 * CACHE_BYTES / max(input_bytes, 1))))


def time_in_turn(works: Mapping[K, Work], samples: int = 5, sample_ms: int | float = 30.0) -> dict[K, Timing]:
    """The timing of each work; samples are taken in turn, so that clock drift affects all alike."""
    launches = {name: _launches(work, sample_ms / 1e3) for name, work in works.items()}
    taken: dict[K, list[float]] = {name: [] for name in works}
    for _ in range(samples):
        for name, work in works.items():
            taken[name].append(1e3 * work.sample(launches[name]) / launches[name])
    return {name: _summary(taken[name], launches[name]) for name in works}


def _launches(work: Work, seconds: float) -> int:
    """The number of launches for a sample to last `seconds`; the launches made to determine it serve as warm-up."""
    work.sample(1)
    count, took = 2, work.sample(2)
    while took < seconds / 3 and count < 1024:
        count = min(1024, max(2 * count, math.ceil(count * seconds / (2 * max(took, 1e-9)))))
        took = work.sample(count)
    return max(1, math.ceil(count * seconds / took))


def _summary(samples: list[float], launches: int) -> Timing:
    median = statistics.median(samples)
    return Timing(median, (max(samples) - min(samples)) / median, tuple(samples), launches)


def launch_floor(inputs: Any) -> float:
    """Milliseconds of an empty launch with these inputs; shorter work cannot be measured by single launches."""
    empty = jax.jit(lambda inputs: jnp.zeros(()), keep_unused=True).lower(inputs).compile()
    return time_in_turn({"floor": JaxWork(empty, [(inputs,)])}, samples=3, sample_ms=2.0)["floor"].ms


def runs_needed(ms: float, floor: float) -> int:
    """Counts how often a program must repeat work of `ms` milliseconds so that its own launch does not dominate the time; 1 for no repetition.

    Always 1 on a CPU, where each launch is awaited and XLA removes the barriers between runs before it merges equal ones.
    """
    if ms >= _BOUND * floor or jax.default_backend() == "cpu":
        return 1
    # Work that takes no longer than an empty launch may be much shorter.
    mine = max(ms - floor, 0.1 * floor)
    return min(_MOST_RUNS, max(2, math.ceil(2 * _BOUND * floor / mine)))


def time_runs(
    take: Callable[[Mapping[K, int]], dict[K, Timing]], keys: Iterable[K], floor: Callable[[K], float]
) -> dict[K, Timing]:
    """The timing of one run of each. `take` times programs with the given number of runs; `floor` is the time of an empty launch in
    milliseconds."""
    timings = take(dict.fromkeys(keys, 1))
    runs = {key: runs_needed(timing.ms, floor(key)) for key, timing in timings.items()}
    if all(count == 1 for count in runs.values()):
        return timings
    return {key: per_run(timing, runs[key]) for key, timing in take(runs).items()}


def repeated(function: Callable[[Any], Any], runs: int) -> Callable[[Any], Any]:
    """A function that computes `function(inputs)` `runs` times in sequence.

    A barrier over inputs and results separates the runs, so that the compiler can neither merge nor reorder them. The results of all
    runs are returned, because the compiler removes unused runs even across a barrier.
    """

    def run(inputs: Any) -> Any:
        kept = [function(inputs)]
        for _ in range(runs - 1):
            inputs, kept[-1] = jax.lax.optimization_barrier((inputs, kept[-1]))
            kept.append(function(inputs))
        return kept

    return function if runs == 1 else run


def per_run(timing: Timing, runs: int) -> Timing:
    """The timing of one run, from that of a program with several."""
    return timing._replace(ms=timing.ms / runs, samples=tuple(ms / runs for ms in timing.samples))


def benchmark(
    fn: Callable[..., Any],
    *args: Any,
    samples: int = 5,
    sample_ms: int | float = 30.0,
    jit: bool = True,
    input_sets: Sequence[tuple[Any, ...]] = (),
    **kwargs: Any,
) -> Timing:
    """The device time of `fn(*args, **kwargs)` in milliseconds.

    The call is compiled once. Each sample enqueues enough launches to last `sample_ms` and waits once. A function that takes less time
    than its launch is run several times in one program.

    **Arguments:**

    - `fn`: any function or module; its result may be any pytree.
    - `args`, `kwargs`: arguments of the call; anything that is not an array is static.
    - `samples`: number of samples.
    - `sample_ms`: duration of a sample in milliseconds.
    - `jit`: whether to compile the call; `False` times it as is, including Python's overhead.
    - `input_sets`: further tuples to use instead of `args`, of the same shapes. Launches rotate through them, so that
        none finds its inputs in the cache.

    **Returns:**

    `Timing`: `ms` (the median), `spread` ((largest - smallest) / median), `samples` and `launches` (per sample).

    **Raises:** `TuningError` inside `jit` or another staged transformation, which executes nothing to time.
    """
    refuse_trace("benchmark")
    TuneOptions(samples=samples, sample_ms=sample_ms)  # checks them
    sets = [args, *input_sets]
    if not jit:
        return time_in_turn({"": JaxWork(functools.partial(fn, **kwargs), sets)}, samples, sample_ms)[""]
    split = [eqx.partition((fn, _arrays(one), _arrays(kwargs)), eqx.is_array) for one in sets]
    static = split[0][1]
    inputs = [(dynamic,) for dynamic, _ in split]

    def call(dynamic: Any) -> Any:
        function, positional, named = eqx.combine(dynamic, static)
        return eqx.filter(function(*positional, **named), eqx.is_array)

    def take(runs: Mapping[str, int]) -> dict[str, Timing]:
        compiled = jax.jit(repeated(call, runs[""])).lower(*inputs[0]).compile()
        return time_in_turn({"": JaxWork(compiled, inputs)}, samples, sample_ms)

    # Without inputs nothing orders the runs.
    floor = lambda _: launch_floor(inputs[0]) if jax.tree.leaves(inputs[0]) else 0.0
    return time_runs(take, [""], floor)[""]


def _arrays(tree: Any) -> Any:
    """Converts NumPy arrays, so that they are inputs instead of constants of the program."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, tree)
