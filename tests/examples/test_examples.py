"""The examples, run as a user runs them: each in a process of its own, with small settings."""

import argparse
import csv
import pathlib
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.processes import environment, programs
from tests.tolerances import assert_close

ROOT = pathlib.Path(__file__).parents[2]
SMALL = "--batch-size 8 --seq-len 32 --embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2".split()
SMALL += "--validate-every 10 --checkpoint-every 10 --sample-length 20 --learning-rate 1e-2".split()


def _environment(devices=1):
    return environment(devices) | programs() | {"PYTHONPATH": str(ROOT / "src")}


def _start(example, *options, devices=1):
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example), *map(str, options)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=_environment(devices))


def _run(example, *options, code=0, devices=1):
    process = _start(example, *options, devices=devices)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err[-4000:]
    return out, err


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return path


def _losses(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_train_resume_and_generate(tmp_path, text):
    folder = tmp_path / "run"
    options = ["--data", text, "--out-dir", folder, *SMALL, "--prompt", "the quick "]
    out, err = _run("train_lm.py", *options, "--steps", 20)
    assert "20 bytes from the checkpoint of step 20" in out and "the quick " in out
    assert (
        "\r" not in out + err and "it/s" not in err and "step/s" not in err
    )  # no bar where there is no terminal
    first = _losses(folder)
    assert [step for step, _ in first] == list(range(1, 21))
    assert first[0][1] > 5.0 and first[-1][1] < 3.5
    plot = (folder / "loss.png").read_bytes()
    assert plot.startswith(b"\x89PNG") and len(plot) > 5000

    # Greedy: a sentence this short and this often repeated is learnt by heart.
    out, _ = _run("train_lm.py", *options, "--steps", 50, "--resume", "--temperature", 0)
    assert "step 20 of 50" in out and "the checkpoint of step 50" in out
    losses = _losses(folder)
    assert losses[:20] == first and [step for step, _ in losses] == list(range(1, 51))
    assert losses[-1][1] < 1.0
    assert "the quick brown" in (folder / "sample.txt").read_text()


@pytest.mark.slow
def test_a_mesh_trains_as_one_device(tmp_path, text):
    """Rows, tokens and heads over eight devices, weights over all; checkpoints do not depend on the mesh."""
    options = ["--data", text, *SMALL, "--mixer", "gla,attention", "--prompt", "the quick "]
    alone, split = (["--out-dir", tmp_path / name] for name in ("alone", "split"))
    mesh = ["--mesh", "data=2,sequence=2,tensor=2"]
    _run("train_lm.py", *options, *alone, "--steps", 20)
    out, _ = _run("train_lm.py", *options, *split, *mesh, "--steps", 20, devices=8)
    assert "20 bytes from the checkpoint of step 20" in out  # on one device
    first, second = (_losses(tmp_path / name) for name in ("alone", "split"))
    assert [step for step, _ in second] == list(range(1, 21))
    assert all(abs(x - y) < 1e-3 for (_, x), (_, y) in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "tensor=2", "sequence=2"])
