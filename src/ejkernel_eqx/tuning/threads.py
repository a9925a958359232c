"""Threads that the end of the process does not wait for, since what a candidate does in them may never end."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ..launch._workers import fulfil

T = TypeVar("T")
R = TypeVar("R")


def attempted(function: Callable[[], R]) -> R | Exception:
    """The result of a function, or what it raised, of any kind: a candidate is arbitrary code."""
    try:
        return function()
    except Exception as error:
        return error


def in_thread(function: Callable[[], Any], name: str) -> Future[Any]:
    """The future result of a function."""
    done: Future[Any] = Future()
    threading.Thread(target=fulfil, args=(done, function), name=name, daemon=True).start()
    return done


def in_threads(function: Callable[[T], R], items: Sequence[T], count: int) -> list[R]:
    """The results for all items, in their order, from `count` threads."""
    todo: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    results: dict[int, R] = {}
    for numbered in enumerate(items):
        todo.put(numbered)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                n, item = todo.get_nowait()
                results[n] = function(item)

    workers = [in_thread(work, "ejkernel_eqx candidates") for _ in range(min(count, len(items)))]
    wait(workers)
    for worker in workers:
        worker.result()
    return [results[n] for n in range(len(items))]
