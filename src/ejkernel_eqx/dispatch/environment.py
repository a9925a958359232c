"""The environment variables that the package reads: each declared once, beside its reader, and listed by `doctor`."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class EnvironmentVariable:
    """One variable. Its text is turned into a value by `parse`, whose `ValueError` says what was expected.

    It is read when it is asked for, never at import; unset or empty, it has the value `default`.
    """

    name: str
    description: str
    parse: Callable[[str], Any]
    default: Any

    @property
    def text(self) -> str | None:
        """What the environment holds; `None` if it is unset or empty."""
        return os.environ.get(self.name) or None

    @property
    def state(self) -> str:
        """What it is set to, or that it is not and what holds then, for readers."""
        if self.text is None:
            default = "" if self.default is None else f", so {self.default}"
            return f"not set{default}"
        try:
            return f"set to {self.text!r}, read as {self.read()}"
        except ValueError as error:
            return f"set to {self.text!r}, WRONG: {error}"

    def read(self) -> Any:
        """The value in force; `ValueError` naming the variable if its text cannot be read."""
        text = self.text
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"environment variable {self.name}: {error}") from None


_DECLARED: dict[str, EnvironmentVariable] = {}


def declare(name: str, description: str, parse: Callable[[str], Any], default: Any) -> EnvironmentVariable:
    """The variable, and its place in the list of all of them."""
    variable = EnvironmentVariable(name, description, parse, default)
    _DECLARED[name] = variable
    return variable


class Environment(tuple[EnvironmentVariable, ...]):
    """The variables, which are read as text where they are shown."""

    def __repr__(self) -> str:
        return "\n".join(
            f"{variable.name}: {variable.state}\n    {variable.description}" for variable in self
        )


def env() -> Environment:
    """Every environment variable that the package reads, by name: a tuple that prints itself as text."""
    return Environment(_DECLARED[name] for name in sorted(_DECLARED))
