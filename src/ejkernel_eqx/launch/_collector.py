"""Works around a bug of Python 3.11: `ast.parse` miscounts its recursion when the garbage collector, whose callbacks are Python code, lets
another thread parse in the meantime, and one of the two gets a `SystemError`. Every compilation of a Triton kernel parses its source."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_users = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """While any thread is in this context, cyclic garbage collection is paused."""
    global _users, _was_enabled
    with _lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                gc.enable()
