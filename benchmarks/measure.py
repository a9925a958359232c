"""Device time of asynchronous work, measured as in the package's tuner, also for PyTorch."""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from ejkernel_eqx.tuning.measure import input_set_count as input_set_count
from ejkernel_eqx.tuning.measure import JaxWork as JaxWork
from ejkernel_eqx.tuning.measure import launch_floor as launch_floor
from ejkernel_eqx.tuning.measure import per_run as per_run
from ejkernel_eqx.tuning.measure import repeated as repeated
from ejkernel_eqx.tuning.measure import runs_needed as runs_needed
from ejkernel_eqx.tuning.measure import time_in_turn as time_in_turn
from ejkernel_eqx.tuning.measure import Timing as Timing
from ejkernel_eqx.tuning.measure import Work as Work

K = TypeVar("K", bound=Hashable)


def time_whole(
    makers: Mapping[K, Callable[[int], Work]], floor: float, samples: int = 5, sample_ms: float = 30.0
) -> dict[K, Timing]:
    """As `time_in_turn`, with one run each; work as short as a launch (`floor`, in milliseconds) runs several times per launch.

    A maker takes the number of runs per launch and returns the work to time.
    """
    works = {name: make(1) for name, make in makers.items()}
    timings = time_in_turn(works, samples, sample_ms)
    runs = {name: runs_needed(timing.ms, floor) for name, timing in timings.items()}
    if all(count == 1 for count in runs.values()):
        return timings
    works |= {name: makers[name](count) for name, count in runs.items() if count > 1}
    timings = time_in_turn(works, samples, sample_ms)
    return {name: per_run(timing, runs[name]) for name, timing in timings.items()}


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
