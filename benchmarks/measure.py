"""Device time of asynchronous work, measured as in the package's tuner, also for PyTorch; and what traces of `jax.profiler` say."""

import collections
import contextlib
import gzip
import itertools
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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


def kernel_times(run: Callable[[], Any], runs: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches per run of each kernel, longest first; `run` must return arrays to wait for."""
    jax.block_until_ready(run())
    times: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for name, begin, end in gpu_spans(traced(lambda: [run() for _ in range(runs)])):
        times[name] += (end - begin) / 1e3 / runs
        counts[name] += 1
    return {name: (times[name], counts[name] // runs) for name in sorted(times, key=lambda n: -times[n])}


def by_kind(times: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Milliseconds per run of each kind of kernel."""
    result: dict[str, float] = collections.defaultdict(float)
    for name, (ms, _) in times.items():
        result[
            next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")
        ] += ms
    return dict(sorted(result.items(), key=lambda entry: -entry[1]))


_SENDS = re.compile(r"nccl|sendrecv|collective.?permute|all.?to.?all", re.IGNORECASE)
Span = tuple[float, float]


def traced(run: Callable[[], Any], folder: pathlib.Path | None = None) -> list[Mapping[str, Any]]:
    """The events of a trace of `run`, whose results are waited for. The trace stays in a folder, if there is one."""
    with contextlib.ExitStack() as stack:
        folder = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with jax.profiler.trace(str(folder)):
            jax.block_until_ready(run())
        files = sorted(folder.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
        if not files:
            return []
        with gzip.open(files[-1], "rt", encoding="utf-8") as file:
            return json.load(file)["traceEvents"]


def hidden(events: Iterable[Mapping[str, Any]]) -> float | None:
    """The part of the time of sending kernels in which another stream of the same GPU computes, over all GPUs; `None` if nothing is sent."""
    spans: dict[Any, dict[bool, list[Span]]] = {}
    for event in _on_streams(list(events)):
        kinds = spans.setdefault(event["pid"], {True: [], False: []})
        kinds[bool(_SENDS.search(event["name"]))].append(_span(event))
    sent = sum(_length(kinds[True]) for kinds in spans.values())
    ran = sum(_length(kinds[False]) for kinds in spans.values())
    either = sum(_length(kinds[True] + kinds[False]) for kinds in spans.values())
    return (sent + ran - either) / sent if sent else None


def gpu_spans(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, begin and end, in microseconds, of all that the streams of all GPUs ran, in order."""
    results = [(event["name"], *_span(event)) for event in _on_streams(list(events))]
    return sorted(results, key=lambda span: span[1])


def _on_streams(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    named = lambda what: [e for e in events if e.get("ph") == "M" and e.get("name") == what]
    devices = {e.get("pid"): e["args"]["name"] for e in named("process_name")}
    streams = {(e.get("pid"), e.get("tid")): e["args"]["name"] for e in named("thread_name")}
    for event in events:
        device, stream = event.get("pid"), streams.get((event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and "GPU" in devices.get(device, "") and "Stream" in stream:
            yield event


def _span(event: Mapping[str, Any]) -> Span:
    begin, time = float(event["ts"]), float(event.get("dur", 0))
    return begin, begin + time


def _length(spans: Iterable[Span]) -> float:
    """The time in which any of the spans runs."""
    total, last = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
