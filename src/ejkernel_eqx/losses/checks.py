"""Checks that the losses share: numbers among their options, and arrays with one number for each token."""

from typing import Any

from jax import Array

from ..core.arguments import array, is_finite


def check_number(name: str, number: Any, least: Any, most: Any, *, ends: bool = True) -> None:
    """Raises `ValueError` for a number that is not from `least` to `most`, or without `ends` not between them."""
    inside = is_finite(number) and (least <= number <= most if ends else least < number < most)
    if not inside:
        words = f"from {least} to {most}" if ends else f"of more than {least} and less than {most}"
        raise ValueError(f"{name}: expected a finite number {words}, received {number!r}.")


def read_soft_cap(cap: Any) -> float | None:
    if cap is not None:
        check_number("logits_soft_cap", cap, 0, float("inf"), ends=False)
    return cap and float(cap)


def check_shape(name: str, x: Array, shape: tuple[int, ...], other: str) -> Array:
    """Returns `x` if it has the shape of another array."""
    if x.shape != shape:
        raise ValueError(
            f"{name}: expected the shape {shape} of {other}, received {x.shape}; give one number for each."
        )
    return x


def floats(name: str, x: Any, shape: tuple[int, ...], other: str) -> Array:
    return check_shape(name, array(name, x, "", 0), shape, other)
