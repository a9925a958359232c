"""`Explanation`: the rows that `explain` gives, as text and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .dispatch import FORWARD
from .tuning.report.roofline import Peaks, Roofline

_COLUMNS = ("", "ms", "bound ms", "of bound", "bound by", "GFLOP", "MB", "FLOP/byte")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of an explanation.

    - `path`: where the kernel stands in the model; `operation`, `problem`, `key`: what it is asked (`Problem.key()`).
    - `device`: what the choice is made for: the device that the call is compiled for, as far as tracing knows.
    - `platform`, `config`, `tier`, `origin`: what was chosen, by which tier, and where that had it from.
    - `label`: the name scope of the call in lowered and compiled text and in profiles.
    - `ms`: the measured milliseconds by direction (`"forward"`, `"forward+backward"`); empty where nothing was measured.
    - `rooflines`: by direction arithmetic, memory traffic and the device's bound; `dtype`: the type whose peak counts.
    - `notes`; `rejected`: the platforms asked before, with their reasons.
    """

    path: str = ""
    operation: str = ""
    problem: str = ""
    platform: str = ""
    config: str = ""
    tier: str = ""
    notes: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    key: str = ""
    label: str = ""
    origin: str = ""
    ms: tuple[tuple[str, float], ...] = ()
    dtype: str = ""
    rooflines: tuple[tuple[str, Roofline], ...] = ()
    device: str = ""

    def roofline(self, direction: str = FORWARD) -> Roofline | None:
        """The roofline of one direction; `None` where the operation does not tell its cost."""
        return dict(self.rooflines).get(direction)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "notes": list(self.notes),
            "rejected": dict(self.rejected),
            "ms": dict(self.ms),
            "rooflines": {direction: known.to_dict() for direction, known in self.rooflines},
        }

    def title(self, paths: Sequence[str]) -> str:
        """The head of the rows of one kernel, or of several alike."""
        if not paths[0]:
            return self.problem or self.operation
        more = f" (and {len(paths) - 1} more, to {paths[-1]})" if len(paths) > 1 else ""
        return f"{paths[0]}{more}: {self.problem or self.operation}"

    def lines(self, device: str = "") -> list[str]:
        """What stands below the title; the device too, where it is another than the one that is named already."""
        lines = [f"device    {self.device}"] if self.device not in ("", device) else []
        lines.append(f"platform  {self.platform}")
        if self.config:
            source = f"{self.tier}, {self.origin}" if self.origin else self.tier
            lines.append(f"config    {self.config}   (from: {source})")
        lines.extend(self._table())
        lines.extend(f"note      {note}" for note in self.notes)
        lines.extend(f"not {platform}: {reason}" for platform, reason in self.rejected)
        return lines

    def _table(self) -> list[str]:
        """Aligned columns, one row for each direction, without the columns of which nothing is known."""
        known, measured = dict(self.rooflines), dict(self.ms)
        rows = [_cells(name, measured.get(name), known.get(name)) for name in {**known, **measured}]
        kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
        table = [[row[i] for i in kept] for row in (_COLUMNS, *rows)] if rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]


def _cells(direction: str, ms: float | None, known: Roofline | None) -> tuple[str, ...]:
    measured = "" if ms is None else f"{ms:.4g}"
    if known is None:
        return (direction, measured, *[""] * (len(_COLUMNS) - 2))
    return (
        direction,
        measured,
        "" if known.bound_ms is None else f"{known.bound_ms:.4g}",
        "" if known.fraction is None else f"{known.fraction:.0%}",
        known.bound_by or "",
        f"{known.flops / 1e9:.4g}",
        f"{known.bytes / 1e6:.4g}",
        f"{known.intensity:.4g}",
    )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Rows of choices; `str()` of it is readable, `to_dict()` is JSON. `peaks`: what bounds the device, by dtype, where it is known."""

    device: str
    choices: tuple[Choice, ...]
    peaks: tuple[tuple[str, Peaks], ...] = ()
    remark: str = ""
    """Why there are no choices, and what to give."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "device": self.device,
            "peaks": {dtype: dataclasses.asdict(known) for dtype, known in self.peaks},
            "choices": [choice.to_dict() for choice in self.choices],
            "remark": self.remark,
        }

    def __str__(self) -> str:
        lines = [f"device: {self.device}"]
        for dtype, known in self.peaks:
            rates = f"{known.flops / 1e12:.4g} TFLOP/s, {known.bytes / 1e12:.4g} TB/s"
            lines.append(f"peak of {dtype}: {rates} ({known.source})")
        if not self.choices:
            lines.append(
                "no kernel of this package is in what was given" + (f": {self.remark}" if self.remark else "")
            )
        # Layers built alike are one row.
        groups: dict[Choice, list[str]] = {}
        for choice in self.choices:
            groups.setdefault(dataclasses.replace(choice, path=""), []).append(choice.path)
        titles = [choice.title(paths) for choice, paths in groups.items()]
        for previous, title, choice in zip([None, *titles], titles, groups, strict=False):
            lines.extend([title] if title != previous else [])
            lines.extend(f"  {line}" for line in choice.lines(self.device))
        return "\n".join(lines)
