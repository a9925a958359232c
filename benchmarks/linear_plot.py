"""The plot of a report on the linear-time family, recurrent cells or grouped matmuls: the speed of each relative to the fastest peer."""

from collections.abc import Mapping
from typing import Any

from benchmarks.report import pyplot, write_plot


def plot(report: Mapping[str, Any], path: str, title: str = "The linear-time family") -> None:
    """Writes the PNG. With a peer, bars start at 1, the speed of the peer; otherwise only milliseconds are shown. Requires matplotlib."""
    plt = pyplot()
    from matplotlib.patches import Patch

    rows = [row for row in report["rows"] if row["ms"] is not None]
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    counts = [len({row["problem"] for row in rows if row["direction"] == d}) for d in directions]
    figure, axes = plt.subplots(
        len(directions),
        1,
        figsize=(9, 1.5 + 0.75 * sum(counts)),
        squeeze=False,
        gridspec_kw={"height_ratios": counts},
        layout="constrained",
    )
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    colours = {name: plt.get_cmap("tab10")(n % 10) for n, name in enumerate(names)}
    for axis, direction in zip(axes[:, 0], directions):
        _bars(axis, [row for row in rows if row["direction"] == direction], colours)
        axis.set_title(f"{direction}: speed over the fastest peer's (milliseconds in the bars)", fontsize=9)
    used = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=used, ncols=4, fontsize=7, loc="outside lower center")
    figure.suptitle(f"{title} on {report['environment']['device']}")
    write_plot(figure, path)


def _bars(axis: Any, rows: list[Mapping[str, Any]], colours: Mapping[str, Any]) -> None:
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    for n, problem in enumerate(problems):
        mine = [row for row in rows if row["problem"] == problem]
        width = 0.85 / len(mine)
        for i, row in enumerate(mine):
            at = n + (i - (len(mine) - 1) / 2) * width
            length = row["ratio"] or 1.0
            axis.barh(at, length, width, color=colours[row["implementation"]])
            axis.text(0.01, at, f" {row['ms']:.3f} ms", va="center", fontsize=6, color="white")
    axis.axvline(1.0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(problems)), problems, fontsize=7)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
