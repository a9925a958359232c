"""Reads what the TPU compiler says of every Pallas kernel, without a TPU: the length of a step's schedule, spills, vector memory and bytes
moved, for each generation, beside JAX's own kernel on the same problem.

Needs libtpu (`pip install 'ejkernel-eqx[tpu]'`). A bundle is what a core starts in one cycle, so a step takes at least as many cycles as
it has bundles. Nothing here has run on a TPU.
"""

import argparse
import collections
import dataclasses
import glob
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FAMILIES = ("attention", "latent", "matmul", "paged", "recurrence")
"""`tpu_cases.py` has `FAMILY(generation) -> list[Case]` for each."""

RESULTS = pathlib.Path(__file__).parent / "results/tpu_static.json"
GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "tpu.md"
GENERATIONS = "v4,v5e,v5p,v6e,tpu7x"
BAR = 1.05
PASSES = {2: 1, 4: 6}
"""Passes of a product of numbers of so many bytes through the unit that multiplies bfloat16."""
PARTLY = "partly visible"
_COMPILED: dict[Any, tuple[Any, ...]] = {}


# The compiler's dumps: its last schedule of each Pallas kernel. libtpu reads its settings when it is loaded, so `prepare` comes before anything is
# compiled for a TPU.

SLOTS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
"""Slots of a bundle, in the compiler's order; fills and spills share the slots of loads and stores."""

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:LH|LB|LE|PB|PF|CT)?\s*:")
_STARTS = re.compile(r"Start(?:/End)? (?:empty )?region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \(.*?\) target = \$region(\d+)")
_VMEM = re.compile(r"#allocation\d+ \[shape = '[^']*', space=vmem, size = (0x[0-9a-f]+)")


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the schedule that is skipped or repeated as a whole: how many bundles it has, and how many of each slot they use."""

    start: int
    bundles: int
    slots: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One kernel: all its bundles, the bytes of VMEM that it allocates, what a bundle has room for, its innermost regions with products, and its
    loops."""

    kernel: str
    bundles: int
    vmem: int
    capacity: Mapping[str, int]
    regions: tuple[Region, ...]
    loops: tuple[Region, ...]

    def busiest(self, region: Region) -> tuple[str, float]:
        """The slot that alone would take most bundles, and how many."""
        needs = {slot: region.slots[slot] / max(self.capacity[slot], 1) for slot in SLOTS}
        slot = max(needs, key=lambda name: needs[name])
        return slot, needs[slot]

    def turn(self, region: Region) -> Region:
        """The loop around a region without the other regions with products: what a turn has that runs the region alone of these."""
        around = min((x for x in self.loops if _inside(region, x)), key=lambda x: x.bundles)
        rest = [x for x in self.regions if x != region and _inside(x, around)]
        less = lambda slot: around.slots[slot] - sum(x.slots[slot] for x in rest)
        bundles = around.bundles - sum(x.bundles for x in rest)
        return Region(around.start, bundles, {slot: less(slot) for slot in SLOTS})


def prepare() -> pathlib.Path:
    """Makes libtpu write its schedules into a new folder, and JAX leave a TPU alone."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ejkernel_eqx-tpu-"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder} --xla_jf_dump_llo_html=false"
    os.environ["LIBTPU_INIT_ARGS"] = flags.strip()
    return folder


def schedules(folder: pathlib.Path, compile_it: Callable[[], Any]) -> tuple[Schedule, ...]:
    """The schedules of all kernels of the program that `compile_it` compiles. What it writes is removed."""
    for path in folder.iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    compile_it()
    results = []
    for path in sorted(glob.glob(f"{glob.escape(str(folder))}/*-final_bundles.txt")):
        name = re.sub(r"^\d+-", "", pathlib.Path(path).name)
        if "schedule-analysis" in name or name.startswith(("TLP", "<")):
            continue
        stem = re.sub(r"-\d+-final_bundles\.txt$", "", path)
        use = glob.glob(f"{glob.escape(stem)}-*final_hlo-static-per-bundle-utilization.txt")
        first = glob.glob(f"{glob.escape(stem)}-*-original.txt")
        kernel = re.sub(r"(\.\d+)?-\d+-final_bundles\.txt$", "", name)
        results.append(_read(kernel, *(pathlib.Path(file).read_text() for file in (path, use[0], first[0]))))
    for path in folder.iterdir():
        path.unlink()
    return tuple(results)


def _read(kernel: str, text: str, utilization: str, original: str) -> Schedule:
    numbers = (line.split() for line in utilization.splitlines() if re.fullmatch(r"[\d\s]+", line))
    capacity, *used = (tuple(map(int, row)) for row in numbers if len(row) == len(SLOTS))
    starts: dict[str, int] = {}
    branches, last = [], 0
    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        last = int(bundle[1], 16)
        for region in _STARTS.findall(line):
            starts.setdefault(region, last)
        branches += [(last, target) for target in _BRANCH.findall(line)]
    ranges = {tuple(sorted((at, starts[target]))) for at, target in branches if target in starts}
    regions = [_region(low, high, used) for low, high in sorted(ranges)]
    back = sorted({(starts[target], at) for at, target in branches if starts.get(target, at) < at})
    busy = [region for region in regions if region.slots["MXU"]]
    inner = [a for a in busy if not any(_inside(b, a) for b in busy)]
    return Schedule(
        kernel,
        last + 1,
        sum(int(size, 16) for size in _VMEM.findall(original)),
        dict(zip(SLOTS, capacity, strict=True)),
        tuple(inner),
        tuple(_region(low, high, used) for low, high in back),
    )


def _region(low: int, high: int, used: list[tuple[int, ...]]) -> Region:
    total: collections.Counter[str] = collections.Counter(dict.fromkeys(SLOTS, 0))
    for row in used[low:high]:
        total.update(dict(zip(SLOTS, row, strict=True)))
    return Region(low, high - low, dict(total))


def _inside(a: Region, b: Region) -> bool:
    """Tells whether region `a` is a part of `b`."""
    return a is not b and b.start <= a.start and a.start + a.bundles <= b.start + b.bundles


# Cases


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with one kernel to look at.

    - `function`, `arrays`: what is compiled; shapes will do.
    - `kernel`: a part of the kernel's name.
    - `units`: how much of the common unit of the case one step does, such as tiles of 512 by 512 scores.
    - `step`: which of the kernel's innermost regions with products is the usual step, in the order of the program.
    - `others`: the names of the other regions, by their number.
    - `times`: how often the step's region runs in a step, if it is the body of a loop.
    - `turn`: whether a step is the turn of a loop that the region is a part of, with copies that it starts.
    """

    function: Callable[..., Any]
    arrays: Sequence[Any]
    kernel: str
    units: float = 1.0
    step: int = 0
    others: dict[int, str] = dataclasses.field(default_factory=dict)
    times: int = 1
    turn: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel on one problem. `unit` says what is counted; `flops`, in passes of bfloat16, and `bytes` are those of a unit, as our kernel moves
    them; `tiles` is the heuristic's choice for the generation."""

    name: str
    unit: str
    ours: Program
    peer: Program | None = None
    peer_name: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    tiles: str = ""


