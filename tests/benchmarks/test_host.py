"""The benchmark of what masks cost on the host runs, and its masks are as small as the page says."""

import json

from benchmarks import host


def test_a_run(tmp_path):
    path = tmp_path / "masks.json"
    assert host.main(["--quick", "--commit", "abc", "--json", str(path)], "mask-construction") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == list(host.MASKS)
    for row in rows:
        assert 0 < row["mb_64"] < 10
