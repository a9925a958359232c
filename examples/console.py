"""What the commands `train_lm.py` and `serve_lm.py` share: errors of their users, Ctrl-C, and a standard output that is gone."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator


class UsageError(Exception):
    """Invalid arguments; the message gives the remedy."""


def check_numbers(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raises an error that names the first option below `least`. Options that are `None` are not given."""
    expected = "a positive number" if least == 1 else f"at least {least}"
    for name in names:
        if (value := getattr(args, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')}: expected {expected}, received {value}.")


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Catches the first Ctrl-C (or SIGTERM), so that the loop can end cleanly; a second one ends immediately."""
    received: list[int] = []

    def handle(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def drop_output() -> None:
    """What standard output still holds is not written when the process ends, which would fail again."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # no stream, or one without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
