"""The benchmark of several devices runs whole, refuses to time wrong results, and counts what is sent."""

import json

import jax
import pytest

from benchmarks import devices


@pytest.mark.parametrize("part", ["experts", pytest.param("train", marks=pytest.mark.slow)])
def test_quick(part, tmp_path):
    path = tmp_path / "json"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax
        assert devices.main(["--quick", "--devices", "2", "--parts", part, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert not [row for row in rows if "reason" in row]
    split = [row for row in rows if row["variant"] != "one device"]
    of_two = [step for step in devices.STEPS.values() if step.data == 1]
    of_steps = sum(2 if step.axis == devices.EXPERT else 3 for step in of_two)
    assert len(split) == (2 if part == "experts" else of_steps)
    for row in split:
        assert row["speedup"] > 0 and row["sent_gb"] > 0 and row["error"] <= 1e-5, row


def test_what_more_than_two_devices_should_reach(tmp_path):
    """Two along the axis of the rows, and a part of the number of all."""
    path, name = tmp_path / "json", "data and sequence"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax
        options = ["--quick", "--devices", "4", "--parts", "train", "--only", name]
        assert devices.main([*options, "--json", str(path)]) == 0
    alone, *split = json.loads(path.read_text())["rows"]
    assert {row["variant"]: row["wanted"] for row in split} == dict.fromkeys(("explicit", "xla"), 3)
    assert "wanted" not in alone and not [row for row in split if "reason" in row]
    with pytest.raises(SystemExit):
        devices.parse(["--devices", "2", "--only", name])


def test_a_wrong_result_is_not_timed(monkeypatch, tmp_path):
    true = devices.forward_of
    wrong = lambda static: lambda *given: jax.tree.map(lambda y: y * jax.device_count(), true(static)(*given))
    calls = iter((true, wrong))
    monkeypatch.setitem(devices.DIRECTIONS, "forward", lambda static: next(calls)(static))
    path = tmp_path / "json"
    assert devices.main(["--quick", "--devices", "2", "--parts", "experts", "--json", str(path)]) == 1
    (row,) = (row for row in json.loads(path.read_text())["rows"] if "reason" in row)
    assert row["reason"].startswith("wrong") and "ms" not in row and row["variant"] == "by_token"


def test_bytes_of_collectives():
    text = """
  %a = bf16[2,1024]{1,0} all-gather(%x), dimensions={0}
  %b = (f32[8]{0}, f32[4,2]{1,0}) all-to-all(%x, %y), dimensions={0}
  %c = (bf16[1,1024]{1,0}, bf16[2,1024]{1,0}) all-gather-start(%x), dimensions={0}
  %d = ((f32[4]{0}, f32[2]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%y, %z), dimensions={0}
  %e = (f32[8]{0}, f32[4]{0}) all-reduce-start(%y, %z), to_apply=%add
  %f = f32[64]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add
  %g = f32[64]{0} all-reduce(%a), replica_groups=[8,1]<=[8], to_apply=%add
  %h = bf16[8]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %i = f32[16]{0} add(%a, %b)
"""
    assert devices.sent_bytes(text) == 2 * 2 * 2 * 1024 + 4 * (8 + 8) + 4 * (8 + 4) * 2 + 2 * 8
