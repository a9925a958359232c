"""The faults of `tests/mutants.py` can be planted. Whether tests catch them is what that command says, which is run by hand."""

import pytest

from tests.mutants import FAULTS, outdated, planted


def test_every_fault_can_be_planted():
    assert outdated() == []
    assert len(FAULTS) >= 60


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"old": "no such text"}, "stands 0 times"),
        ({"old": "x"}, "stands 2 times"),
        ({"function": "first"}, "expected one definition of first, received 0"),
        ({"function": "Table.third"}, "expected one definition of third, received 2"),
        ({"new": "x + 1  # as before"}, "changes nothing"),
        ({"file": "other.py"}, "no such file"),
    ],
)
def test_a_fault_that_cannot_be_planted(tmp_path, changed, words):
    source = tmp_path / "src/ejkernel_eqx/table.py"
    source.parent.mkdir(parents=True)
    methods = "".join(
        f"    def {name}(self, x):\n        return x + 1\n" for name in ("second", "third", "third")
    )
    source.write_text(f"class Table:\n{methods}", encoding="utf-8")
    fault = FAULTS[0]._replace(file="table.py", function="Table.second", old="x + 1", new="x - 1")
    assert planted(fault, tmp_path).count("x - 1") == 1
    with pytest.raises(ValueError, match=words):
        planted(fault._replace(**changed), tmp_path)
