"""Device time of asynchronous work, taken so that competitors meet the same conditions."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

CACHE_BYTES = 64 * 2**20
"""At least the last-level cache of the GPUs measured so far (60 MB on an H200)."""


class Timing(NamedTuple):
    """Milliseconds of one launch: the median of the samples, and (largest - smallest) / median."""

    ms: float
    spread: float
    samples: tuple[float, ...]
    launches: int


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


class TorchWork:
    """A PyTorch function between two CUDA events."""

    def __init__(self, function: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]]):
        self.function, self.input_sets = function, list(input_sets)

    def sample(self, launches: int) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for inputs in itertools.islice(itertools.cycle(self.input_sets), launches):
            self.function(*inputs)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def input_set_count(input_bytes: int) -> int:
    """How many sets of inputs to rotate so that a launch does not find its inputs in the cache."""
    if jax.default_backend() == "cpu":
        return 1
    return min(8, max(1, math.ceil(2 * CACHE_BYTES / max(input_bytes, 1))))


def time_in_turn(works: Mapping[str, Work], samples: int = 5, sample_ms: float = 30.0) -> dict[str, Timing]:
    """The timing of each; samples are taken in turn, so that a drift of the clocks meets all alike."""
    launches = {name: _launches(work, sample_ms / 1e3) for name, work in works.items()}
    taken: dict[str, list[float]] = {name: [] for name in works}
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