def measured(program: Program, generation: str, folder: pathlib.Path) -> dict[str, Any]:
    """Reads what the compiler says of one program."""
    import jax

    from benchmarks.tpu_ahead import compile_for_tpu

    key = generation, program.function  # a program of several kernels is compiled once
    try:
        if key not in _COMPILED:
            call = lambda: compile_for_tpu(generation, program.function, *program.arrays)
            _COMPILED[key] = schedules(folder, call)
        known = _COMPILED[key]
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return {"error": str(error).strip().splitlines()[0][:300]}
    mine = [x for x in known if program.kernel in x.kernel]
    if len(mine) != 1 or len(mine[0].regions) <= program.step:
        return {"error": f"the kernel {program.kernel!r} was not found among {[x.kernel for x in known]}"}
    (schedule,) = mine
    region = schedule.regions[program.step]
    region = schedule.turn(region) if program.turn else region
    slot, bound = schedule.busiest(region)
    per = lambda bundles: bundles * program.times / program.units
    return {
        "kernel": schedule.kernel,
        "bundles": schedule.bundles,
        "vmem": schedule.vmem,
        "per_unit": per(region.bundles),
        "spills_per_unit": per(region.slots["SPILL"]),
        "fills_per_unit": per(region.slots["FILL"]),
        "busiest": slot,
        "bound_per_unit": per(bound),
        "others": {
            name: per(x.bundles) for n, x in enumerate(schedule.regions) if (name := program.others.get(n))
        },
    }


def roofline(case: Case, generation: str) -> dict[str, float]:
    """The seconds that a unit takes at least, by JAX's table of a core's peak numbers."""
    from jax.experimental.pallas import tpu as pltpu

    version = {"tpu7x": "7x"}.get(generation, generation)
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), 1)
    return {
        "compute_s": case.flops / info.bf16_ops_per_second,
        "memory_s": case.bytes / info.mem_bw_bytes_per_second,
    }


def run(
    generations: Sequence[str], families: Sequence[str], only: str, folder: pathlib.Path
) -> list[dict[str, Any]]:
    rows = []
    for family in families:
        for generation in generations:
            for case in getattr(importlib.import_module("benchmarks.tpu_cases"), family)(generation):
                if only not in case.name:
                    continue
                row: dict[str, Any] = {"family": family, "generation": generation, "case": case.name}
                row |= {"unit": case.unit, "tiles": case.tiles}
                row["ours"] = measured(case.ours, generation, folder)
                if case.peer is not None:
                    row["peer"] = measured(case.peer, generation, folder) | {"name": case.peer_name}
                row |= roofline(case, generation) | {"flops": case.flops, "bytes": case.bytes}
                rows.append(row)
                print(line_of(row), flush=True)
    return rows


def bundles_of(row: dict[str, Any], other: str = "") -> float | None:
    """Our bundles of a unit, of the usual step or of another one by its name."""
    return row["ours"].get("others", {}).get(other) if other else row["ours"].get("per_unit")


