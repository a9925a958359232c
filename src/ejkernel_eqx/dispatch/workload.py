"""The tuner's view of an operation: representative work, its expected results, and its cost."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._tolerances import Tolerance

FORWARD, BOTH = "forward", "forward+backward"
"""The two directions in which work is timed: forward results only, and all results."""

Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Arithmetic operations, and the minimum number of bytes transferred between the device's memory and its chip."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Part:
    """A field of the configuration that affects only some results; it is tuned separately, by the time of these results."""

    field: str
    results: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Representative work of one problem on one implementation.

    - `make_inputs(seed)`: a pytree of arrays, new for every seed: random values, valid tables, realistic lengths.
    - `run(inputs, config)`: the results by name: forward results, and gradients of a loss that weights every output; may be traced.
    - `reference(inputs)`: reference results under the same names, in float32 or better.
    - `tolerances`: the allowed deviation of each result from the reference.
    - `forward`: the names of the forward results; all others are gradients.
    - `parts`: the fields of the configuration that are tuned one after the other; empty if configurations are tuned as a whole.
    - `costs`: costs by direction (`FORWARD`, `BOTH`).
    - `launches(config)`: the Triton launches of a configuration (`launch.Launch`), for ahead-of-time compilation; `None` if
        there are none or they are known only during the run.
    """

    make_inputs: Callable[[int], Any]
    run: Callable[[Any, Any], Results]
    reference: Callable[[Any], Results]
    tolerances: Mapping[str, Tolerance]
    forward: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    costs: Mapping[str, Cost] = dataclasses.field(default_factory=dict)
    launches: Callable[[Any], Sequence[Any]] | None = None
