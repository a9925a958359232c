"""Compilation wherever Triton's cache on disk is unusable, damaged or incomplete, and what it says of that."""

import contextlib
import importlib
import json
import logging
import os
import pathlib
import subprocess
import sys

import pytest

from tests.launch import kernels
from tests.launch.launches import one_to_one, square, TARGETS

pytest.importorskip("triton")
import triton
from triton import knobs

compiling = importlib.import_module("ejkernel_eqx.launch.compile")
disk_cache = importlib.import_module("ejkernel_eqx.launch._disk_cache")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Triton's folder, for this test; and nothing was warned of yet."""
    monkeypatch.setattr(disk_cache, "_warned", set())
    with contextlib.ExitStack() as changes:
        changes.enter_context(knobs.cache.scope())
        changes.enter_context(knobs.compilation.scope())
        knobs.cache.dir = str(tmp_path / "cache")
        yield tmp_path / "cache"


def compiled(**options):
    return compiling.compiled(square(**options), TARGETS["sm_90"])


def is_whole(found):
    return disk_cache._is_whole(found, "ptx")


def files(folder: pathlib.Path, ending: str) -> list[pathlib.Path]:
    return sorted(folder.rglob(f"square_kernel{ending}"))


def test_what_is_there_is_used(folder):
    first = compiled()
    (file,) = files(folder, ".ptx")
    before = file.stat().st_mtime_ns
    assert is_whole(first) and compiled().asm["ptx"] == first.asm["ptx"]
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["metadata", "text", "half a text", "binary"])
def test_a_damaged_entry(folder, caplog, damage):
    expected = compiled().asm["ptx"]
    ending = {"metadata": ".json", "binary": ".cubin"}.get(damage, ".ptx")
    (file,) = files(folder, ending)
    if damage == "binary":
        file.unlink()
    else:
        file.write_text(file.read_text()[: file.stat().st_size // 2] if damage == "half a text" else "")
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert compiled().asm["ptx"] == expected
        assert compiled().asm["ptx"] == expected
    if damage != "binary" or triton.__version__.startswith(
        "3.7."
    ):  # later ones compile again by themselves if a file is missing
        assert len(caplog.records) == 1 and str(folder) in caplog.text and "TRITON_CACHE_DIR" in caplog.text
    assert knobs.cache.dir == str(folder)  # as before


VALUES = {"null": None, "a text": "x", "a list": []}
FIELDS = ("name", "target", "num_warps", "shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
WRONG = {
    **{f"the description is {name}": ("", lambda _, x=x: x) for name, x in VALUES.items()},
    **{f"the group is {name}": ("__grp__", lambda _, x=x: x) for name, x in VALUES.items()},
    **{f"the files are {name}": ("__grp__", lambda _, x=x: {"child_paths": x}) for name, x in VALUES.items()},
    **{f"the {field} is a list": ("", lambda known, field=field: known | {field: []}) for field in FIELDS},
    "another number of warps": ("", lambda known: known | {"num_warps": 8}),
    "memory below zero": ("", lambda known: known | {"shared": -1}),
    "no name": ("", lambda known: {k: v for k, v in known.items() if k != "name"}),
    "a field that no class can have": ("", lambda known: known | {"class": 1}),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", WRONG)
def test_an_entry_of_whole_json_that_is_wrong(folder, caplog, name):
    expected = compiled()
    prefix, change = WRONG[name]
    (file,) = folder.rglob(f"{prefix}square_kernel.json")
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        again = compiled()
    assert again.asm["ptx"] == expected.asm["ptx"]
    for field in ("name", *disk_cache._SIZES["ptx"]):  # what a launch takes from it
        assert getattr(again.metadata, field) == getattr(expected.metadata, field), field
    assert len(caplog.records) <= 1 and knobs.cache.dir == str(folder)


def test_a_description_that_is_nested_deeply(folder, caplog):
    compiled()
    (file,) = files(folder, ".json")
    file.write_text("[" * 100_000)
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert is_whole(compiled())
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_made(folder, caplog):
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert is_whole(compiled()) and is_whole(compiled(num_warps=2))
    assert len(caplog.records) == 1 and folder.read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_of_others(folder, caplog):
    """Kernels that are there are used; the others are compiled."""
    compiled()
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555)
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert is_whole(compiled()) and not caplog.records
        assert is_whole(compiled(num_warps=2)) and len(caplog.records) == 1


def test_only_binaries_are_kept(folder):
    """`TRITON_STORE_BINARY_ONLY` keeps no text, which is what jaxlib takes."""
    knobs.compilation.store_binary_only = True
    assert is_whole(compiled())
    assert knobs.compilation.store_binary_only


def test_an_error_of_the_kernel_is_its_own(folder):
    wrong = one_to_one(kernels.block_truth_kernel, BLOCK=8)
    with pytest.raises(Exception, match=r"block|Boolean|boolean"):
        compiling.compiled(wrong, TARGETS["sm_90"])
    assert not disk_cache._warned


@pytest.mark.slow
def test_processes_compile_to_one_text(tmp_path):
    """JAX's cache of compiled programs finds a program by its text, in which the kernel is: every process must make the same."""
    program = """
import json
from tests.launch.launches import TARGETS
from tests.launch.test_compile import copy, matmul
from tests.launch.test_disk_cache import compiling
print(json.dumps([compiling.compiled(launch, TARGETS["sm_90"]).asm["ptx"] for launch in (copy(), matmul())]))
"""
    texts = []
    for seed in ("1", "2"):
        own = {"PYTHONHASHSEED": seed, "TRITON_CACHE_DIR": str(tmp_path / seed)}
        variables = os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, env=variables, timeout=300, capture_output=True, text=True, check=True)
        texts.append(json.loads(done.stdout.splitlines()[-1]))
    assert texts[0] == texts[1] and all(".entry" in text for text in texts[0])
