"""`platform-times`: what it writes, on no device that it is made for."""

import dataclasses
import json

import pytest

from benchmarks import tune
from benchmarks.tune import Table
from ejkernel_eqx.cli.bench import Contender, TIMED, WRONG
from ejkernel_eqx.dispatch import BOTH, FORWARD, kernel_registry, to_dict
from ejkernel_eqx.tuning.measure import Timing

QUICK = ("--quick", "--platform", "xla", "--platform", "triton-interpret")


@pytest.fixture
def contenders(monkeypatch):
    """What a run finds, in place of one."""
    pytest.importorskip("triton")
    found: dict[str, Contender] = {}

    def bench(problem, known, samples, sample_ms):
        for i, ms in zip(known, (1.0, 2.0), strict=True):
            timings = {d: Timing(ms * n, 0.0, (ms,) * samples, 1) for n, d in enumerate((FORWARD, BOTH), 1)}
            config = i.hooks.default_config(problem, tune.device_facts())
            new = Contender(
                i.platform.value, TIMED, config=config, implementation=i, settled=True, timings=timings
            )
            found[i.platform.value] = dataclasses.replace(new, **changes.get(i.platform.value, {}))
        return list(found.values())

    changes: dict[str, dict] = {}
    monkeypatch.setattr(tune, "bench", bench)
    return changes


TWINS = ("block_sparse_attention", "flash_attention", "ring_attention", "scaled_dot_product_attention")


def entries(path) -> dict[tuple[str, str], dict]:
    known = json.loads(path.read_text(encoding="utf-8"))["entries"]
    return {(entry["operation"], entry["platform"]): entry for entry in known}


def test_times_of_one_run_are_written_for_every_twin(contenders, tmp_path, capsys):
    path = tmp_path / "table.json"
    options = (*QUICK, "--problems", "KV2", "--output", str(path))
    assert tune.main_times(options) == 0
    assert "KV2 D16 full: xla" in capsys.readouterr().out
    found = entries(path)
    assert set(found) == {
        (operation, platform) for operation in TWINS for platform in ("xla", "triton-interpret")
    }
    xla = found["flash_attention", "xla"]
    assert (
        xla["ms"] == {FORWARD: 1.0, BOTH: 2.0}
        and found["flash_attention", "triton-interpret"]["ms"][BOTH] == 4.0
    )
    before = path.read_text(encoding="utf-8")
    assert tune.main_times(options) == 0 and path.read_text(encoding="utf-8") == before  # known


@pytest.mark.parametrize(
    "changed, reason",
    [({"settled": False}, "triton-interpret is not tuned"), ({"state": WRONG, "reason": "no"}, "wrong, no")],
)
def test_nothing_is_written_of_what_cannot_be_compared(contenders, tmp_path, capsys, changed, reason):
    contenders["triton-interpret"] = changed
    path = tmp_path / "table.json"
    assert tune.main_times((*QUICK, "--problems", "KV2", "--output", str(path))) == 0
    assert reason in capsys.readouterr().out and not path.exists()


def test_what_is_known_of_other_sizes_is_not_replaced(contenders, tmp_path, capsys):
    """Sizes count, requirements do not: a table may be older than one of them."""
    path = tmp_path / "table.json"
    options = (*QUICK, "--problems", "KV2", "--force", "--output", str(path))
    assert tune.main_times(options) == 0
    first = path.read_text(encoding="utf-8")
    older = json.loads(first)
    for entry in older["entries"]:
        exact = entry["exact"]
        exact["flags"] = {n: v for n, v in exact["flags"].items() if n not in exact["requirements"]}
        exact["requirements"] = []
    path.write_text(json.dumps(older), encoding="utf-8")
    assert tune.main_times(options) == 0 and "omitted" not in capsys.readouterr().out
    assert entries(path)["flash_attention", "xla"]["exact"]["requirements"]

    shorter = json.loads(first)
    for entry in shorter["entries"]:
        entry["exact"]["dims"]["T"] -= 1
    path.write_text(json.dumps(shorter), encoding="utf-8")
    assert tune.main_times(options) == 0
    assert "for another problem of this key" in capsys.readouterr().out


def test_what_a_platform_does_not_run_is_left_out(tmp_path, capsys):
    path = tmp_path / "table.json"
    assert tune.main_times(("--quick", "--output", str(path))) == 0
    out = capsys.readouterr().out
    assert out.count("omitted, cuda needs a GPU") == len(tune.FAMILIES["attention"].tiny()) > 0
    assert not path.exists()
    assert (
        Table(path).records == {}
        and to_dict(kernel_registry.get("flash_attention", "cuda").hooks.config_type()) == {}
    )
