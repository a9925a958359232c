"""Changes of settings that are global to the process, made while any of several threads needs them."""

import contextlib
import gc
import threading
from collections.abc import Callable


class WhileUsed:
    """A context: the first of several threads in it makes the change, the last takes it back."""

    def __init__(self, change: Callable[[contextlib.ExitStack], None]):
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._changes = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._change(self._changes)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._changes.close()


def _without_collector(changes: contextlib.ExitStack) -> None:
    if gc.isenabled():
        gc.disable()
        changes.callback(gc.enable)


collector_paused = WhileUsed(_without_collector)
"""Cyclic garbage collection is paused here, because of a bug of Python 3.11: `ast.parse` miscounts its recursion when the garbage collector, whose
callbacks are Python code, lets another thread parse in the meantime, and one of the two gets a `SystemError`. Every compilation of a Triton kernel
parses its source."""
