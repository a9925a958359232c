"""What a tuner needs of an operation: representative work, what must come out of it, and what it costs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._tolerances import Tolerance

FORWARD, BOTH = "forward", "forward+backward"
"""The two directions in which work is timed: the forward results alone, and all results."""

Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Arithmetic operations, and the bytes that must at least pass between the device's memory and its chip."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Part:
    """A field of the configuration on which some results alone depend: it is tuned by itself, by the time that these take."""

    field: str
    results: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Representative work of one problem on one implementation.

    - `make_inputs(seed)`: a pytree of arrays, fresh for every seed: random values, valid tables, realistic lengths.
    - `run(inputs, config)`: the results by name, forward results and gradients of a loss that weighs every output; may be traced.
    - `reference(inputs)`: the same names, by the plain mathematics in float32 or better.
    - `tolerances`: how far each result may be from the reference.
    - `forward`: the names of the forward results; all others are gradients.
    - `parts`: the fields of the configuration that are tuned one after the other; none: configurations are tuned whole.
    - `costs`: by direction (`FORWARD`, `BOTH`).
    - `launches(config)`: the Triton launches of a configuration (`launch.Launch`), for compiling ahead of time; `None` if
        there are none or only the run itself knows them.
    """

    make_inputs: Callable[[int], Any]
    run: Callable[[Any, Any], Results]
    reference: Callable[[Any], Results]
    tolerances: Mapping[str, Tolerance]
    forward: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    costs: Mapping[str, Cost] = dataclasses.field(default_factory=dict)
    launches: Callable[[Any], Sequence[Any]] | None = None
