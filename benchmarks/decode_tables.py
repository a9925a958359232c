"""The tables of a report on attention over pages, as text and as Markdown."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import report
from benchmarks.decode_problems import KINDS

HEADER = (
    "problem", "implementation", "platform", "ms", "spread", "TB/s", "of a copy", "TFLOP/s", "ratio", "baseline", "error",
)  # fmt: skip
BAR_HEADER = ("on one H200", "bar", "worst", "met", "problem")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["implementation"] + (" (baseline)" if row["role"] == "baseline" else "")
    head = (row["problem"], name, row["platform"] or "")
    if row["reason"] is not None:
        return *head, *["–"] * 7, row["reason"][:60]
    number = report.number
    speeds = (number(row["tb_per_s"]), number(row["of_card"]), number(row["tflops"], 1))
    ratios = (number(row["ratio"]), number(row["over_baseline"]))
    error = "–" if row["error"] is None else f"{row['error']:.1e}"
    return *head, number(row["ms"], 4), report.percent(row["spread"]), *speeds, *ratios, error


def _bar_cells(bar: Mapping[str, Any]) -> tuple[str, ...]:
    bound = f"{'<=' if bar['at_most'] else '>='} {bar['bound']:g}"
    measured = "" if bar["measured"] == bar["of"] else f" ({bar['measured']} of {bar['of']} measured)"
    met = "yes" if bar["met"] else "no"
    return bar["what"], bound, f"{bar['value']:.4g}", met, bar["problem"] + measured


def _tables(
    content: Mapping[str, Any], table: Callable[..., str], titled: Callable[[str, str], str]
) -> list[str]:
    parts = []
    for kind in KINDS:
        if rows := [_cells(row) for row in content["rows"] if row["kind"] == kind]:
            parts.append(titled(kind, table(HEADER, rows)))
    if bars := content["summary"]["bars"]:
        parts.append(table(BAR_HEADER, [_bar_cells(bar) for bar in bars]))
    return parts


def card_line(content: Mapping[str, Any]) -> str:
    card = content["card"]
    return f"A copy runs at {card['copy']:.3g} TB/s (read and written), a sum at {card['read']:.3g} TB/s."


def text_tables(content: Mapping[str, Any]) -> str:
    explained = "(ratio, baseline: speed over the fastest peer's and over the baseline's)"
    tables = _tables(content, report.table, lambda kind, table: f"{kind} {explained}\n{table}")
    lowest = {f"lowest ratio, {kind}": entry for kind, entry in content["summary"]["lowest ratio"].items()}
    return "\n\n".join((card_line(content), *tables, report.summary_lines(lowest)))


def markdown(content: Mapping[str, Any], picture: str | None) -> str:
    """A table for each kind of problem, as Markdown for the documentation."""
    parts = [report.environment_line(content["environment"]), card_line(content)]
    parts += _tables(content, report.markdown_table, lambda kind, table: f"{kind}:\n\n{table}")
    if picture is not None:
        parts.insert(1, f"![Decoding: achieved bandwidth over context and page size]({picture})")
    return "\n\n".join(parts) + "\n"
