"""Output shared by all benchmarks: the environment, JSON, text tables and Markdown blocks."""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import statistics
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGES = (
    "jax",
    "jaxlib",
    "triton",
    "jax-triton",
    "torch",
    "fla-core",
    "mamba-ssm",
    "liger-kernel",
    "ejkernel-eqx",
)


def environment(commit: str | None = None) -> dict[str, Any]:
    """Device, driver, versions, commit and date; `None` for what cannot be determined."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "runtime": " ".join(str(device.client.platform_version).split()),
        "versions": versions(),
        "commit": commit or _commit(),
        "date": now(),
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """The versions of all relevant packages."""
    results: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            results[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            results[package] = None
    if results["ejkernel-eqx"] is None:  # used from a checkout, without being installed
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        results["ejkernel-eqx"] = project["version"]
    return results


def _commit() -> str | None:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if commit and changed else commit


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.strip().splitlines()
    return lines[0] if result.returncode == 0 and lines else None


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """Writes the file atomically."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """JSON without NaN and infinity; a missing result is `None`."""
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def save(options: argparse.Namespace, **content: Any) -> None:
    """Writes a benchmark's JSON where `--json` says, if it does, with the environment."""
    if options.json:
        write_json(options.json, {"environment": environment(options.commit), **content})


@functools.cache
def data(name: str) -> dict[str, Any]:
    """The content of a TOML file of this folder."""
    return tomllib.loads((ROOT / "benchmarks" / f"{name}.toml").read_text(encoding="utf-8"))


_TYPES = {"str": str, "int": int, "float": float, "path": pathlib.Path, "regex": re.compile}


def parser(
    command: str, description: str | None, options: str = "", **defaults: Any
) -> argparse.ArgumentParser:
    """A parser with the options of every command and those of `options`, by default the command itself, as in `options.toml`."""
    program, layout = f"python -m benchmarks {command}", argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(program, description=description, formatter_class=layout)
    for name, how in (data("options")["every"] | data("options")[options or command]).items():
        if how:  # otherwise the command has no option of this name
            kind = how.get("type", type(how.get("default", "")).__name__)
            typed = {} if "action" in how else {"type": _TYPES[kind]}
            result.add_argument(f"--{name}", **how | typed)
    result.set_defaults(**defaults)
    return result


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))
        return "  ".join((cells[0].ljust(widths[0]), *padded)).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def table_of(name: str, rows: Sequence[Mapping[str, Any]], make: Callable[..., str] = table) -> str:
    """A table of `tables.toml`, of rows by name; nothing is shown where a row has none."""
    columns = data("tables")["columns"][name]

    def cell(row: Mapping[str, Any], column: str) -> str:
        name, _, form = column.partition(":")
        return "" if row.get(name) is None else format(row[name], form)

    return make([*columns], [[cell(row, column) for column in columns.values()] for row in rows])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def write_markdown(path: str | os.PathLike, name: str, text: str) -> None:
    """Writes into `path` between its lines `<!-- NAME: begin -->` and `<!-- NAME: end -->` or, without these, replaces the whole file."""
    path = pathlib.Path(path)
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        text = f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end, 1)[1]}"
    write_atomic(path, text if text.endswith("\n") else text + "\n")


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def times_of(samples: Sequence[float]) -> dict[str, float]:
    """The median of samples in milliseconds, and their spread."""
    ms = statistics.median(samples)
    return {"ms": ms, "spread": (max(samples) - min(samples)) / ms}


def bytes_of(memory: Any) -> int | None:
    """Bytes that a compiled program needs in all, by its analysis of memory; donated arguments are counted once."""
    if memory is None:
        return None
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return sizes + memory.temp_size_in_bytes


def summary_lines(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per name: the value, and its problem."""
    return "\n".join(f"{name}: {entry['value']:.3f} ({entry['problem']})" for name, entry in summary.items())


class Panel(NamedTuple):
    """A part of a plot: a bar of the height `field` for each row, by problem, with a text; or what `draw(axis)` draws. `at`: a line.
    `inches`: of a bar. `limits`: of the axis."""

    title: str
    rows: Sequence[Mapping[str, Any]] = ()
    field: str = "ms"
    label: Callable[[Mapping[str, Any]], str] = lambda row: ""
    at: float | None = None
    inches: float = 0.2
    limits: tuple[float | None, float | None] = (None, None)
    draw: Callable[[Any], None] | None = None

    @property
    def height(self) -> float:
        return 3.0 if self.draw else 0.7 + self.inches * len(self.rows)


def plot(panels: Sequence[Panel], title: str, path: str | os.PathLike, **options: Any) -> None:
    """Writes the plot, if anything was timed: a PNG, unless `options` say otherwise. Requires matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # without a display
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    panels = [panel for panel in panels if panel.draw or panel.rows]
    if not panels:
        return
    heights = [panel.height for panel in panels]
    grid: Any = {"gridspec_kw": {"height_ratios": heights}, "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 1.0 + sum(heights)), **grid)
    names = list(dict.fromkeys(row["implementation"] for panel in panels for row in panel.rows))
    colours = {name: plt.get_cmap("tab10")(n % 10) for n, name in enumerate(names)}
    for axis, panel in zip(axes[:, 0], panels):
        panel.draw(axis) if panel.draw else _bars(axis, panel, colours)
        if panel.at is not None:
            axis.axvline(panel.at, color="#444444", linewidth=0.8)
        axis.set_xlim(panel.limits)
        axis.set_title(panel.title, fontsize=9)
    used = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=used, ncols=4, fontsize=7, loc="outside lower center")
    figure.suptitle(title)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **{"format": "png", "dpi": 110} | options)
    plt.close(figure)


def _bars(axis: Any, panel: Panel, colours: Mapping[str, Any]) -> None:
    """A bar for each row, by problem."""
    problems = list(dict.fromkeys(row["problem"] for row in panel.rows))
    for n, problem in enumerate(problems):
        mine = [row for row in panel.rows if row["problem"] == problem]
        width = 0.85 / len(mine)
        for i, row in enumerate(mine):
            at = n + (i - (len(mine) - 1) / 2) * width
            axis.barh(at, row[panel.field] or 1.0, width, color=colours[row["implementation"]])
            place = axis.get_yaxis_transform()  # from the left edge, however long bars are
            axis.text(0.005, at, panel.label(row), va="center", fontsize=5.5, transform=place)
    axis.set_yticks(range(len(problems)), problems, fontsize=7)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def environment_line(env: Mapping[str, Any]) -> str:
    """The environment as one sentence for a page."""
    known = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    driver = f", driver {env['driver']}" if env["driver"] else ""
    commit = f", commit {env['commit']}" if env["commit"] else ""
    return f"{env['device']}{driver}; {known}{commit}; {env['date'][:10]}."
