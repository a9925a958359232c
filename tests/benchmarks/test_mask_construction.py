"""The benchmark of what masks cost on the host runs, and its masks are as small as the page says."""

import json

from benchmarks import mask_construction


def test_a_run(tmp_path):
    path = tmp_path / "masks.json"
    assert mask_construction.main(["--quick", "--commit", "abc", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == list(mask_construction.MASKS)
    for row in rows:
        assert 0 < row["mb_64"] < 10
