"""What libtpu says of a program that it compiles for a TPU: its last schedule of each Pallas kernel, read from the compiler's dumps.

The settings of libtpu are read when it is loaded, so `prepare` comes before anything is compiled for a TPU.
"""

import collections
import dataclasses
import glob
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

SLOTS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
"""What a bundle has room for, in the compiler's order; fills and spills share the slots of loads and stores."""

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
    flags = (
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_html=false",
    )
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(filter(None, flags))
    return folder


def schedules(folder: pathlib.Path, compile_it: Callable[[], Any]) -> tuple[Schedule, ...]:
    """The schedules of all kernels of the program that `compile_it` compiles. What it writes is removed."""
    for path in folder.iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    compile_it()
    found = []
    for path in sorted(glob.glob(f"{glob.escape(str(folder))}/*-final_bundles.txt")):
        name = re.sub(r"^\d+-", "", pathlib.Path(path).name)
        if "schedule-analysis" in name or name.startswith(("TLP", "<")):
            continue
        stem = re.sub(r"-\d+-final_bundles\.txt$", "", path)
        use = glob.glob(f"{glob.escape(stem)}-*final_hlo-static-per-bundle-utilization.txt")
        first = glob.glob(f"{glob.escape(stem)}-*-original.txt")
        kernel = re.sub(r"(\.\d+)?-\d+-final_bundles\.txt$", "", name)
        found.append(_read(kernel, *(pathlib.Path(file).read_text() for file in (path, use[0], first[0]))))
    for path in folder.iterdir():
        path.unlink()
    return tuple(found)


def _read(kernel: str, text: str, utilization: str, original: str) -> Schedule:
    rows = [
        tuple(map(int, line.split())) for line in utilization.splitlines() if re.fullmatch(r"[\d\s]+", line)
    ]
    rows = [row for row in rows if len(row) == len(SLOTS)]
    capacity, used = rows[0], rows[1:]
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
    """Whether region `a` is a part of `b`."""
    return a is not b and b.start <= a.start and a.start + a.bundles <= b.start + b.bundles
