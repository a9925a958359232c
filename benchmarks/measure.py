"""Device time of asynchronous work, measured as in the package's tuner, also for PyTorch; and what traces of `jax.profiler` say."""

import collections
import contextlib
import itertools
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from benchmarks import report
from ejkernel_eqx.tuning.measure import JaxWork, time_in_turn, time_runs, Timing, Work

K = TypeVar("K", bound=Hashable)


def time_whole(
    makers: Mapping[K, Callable[[int], Work]], floor: float, samples: int = 5, sample_ms: float = 30.0
) -> dict[K, Timing]:
    """Times as `time_in_turn`, with one run each; work as short as a launch (`floor`, in milliseconds) runs several times per launch.

    A maker takes the number of runs per launch and returns the work to time.
    """

    def take(runs: Mapping[K, int]) -> dict[K, Timing]:
        works = {name: makers[name](count) for name, count in runs.items()}
        return time_in_turn(works, samples, sample_ms)

    return time_runs(take, makers, lambda name: floor)


def host_ms(call: Callable[[], Any], calls: int) -> float:
    """Milliseconds of one of many calls in a row, whose last results are waited for."""
    start = time.perf_counter()
    for _ in range(calls):
        results = call()
    jax.block_until_ready(results)
    return 1e3 * (time.perf_counter() - start) / calls


class StateWork:
    """A compiled step `(inputs, state) -> (state, results)` that may update its state in place: each launch takes the state of the previous one."""

    def __init__(self, function: Callable[..., Any], state: Any, input_sets: Sequence[Any]):
        self.function, self.state, self.input_sets = function, state, list(input_sets)

    def sample(self, launches: int) -> float:
        jax.block_until_ready(self.state)
        return JaxWork(self._step, [(inputs,) for inputs in self.input_sets]).sample(launches)

    def _step(self, inputs: Any) -> Any:
        self.state, _ = self.function(inputs, self.state)
        return self.state


def torch_with_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


class TorchWork:
    """A PyTorch function, timed between two CUDA events."""

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


class _GraphWork(TorchWork):
    """A PyTorch function as one CUDA graph per set of inputs, launched without Python's overhead."""

    def __init__(self, function: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]], runs: int):
        import torch

        graphs = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # initialise before the capture
            for inputs in input_sets:
                function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        for inputs in input_sets:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for _ in range(runs):
                    function(*inputs)
        super().__init__(lambda graph: graph.replay(), [(graph,) for graph in graphs])


def torch_work(
    function: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]], runs: int = 1
) -> TorchWork:
    """A CUDA graph or, if the function cannot be captured, launches from Python."""

    def several(*inputs: Any) -> None:
        for _ in range(runs):
            function(*inputs)

    try:
        return _GraphWork(function, input_sets, runs)
    except RuntimeError:
        return TorchWork(several, input_sets)


# Traces

KINDS = report.data("tables")["kinds"]
"""Kinds of kernels by their names: the first whose pattern occurs in one."""


class Span(NamedTuple):
    """What a stream of a GPU ran, in microseconds."""

    device: str
    name: str
    begin: float
    end: float


def traced(run: Callable[[], Any], folder: pathlib.Path | None = None) -> list[Span]:
    """What ran on GPUs in a trace of `run`, whose results are waited for. The trace stays in a folder, if there is one."""
    with contextlib.ExitStack() as stack:
        folder = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with jax.profiler.trace(str(folder)):
            jax.block_until_ready(run())
        newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        return gpu_spans(jax.profiler.ProfileData.from_file(str(newest)))


def gpu_spans(data: jax.profiler.ProfileData) -> list[Span]:
    """What the streams of all GPUs ran, in order."""
    results = [
        Span(plane.name, event.name, event.start_ns / 1e3, event.end_ns / 1e3)
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(results, key=lambda span: span.begin)


def kernel_times(run: Callable[[], Any], runs: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches per run of each kernel, longest first; `run` must return arrays to wait for."""
    jax.block_until_ready(run())
    times: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for span in traced(lambda: [run() for _ in range(runs)]):
        times[span.name] += (span.end - span.begin) / 1e3 / runs
        counts[span.name] += 1
    return {name: (times[name], counts[name] // runs) for name in sorted(times, key=lambda n: -times[n])}


def by_kind(times: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Milliseconds per run of each kind of kernel."""
    result: dict[str, float] = collections.defaultdict(float)
    for name, (ms, _) in times.items():
        known = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
        result[next(known, "other")] += ms
    return dict(sorted(result.items(), key=lambda entry: -entry[1]))


_SENDS = re.compile(r"nccl|sendrecv|collective.?permute|all.?to.?all", re.IGNORECASE)


def hidden(spans: Iterable[Span]) -> float | None:
    """The part of the time of sending kernels in which another stream of the same GPU computes, over all GPUs; `None` if nothing is sent."""
    by_device: dict[str, dict[bool, list[Span]]] = {}
    for span in spans:
        kinds = by_device.setdefault(span.device, {True: [], False: []})
        kinds[bool(_SENDS.search(span.name))].append(span)
    sent = sum(_length(kinds[True]) for kinds in by_device.values())
    ran = sum(_length(kinds[False]) for kinds in by_device.values())
    either = sum(_length(kinds[True] + kinds[False]) for kinds in by_device.values())
    return (sent + ran - either) / sent if sent else None


def _length(spans: Iterable[Span]) -> float:
    """The time in which any of the spans runs."""
    total, last = 0.0, -float("inf")
    for _, _, begin, end in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
