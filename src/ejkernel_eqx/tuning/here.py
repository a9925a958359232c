"""Searching in this process, which cannot end a candidate: one that takes too long ends the search."""

import contextvars
import threading
from concurrent.futures import wait

from .._errors import TuningError
from .isolated.events import Event, Job
from .isolated.settings import applied, thread_settings
from .ledger import Ledger
from .search import search
from .threads import in_thread

_POLL = 0.25


class _GivenUp(BaseException):
    """The caller no longer waits for the search. Not an `Exception`, which candidates are expected to raise."""


def search_here(job: Job, ledger: Ledger) -> None:
    """Runs the search in another thread of this process, with this thread's settings. `TuningError` as soon as a candidate has not finished a step
    within `candidate_timeout`; its thread is left behind."""
    settings, limit, given_up = thread_settings(), job.options.candidate_timeout, threading.Event()

    def emit(event: Event) -> None:
        if given_up.is_set():
            raise _GivenUp
        ledger.take(event)

    def run() -> None:
        with applied(settings):
            # In an empty context, because the caller's contexts (listeners, overlays, a policy) are not meant for candidates.
            contextvars.Context().run(search, job, emit)

    done = in_thread(run, "ejkernel_eqx search")
    try:
        while not wait([done], timeout=_POLL).done:
            for candidate, seconds in ledger.running()[:1]:
                if seconds > limit:
                    raise TuningError(
                        f"{job.name}: {candidate} did not finish within {limit:g} s, and this process cannot end it; restart the process and tune "
                        "with isolate=True, or allow more time with candidate_timeout=."
                    )
    finally:
        given_up.set()
    done.result()
