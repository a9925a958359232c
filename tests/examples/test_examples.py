"""The examples with small settings. Those that are about a process run in one of their own, as a user starts it."""

import csv
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.serving.text import ByteTokenizer
from tests.processes import environment, programs
from tests.tolerances import assert_close

from .conftest import SMALL

ROOT = pathlib.Path(__file__).parents[2]


def start(example, *options, **streams) -> "subprocess.Popen[Any]":
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example), *map(str, options)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    variables = environment() | programs() | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, **pipes, env=variables)


def run(example, *options, code=0):
    out, err = (process := start(example, *options, text=True)).communicate(timeout=300)
    assert process.returncode == code, err[-4000:]
    return out, err


def losses_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


@pytest.fixture
def train_lm(examples):
    return examples.train_lm


@pytest.mark.slow
def test_train_resume_and_generate(examples, tmp_path, text, capsys):
    folder = tmp_path / "run"
    options = ["--data", text, "--out-dir", folder, *SMALL, "--prompt", "the quick "]
    out, err = run("train_lm.py", *options, "--steps", 20)
    assert "20 tokens from the checkpoint of step 20" in out and "the quick " in out
    # There is no bar where there is no terminal.
    assert "\r" not in out + err and "it/s" not in err and "step/s" not in err
    first = losses_of(folder)
    assert [step for step, _ in first] == list(range(1, 21))
    assert first[0][1] > 5.0 and first[-1][1] < 3.5
    plot = (folder / "loss.png").read_bytes()
    assert plot.startswith(b"\x89PNG") and len(plot) > 5000

    # Greedy: a sentence this short and this often repeated is learnt by heart.
    assert examples.train(*options, "--steps", 50, "--resume", "--temperature", 0) == 0
    out = capsys.readouterr().out
    assert "step 20 of 50" in out and "the checkpoint of step 50" in out
    losses = losses_of(folder)
    assert losses[:20] == first and [step for step, _ in losses] == list(range(1, 51))
    assert losses[-1][1] < 1.0
    assert "the quick brown" in (folder / "sample.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[], ["--mesh", "data=2,tensor=2"]], ids=str)
def test_a_resumed_run_continues_exactly(examples, train_lm, tmp_path, text, monkeypatch, mesh):
    """Seven steps at once, and three, an interrupt, and four more: every bit of the state, and every number of the log but the speed."""
    options = ["--data", text, *SMALL, "--num-layers", 1, "--steps", 7, "--validate-every", 4, *mesh]
    monkeypatch.setattr(train_lm, "write_sample", lambda *_: None)
    batch_at, states, rows = train_lm.batch_at, [], []

    def interrupting(data, step, args):
        # The step is finished, and its checkpoint is written.
        if step == 2 and len(data) > 10000:
            signal.raise_signal(signal.SIGINT)
        return batch_at(data, step, args)

    for name in ("whole", "parts"):
        run = [*options, "--out-dir", tmp_path / name, "--log", tmp_path / f"log of {name}"]
        with monkeypatch.context() as patch:
            patch.setattr(train_lm.Log, "plot", lambda log: None)
            patch.setattr(train_lm, "batch_at", interrupting if name == "parts" else batch_at)
            assert examples.train(*run) == (130 if name == "parts" else 0)
        if name == "parts":
            assert examples.train(*run, "--resume") == 0
            assert (tmp_path / "log of parts" / "loss.png").stat().st_size > 5000
        args = train_lm.parse([*map(str, run)])
        states.append(train_lm.load_checkpoint(train_lm.newest_checkpoint(tmp_path / name), args))
        with (tmp_path / f"log of {name}" / "metrics.csv").open(newline="") as file:
            rows.append([*csv.DictReader(file)])
        assert not (tmp_path / name / "metrics.csv").exists()
    assert states[0].step == 7 and eqx.tree_equal(*states)
    assert [int(row["step"]) for row in rows[0]] == [*range(1, 8)]
    assert rows[1][2].pop("validation_loss")  # where the run was interrupted
    assert not rows[0][2].pop("validation_loss")
    for whole, parts in zip(*rows, strict=True):
        assert float(whole.pop("tokens_per_second")) > 0 and float(parts.pop("tokens_per_second")) > 0
        assert whole == parts
    # A linear rise over one step, and the gradient of the first batch.
    assert float(rows[0][0]["learning_rate"]) == 0.0
    assert float(rows[0][1]["learning_rate"]) == pytest.approx(1e-2)
    first = train_lm.make_state(args, train_lm.architecture_of(args)).model
    tokens = jnp.asarray(batch_at(train_lm.load_data(text, args.seq_len, ByteTokenizer())[0], 0, args))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: train_lm.mean_loss(m, tokens, "float32")))(first)
    squares = sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(gradient))
    assert_close(np.float32(rows[0][0]["gradient_norm"]), squares**0.5, kind="gradient")
    assert [bool(row.get("validation_loss")) for row in rows[0]] == [False] * 3 + [True] + [False] * 2 + [
        True
    ]


