"""How many programs XLA compiles while something runs."""

import contextlib
from collections.abc import Iterator

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The name of each program that is compiled while it is open."""
    found: list[str] = []

    def hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            found.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
