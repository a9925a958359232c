"""Hosted checks: workflows parse, pin what they run, may do little, and name the Pythons of the package."""

import pathlib
import re
import tomllib

import pytest

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parents[1]
PATHS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [
    match[1]
    for name in PROJECT["classifiers"]
    if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", name))
]
# A source distribution has no workflows.
pytestmark = pytest.mark.skipif(not PATHS, reason="needs a copy of the repository")


def steps(path: pathlib.Path) -> list[dict]:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_actions_are_pinned_with_their_tag(path):
    lines = re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8"))
    assert len(lines) == sum("uses" in step for step in steps(path)) > 0
    assert not [line for line in lines if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_jobs_may_do_little_and_end(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        assert job.get("permissions", {}) in ({}, {"id-token": "write"})
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_one_action_has_one_version():
    uses = {step["uses"] for path in PATHS for step in steps(path) if "uses" in step}
    assert len(uses) == len({use.split("@")[0] for use in uses})


def test_pythons_are_those_of_the_package():
    versions = {
        path.stem: [
            str(step["with"]["python-version"]).split()
            for step in steps(path)
            if "python-version" in step.get("with", {})
        ]
        for path in PATHS
    }
    oldest, newest = PYTHONS[0], PYTHONS[-1]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert versions == {"ci": [[oldest, newest]], "release": [[newest]], "weekly": [[newest]]}


def test_pages_name_the_same_versions():
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"| Python | {PYTHONS[0]} to {PYTHONS[-1]} |" in page
    jax = next(need for need in PROJECT["dependencies"] if need.startswith("jax>="))
    assert f"| JAX, jaxlib | {jax.removeprefix('jax>=')} or newer |" in page
    triton = next(need for need in PROJECT["optional-dependencies"]["triton"] if need.startswith("triton"))
    assert f"pip install '{triton.split(';')[0]}'" in page


def test_releasing_describes_the_release():
    text = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    assert f"environment `{jobs['publish']['environment']}`" in text and "workflow `release.yml`" in text
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    for command in ("python -m build", "python -m twine check --strict dist/*"):
        assert command in commands and f"\n    {command}\n" in text
