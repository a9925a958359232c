"""References beside the device under test."""

from collections.abc import Callable
from typing import Any

import jax


def on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """The float64 reference runs on the CPU, beside the device under test."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*arguments)