@pytest.mark.parametrize(
    "options", [[], ["--mlp", "moe"], ["--mixer", "mamba2,kda"]], ids=["", "experts", "recurrent"]
)
def test_a_mesh_trains_on_interpreted_kernels(tmp_path, text, mesh, options):
    """What a GPU runs is opaque to JAX, and so are interpreted kernels. The other axes of the mesh have one device."""
    pytest.importorskip("triton")
    folder = [
        "--data",
        text,
        "--steps",
        2,
        *SMALL,
        "--seq-len",
        32,
        "--num-kv-heads",
        2,
        "--sample-length",
        2,
    ]
    losses = []
    for name, more in (("alone", []), ("split", ["--mesh", mesh, "--platform", "triton-interpret"])):
        _run("train_lm.py", *folder, *options, *more, "--out-dir", tmp_path / name, devices=2)
        losses.append([loss for _, loss in _losses(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "rows=2"], "expected some of data=N,sequence=N,tensor=N, received 'rows=2'"),
        (["--mesh", "data=64"], "--mesh: expected at most the"),
        (["--mesh", "sequence=2", "--seq-len", "33"], "--seq-len: expected a multiple of the 2 devices"),
    ],
)
def test_meshes_that_are_none(train_lm, capsys, options, message):
    try:
        assert train_lm.main(options) == 2
    except SystemExit as stop:  # of argparse
        assert stop.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_hybrid_trains_and_writes(tmp_path, text):
    folder = tmp_path / "run"
    options = ["--data", text, "--out-dir", folder, *SMALL, "--mixer", "mamba2,attention"]
    out, _ = _run("train_lm.py", *options, "--steps", 50, "--prompt", "the quick ", "--temperature", 0)
    assert "the checkpoint of step 50" in out and _losses(folder)[-1][1] < 1.5
    assert "the quick brown" in (folder / "sample.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["mla", "nsa", "mamba1", "gla", "lightning", "kda", "gated_deltanet"])
def test_every_mixer_trains(tmp_path, text, mixer):
    folder = tmp_path / "run"
    options = ["--data", text, "--out-dir", folder, *SMALL, "--mixer", mixer, "--steps", 60]
    options += ["--batch-size", 2] if mixer == "nsa" else []  # on a CPU, its time is that of its tokens
    out, _ = _run("train_lm.py", *options, "--prompt", "the quick ", "--temperature", 0)
    assert "the checkpoint of step 60" in out and _losses(folder)[-1][1] < 1.5


@pytest.mark.slow
def test_a_mixture_of_experts_trains_and_is_served(tmp_path, text):
    folder = tmp_path / "run"
    options = ["--data", text, "--out-dir", folder, *SMALL, "--mlp", "moe"]
    out, _ = _run("train_lm.py", *options, "--steps", 50, "--prompt", "the quick ", "--temperature", 0)
    assert "the checkpoint of step 50" in out and _losses(folder)[-1][1] < 1.5
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick \n")
    written = tmp_path / "texts.jsonl"
    served = ["--checkpoint", folder / "checkpoint.ejx", "--prompts", prompts, "--out", written]
    _run("serve_lm.py", *served, *"--max-new-tokens 12 --num-pages 24 --page-size 4".split())
    assert "brown fox" in written.read_text()
    _, err = _run("train_lm.py", *options[:-1], "dense", "--resume", "--steps", 60, code=2)
    assert "mlp='moe' (requested: 'dense')" in err


@pytest.mark.slow
def test_experts_are_balanced(train_lm):
    """The gradient has that of the balancing loss in it; the loss that is reported has not."""
    arch = train_lm.Architecture(32, 1, 4, 2, mlp="moe")
    model = train_lm.make_model(arch, key=jax.random.key(0))
    tokens = jnp.arange(18).reshape(2, 9) % 11
    of = lambda balance: train_lm.training_loss(
        model, tokens, argparse.Namespace(balance=balance, dtype="float32")
    )
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
    out, _ = _run("train_lm.py", "--data", text, "--out-dir", folder, *SMALL, "--steps", 2, "--tune")
    assert ".attention: flash_attention" in out and "from: autotune" in out
    assert len(_losses(folder)) == 2 and "20 bytes from the checkpoint of step 2" in out


@pytest.mark.slow
def test_interrupting_saves_a_checkpoint(tmp_path, text):
    folder = tmp_path / "run"
    process = _start("train_lm.py", "--data", text, "--out-dir", folder, *SMALL, "--steps", 1000000)
    deadline = time.monotonic() + 200
    while not (folder / "checkpoint.ejx").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err[-4000:]
    assert "Interrupted" in out and "--resume" in out and "Traceback" not in err
    assert len(_losses(folder)) >= 10


@pytest.mark.slow
def test_quickstart():
    out, _ = _run("quickstart.py")
    for expected in ("FlashAttention: out (2, 256, 8, 64)", "platform", "training: loss", "loaded: equal"):
        assert expected in out


@pytest.fixture(scope="module")
def train_lm():
    """The example as a module, for what ends before any training."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "train_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_lm"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "/no/such/place"], "'/no/such/place' does not exist; check the path"),
        (["--data", "EMPTY"], "--data: expected more than 660 bytes for sequences of 32, found 0"),
        (["--resume"], "there is no checkpoint"),
        (["--steps", "0"], "--steps: expected a positive number, received 0"),
        (["--num-heads", "3"], "num_heads: expected a divisor of embed_dim=32, received 3"),
        (["--platform", "triton", "--data", "TEXT"], "triton"),
        (
            ["--mixer", "gla,attention", "--num-layers", "3"],
            "--num-layers: expected a multiple of the 2 layers",
        ),
    ],
)
def test_errors_are_one_sentence(train_lm, tmp_path, text, capsys, options, message):
    (tmp_path / "empty.txt").touch()
    places = {"EMPTY": str(tmp_path / "empty.txt"), "TEXT": str(text)}
    options = [places.get(option, option) for option in options]
    assert train_lm.main([*SMALL, "--steps", "2", "--out-dir", str(tmp_path / "run"), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_sentence(train_lm, text, capsys):
    assert train_lm.main([*SMALL, "--steps", "2", "--out-dir", str(text / "run")]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("train_lm: [Errno 20] Not a directory") and message.endswith(
        "continue with --resume."
    )


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
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([100 + i]) * 50)
    train, validation = train_lm.load_data(tmp_path, 50)
    assert validation.tobytes() == bytes([110]) * 50 + b"\n" + bytes([130]) * 50
    assert train.tobytes() == b"\n".join(bytes([100 + i]) * 50 for i in range(40) if i not in (10, 30))


def _gradient(train_lm, mixer, tokens, **layers):
    """The loss's gradient, the program's temporary memory, and how many of its periods a loop takes at once, forward and backward."""
    arch = train_lm.Architecture(32, 2 * (mixer.count(",") + 1), 4, 2, mixer)
    model = train_lm.make_model(arch, "xla", **layers, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    loss = jax.jit(
        jax.grad(lambda arrays: train_lm.mean_loss(eqx.combine(arrays, static), tokens, "float32"))
    )
    traced = loss.trace(arrays)
    scans = [equation.params for equation in traced.jaxpr.eqns if equation.primitive.name == "scan"]
    program = traced.lower().compile()
    memory = program.memory_analysis()
    assert memory is not None
    unrolled = [scan["unroll"] for scan in scans if scan["length"] == 2]
    return program(arrays), memory.temp_size_in_bytes, unrolled


KEPT = [{}, {"remat": "matmuls"}, {"remat": "kernels"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "variants"),
    [
        ("attention", [{"remat": "kernels"}]),
        pytest.param("attention", [*KEPT, {"remat": "kernels", "scan_layers": True}], marks=pytest.mark.slow),
        pytest.param("lightning,attention", [{"remat": "kernels"}], marks=pytest.mark.slow),
    ],
)
def test_layers_written_out_and_made_again_have_the_gradient_of_the_loop(train_lm, mixer, variants):
    tokens = jax.random.randint(jax.random.key(1), (2, 65), 0, 256)
    expected, looped, unrolled = _gradient(train_lm, mixer, tokens, scan_layers=True)
    assert unrolled == [1, 1]
    temporary = {}
    for layers in variants:
        grads, size, unrolled = _gradient(train_lm, mixer, tokens, **layers)
        assert unrolled == [1 if "scan_layers" in layers else 2] * 2
        for grad, reference in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
            assert_close(grad, reference)
        temporary[*layers.values()] = size
    if variants[:3] == KEPT:  # whatever is made again need not be kept
        assert temporary[()] > max(temporary["matmuls",], temporary["kernels",])
        assert looped > temporary["kernels", True]


SLOW_MIXERS = ["mla,lightning", "mamba1,gla,attention", "kda,gated_deltanet,mamba2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer", ["lightning,attention", *(pytest.param(mixer, marks=pytest.mark.slow) for mixer in SLOW_MIXERS)]
)
def test_steps_on_the_states_give_the_logits_of_one_pass(train_lm, mixer):
    places = mixer.count(",") + 1
    arch = train_lm.Architecture(32, 2 * places, 4, 2, mixer)
    model = train_lm.make_model(arch, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    call = eqx.filter_jit(lambda model, tokens, state: model(tokens, state))
    expected = call(model, tokens, None)
    logits, state = call(model, tokens[:, :7], model.init_cache(2, 9))
    pieces = [logits]
    for t in (7, 8):
        logits, state = call(model, tokens[:, t : t + 1], state)
        pieces.append(logits)
    assert_close(jnp.concatenate(pieces, axis=1), expected)


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
    default = train_lm.SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"]["num_layers"]
    assert parse().mixer == "attention" and parse().num_layers == default
    hybrid = parse("--mixer", "mamba2, mamba2,attention")
    assert hybrid.mixer == "mamba2,mamba2,attention" and hybrid.num_layers == default // 3 * 3
    many = ",".join(["gla"] * (default + 1))
    assert parse("--mixer", many).num_layers == default + 1
    with pytest.raises(SystemExit):
        parse("--mixer", "mamba3")
    message = capsys.readouterr().err
    assert "received 'mamba3'" in message and "gated_deltanet" in message
