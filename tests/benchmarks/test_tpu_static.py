"""What the TPU compiler says of kernels: its dumps are read right, and the committed results hold what the guide claims."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import tpu_static
from tests.tpus import needs_libtpu

ROOT = pathlib.Path(__file__).parents[2]
MISSED = {("v4", "forward f32"), ("v4", "lhs f32")}
"""Longer than the peer's by 7%, as the guide says."""
RESULTS = json.loads(tpu_static.RESULTS.read_text())["rows"]

BUNDLES = """
LH: loop header

     0   :  { %s1 = smov 0 }
   0x1 LB: > { %p1 = scmp.eq %s1, 3 }
   0x2   : > { %9 = sbr.rel (%p1) target = $region8 }
   0x3   : > { %v1 = vmatmul.bf16 %v2 }
   0x4   : > { %v3 = vst %v1 }
   0x5 PF: > { %s2 = sadd.s32 %s1, 1 } /* Start/End empty region 8 :: Start region 9 */
   0x6   : > { %10 = sbr.rel (!%p1) target = $region20 }
   0x7   :  { %s3 = smov 1 }
"""
UTILIZATION = "\n".join(
    ["== CAPACTIY:", "MXU, ...", "4 3 4 2 1 3 3 1 1 2", "== UTILIZATION:"]
    + [f"{4 if n == 3 else 0} 0 0 0 0 0 0 {2 if n == 4 else 0} {1 if n == 4 else 0} 1" for n in range(8)]
)
ALLOCATIONS = (
    "#allocation3 [shape = 'f32[8,128]{1,0:T(8,128)}', space=vmem, size = 0x1000, scoped, tag = 'scratch']"
)


def test_a_schedule_is_read():
    schedule = tpu_static._read("toy", BUNDLES, UTILIZATION, ALLOCATIONS)
    assert schedule.bundles == 8 and schedule.vmem == 4096 and schedule.capacity["MXU"] == 4
    (region,) = schedule.regions
    assert (region.start, region.bundles) == (2, 3)
    assert region.slots["MXU"] == 4 and region.slots["SPILL"] == 1 and region.slots["SALU"] == 3
    assert schedule.busiest(region) == ("VSTORE", 2.0)


@needs_libtpu
def test_a_kernel_is_compiled_and_read(tmp_path):
    """In a process of its own: libtpu reads its settings when it is loaded."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "tpu-static",
        "--generations",
        "v5e",
        "--families",
        "attention",
    ]
    command += ["--only", "forward D64", "--json", str(tmp_path / "out.json")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["ours"]["vmem"] > 2**18 and 300 < row["ours"]["per_unit"] < 3000 and row["flops"] > 0
    ratio = tpu_static.ratio_of(row)
    assert ratio is not None and 0.5 < ratio < 1.5


@pytest.mark.parametrize("family", tpu_static.FAMILIES)
def test_committed_results_hold_the_bar(family):
    """No step is longer than its peer's by more than 5%, and at least half are shorter; nor is a tile longer that a mask crosses."""
    rows = [row for row in RESULTS if row["family"] == family]
    ratios = [
        ratio
        for row in rows
        if (ratio := tpu_static.ratio_of(row)) is not None and (row["generation"], row["case"]) not in MISSED
    ]
    assert rows and not [row["case"] for row in rows if "error" in row["ours"]]
    assert all(ratio <= 1.05 for ratio in ratios) and sum(ratio < 1 for ratio in ratios) * 2 >= len(ratios)
    partly = [tpu_static.ratio_of(row, tpu_static.PARTLY) for row in rows if row["family"] == "attention"]
    assert all(ratio <= 1.05 for ratio in partly if ratio is not None)
    assert "shorter" in tpu_static.summary_of(rows)


@pytest.mark.parametrize("family", tpu_static.FAMILIES)
def test_the_guide_shows_the_committed_results(family):
    rows, guide = [row for row in RESULTS if row["family"] == family], tpu_static.GUIDE.read_text()
    assert tpu_static.guide_with(guide, family, rows) == guide
