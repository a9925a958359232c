"""`recording`: the choices that calls make, in order."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .._kernel import choices_of, Inputs
from ..dispatch import Implementation, on_selection, Platform, Problem, Selection, Tier


@dataclasses.dataclass(frozen=True)
class Invocation:
    """One choice made by a call: its problem, platform, configuration, and the tier that answered.

    `origin` gives details about the tier, for example where a known configuration was measured.
    """

    problem: Problem
    implementation: Implementation
    config: Any
    tier: Tier
    origin: str = ""

    @property
    def operation(self) -> str:
        return self.problem.operation

    @property
    def platform(self) -> Platform:
        return self.implementation.platform

    @classmethod
    def of(cls, selection: Selection) -> "Invocation":
        return cls(
            selection.problem, selection.implementation, selection.config, selection.tier, selection.origin
        )

    def __str__(self) -> str:
        return f"{self.problem} on {self.platform.value}: {self.config!r} (from: {self.origin or self.tier.value})"


@contextlib.contextmanager
def recording() -> Iterator[list[Invocation]]:
    """Collects the distinct choices of all calls made inside this context, in order.

    ```python
    with ejx.recording() as calls:
        model(x)                            # or, without computing: eqx.filter_eval_shape(model, x)
    ```

    **Returns:**

    A list of `Invocation`s (`operation`, `problem`, `platform`, `config`, `tier`, `origin`), filled while the context is open. Functions
    under `jit` are traced again inside (and compiled again, if they are run), so that no choice is missed.
    """
    calls: list[Invocation] = []
    heard: dict[Invocation, list[Selection]] = {}

    def listen(selection: Selection) -> None:
        invocation = Invocation.of(selection)
        if invocation not in heard:
            calls.append(invocation)
        heard.setdefault(invocation, []).append(selection)

    def forget(selection: Selection) -> None:
        invocation = Invocation.of(selection)
        kept = [other for other in heard.get(invocation, ()) if other is not selection]
        if kept:
            heard[invocation] = kept
        elif heard.pop(invocation, None):
            calls.remove(invocation)

    with on_selection(listen, forget):
        yield calls


def invocations_of(function: Callable[..., Any], call: Inputs) -> list[Invocation]:
    """The distinct choices of one call, traced with shapes only."""
    return list(dict.fromkeys(map(Invocation.of, choices_of(function, call))))
