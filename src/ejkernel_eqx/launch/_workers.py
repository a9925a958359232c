"""Threads for work that the process need not wait for when it ends."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """At most `most` threads, which exist while there is work.

    When the main thread has ended, by Ctrl-C perhaps, what was not begun is cancelled, and later work is done by the thread that asks for it. (An
    executor of the standard library would do all of it before the process ends.)"""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: collections.deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = (
            collections.deque()
        )

    def submit(self, work: Callable[[], T]) -> "concurrent.futures.Future[T]":
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if not threading.main_thread().is_alive():
            fulfil(future, work)
            return future
        with self._lock:
            self._waiting.append((future, work))
            is_new = self._running < self._most
            self._running += is_new
        if is_new:
            threading.Thread(target=self._work, name="ejkernel_eqx").start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, work = self._waiting.popleft()
            if threading.main_thread().is_alive():
                fulfil(future, work)
            else:
                future.cancel()


def fulfil(future: "concurrent.futures.Future[Any]", work: Callable[[], Any]) -> None:
    """Does the work, and gives the future its result or its error."""
    try:
        future.set_result(work())
    except BaseException as error:  # of any kind: it is raised where the result is asked for
        future.set_exception(error)
