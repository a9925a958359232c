"""What the documents call by name is there, and whoever comes from ejKernel finds every name of its framework."""

import pathlib
import re

import pytest

import ejkernel_eqx as ejx

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_exist(page):
    missing = set()
    for name in re.findall(r"\bejx\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", page.read_text(encoding="utf-8")):
        found = ejx
        for part in name.split("."):
            if not hasattr(found, part):
                missing.add(name)
                break
            found = getattr(found, part)
    assert not missing


FRAMEWORK = """Executor overlay_cache policy_override autotune benchmark record_invocation autotune_recorded vmap_with_config
pmap_with_config to_json from_json stable_json device_fingerprint sharding_fingerprint find_labels_in_lowered
extract_labels_from_hlo_text labels_to_configs""".split()


@pytest.mark.parametrize("name", FRAMEWORK)
def test_names_of_the_framework(name):
    rows = [line for line in (ROOT / "docs/coming-from-ejkernel.md").read_text().splitlines() if name in line]
    assert any(line.startswith("|") for line in rows)
    assert hasattr(ejx, name) or name in ("Executor", "sharding_fingerprint")
