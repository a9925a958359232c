"""The environment variables that the package reads. Each is declared once, next to its reader, and listed by `doctor`."""

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class EnvironmentVariable:
    """An environment variable. `parse` converts its text to a value, or raises a `ValueError` that says what was expected.

    It is read when it is needed, never at import. If it is unset or empty, its value is `default`.
    """

    name: str
    description: str
    parse: Callable[[str], Any]
    default: Any

    @property
    def text(self) -> str | None:
        """The text in the environment; `None` if it is unset or empty."""
        return os.environ.get(self.name) or None

    @property
    def state(self) -> str:
        """A description of its current value, or of its default if it is not set."""
        if self.text is None:
            default = "" if self.default is None else f", default {self.default}"
            return f"not set{default}"
        try:
            return f"set to {self.text!r}, read as {self.read()}"
        except ValueError as error:
            return f"set to {self.text!r}, INVALID: {error}"

    def read(self) -> Any:
        """The current value; `ValueError` naming the variable if its text is invalid."""
        text = self.text
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"environment variable {self.name}: {error}") from None


_DECLARED: dict[str, EnvironmentVariable] = {}
_READERS = ("dispatch.overlay", "dispatch.persistent", "launch.own_call", "_values")
"""The modules that declare variables. They are imported before all variables are listed."""


def declare(name: str, description: str, parse: Callable[[str], Any], default: Any) -> EnvironmentVariable:
    """Declares a variable and adds it to the list of all variables."""
    variable = EnvironmentVariable(name, description, parse, default)
    _DECLARED[name] = variable
    return variable


class Environment(tuple[EnvironmentVariable, ...]):
    """A tuple of variables that prints as text."""

    def __repr__(self) -> str:
        return "\n".join(
            f"{variable.name}: {variable.state}\n    {variable.description}" for variable in self
        )


def env() -> Environment:
    """Returns every environment variable that the package reads, sorted by name, as a tuple that prints as text."""
    for reader in _READERS:
        importlib.import_module(f".{reader}", __name__.partition(".")[0])
    return Environment(_DECLARED[name] for name in sorted(_DECLARED))
