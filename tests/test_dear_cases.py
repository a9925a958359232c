"""The list of cases that are slow although nothing beside them says so names tests that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent


def test_listed_cases_exist():
    listed = (ROOT / "dear_cases.txt").read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    for line in listed:
        file, _, name = line.partition("::")
        function = name.split("[", 1)[0].rpartition("::")[2]
        text = (ROOT.parent / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {re.escape(function)}\(", text, re.M), line
