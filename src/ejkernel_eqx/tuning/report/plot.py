"""Pictures of tuned problems. Only this module imports matplotlib, and only when it makes a picture."""

import io
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..._errors import require_matplotlib
from ...dispatch import BOTH
from ..roofline import Peaks
from .data import Candidate, describe, Entry

_GREY, _WINNER, _HEURISTIC = "#b8c0c8", "#2a9d5c", "#e39b2d"
_MOST_BARS, _MOST_DENIED = 30, 5


_STYLE = {"font.size": 6.5, "axes.titlesize": 7.5, "figure.titlesize": 9, "figure.titleweight": "bold"}
_STYLE |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "axes.labelsize", "legend.fontsize"), 6.5)


def _height_of(entry: Entry) -> float:
    """The height in inches."""
    bars = Counter(candidate.part for candidate in entry.candidates if candidate.ms is not None)
    height = max(2.6, 1.3 + 0.2 * min(_MOST_BARS, max(bars.values(), default=0)))
    return height + 0.9 * any(c.reason and c.ms is None for c in entry.candidates)


def png(entries: Sequence[Entry], header: str = "") -> bytes:
    """One picture of all entries, from top to bottom: a column for each part, and one for the roofline."""
    matplotlib = require_matplotlib("tuning_report")
    heights = [0.22 * header.count("\n") + 0.45] * bool(header) + [_height_of(entry) for entry in entries]
    points = [_points(entry) for entry in entries]
    columns = [len(entry.parts) + bool(some) for entry, some in zip(entries, points)]
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        size = max(8.0, 4.0 * max(columns)), sum(heights)
        figure = matplotlib.figure.Figure(size, layout="constrained")
        bands = list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
        if header:
            bands.pop(0).text(0.01, 0.5, header, va="center", fontsize=9, family="monospace")
        for band, entry, some, count in zip(bands, entries, points, columns, strict=True):
            band.suptitle("\n".join(textwrap.wrap(entry.title, 45 * max(count, 2))))
            axes = band.subplots(1, max(count, 1), squeeze=False)[0]
            for axis, part in zip(axes, entry.parts):
                _bars(axis, part, [c for c in entry.candidates if c.part == part])
            if some and entry.peaks is not None:
                _roofline(axes[-1], some, entry.peaks)
            if not count:
                axes[0].set_axis_off()
        figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _bars(axis: Any, part: str, candidates: Sequence[Candidate]) -> None:
    """Times, the fastest at the top. Much longer bars are cut off and labelled, so that the others can be compared."""
    timed = sorted((c for c in candidates if c.ms is not None), key=lambda c: c.ms or 0.0)
    shown = [c for n, c in enumerate(timed) if n < _MOST_BARS or c.is_heuristic]
    fields = _varying(shown)
    longest = 4 * (shown[0].ms or 0.0) if shown else 1.0
    for row, candidate in enumerate(shown):
        ms, is_cut = candidate.ms or 0.0, (candidate.ms or 0.0) > longest
        colour = _WINNER if candidate.is_winner else _HEURISTIC if candidate.is_heuristic else _GREY
        edge = {"edgecolor": _HEURISTIC, "hatch": "//"} if len(candidate.marks) == 2 else {}
        spread = None if is_cut else ms * candidate.spread / 2
        axis.barh(row, min(ms, longest), xerr=spread, color=colour, error_kw={"elinewidth": 0.8}, **edge)
        words = " ".join((f"{ms:.4g}", *candidate.marks, *["(cut)"] * is_cut))
        axis.text(0.02 * longest / 4, row, words, va="center")
    axis.set_yticks(range(len(shown)), [_label(c, fields) for c in shown])
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.set_title(" ".join(filter(None, (part, f"({', '.join(fields)})" if fields else ""))))
    denied = [f"{_label(c, fields)}: {c.reason}" for c in candidates if c.ms is None and c.reason]
    if denied:
        lines = [textwrap.shorten(line, 75, placeholder=" ...") for line in denied[:_MOST_DENIED]]
        lines += [f"and {len(denied) - _MOST_DENIED} more"] * (len(denied) > _MOST_DENIED)
        text = "\n".join([f"{len(denied)} not timed:", *lines])
        axis.annotate(text, (0, 0), (0, -30), "axes fraction", textcoords="offset points", va="top")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    inner = lambda name, x: _flat(x, f"{name}.") if isinstance(x, Mapping) else {name: x}
    return {n: x for name, value in config.items() for n, x in inner(prefix + name, value).items()}


def _varying(candidates: Sequence[Candidate]) -> list[str]:
    """The fields that differ between candidates."""
    flat = [_flat(c.config) for c in candidates]
    names = dict.fromkeys(name for config in flat for name in config)
    return [name for name in names if len({str(config.get(name)) for config in flat}) > 1]


def _label(candidate: Candidate, fields: Sequence[str]) -> str:
    flat = _flat(candidate.config)
    return ", ".join(str(flat.get(name)) for name in fields) if fields else describe(candidate.config)


class _Point(NamedTuple):
    direction: str
    name: str
    colour: str
    intensity: float  # operations per byte
    speed: float  # operations per second


def _points(entry: Entry) -> list[_Point]:
    """One point for every timed direction of the winner and of the heuristic; none if the device's peaks are unknown."""
    times = (("heuristic", _HEURISTIC, entry.heuristic_ms), ("winner", _WINNER, entry.record.ms))
    return [
        _Point(direction, name, colour, cost.flops / cost.bytes, cost.flops / (ms[direction] / 1e3))
        for direction, cost in (entry.costs.items() if entry.peaks is not None else ())
        for name, colour, ms in times
        if ms.get(direction) and cost.bytes and cost.flops
    ]


def _roofline(axis: Any, points: Sequence[_Point], peaks: Peaks) -> None:
    ridge = peaks.flops / peaks.bytes
    known = [point.intensity for point in points]
    shown = (min(ridge / 8, min(known) / 4), ridge, max(ridge * 8, max(known) * 4))
    roof = [min(peaks.flops, x * peaks.bytes) / 1e12 for x in shown]
    axis.loglog(shown, roof, color="#444444", linewidth=1)
    for point in points:
        size, style = (36, point.colour) if point.name == "winner" else (81, "none")
        label = f"{point.direction}, {point.name}: {point.speed / 1e12:.3g}"
        look = {"s": size, "marker": "s" if point.direction == BOTH else "o", "facecolors": style}
        axis.scatter(point.intensity, point.speed / 1e12, label=label, edgecolors=point.colour, **look)
    axis.set_xlabel("operations per byte")
    axis.set_title(f"roofline, TFLOP/s (at most {peaks.flops / 1e12:.4g}, {peaks.bytes / 1e12:.3g} TB/s)")
    axis.grid(alpha=0.3, which="both", linewidth=0.4)
    axis.legend(loc="lower right")