def ratio_of(row: dict[str, Any], other: str = "") -> float | None:
    """Our bundles over those of the peer's usual step."""
    ours, peer = bundles_of(row, other), row.get("peer", {}).get("per_unit")
    return ours / peer if ours and peer else None


def line_of(row: dict[str, Any]) -> str:
    ours, ratio = row["ours"], ratio_of(row)
    head = f"{row['generation']:6} {row['case']:36} {row['tiles']:10}"
    if "error" in ours:
        return f"{head} FAILED: {ours['error']}"
    text = f"{head} {ours['per_unit']:8.0f} bundles, {ours['spills_per_unit']:5.0f} spills, {ours['vmem'] / 2**20:5.1f} MiB"
    if ratio is not None:
        text += f"; {row['peer']['name']} {row['peer']['per_unit']:8.0f}: {ratio:.2f}"
    return text


def summary_of(rows: list[dict[str, Any]]) -> str:
    ratios = [ratio for row in rows if (ratio := ratio_of(row)) is not None]
    shorter, longer = sum(ratio < 1 for ratio in ratios), sum(ratio > BAR for ratio in ratios)
    failed = sum("error" in row["ours"] for row in rows)
    return f"{len(rows)} schedules, {failed} failed; of {len(ratios)} with a peer, {shorter} are shorter and {longer} longer by more than 5%"


def table_of(rows: list[dict[str, Any]]) -> str:
    """Markdown: bundles of a unit for each generation, with the ratio to the peer's; and of attention those of tiles that are visible in part."""

    def cell(row: dict[str, Any], other: str) -> str:
        bundles, ratio = bundles_of(row, other), ratio_of(row, other)
        return "–" if bundles is None else f"{bundles:.0f}" + (f" ({ratio:.2f})" if ratio is not None else "")

    return _table(rows, ("", PARTLY) if rows[0]["family"] in ("attention", "latent") else ("",), cell)


def bounds_of(rows: list[dict[str, Any]]) -> str:
    """Markdown: which part of the core the step keeps busiest, and for how much of its bundles; and whether the unit's bytes take longer than its
    products at the peak rates of the device."""

    def cell(row: dict[str, Any], other: str) -> str:
        ours = row["ours"]
        if "error" in ours:
            return "–"
        share = f"{ours['busiest']} {ours['bound_per_unit'] / ours['per_unit']:.0%}"
        return share + (", memory" if row["memory_s"] > row["compute_s"] else "")

    return _table(rows, ("",), cell)


def _table(
    rows: list[dict[str, Any]], others: Sequence[str], cell: Callable[[dict[str, Any], str], str]
) -> str:
    """A line for each kernel, or kernel and number of sides of the tile, as these differ between generations, and each of the steps."""
    generations = list(dict.fromkeys(row["generation"] for row in rows))
    lines = [f"| kernel | unit | {' | '.join(generations)} |", "|---" * (len(generations) + 2) + "|"]
    for name, unit in dict.fromkeys((row["case"], row["unit"]) for row in rows):
        results = {row["generation"]: row for row in rows if (row["case"], row["unit"]) == (name, unit)}
        for other in others:
            cells = [cell(results[x], other) if x in results else "" for x in generations]
            lines.append(f"| {name}{other and ', ' + other} | {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def guide_with(text: str, family: str, rows: list[dict[str, Any]]) -> str:
    """The guide with a family's tables, between marks."""
    for name, table in (("bundles", table_of(rows)), ("bounds", bounds_of(rows))):
        begin, end = (f"<!-- tpu_static {family} {name}: {side} -->" for side in ("begin", "end"))
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def _write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    import jax

    versions = {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}
    path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add, saved = parser.add_argument, "as the project's results, and their tables in the guide"
    add("--generations", default=GENERATIONS)
    add("--families", default=",".join(FAMILIES))
    add("--only", default="", help="cases whose name has this part")
    add("--json", type=pathlib.Path)
    add("--markdown", type=pathlib.Path)
    add("--save", action="store_true", help=saved)
    add("--render", type=pathlib.Path, help="shows the results of an earlier run")
    inputs = parser.parse_args(arguments)
    if inputs.save and (inputs.only or inputs.render or inputs.generations != GENERATIONS):
        parser.error("--save takes whole families: neither --only, --render nor --generations")
    if inputs.render:
        rows = json.loads(inputs.render.read_text())["rows"]
    else:
        folder = prepare()
        rows = run(inputs.generations.split(","), inputs.families.split(","), inputs.only, folder)
    if inputs.json:
        _write(inputs.json, rows)
    if inputs.save:
        mine = {
            family: [row for row in rows if row["family"] == family] for family in inputs.families.split(",")
        }
        others = [row for row in json.loads(RESULTS.read_text())["rows"] if row["family"] not in mine]
        _write(RESULTS, [*others, *rows])
        for family, own in mine.items():
            GUIDE.write_text(guide_with(GUIDE.read_text(), family, own))
    if inputs.markdown:
        inputs.markdown.write_text(table_of(rows) + "\n")
    print(summary_of(rows))
    return int(any("error" in row["ours"] for row in rows))