@pytest.mark.parametrize(
    ("mesh", "platform", "options"),
    [
        ("data=2", "triton-interpret", ["--num-layers", "1"]),
        *(
            pytest.param(mesh, platform, options.split(), marks=pytest.mark.slow)
            for mesh, platform, options in [
                ("tensor=2", "triton-interpret", "--mlp moe --num-layers 1"),
                ("data=2", "triton-interpret", "--float8 --embed-dim 128 --num-layers 1"),
                ("sequence=2", "triton-interpret", "--mixer mamba2,kda"),
                ("data=2,sequence=2,tensor=2", "xla", "--mixer gla,attention --scan-layers"),
            ]
        ),
    ],
)
def test_a_mesh_trains_as_one_device(examples, tmp_path, text, capsys, mesh, platform, options):
    """What a GPU runs is opaque to JAX, and so are interpreted kernels. Axes that are not named have one device; checkpoints do not depend on
    the mesh, and are read on one device, and where training goes on."""
    if platform != "xla":
        pytest.importorskip("triton")
    losses = []
    for name, more in (("alone", []), ("split", ["--mesh", mesh, "--platform", platform])):
        folder = tmp_path / name
        run = ["--data", text, *SMALL, *options, *more, "--out-dir", folder, "--sample-length", 2]
        assert examples.train(*run, "--steps", 3) == 0
        assert "2 tokens from the checkpoint of step 3" in capsys.readouterr().out
        losses.append([loss for _, loss in losses_of(folder)])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], abs=1e-3)
    if platform == "xla":  # on other devices
        for name, more in (("alone", ["--mesh", "data=4"]), ("split", [])):
            run = [
                "--data",
                text,
                *SMALL,
                *options,
                *more,
                "--out-dir",
                tmp_path / name,
                "--sample-length",
                2,
            ]
            assert examples.train(*run, "--steps", 5, "--resume") == 0
        losses = [[loss for _, loss in losses_of(tmp_path / name)] for name in ("alone", "split")]
        assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--mixer mla,nsa --batch-size 2 --steps 80", "--mixer mamba1,kda"]
    + ["--mixer gla,lightning,gated_deltanet,mamba2 --num-layers 4", "--mlp moe"],
)
def test_every_mixer_trains_and_writes(examples, tmp_path, text, options):
    options = [*SMALL, "--steps", 60, *options.split()]
    folder = tmp_path / "run"
    more = ["--data", text, "--out-dir", folder, "--prompt", "the quick ", "--temperature", 0]
    assert examples.train(*options, *more) == 0
    assert losses_of(folder)[-1][1] < 1.5 and "the quick brown" in (folder / "sample.txt").read_text()


@pytest.mark.slow
def test_experts_are_balanced(train_lm):
    """The gradient has that of the balancing loss in it; the loss that is reported has not."""
    arch = train_lm.Architecture(32, 1, 4, 2, mlp="moe")
    model = train_lm.make_model(arch, key=jax.random.key(0))
    tokens = jnp.arange(18).reshape(2, 9) % 11
    of = lambda balance: train_lm.training_loss(model, tokens, "float32", balance)
    (plain, loss), (whole, same) = eqx.filter_jit(lambda: (of(0.0), of(0.5)))()
    _, statistics = eqx.filter_jit(lambda: model(tokens[:, :-1], return_statistics=True))()
    assert_close(whole - plain, 0.5 * ejx.nn.load_balancing_loss(statistics), scale=1.0)
    assert float(loss) == float(same) == float(plain)
    cast = train_lm.cast(model, "bfloat16").stacks[0][0].mlp
    assert cast.gate.weight.dtype == jnp.float32 and cast.experts.gate_proj.dtype == jnp.bfloat16


