"""`Explanation`: the result of `explain`, as text and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..dispatch import FORWARD
from .roofline import Peaks, Roofline

_COLUMNS = ("", "ms", "bound ms", "of bound", "bound by", "GFLOP", "MB", "FLOP/byte")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of an explanation.

    - `path`: the path of the kernel in the model; `operation`, `problem`, `key`: the problem (`Problem.key()`).
    - `device`: the device that the choice is made for, which is the one that the call is compiled for if tracing knows it.
    - `platform`, `config`, `tier`, `origin`: the choice, the tier that made it, and the origin of its configuration.
    - `label`: the name scope of the call in lowered and compiled text and in profiles.
    - `ms`: the measured milliseconds by direction (`"forward"`, `"forward+backward"`); empty if nothing was measured.
    - `rooflines`: arithmetic, memory traffic and the device's bound, by direction; `dtype`: the dtype whose peak applies.
    - `notes`; `rejected`: the platforms considered before, with the reasons against them.
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
        """The roofline of one direction; `None` if the operation's cost is unknown."""
        return dict(self.rooflines).get(direction)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "notes": list(self.notes),
            "rejected": dict(self.rejected),
            "ms": dict(self.ms),
            "rooflines": {direction: known.to_dict() for direction, known in self.rooflines},
        }

    def title(self, paths: Sequence[str]) -> str:
        """The heading of one kernel, or of several identical ones."""
        if not paths[0]:
            return self.problem or self.operation
        more = f" (and {len(paths) - 1} more, to {paths[-1]})" if len(paths) > 1 else ""
        return f"{paths[0]}{more}: {self.problem or self.operation}"

    def lines(self, device: str = "") -> list[str]:
        """The lines below the title; they include the device unless it is `device`."""
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
        """Aligned columns with one row per direction, without empty columns."""
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
    """The choices, as text (`str`) or JSON (`to_dict()`). `peaks`: the peaks of the device by dtype, if known."""

    device: str
    choices: tuple[Choice, ...]
    peaks: tuple[tuple[str, Peaks], ...] = ()
    remark: str = ""
    """Why there are no choices, and what to pass."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
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
            lines.append("no kernel of this package was found" + (f": {self.remark}" if self.remark else ""))
        # Identical layers share a row.
        groups: dict[Choice, list[str]] = {}
        for choice in self.choices:
            groups.setdefault(dataclasses.replace(choice, path=""), []).append(choice.path)
        titles = [choice.title(paths) for choice, paths in groups.items()]
        for previous, title, choice in zip([None, *titles], titles, groups, strict=False):
            lines.extend([title] if title != previous else [])
            lines.extend(f"  {line}" for line in choice.lines(self.device))
        return "\n".join(lines)
