"""Device time of asynchronous work: as the package's tuner takes it, and of PyTorch beside it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel_eqx.tuning.measure import input_set_count as input_set_count
from ejkernel_eqx.tuning.measure import JaxWork as JaxWork
from ejkernel_eqx.tuning.measure import time_in_turn as time_in_turn
from ejkernel_eqx.tuning.measure import Timing as Timing
from ejkernel_eqx.tuning.measure import Work as Work


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
