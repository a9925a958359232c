"""`tuning_report`: a readable page about tuning results."""

import base64
import datetime
import html
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._errors import require_matplotlib
from ...dispatch import BOTH, device_facts, device_fingerprint, FORWARD
from ...dispatch.files import replacing
from ...dispatch.persistent import software, user_caches
from ...dispatch.records import Record
from ..result import TuningResult
from ..roofline import roofline
from ..tuner import tuned_results
from .data import describe, Entry, entry_of_record, entry_of_result
from .plot import png

_MOST_IN_ONE_PICTURE = 60


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
    if target.suffix.lower() not in (".html", ".htm", ".png"):
        raise ValueError(
            f"path: expected a file name that ends in .html or .png, received {os.fspath(path)!r}."
        )
    require_matplotlib("tuning_report")
    chosen = list((tuned_results() or cached_records()) if results is None else results)
    if not chosen:
        raise ValueError(
            "results: expected at least one tuned problem, received none; tune first, with ejx.tune(model, x) or python -m ejkernel_eqx tune."
        )
    entries = [entry_of_record(x) if isinstance(x, Record) else entry_of_result(x) for x in chosen]
    entries.sort(key=lambda entry: (entry.problem.operation, entry.record.platform, entry.title))
    is_picture = target.suffix.lower() == ".png"
    if is_picture and len(entries) > _MOST_IN_ONE_PICTURE:
        raise ValueError(
            f"path: expected .html for more than {_MOST_IN_ONE_PICTURE} problems, received {target.name!r} for {len(entries)}; use .html."
        )
    content = png(entries, header="\n".join(_header())) if is_picture else _page(entries).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(content)
    return target


def cached_records() -> list[Record]:
    """The records for this device in the user's cache."""
    return [record for cache in user_caches(device_facts()) for record in cache.records()]


_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; margin: .6rem 0 } td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } code { font-size: 12px } img { max-width: 100% }
h2 { font-size: 1.05rem; margin-top: 2.2rem; border-top: 2px solid #444; padding-top: .6rem } summary { cursor: pointer }
"""


def _header() -> list[str]:
    device, now = device_facts(), datetime.datetime.now(datetime.UTC)
    title = f"Tuning on {device.kind} ({device_fingerprint(device)})"
    return [title, device.runtime, f"{_pairs(software())}; written {now:%Y-%m-%d %H:%M UTC}"]


def _page(entries: Sequence[Entry]) -> str:
    title, *facts = map(html.escape, _header())
    body = "".join(_section(n, entry) for n, entry in enumerate(entries))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1><p>{'<br>'.join(facts)}</p>\n{_summary(entries)}\n{body}</body></html>\n"
    )


def _summary(entries: Sequence[Entry]) -> str:
    rows = []
    for n, entry in enumerate(entries):
        link = f'<a href="#p{n}">{html.escape(str(entry.problem))}</a>'
        if entry.record.config is None:
            rows.append((link, entry.record.platform, "every candidate was rejected", *[""] * 4))
        for direction in (d for d in (FORWARD, BOTH) if d in entry.record.ms):
            before, after = (ms.get(direction) for ms in (entry.heuristic_ms, entry.record.ms))
            cost = entry.costs.get(direction)
            bound = _text(roofline(cost, entry.peaks, after).fraction if cost else None, ".0%")
            rows.append((link, entry.record.platform, direction, *_times(before, after), bound))
    header = ("problem", "platform", "direction", "heuristic ms", "tuned ms", "speed-up", "of the roofline")
    return _table(header, rows, numeric=4)


def _section(n: int, entry: Entry) -> str:
    picture = base64.b64encode(png([entry])).decode()
    rows = []
    for part in entry.parts:
        heuristic, winner = (entry.timed(part, mark) for mark in ("heuristic", "winner"))
        times = _times(heuristic and heuristic.ms, winner and winner.ms)
        rows.append((html.escape(part or "whole"), _code(winner.config) if winner else "none", *times))
    errors = ", ".join(f"{name} {error:.2g}" for name, error in entry.record.errors.items())
    facts = f"{entry.record.date} {_pairs(entry.record.software)}"
    facts += f"; relative error of the winner: {errors}" if errors else ""
    row = lambda c: (html.escape(c.part), _code(c.config), c.status, html.escape(c.reason))
    over = [row(c) for c in entry.candidates if c.ms is None or c.reason]
    details = f"<details open><summary>{len(over)} not timed or passed over</summary>"
    details += f"{_table(('part', 'candidate', 'status', 'reason'), over, numeric=0)}</details>"
    parts = _table(("part", "winner", "heuristic ms", "winner ms", "speed-up"), rows, numeric=3)
    return (
        f'<h2 id="p{n}">{html.escape(entry.title)}</h2>\n<p>{html.escape(facts)}</p>\n{parts}\n'
        f'<img alt="times of the candidates" src="data:image/png;base64,{picture}">\n{details if over else ""}'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], numeric: int) -> str:
    """The last `numeric` columns are numbers. Cells contain HTML."""
    classes = [""] * (len(header) - numeric) + [" class=n"] * numeric
    line = lambda cells, tag: "".join(f"<{tag}{kind}>{x}</{tag}>" for x, kind in zip(cells, classes))
    body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in rows)
    return f"<table><thead><tr>{line(header, 'th')}</tr></thead><tbody>\n{body}</tbody></table>"


def _pairs(entries: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in entries.items())


def _code(config: Any) -> str:
    return f"<code>{html.escape(describe(config))}</code>"


def _times(before: float | None, after: float | None) -> tuple[str, str, str]:
    """The times of the heuristic and of the winner, and the speed-up; empty where they are unknown."""
    return _text(before, ".4g"), _text(after, ".4g"), f"{before / after:.2f}x" if before and after else ""


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
