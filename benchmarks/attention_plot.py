"""The plot of an attention report: the speed of every implementation, and the cost of the options."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import pyplot, write_plot

_COLOURS = {
    "default": "#1b6ca8",
    "cuda": "#5aa9e6",
    "triton": "#e4572e",
    "xla": "#f3a712",
    "cudnn": "#444444",
    "jax-xla": "#444444",
    "torch-fa2": "#8ab17d",
    "torch-cudnn": "#b5b5b5",
}


def plot(report: Mapping[str, Any], path: str) -> None:
    """Writes the PNG. Requires matplotlib."""
    plt = pyplot()

    rows = [row for row in report["rows"] if row["ms"] is not None]
    plain = list(dict.fromkeys(row["problem"] for row in rows if row["plain"]))
    names = [name for name in _COLOURS if any(row["implementation"] == name for row in rows)]
    height = 3.4 * (2 + bool(report["features"]))
    figure, axes = plt.subplots(
        2 + bool(report["features"]), 1, figsize=(max(8, 0.62 * len(plain) + 3), height)
    )
    for axis, direction in zip(axes, ("forward", "forward+backward")):
        chosen = [row for row in rows if row["direction"] == direction and row["plain"]]
        _bars(axis, chosen, plain, names)
        axis.set_title(f"{direction}, TFLOP/s")
    axes[0].set_ylim(top=1.15 * axes[0].get_ylim()[1])
    axes[0].legend(ncols=len(names), fontsize=7, loc="upper left")
    if report["features"]:
        _features(axes[2], report["features"])
    figure.suptitle(f"Attention on {report['environment']['device']}")
    figure.tight_layout()
    write_plot(figure, path, bbox_inches="tight")


def _bars(
    axis: Any, rows: Sequence[Mapping[str, Any]], problems: Sequence[str], names: Sequence[str]
) -> None:
    width = 0.85 / max(len(names), 1)
    for n, name in enumerate(names):
        speed = {row["problem"]: row["tflops"] for row in rows if row["implementation"] == name}
        at = [i for i, problem in enumerate(problems) if problem in speed]
        heights = [speed[problems[i]] for i in at]
        places = [i + (n - (len(names) - 1) / 2) * width for i in at]
        axis.bar(places, heights, width, label=name, color=_COLOURS[name])
    labels = [problem.replace(" causal", "\ncausal").replace(" full", "\nfull") for problem in problems]
    axis.set_xticks(range(len(problems)), labels, rotation=35, ha="right", fontsize=6)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)


def _features(axis: Any, features: Sequence[Mapping[str, Any]]) -> None:
    labels = [f"{f['problem']} ({f['platform']})\nagainst {f['baseline']}" for f in features]
    labels = list(dict.fromkeys(labels))
    for n, direction in enumerate(("forward", "forward+backward")):
        values = {
            f"{f['problem']} ({f['platform']})\nagainst {f['baseline']}": f["per_tile"]
            for f in features
            if f["direction"] == direction
        }
        at = [i for i, label in enumerate(labels) if label in values]
        axis.barh([i + (n - 0.5) * 0.38 for i in at], [values[labels[i]] for i in at], 0.36, label=direction)
    axis.axvline(1.0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_title("time of an option relative to plain attention, per visible tile of 128 x 128")
    axis.legend(fontsize=7)
