"""The plot of a report on attention over pages: bandwidth over context and page size, and the other measurements."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.decode_problems import DECODE, LATENT, PREFILL, QUANTISED
from benchmarks.report import pyplot, write_plot

Rows = Sequence[Mapping[str, Any]]


def plot(report: Mapping[str, Any], path: str) -> None:
    """Writes the PNG. Requires matplotlib."""
    plt = pyplot()

    rows = [{**row, **report["sizes"][row["problem"]]} for row in report["rows"] if row["ms"] is not None]
    of_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in (DECODE, QUANTISED)}
    counted = [row for row in rows if row["kind"] in (LATENT, PREFILL)]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    colours = {name: plt.get_cmap("tab10")(n % 10) for n, name in enumerate(names)}
    panels: list[tuple[Callable[[Any], None], int]] = []
    if of_kind[DECODE]:
        decodes, copy = of_kind[DECODE], report["card"]["copy"]
        panels.append((lambda axis: _contexts(axis, decodes, copy), 12))
        paged = _usual(decodes)
        panels.append(
            (lambda axis: _bars(axis, paged, "tb_per_s", "decode, TB/s", colours, copy), len(paged))
        )
    if quantised := of_kind[QUANTISED]:
        panels.append((lambda axis: _bars(axis, quantised, "ms", "8-bit pages, ms", colours), len(quantised)))
    if counted:
        title = "latents and prefills, TFLOP/s"
        panels.append((lambda axis: _bars(axis, counted, "tflops", title, colours), len(counted)))
    if not panels:
        return  # nothing was timed
    heights = [1.2 + 0.15 * size for _, size in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 0.6 + sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, (draw, _) in zip(axes[:, 0], panels, strict=True):
        draw(axis)
        axis.grid(axis="both", alpha=0.3)
        axis.set_axisbelow(True)
    figure.suptitle(f"Attention over pages on {report['environment']['device']}")
    write_plot(figure, path)


def _usual(rows: Rows) -> Rows:
    """The rows of the batch and context that were measured with the most page sizes."""
    sizes = [(row["N"], row["S"], row["H"], row["K"], row["D"], row["ragged"]) for row in rows]
    most = max(sizes, key=lambda size: len({row["p"] for row, own in zip(rows, sizes) if own == size}))
    return sorted((row for row, own in zip(rows, sizes) if own == most), key=lambda row: row["p"])


def _contexts(axis: Any, rows: Rows, copy: float) -> None:
    """Ours (solid) and the fastest peer (dashed) for each batch, at the page size and heads of the first problem."""
    first = rows[0]
    same = [
        row
        for row in rows
        if all(row[name] == first[name] for name in ("p", "H", "K", "D")) and not row["ragged"]
    ]
    for n, batch in enumerate(sorted({row["N"] for row in same})):
        for role, style in (("ours", "-"), ("peer", "--")):
            best: dict[int, float] = {}
            for row in same:
                if row["N"] == batch and row["role"] == role:
                    best[row["S"]] = max(best.get(row["S"], 0.0), row["tb_per_s"])
            label = f"{batch} sequence{'s' if batch > 1 else ''}" if role == "ours" else None
            points = sorted(best.items())
            axis.plot(*zip(*points) if points else ((), ()), f"o{style}", color=f"C{n}", label=label)
    axis.axhline(copy, color="#444444", linewidth=0.8, label="a copy")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("keys of each sequence")
    axis.set_title(f"decode, TB/s, pages of {first['p']}: ours, and dashed the fastest peer", fontsize=9)
    axis.legend(fontsize=7)


def _bars(
    axis: Any, rows: Rows, field: str, title: str, colours: Mapping[str, Any], line: float | None = None
) -> None:
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    for n, problem in enumerate(problems):
        mine = [row for row in rows if row["problem"] == problem]
        width = 0.85 / len(mine)
        for i, row in enumerate(mine):
            at = n + (i - (len(mine) - 1) / 2) * width
            axis.barh(at, row[field], width, color=colours[row["implementation"]])
            axis.text(0, at, f" {row['implementation']}, {row['ms']:.3f} ms", va="center", fontsize=5)
    if line is not None:
        axis.axvline(line, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(problems)), problems, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9)
