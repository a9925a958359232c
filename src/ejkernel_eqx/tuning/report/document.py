"""`tuning_report`: a readable page about tuning results."""

import base64
import datetime
import html
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from ..._errors import require_matplotlib
from ...dispatch import BOTH, device_facts, device_fingerprint, FORWARD
from ...dispatch.files import replacing
from ...dispatch.persistent import software, user_caches
from ...dispatch.records import Record
from ..result import TuningResult
from ..tuner import tuned_results
from .data import Candidate, describe, Entry, entry_of_record, entry_of_result
from .plot import png
from .roofline import roofline

_MOST_IN_ONE_PICTURE = 60
_SUFFIXES = (".html", ".htm", ".png")


def tuning_report(
    path: str | os.PathLike[str], results: Iterable[TuningResult | Record] | None = None
) -> pathlib.Path:
    """Writes a page about tuned problems: the time of every candidate, rejected candidates with reasons, the winners, and the roofline.

    Bar charts show the candidates of each part of the configuration, with the heuristic's choice and the winner marked. If the peaks
    of the device are documented, a second picture compares the speed with them. Nothing is timed.

    **Arguments:**

    - `path`: the file to write, `.html` (one page with pictures) or `.png` (pictures only). It is replaced atomically.
    - `results`: the results to show: `TuningResult`s, or records of a [`ejkernel_eqx.PersistentCache`][]. By default the results of this
        process or, if there are none, the records for this device in the user's cache.

    **Returns:**

    The path. Raises `ValueError` for another suffix or without results, and `ImportError` without matplotlib (extra `report`).
    """
    target = pathlib.Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"path: expected a file name that ends in .html or .png, received {os.fspath(path)!r}."
        )
    require_matplotlib("tuning_report")
    found = list((tuned_results() or cached_records()) if results is None else results)
    if not found:
        raise ValueError(
            "results: expected at least one tuned problem, received none; tune first, with ejx.tune(model, x) or python -m ejkernel_eqx tune."
        )
    entries = [entry_of_record(x) if isinstance(x, Record) else entry_of_result(x) for x in found]
    entries.sort(key=lambda entry: (entry.problem.operation, entry.platform, entry.title))
    if target.suffix.lower() == ".png":
        if len(entries) > _MOST_IN_ONE_PICTURE:
            raise ValueError(
                f"path: expected .html for more than {_MOST_IN_ONE_PICTURE} problems, received {target.name!r} for {len(entries)}; use .html."
            )
        content = png(entries, header="\n".join(_header()))
    else:
        content = _page(entries).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(content)
    return target


def cached_records() -> list[Record]:
    """The records for this device in the user's cache."""
    return [record for cache in user_caches(device_facts()) for record in cache.records()]


def _header() -> list[str]:
    device = device_facts()
    versions = ", ".join(f"{name} {version}" for name, version in software().items())
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"Tuning on {device.kind} ({device_fingerprint(device)})",
        device.runtime,
        f"{versions}; written {now}",
    ]


_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; margin: .6rem 0 } td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } code { font-size: 12px } img { max-width: 100% }
h2 { font-size: 1.05rem; margin-top: 2.2rem; border-top: 2px solid #444; padding-top: .6rem } summary { cursor: pointer }
"""


def _page(entries: Sequence[Entry]) -> str:
    title, *facts = map(html.escape, _header())
    body = "".join(_section(n, entry) for n, entry in enumerate(entries))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1><p>{'<br>'.join(facts)}</p>\n{_summary(entries)}\n{body}</body></html>\n"
    )


def _summary(entries: Sequence[Entry]) -> str:
    header = ("problem", "platform", "direction", "heuristic ms", "tuned ms", "speed-up", "of the roofline")
    rows = []
    for n, entry in enumerate(entries):
        link = f'<a href="#p{n}">{html.escape(str(entry.problem))}</a>'
        if entry.config is None:
            rows.append((link, entry.platform, "every candidate was rejected", "", "", "", ""))
        for direction in (d for d in (FORWARD, BOTH) if d in entry.ms):
            numbers = (
                _number(entry.heuristic_ms.get(direction)),
                _number(entry.ms[direction]),
                _times(entry.speed_up(direction)),
                _of_roofline(entry, direction),
            )
            rows.append((link, entry.platform, direction, *numbers))
    return _table(header, rows, numeric=4)


def _of_roofline(entry: Entry, direction: str) -> str:
    cost = entry.costs.get(direction)
    fraction = roofline(cost, entry.peaks, entry.ms[direction]).fraction if cost else None
    return "" if fraction is None else f"{100 * fraction:.0f}%"


def _section(n: int, entry: Entry) -> str:
    picture = base64.b64encode(png([entry])).decode()
    rows = []
    for part in entry.parts:
        timed = [c for c in entry.candidates if c.part == part and c.ms is not None]
        winner = next((c for c in timed if c.is_winner), None)
        before, after = (c.ms if c else None for c in (entry.heuristic_of(part), winner))
        config = _code(describe(winner.config)) if winner else "none"
        faster = before / after if before and after else None
        rows.append((html.escape(part or "whole"), config, _number(before), _number(after), _times(faster)))
    software = ", ".join(f"{name} {version}" for name, version in entry.software.items())
    errors = ", ".join(f"{name} {error:.2g}" for name, error in entry.errors.items())
    facts = f"{entry.date} {software}" + (f"; relative error of the winner: {errors}" if errors else "")
    return "\n".join(
        (
            f'<h2 id="p{n}">{html.escape(entry.title)}</h2>',
            f"<p>{html.escape(facts)}</p>",
            _table(("part", "winner", "heuristic ms", "winner ms", "speed-up"), rows, numeric=3),
            f'<img alt="times of the candidates" src="data:image/png;base64,{picture}">',
            _passed_over([c for c in entry.candidates if c.ms is None or c.reason]),
        )
    )


def _passed_over(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return ""
    rows = [
        (html.escape(c.part), _code(describe(c.config)), c.status, html.escape(c.reason)) for c in candidates
    ]
    table = _table(("part", "candidate", "status", "reason"), rows, numeric=0)
    return f"<details open><summary>{len(candidates)} not timed or passed over</summary>{table}</details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], numeric: int) -> str:
    """The last `numeric` columns are numbers. Cells contain HTML."""
    first = len(header) - numeric

    def line(cells: Sequence[Any], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i >= first else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in rows)
    return f"<table><thead><tr>{line(header, 'th')}</tr></thead><tbody>\n{body}</tbody></table>"


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _number(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4g}"


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"
