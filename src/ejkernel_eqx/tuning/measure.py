"""Device time of asynchronous work, taken so that competitors meet the same conditions."""

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
"""At least the last-level cache of the GPUs measured so far (60 MB on an H200)."""

_BOUND = 4.0  # a launch shorter than so many empty ones is timed in a program that runs it several times
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
        """Seconds that so many launches take, from an idle device to an idle device."""
        ...


class JaxWork:
    """A compiled JAX function: launches are enqueued without waiting, then the last one is waited for.

    A GPU works them off in order. A CPU may overlap them, so there each launch is waited for.
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
    """How many sets of inputs to rotate so that a launch does not find its inputs in the cache."""
    if jax.default_backend() == "cpu":
        return 1
    return min(8, max(1, math.ceil(2 * CACHE_BYTES / max(input_bytes, 1))))


def time_in_turn(works: Mapping[K, Work], samples: int = 5, sample_ms: int | float = 30.0) -> dict[K, Timing]:
    """The timing of each; samples are taken in turn, so that a drift of the clocks meets all alike."""
    launches = {name: _launches(work, sample_ms / 1e3) for name, work in works.items()}
    taken: dict[K, list[float]] = {name: [] for name in works}
    for _ in range(samples):
        for name, work in works.items():
            taken[name].append(1e3 * work.sample(launches[name]) / launches[name])
    return {name: _summary(taken[name], launches[name]) for name in works}


def _launches(work: Work, seconds: float) -> int:
    """So many that a sample lasts `seconds`; what it launches to find out is the warm-up."""
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
    """Milliseconds that a launch with these inputs takes if it has nothing to do: what is shorter cannot be seen in launches."""
    empty = jax.jit(lambda inputs: jnp.zeros(()), keep_unused=True).lower(inputs).compile()
    return time_in_turn({"floor": JaxWork(empty, [(inputs,)])}, samples=3, sample_ms=2.0)["floor"].ms


def runs_needed(ms: float, floor: float) -> int:
    """How often a program must run what takes `ms`, so that the launch of the program does not decide its time; 1: once.

    On a CPU always once: each launch is waited for, and XLA takes the barriers between runs away before it merges what is equal.
    """
    if ms >= _BOUND * floor or jax.default_backend() == "cpu":
        return 1
    # What is no longer than an empty launch may be much shorter.
    own = max(ms - floor, 0.1 * floor)
    return min(_MOST_RUNS, max(2, math.ceil(2 * _BOUND * floor / own)))


def time_runs(
    take: Callable[[Mapping[K, int]], dict[K, Timing]], keys: Iterable[K], floor: Callable[[K], float]
) -> dict[K, Timing]:
    """The timings of one run each. `take` times programs of so many runs; `floor` are the milliseconds of an empty launch."""
    timings = take(dict.fromkeys(keys, 1))
    runs = {key: runs_needed(timing.ms, floor(key)) for key, timing in timings.items()}
    if all(count == 1 for count in runs.values()):
        return timings
    return {key: per_run(timing, runs[key]) for key, timing in take(runs).items()}


def repeated(function: Callable[[Any], Any], runs: int) -> Callable[[Any], Any]:
    """A function that computes `function(inputs)` so many times, one after the other.

    Between two runs stands a barrier over inputs and results: the compiler may neither merge the runs nor reorder them. The
    results of all are returned, as it removes a run of which nothing is used, from under the barrier too.
    """

    def run(inputs: Any) -> Any:
        kept = [function(inputs)]
        for _ in range(runs - 1):
            inputs, kept[-1] = jax.lax.optimization_barrier((inputs, kept[-1]))
            kept.append(function(inputs))
        return kept

    return function if runs == 1 else run


def per_run(timing: Timing, runs: int) -> Timing:
    """The timing of one run, from that of a program of several."""
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

    The call is compiled once. Each sample enqueues as many launches as last `sample_ms` and waits once; a launch that is shorter
    than the work of launching it is run several times in one program.

    **Arguments:**

    - `fn`: any function or module; its result may be any pytree.
    - `args`, `kwargs`: arrays, or anything else: what is not an array is static.
    - `samples`: how many samples to take.
    - `sample_ms`: how long a sample lasts.
    - `jit`: whether to compile the call; `False` times it as it is, with the time that Python takes.
    - `input_sets`: further tuples in place of `args`, of the same shapes, that the launches rotate through, so that none finds its
        inputs in the cache.

    **Returns:**

    `Timing`: `ms` (the median), `spread` ((largest - smallest) / median), `samples` and `launches` (per sample).

    **Raises:** `TuningError` inside `jit` or another staged transformation, where there is nothing to time.
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

    # Without inputs nothing ties one run to the next.
    floor = lambda _: launch_floor(inputs[0]) if jax.tree.leaves(inputs[0]) else 0.0
    return time_runs(take, [""], floor)[""]


def _arrays(tree: Any) -> Any:
    """NumPy arrays are inputs too, not constants of the program."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, tree)
