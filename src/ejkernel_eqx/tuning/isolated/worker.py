"""The process that `isolation` starts: makes one search and writes its events to standard output.

Not for use by hand. What candidates print goes to standard error.
"""

import contextlib
import faulthandler
import os
import pickle
import sys
import threading

from ...dispatch import no_tuning
from ..search import search
from .events import Event, Failed
from .settings import apply_to_process


def main() -> None:
    faulthandler.enable()
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            pickle.dump(event, events)
            events.flush()

    settings, payload = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        apply_to_process(settings)
        with no_tuning():  # the lock is held by the parent
            search(pickle.loads(payload), emit)
    # Of any kind: imports, inputs and reference are arbitrary code, and the reason has to be told.
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            emit(Failed(f"{type(error).__name__}: {error}"))
        raise


def _end_with_parent() -> None:
    """Nobody would stop a candidate that hangs after its tuner is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
