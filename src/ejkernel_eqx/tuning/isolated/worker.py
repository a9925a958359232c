"""The process that `isolation` starts: runs one search and writes its events to standard output.

Not for direct use. Output of candidates goes to standard error.
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
    # Of any kind: imports, inputs and reference are arbitrary code, and the reason must be reported.
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            emit(Failed(f"{type(error).__name__}: {error}"))
        raise


def _end_with_parent() -> None:
    """Ends this process with its parent; otherwise a hanging candidate would outlive its tuner."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
