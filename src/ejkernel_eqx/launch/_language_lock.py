"""Interpretation replaces functions of `triton.language` for its duration, in the whole process: it excludes every
compilation and every other interpretation. Compilations do not disturb each other."""

import contextlib
import threading
from collections.abc import Iterator


class LanguageLock:
    """Held by one interpretation (`with language_lock:`) or by any number of compilations (`with language_lock.shared():`).

    A waiting interpretation takes precedence over later compilations. The interpreting thread may reacquire the lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compilers = 0
        self._waiting = 0
        self._interpreter: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._interpreter != me:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: self._interpreter is None and self._compilers == 0)
                finally:
                    self._waiting -= 1
                    self._changed.notify_all()
                self._interpreter = me
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._interpreter = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """The lock for a compilation."""
        with self._changed:
            self._changed.wait_for(lambda: self._interpreter is None and self._waiting == 0)
            self._compilers += 1
        try:
            yield
        finally:
            with self._changed:
                self._compilers -= 1
                self._changed.notify_all()


language_lock = LanguageLock()
