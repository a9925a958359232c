"""The benchmark of a training step: every variant gives the same before it is timed."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import float8_loss, train_step


@pytest.mark.slow
def test_variants_are_checked_and_timed(tmp_path):
    path = tmp_path / "step.json"
    options = ["--quick", "--samples", "2", "--steps", "1", "--commit", "abc", "--json", str(path)]
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # optax promotes as it likes
        assert train_step.main([*options, "--variants", "scan,unrolled-kernels"]) == 0
    content = json.loads(path.read_text())
    assert content["environment"]["commit"] == "abc" and content["size"]["num_layers"] == 2
    assert [row["variant"] for row in content["rows"]] == ["scan", "unrolled-kernels"]
    for row in content["rows"]:
        assert row["ms"] > 0 and len(row["samples_ms"]) == 2 and row["compile_seconds"] > 0
        assert row["temporary_bytes"] > 0
        assert row["first_loss"] == pytest.approx(math.log(256), rel=0.2)  # of a model that knows nothing yet
        assert row["gradient_norm"] == pytest.approx(content["rows"][0]["gradient_norm"], rel=1e-4)


@pytest.mark.parametrize(("loss", "norm"), [(5.1, 1.0), (5.0, 1.1), (float("nan"), 1.0)])
def test_a_variant_that_differs_is_not_timed(loss, norm):
    results = iter([(5.0, 1.0), (loss, norm)])
    program = lambda state, tokens: (state, next(results))
    variants = [train_step.Variant(name, program, 0.0) for name in ("scan", "other")]
    with pytest.raises(SystemExit, match=r"other: loss off by .* nothing is timed"):
        train_step.check(variants, jnp.zeros(2), jnp.zeros(2, jnp.int32))


def test_only_variants_that_there_are(capsys):
    with pytest.raises(SystemExit):
        train_step.parse(["--variants", "scan,loop"])
    assert "received loop" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_without_its_peer(tmp_path):
    path = tmp_path / "peers.json"
    options = ["--quick", "--peers", "--no-torch", "--samples", "1", "--steps", "1", "--json", str(path)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert train_step.main(options) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["problem"], row["variant"]) == ("B2_T64_V256", "unrolled") and row["bytes"] > 1e6


def test_a_peer_with_another_loss_is_not_timed(monkeypatch):
    options = train_step.parse(["--quick", "--peers"]).problems[0]
    variant = train_step.Variant("unrolled", lambda state, tokens: (state, (5.7, 1.0)), 0.0)
    peer = object.__new__(train_step.Torch)
    peer.ready = {"compile_seconds": 1.0}
    monkeypatch.setattr(peer, "begin", lambda: peer.ready.update(loss=6.5))
    monkeypatch.setattr(train_step, "make_state", lambda options: jnp.zeros(2))
    with pytest.raises(SystemExit, match=r"first loss 5.700, PyTorch's 6.500"):
        train_step.measure(options, [variant], peer)


class _Program:
    """A step that changes nothing."""

    def __call__(self, state, tokens):
        return state, (5.7, 1.0)

    def memory_analysis(self):
        return None


def test_a_peer_on_a_cpu_has_times_alone(monkeypatch):
    """It counts no bytes there."""
    options = train_step.parse(["--quick", "--peers", "--samples", "2"]).problems[0]
    peer = object.__new__(train_step.Torch)
    peer.ready = {"compile_seconds": 1.0, "loss": 5.8, "parameters": 2, "graph": False}
    monkeypatch.setattr(peer, "begin", lambda: None)
    monkeypatch.setattr(peer, "run", lambda steps: {"ms": 2.0, "bytes": 0})
    monkeypatch.setattr(train_step, "make_state", lambda options: ([jnp.zeros(2)], None))
    ours, torch = train_step.measure(options, [train_step.Variant("unrolled", _Program(), 0.0)], peer)
    assert ours["time_of_torch"] == ours["ms"] / 2.0 and torch["time_of_torch"] == 1.0
    assert "bytes_of_torch" not in ours and "torch.compile" in train_step.text_of(
        [{"problem": "a"} | row for row in (ours, torch)]
    )


def test_the_bound_follows_the_number_of_tokens():
    """Means of few tokens differ by more; of a full batch the bound is the systematic one."""
    assert train_step.peer_bound(8 * 2048) == 0.05 and 0.4 < train_step.peer_bound(2 * 64) < 0.5


def test_only_problems_that_there_are(capsys):
    with pytest.raises(SystemExit):
        train_step.parse(["--peers", "--problems", "B1_T1_V1"])
    assert "received B1_T1_V1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_loss_in_float8(tmp_path):
    """Both runs start from the same weights and see the same batches."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert float8_loss.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    plain, rounded = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert (plain["way"], rounded["way"]) == ("bfloat16", "float8")
    assert rounded["losses"][0] == pytest.approx(plain["losses"][0], rel=2e-3) and rounded != plain
    assert rounded["held_out_loss"] < 0.95 * rounded["losses"][0]
    assert rounded["held_out_loss_over_bfloat16"] == pytest.approx(1, abs=0.01)
