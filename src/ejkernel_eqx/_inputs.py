"""`inputs`: the arguments of a call as a value."""

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """Positional and keyword arguments of a module's call: arrays or `jax.ShapeDtypeStruct`s."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def inputs(*args: Any, **kwargs: Any) -> Inputs:
    """The arguments of a call for `tune_for=`, such as `ejx.inputs(q, k, v, bias=bias)`: arrays or `jax.ShapeDtypeStruct`s."""
    return Inputs(args, kwargs)


def as_inputs(value: Any) -> Inputs:
    """`Inputs` from what `tune_for=` accepts: `inputs(...)` or a tuple of positional arguments."""
    if isinstance(value, Inputs):
        return value
    if isinstance(value, tuple):
        return Inputs(value, {})
    raise ValueError(
        f"tune_for: expected a tuple of the call's arguments or ejx.inputs(...), received {type(value).__name__}."
    )
