"""The built wheel, installed by itself: a module built on a device that the package knows finds its table there."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

PROGRAM = """
import pathlib, sys
import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import Problem, select, snapshot, take_snapshot
from ejkernel_eqx.dispatch.cache_file import parse
from ejkernel_eqx.dispatch.registry import Implementation

package = pathlib.Path(ejx.__file__).parent
assert package.parent == pathlib.Path(sys.argv[1]), package
file = package / "data" / "nvidia_h200" / "attention.json"
table = parse(file.read_text(encoding="utf-8"), str(file))
snapshot.device_facts = lambda: ejx.DeviceFacts.from_dict(table.header["device"])
Implementation.unusable = lambda self, device: None  # whether or not jax-triton works on this machine
record = next(record for record in table.records if record.platform == "triton")
selection = select(take_snapshot(record.operation, platform="triton"), Problem.from_dict(record.exact))
print(selection.tier.value, "|", selection.origin)
"""


@pytest.mark.slow
def test_an_installed_wheel_answers_from_its_tables(tmp_path):
    pytest.importorskip("triton")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL")}
    environment |= {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(site)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("persistent | shipped for NVIDIA H200")
