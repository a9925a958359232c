"""Serving one model to many requests at once: continuous batching over pages, with a prefix cache."""

from .engine import Engine as Engine
from .requests import Event as Event
from .requests import RequestError as RequestError
