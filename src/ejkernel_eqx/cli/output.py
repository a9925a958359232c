"""Output of the commands: tables, JSON documents, and errors for invalid input."""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

OK, FAILED, USAGE = 0, 1, 2
"""The exit codes: success; something is wrong or was rejected; invalid command line."""

_PIPE_WIDTH = 160
_NARROWEST = 12
_INDENT = 2  # of a section


class UsageError(ValueError):
    """Invalid input on the command line. The message says what was expected, what was received and the remedy."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a command: a document for `--json`, and its text form."""

    document: Mapping[str, Any]
    text: Callable[[], str]
    code: int = OK


@contextlib.contextmanager
def user_input(argument: str = "") -> Iterator[None]:
    """Turns a `ValueError` into a `UsageError`; `argument` names the argument if the message does not."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{argument}: {error}" if argument else str(error)) from error


def progress(message: str) -> None:
    """Prints one line of progress to standard error."""
    print(message, file=sys.stderr, flush=True)


def write_json(document: Any) -> str:
    """JSON with null in place of numbers that are not finite."""
    return json.dumps(_plain(document), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Aligned columns, those named in `right` right-aligned. Cells too wide for the terminal are wrapped."""
    columns = [[row[i] for row in (header, *rows)] for i in range(len(header))]
    widths = [max(map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    most = width_of_output() - _INDENT - 2 * (len(header) - 1)
    # Break lines between words while that suffices.
    for narrowest in (words, [min(_NARROWEST, word) for word in words]):
        while sum(widths) > most and any(w > n for w, n in zip(widths, narrowest)):
            # The widest column that can still shrink gives up one character.
            spare = [w if w > n else 0 for w, n in zip(widths, narrowest)]
            widths[spare.index(max(spare))] -= 1
    lines = [_line(header, header, widths, right), "  ".join("-" * width for width in widths)]
    lines.extend(_line(row, header, widths, right) for row in rows)
    return "\n".join(lines)


def _line(row: Sequence[str], header: Sequence[str], widths: Sequence[int], right: Collection[str]) -> str:
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths)]
    lines = []
    for n in range(max(len(cell) for cell in wrapped)):
        cells = [cell[n] if n < len(cell) else "" for cell in wrapped]
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, name, width in zip(cells, header, widths)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def width_of_output() -> int:
    """The width of the terminal (or `COLUMNS` if it is set); wide if output is not a terminal."""
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns


def pairs(facts: Mapping[str, Any], width: int, missing: str = "") -> str:
    """One line per fact; absent facts show `missing`, or are omitted if that is empty."""
    return "\n".join(f"{name:<{width}} {fact or missing}" for name, fact in facts.items() if fact or missing)


def section(title: str, body: str) -> str:
    return f"{title}\n{textwrap.indent(body, '  ')}"


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def number(value: float | None, digits: int = 4) -> str:
    """The number with `digits` significant digits, never in scientific notation; a dash if unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    whole = len(str(int(abs(value))))
    # Zeros right behind the point are not significant digits.
    first = whole if abs(value) >= 1 or value == 0 else 1 + math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, digits - first)}f}"


def ratio(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"
