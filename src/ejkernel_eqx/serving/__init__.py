"""Serving: one model for many requests at once, with continuous batching over pages and a prefix cache."""

from .engine import Engine as Engine
from .requests import Event as Event
from .requests import RequestError as RequestError