@pytest.mark.slow
def test_tuning_before_training(tmp_path, text, monkeypatch):
    """The optimiser's state goes on matching the tuned model, and its checkpoint is read back."""
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    out, _ = run("train_lm.py", "--data", text, "--out-dir", folder, *SMALL, "--steps", 2, "--tune")
    assert ".attention: flash_attention" in out and "from: autotune" in out
    assert len(losses_of(folder)) == 2 and "20 tokens from the checkpoint of step 2" in out


@pytest.mark.slow
def test_interrupting_saves_a_checkpoint(tmp_path, text):
    folder = tmp_path / "run"
    process = start("train_lm.py", "--data", text, "--out-dir", folder, *SMALL, "--steps", 1000000, text=True)
    deadline = time.monotonic() + 200
    while not (folder / "checkpoint.ejx").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err[-4000:]
    assert "Interrupted" in out and "--resume" in out and "Traceback" not in err
    assert len(losses_of(folder)) >= 10


@pytest.mark.slow
def test_quickstart():
    out, _ = run("quickstart.py")
    assert "FlashAttention: out (2, 256, 8, 64)" in out and "platform" in out and "loaded: equal" in out
    numbers = {line.split(": ")[0]: line.split(" ") for line in out.splitlines()}
    assert float(numbers["training"][2]) < 0.1 and float(numbers["decoding"][-1]) < 1e-5


@pytest.mark.slow
def test_rewards_alone_teach_a_model(examples):
    """Digits come out sorted. At first few do."""
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        assert examples.grpo.main("--steps 1 --kl-weight 0.1".split()) < 0.05
        assert examples.grpo.main("--steps 250".split()) > 0.5


@pytest.mark.slow
def test_statistics_are_those_of_sampled_answers(examples):
    """Of the tokens of an answer, each after those before it; without a temperature the likeliest ones."""
    model, key = examples.grpo.make_model(jax.random.key(0)), jax.random.key(1)
    prompts = jax.random.randint(key, (5, 3), 0, 10)
    answers = examples.grpo.sample(model, prompts, key, temperature=0.0)
    each = eqx.filter_jit(examples.grpo.statistics_of)(model, prompts, answers)
    logits = eqx.filter_jit(lambda: model(jnp.concatenate([prompts, answers], -1)))()[:, 2:-1]
    log_p = jax.nn.log_softmax(logits)
    assert_close(each.log_probs, jnp.take_along_axis(log_p, answers[..., None], -1)[..., 0])
    assert each.is_top1.all() and not examples.grpo.reward_of(prompts, prompts[:, ::-1]).all()


BOTH = "--mixer gla,attention --num-layers 3"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--data /no/such/place", 2, "'/no/such/place' does not exist; check the path"),
        ("--data EMPTY", 2, "--data: expected more than 660 tokens for sequences of 32, found 0"),
        ("--resume", 2, "there is no checkpoint"),
        ("--steps 0", 2, "--steps: expected a positive number, received 0"),
        ("--num-heads 3", 2, "num_heads: expected a divisor of embed_dim=32, received 3"),
        pytest.param("--platform triton --data TEXT", 2, "triton", marks=pytest.mark.slow),
        (BOTH, 2, "--num-layers: expected a multiple of the 2 layers"),
        pytest.param("--float8", 2, "128 inputs and outputs or more, received none", marks=pytest.mark.slow),
        ("--float8 --mesh tensor=2", 2, "--float8: expected a --mesh without tensor"),
        ("--mesh rows=2", 2, "expected some of data=N,sequence=N,tensor=N, received 'rows=2'"),
        ("--mesh data=64", 2, "--mesh: expected at most the"),
        ("--distil TEXT", 2, "config.json' is not there. Give the folder of a published model"),
        ("--distil-weight 2", 2, "--distil-weight: expected a share from 0 to 1, received 2.0"),
        ("--mesh sequence=2 --seq-len 33", 2, "--seq-len: expected a multiple of the 2 devices"),
        ("--out-dir TEXT/run", 1, "Not a directory"),
    ],
)
def test_errors_are_one_sentence(train_lm, tmp_path, text, capsys, options, code, message):
    (tmp_path / "empty.txt").touch()
    given = options.replace("EMPTY", str(tmp_path / "empty.txt")).replace("TEXT", str(text)).split()
    try:
        found = train_lm.main([*SMALL, "--steps", "2", "--out-dir", str(tmp_path / "run"), *given])
    except SystemExit as stop:  # of argparse
        found = stop.code
    assert found == code and message in capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_of_another_architecture_is_named(train_lm, tmp_path, capsys):
    args = train_lm.parse([*SMALL, "--steps", "2", "--out-dir", str(tmp_path)])
    state = train_lm.make_state(args, train_lm.architecture_of(args))
    train_lm.save_checkpoint(tmp_path / "checkpoint.ejx", state, args)
    options = [*SMALL, "--num-layers", "3", "--out-dir", str(tmp_path), "--resume"]
    assert train_lm.main(options) == 2
    message = capsys.readouterr().err
    assert "holds another architecture, with num_layers=2 (requested: 3)" in message
    assert train_lm.main([*SMALL, "--mixer", "lightning", "--out-dir", str(tmp_path), "--resume"]) == 2
    assert "with mixer='attention' (requested: 'lightning')" in capsys.readouterr().err
    path = tmp_path / "checkpoint.ejx"
    path.write_bytes(path.read_bytes()[:-100])
    assert train_lm.main([*SMALL, "--out-dir", str(tmp_path), "--resume"]) == 2
    assert "checkpoint.ejx" in capsys.readouterr().err


