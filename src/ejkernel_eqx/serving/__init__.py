"""Serving one model to many requests at once: continuous batching over pages, with a prefix cache."""

import importlib
from typing import Any

from .engine import Engine as Engine
from .requests import Event as Event
from .requests import RequestError as RequestError


def __getattr__(name: str) -> Any:
    if name in ("server", "text"):  # when they are first used: they need extras
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
