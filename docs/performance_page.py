"""Writes the tables and pictures of `docs/performance.md`, and the table of `README.md`, from `benchmarks/results/`.

python docs/performance_page.py            # the tables
python docs/performance_page.py --plots    # the pictures too; needs matplotlib

`performance_page.toml` says which results a family shows. Of the peers that were measured the fastest counts, whatever run it comes from. The text
around the marked part of a page is written by hand and holds no measured number.
"""

import argparse
import functools
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "docs/performance.md", ROOT / "README.md"
DATA = tomllib.loads((ROOT / "docs/performance_page.toml").read_text(encoding="utf-8"))
DIRECTIONS = {"forward": "forward", "forward+backward": "with gradients"}
OURS = ("default", "Hopper's", "unrolled")
SLOWER, OTHER_RUN = "▼", "†"


class Times(NamedTuple):
    """Milliseconds of ours and of the fastest peer."""

    ours: float
    peer: str
    theirs: float
    other_run: bool

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    @property
    def slower(self) -> bool:
        """Ours is slower by what two digits show."""
        return round(self.ratio, 2) < 1


class Line(NamedTuple):
    """A line of a table: its label and times, `None` where a direction was not measured."""

    label: str
    times: tuple[Times | None, ...]


@functools.cache
def content(file: str) -> Mapping[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{file}.json").read_text(encoding="utf-8"))


def runs(file: str) -> list[Mapping[str, Any]]:
    """The environments that a file's rows are from, the newest last."""
    return sorted(
        content(file).get("runs", [content(file)["environment"]]), key=lambda environment: environment["date"]
    )


def measured(file: str, problem: str, direction: str) -> Iterator[tuple[str, float | None, Any]]:
    """Implementations, their milliseconds and their runs. A step's `kernels` are a direction, and so is its `floor` or its `bound`."""
    same = (problem, DATA["same"].get(problem))
    for row in content(file)["rows"]:
        if row["problem"] in same and row.get("direction", direction) == direction:
            run = (file, row.get("run"))
            if "step_ms" in row:
                yield from (("default", row["step_ms"], run), (direction, row[f"{direction}_ms"], run))
            else:
                ms = row.get("kernels_ms" if direction == "kernels" else "ms")
                yield row.get("implementation") or row["variant"], ms, run


def times(file: str, problem: str, direction: str, more: Sequence[str] = ()) -> Times | None:
    """Ours, and the fastest peer of this file and of the further ones; `None` without one of them."""
    known = [
        (place == file, *each) for place in (file, *more) for each in measured(place, problem, direction)
    ]
    ours = [(ms, run) for here, name, ms, run in known if name in OURS and here and ms]
    peers = [(ms, DATA["peers"][name], run) for _, name, ms, run in known if name in DATA["peers"] and ms]
    if not ours or not peers:
        return None
    (mine, own_run), (theirs, peer, run) = (
        *ours,
        min(peers, key=lambda each: (each[0], each[2] != ours[0][1])),
    )
    return Times(mine, peer, theirs, run != own_run)


def groups(family: Mapping[str, Any]) -> Sequence[str]:
    return family.get("groups", [*DIRECTIONS.values()])


def lines(family: Mapping[str, Any]) -> list[Line]:
    result = []
    for line in family["lines"]:
        directions = line[3:] or [*DIRECTIONS][: len(groups(family))]
        known = [times(line[0], line[1], direction, family.get("more", ())) for direction in directions]
        result.append(Line((line[2:] or line[1:])[0], (*known, *[None] * (len(groups(family)) - len(known)))))
    return result


def further(file: str, direction: str) -> list[Times]:
    """All problems of a file that have ours and a peer."""
    problems = dict.fromkeys(row["problem"] for row in content(file)["rows"])
    return [known for problem in problems if (known := times(file, problem, direction))]


def milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def cells(known: Times | None) -> list[str]:
    if known is None:
        return ["–"] * 4
    ratio = f"**{known.ratio:.2f}** {SLOWER}" if known.slower else f"{known.ratio:.2f}"
    return [
        milliseconds(known.ours),
        known.peer + f" {OTHER_RUN}" * known.other_run,
        milliseconds(known.theirs),
        ratio,
    ]


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---" if n == 0 or n % 4 == 2 else "--:" for n in range(len(header))]
    return ["| " + " | ".join(row) + " |" for row in (header, marks, *body)]


def header(names: Sequence[str], against: str = "fastest peer") -> list[str]:
    return ["problem", *(text for name in names for text in (f"{name}, ms", against, "ms", "ratio"))]


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def summary(names: Sequence[str], against: str, body: Sequence[Line]) -> str:
    """The range of each group of columns, and how often ours is slower."""
    parts = []
    for n, name in enumerate(names):
        known = [value for line in body if (value := line.times[n])]
        slower = sum(value.slower for value in known)
        count = f"slower in {slower} of {len(known)}" if slower else "nowhere slower"
        parts.append(f"{name} {span([value.ratio for value in known])} ({count})")
    return f"Speed over the {against}: {'; '.join(parts)}."


def source(files: Sequence[str]) -> str:
    """Devices, versions and, for each file, its commit and day."""
    known = {file: runs(file) for file in files}
    versions: dict[str, dict[str, None]] = {}
    for run in (run for value in known.values() for run in value):
        for package, version in run["versions"].items():
            if version and package not in ("ejkernel-eqx", "jaxlib"):
                versions.setdefault(package, {})[version] = None
    devices = ", ".join(dict.fromkeys(value[0]["device"] for value in known.values()))
    packages = ", ".join(f"{package} {' or '.join(numbers)}" for package, numbers in versions.items())
    commits = {
        file: ", ".join(dict.fromkeys(run["commit"] for run in value)) for file, value in known.items()
    }
    places = [f"`{file}.json` ({commits[file]}, {value[-1]['date'][:10]})" for file, value in known.items()]
    return f"*{devices}; {packages}; {', '.join(places)}.*"


def section(family: Mapping[str, Any]) -> list[str]:
    names, body, also = groups(family), lines(family), family.get("also", ())
    against = family.get("against", "fastest peer")
    ranges = [
        text.format(span([value.ratio for value in further(file, direction)]))
        for text, file, direction in also
    ]
    files = [line[0] for line in family["lines"]]
    files += [*family.get("more", ()), *(file for _, file, _ in also)]
    picture = (
        f'![{family["title"]}: speed over the {against}](assets/{family["name"]}_h200.png){{ width="480" }}'
    )
    rows = [[line.label, *(text for known in line.times for text in cells(known))] for line in body]
    command = f"`python -m benchmarks {family['command']}`."
    end = " ".join([family["sentence"], *ranges, command, source([*dict.fromkeys(files)])])
    words = [f"## {family['title']}", summary(names, against, body), picture]
    return [*words, "", *table(header(names, against), rows), "", end, ""]


def page() -> str:
    return "\n".join(line for family in DATA["family"] for line in section(family)).strip()


def readme() -> str:
    known = {family["name"]: lines(family) for family in DATA["family"]}
    body = [known[name][n] for name, places in DATA["readme"].items() for n in places]
    rows = [
        [line.label, *(text for value in (*line.times, None)[:2] for text in cells(value))] for line in body
    ]
    return "\n".join(table(header([*DIRECTIONS.values()]), rows))


def marked(text: str, block: str) -> str:
    """`text` with `block` between its two marks."""
    begin, end = "<!-- performance: begin -->", "<!-- performance: end -->"
    (before, rest) = text.split(begin)
    return f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"


GROUND = (("#8ec4f0", "#d3d6da"), ("#6faee3", "#bcc1c7"))  # ours and the peer's, by group of columns
DEVICE = "NVIDIA H200"


def figure(rows: float, title: str):
    """An empty figure for rows of text and bars. Text has at least 9 px on a phone of 412 px."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result, axis = pyplot.subplots(figsize=(4.4, 0.75 + 0.155 * rows), layout="constrained")
    axis.axvline(1, color="#333333", linewidth=0.8, zorder=0)
    axis.set(ylim=(rows - 0.4, -1), yticks=[])
    axis.set_title(title, fontsize=9)
    axis.tick_params(axis="x", labelsize=8.5)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return result, axis


def written(axis, row: float, text: str, **style) -> None:
    axis.text(0.02, row, text, va="center", fontsize=8.5, **style)


def save(drawn, name: str) -> None:
    drawn.savefig(ROOT / f"docs/assets/{name}_h200.png", dpi=170, metadata={"Software": None})


def plot(family: Mapping[str, Any]) -> None:
    """Each problem of the table: in each direction a bar of ours, and one of the peer, at 1."""
    names, body = groups(family), lines(family)
    rows = sum(1.6 + 2.1 * sum(value is not None for value in line.times) for line in body)
    title = f"{family['title']}, {DEVICE}\nspeed over the {family.get('against', 'fastest peer')} (longer is better)"
    drawn, axis = figure(rows, title)
    row = 0.0
    for line in body:
        written(axis, row, line.label, weight="bold", bbox={"color": "white", "pad": 0.4})
        row += 1
        for name, known, (mine, theirs) in zip(names, line.times, GROUND):
            if known:
                label = f", {name}" if len(names) > 1 else ""
                pair = (
                    ("ejkernel_eqx", known.ours, known.ratio, mine),
                    (known.peer, known.theirs, 1.0, theirs),
                )
                for library, ms, size, colour in pair:
                    axis.barh(row, size, 0.95, color=colour)
                    written(axis, row, f"{library}{label}, {milliseconds(ms)} ms")
                    row += 1
                row += 0.1
        row += 0.6
    save(drawn, family["name"])


def overview() -> None:
    """The range of each family's table, with every loss."""
    shown = [family for family in DATA["family"] if "against" not in family]
    rows = sum(1.6 + len(groups(family)) for family in shown)
    drawn, axis = figure(
        rows, f"Speed over the fastest peer, {DEVICE}, bfloat16\nfrom the slowest to the fastest problem"
    )
    row = 0.0
    for family in shown:
        written(axis, row, family["title"], weight="bold", bbox={"color": "white", "pad": 0.4})
        row += 1
        for n, name in enumerate(groups(family)):
            known = [value.ratio for line in lines(family) if (value := line.times[n])]
            axis.barh(row, max(known) - min(known), 0.95, left=min(known), color=GROUND[0][0])
            axis.text(max(known) + 0.04, row, f"{name}: {span(known)}", va="center", fontsize=8.5)
            row += 1
        row += 0.6
    axis.set(xlim=(0, 4.2), xticks=[0, 1, 2, 3, 4])
    save(drawn, "overview")


def plots() -> None:
    for family in DATA["family"]:
        plot(family)
    overview()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plots", action="store_true", help="draw the pictures too")
    options = parser.parse_args()
    for path, block in ((PAGE, page()), (README, readme())):
        path.write_text(marked(path.read_text(encoding="utf-8"), block), encoding="utf-8")
    if options.plots:
        plots()


if __name__ == "__main__":
    main()