def test_data_is_split_by_file_and_in_a_fixed_order(train_lm, tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([80 + i]) * 50)
    (tmp_path / "05.png").write_bytes(b"picture\0" * 10)  # no text
    train, validation = train_lm.load_data(tmp_path, 50, ByteTokenizer())
    assert bytes(validation.tolist()) == bytes([90]) * 50 + b"\n" + bytes([110]) * 50
    assert bytes(train.tolist()) == b"\n".join(bytes([80 + i]) * 50 for i in range(40) if i not in (10, 30))


@pytest.mark.slow
def test_what_is_made_again_need_not_be_kept(train_lm):
    """The temporary memory of a gradient, and how many of its periods a loop takes at once, forward and backward."""
    tokens = jax.random.randint(jax.random.key(1), (2, 65), 0, 256)

    def memory(**layers):
        arch = train_lm.Architecture(32, 2, 4, 2)
        model = train_lm.make_model(arch, "xla", **layers, key=jax.random.key(0))
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        loss = lambda arrays: train_lm.mean_loss(eqx.combine(arrays, static), tokens, "float32")
        traced = jax.jit(jax.grad(loss)).trace(arrays)
        scans = [equation.params for equation in traced.jaxpr.eqns if equation.primitive.name == "scan"]
        looped = "scan_layers" in layers
        assert [scan["unroll"] for scan in scans if scan["length"] == 2] == [1 if looped else 2] * 2
        analysis: Any = traced.lower().compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert memory() > memory(remat="kernels")
    assert memory(scan_layers=True) > memory(remat="kernels", scan_layers=True)


def test_rates_stay_float32(train_lm):
    """`cast` takes all else to the dtype of the computation, in every mixer that has rates."""
    arch = train_lm.Architecture(32, 4, 4, 2, "mamba1,mamba2,kda,gated_deltanet")
    make = lambda: train_lm.cast(train_lm.make_model(arch, key=jax.random.key(0)), jnp.bfloat16)
    model = eqx.filter_eval_shape(make)
    kept = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating):
            name = getattr(path[-1], "name", None)
            assert (leaf.dtype == jnp.float32) == (name in ("A_log", "D", "dt_bias")), path
            kept |= {name} if leaf.dtype == jnp.float32 else set()
    assert kept == {"A_log", "D", "dt_bias"}


def test_mixers_by_name(train_lm, capsys):
    parse = lambda *options: train_lm.parse([*options])
    default = train_lm.train_options.SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"][
        "num_layers"
    ]
    assert parse().mixer == "attention" and parse().num_layers == default
    hybrid = parse("--mixer", "mamba2, mamba2,attention")
    assert hybrid.mixer == "mamba2,mamba2,attention" and hybrid.num_layers == default // 3 * 3
    many = ",".join(["gla"] * (default + 1))
    assert parse("--mixer", many).num_layers == default + 1
    with pytest.raises(SystemExit):
        parse("--mixer", "mamba3")
    message = capsys.readouterr().err
    assert "received 'mamba3'" in message and "gated_deltanet" in message
