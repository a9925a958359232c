"""Annotations that validate fields of configurations: `block_q: Block`, in a class with the base `Checked`."""

import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple


class Rule(NamedTuple):
    """The values a field may have, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def power_of_two(least: int = 1, most: int | None = None) -> Rule:
    words = "a power of two" + (f" from {least}" if least > 1 else "") + (f" up to {most}" if most else "")
    return Rule(words, lambda x: type(x) is int and least <= x <= (most or x) and not x & (x - 1))


def whole(least: int, most: int | None = None) -> Rule:
    words = f"an int from {least}" + (f" to {most}" if most else "")
    return Rule(words, lambda x: type(x) is int and least <= x <= (most or x))


def multiple_of(step: int) -> Rule:
    return Rule(f"a positive multiple of {step}", lambda x: type(x) is int and x > 0 and x % step == 0)


def one_of(*values: Any) -> Rule:
    *others, last = map(repr, values)
    return Rule(f"{', '.join(others)} or {last}", lambda x: x in values)


Power = Annotated[int, power_of_two()]
Block = Annotated[int, power_of_two(16)]
"""A side of a tile that is an operand of products."""
RowBlock = Annotated[
    int, Rule("a power of two from 16, or 192", lambda x: x == 192 or power_of_two(16).holds(x))
]
"""The same for rows, which three groups of warps of a Hopper kernel may share."""
Programs = Annotated[int, whole(0)]
"""How many programs of a Hopper kernel go from tile to tile; 0 for another kernel."""
Lanes = Annotated[int, multiple_of(128)]
"""A side of a tile on a TPU: whole vector registers, whose rows have 128 numbers."""
Warps = Annotated[int, one_of(1, 2, 4, 8, 16)]
Count = Annotated[int, whole(1)._replace(words="a positive int")]
Registers = Annotated[int, whole(0, 255)]
"""Maximum number of registers per thread, 0 for the compiler's choice; no effect with jax-triton before 0.4."""
Float32Dot = Annotated[str, one_of("tf32x3", "ieee", "tf32")]
"""The precision of float32 matrix products: `"tf32x3"` (three passes, float32 accuracy), `"ieee"`, or on request `"tf32"`."""


@functools.cache
def _rules(kind: type) -> dict[str, Rule]:
    hints = typing.get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: mark for name, mark in marks.items() if isinstance(mark, Rule)}


def check_fields(config: Any) -> None:
    """`ValueError` for the first field that violates its annotation."""
    kind = type(config)
    for name, rule in _rules(kind).items():
        value = getattr(config, name)
        if not rule.holds(value):
            raise ValueError(f"{kind.__name__}.{name}: expected {rule.words}, received {value!r}.")


class Checked:
    """A base class of configurations whose fields are checked when they are built."""

    __post_init__ = check_fields
