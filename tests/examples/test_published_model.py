"""The examples on a published model: a folder with a configuration, weights and a tokenizer."""

import json
import pathlib

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from ejkernel_eqx.serving.text import Tokenizer
from tests.models.cases import GOLDEN
from tests.models.test_published import weights_of

from .test_examples import losses_of, run

tokenizers = pytest.importorskip("tokenizers")
TEXT = "the quick brown fox jumps over the lazy dog é "


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A random Llama of 61 tokens: characters, and a few pairs of them."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "config.json").write_text(json.dumps(GOLDEN["llama"]["config"] | {"eos_token_id": None}))
    save_file(weights_of("llama"), folder / "model.safetensors")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.decoder = tokenizers.decoders.Fuse()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=61, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 10, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


SMALL = "--batch-size 2 --seq-len 16 --steps 3 --sample-length 4 --temperature 0 --dtype float32".split()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[1]", "config.json' holds no JSON object, but list"),
        ("config.json", '{"model_type": "llama", "text_config": 3}', "text_config: expected an object"),
        ("generation_config.json", "3", "generation_config.json' holds no JSON object, but int"),
    ],
)
def test_configurations_of_no_model(examples, folder, tmp_path, capsys, name, content, message):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / name).write_text(content)
    assert examples.train("--model", tmp_path, "--out-dir", tmp_path / "run", *SMALL) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train_lm: ") and message in error


SIZES = "--max-new-tokens 5 --num-pages 24 --page-size 4 --max-batch 4 --step-tokens 16 --dtype float32"


def check_served(examples, folder, out, options, model, prompts, capsys):
    """What is written for the prompts is what the model gives."""
    path = out.parent / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    given = [*options, "--prompts", path, "--out", out, *SIZES.split()]
    assert examples.serve_lm.main([*map(str, given)]) == 0
    records = {record["request"]: record for record in map(json.loads, out.read_text().splitlines())}
    tokenizer, shown = Tokenizer(folder / "tokenizer.json"), capsys.readouterr().out
    for index, prompt in enumerate(prompts):
        begin = tokenizer.encode(prompt)
        new = ejx.models.generate(model, [begin], max_new_tokens=5).texts()[0]
        whole = tokenizer.decode([*begin, *new])
        assert records[index]["prompt"] + records[index]["text"] == whole
        assert records[index]["tokens"] == 5 and whole in shown


@pytest.mark.slow
def test_a_published_model_is_served(examples, folder, tmp_path, capsys):
    model, prompts = ejx.models.from_pretrained(folder, dtype="float32"), ["the quick", "lazy dog é"]
    check_served(examples, folder, tmp_path / "out.jsonl", ["--model", folder], model, prompts, capsys)


@pytest.mark.slow
def test_a_quantised_model_is_served(examples, folder, tmp_path, capsys):
    model = ejx.quantise(ejx.models.from_pretrained(folder, dtype="float32"), "fp8")
    options = ["--model", folder, "--quantise", "fp8"]
    check_served(examples, folder, tmp_path / "out.jsonl", options, model, ["the quick"], capsys)


@pytest.mark.slow
def test_lora_beside_quantised_weights(examples, folder, tmp_path, capsys):
    """What `lora.py` runs: updates train, codes stay, and the checkpoint continues."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40, encoding="utf-8")
    options = ["--data", text, "--out-dir", tmp_path / "run", "--model", folder, *SMALL]
    options = [*map(str, options), "--lora", "2", "--quantise", "int8"]
    assert examples.train(*options) == 0
    args = examples.train_lm.parse(options)
    model = examples.train_lm.load_checkpoint(tmp_path / "run" / "checkpoint.ejx", args).model
    update = model.stacks[0][0].mixer.q_proj
    before = ejx.quantise(ejx.models.from_pretrained(folder, dtype="float32"), "int8")
    assert eqx.tree_equal(update.base.weight, before.stacks[0][0].mixer.q_proj.weight)
    assert isinstance(update.base.weight, ejx.QuantizedWeight)
    assert float(jnp.max(jnp.abs(update.b))) > 0
    assert examples.train(*options, "--steps", 4, "--resume") == 0
    assert examples.train(*options[:-2], "--steps", 5, "--resume") == 2
    assert "with quantise='int8' (requested: None)" in capsys.readouterr().err
    _, error = run(
        "lora.py", "--model", tmp_path / "none", "--quantise", "int8", "--out-dir", tmp_path, code=2
    )
    assert "config.json' is not there. Give the folder of a published model" in error


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--quantise", "int8"]], ids=str)
def test_lora_on_a_mesh_trains_as_on_one_device(examples, folder, tmp_path, more):
    text, models, losses = tmp_path / "text.txt", [], []
    text.write_text(TEXT * 40, encoding="utf-8")
    for name, mesh in (("alone", []), ("split", ["--mesh", "data=2,tensor=2"])):
        out = tmp_path / name
        options = ["--data", text, "--out-dir", out, "--model", folder, *SMALL, "--lora", 2, *more, *mesh]
        assert examples.train(*options) == 0
        losses.append([loss for _, loss in losses_of(out)])
        models.append(ejx.models.from_pretrained(out / "tuned")(jnp.asarray([[5, 6, 7, 8]])))
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    np.testing.assert_allclose(*models, atol=1e-4)


@pytest.mark.slow
def test_a_small_model_learns_from_a_published_one(examples, folder, tmp_path):
    """Its probabilities come near those of the teacher, on text that says nothing of them. Its checkpoint continues, with the tokenizer beside it."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40, encoding="utf-8")
    sizes = "--embed-dim 32 --num-layers 1 --num-heads 4 --num-kv-heads 2 --learning-rate 1e-2".split()
    options = [
        "--data",
        text,
        "--out-dir",
        tmp_path / "run",
        "--distil",
        folder,
        *SMALL,
        *sizes,
        "--batch-size",
        8,
    ]
    options = [*map(str, options), "--distil-weight", "1", "--steps", "200"]
    teacher = ejx.models.from_pretrained(folder, dtype="float32")
    vocabulary = examples.train_lm.tokenizer_of(folder)
    args = examples.train_lm.parse(options)
    data, _ = examples.train_lm.load_data(text, 16, vocabulary)
    tokens = jnp.asarray(examples.train_lm.batch_at(data, 0, args))

    def distance(model) -> float:
        of = eqx.filter_jit(
            lambda: model.divergence(model.features(tokens), teacher.as_teacher(teacher.features(tokens)))
        )
        return float(of())

    first = examples.train_lm.make_state(args, examples.train_lm.architecture_of(args)).model
    assert first.config.vocab_size == 61 and examples.train(*options) == 0
    student = examples.train_lm.load_checkpoint(tmp_path / "run" / "checkpoint.ejx", args).model
    assert distance(student) < distance(first) / 4
    assert examples.train(*options, "--steps", 201, "--resume") == 0
    assert (tmp_path / "run" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


@pytest.mark.slow
def test_lora_trains_updates_alone_and_merges(examples, folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40, encoding="utf-8")
    options = ["--data", text, "--out-dir", tmp_path / "run", "--model", folder, *SMALL, "--lora", 2]
    assert examples.train(*options) == 0
    assert "tokens to train on" in capsys.readouterr().out
    args = examples.train_lm.parse([*map(str, options)])
    state = examples.train_lm.load_checkpoint(tmp_path / "run" / "checkpoint.ejx", args)
    before = ejx.models.from_pretrained(folder, dtype="float32")
    update = state.model.stacks[0][0].mixer.q_proj
    np.testing.assert_array_equal(update.base.weight, before.stacks[0][0].mixer.q_proj.weight)
    np.testing.assert_array_equal(state.model.embedding, before.embedding)
    assert float(jnp.max(jnp.abs(update.b))) > 0
    tokens = jnp.asarray([[5, 6, 7, 8]])
    merged = ejx.models.merge_lora(state.model)
    np.testing.assert_allclose(merged(tokens), state.model(tokens), atol=1e-4)
    assert float(jnp.max(jnp.abs(merged(tokens) - before(tokens)))) > 1e-3
    # The checkpoint goes on, and is served with its tokenizer beside it.
    assert examples.train(*options, "--steps", 4, "--resume") == 0
    assert "step 3 of 4" in capsys.readouterr().out
    checkpoint = tmp_path / "run" / "checkpoint.ejx"
    args = examples.train_lm.parse([*map(str, options), "--steps", "4"])
    merged = ejx.models.merge_lora(examples.train_lm.load_checkpoint(checkpoint, args).model)
    served = ["--checkpoint", checkpoint]
    check_served(examples, folder, tmp_path / "out.jsonl", served, merged, ["the quick"], capsys)
    # The folder has the last step in the published form, and is not written over while it is read.
    tuned = tmp_path / "run" / "tuned"
    np.testing.assert_allclose(ejx.models.from_pretrained(tuned)(tokens), merged(tokens), atol=1e-5)
    assert (tuned / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert examples.train(*options[:5], tuned, *SMALL) == 2
    assert "--out-dir: expected a folder for what is written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantise", "int8"], "--quantise: expected --lora with it"),
        (["--lora", "2", "--float8"], "--float8: expected none with --lora"),
        (["--lora", "2"], "--model: expected the folder of a published model beside --lora"),
        (["--lora", "-1"], "--lora: expected a rank from 0 on, received -1"),
        (["--model", "nowhere"], "'nowhere/config.json' is not there. Give the folder of a published model"),
        (["--model", "nowhere", "--mixer", "kda"], "--mixer: expected none beside --model"),
    ],
)
def test_what_does_not_fit_is_named(examples, tmp_path, capsys, options, message):
    assert examples.train("--out-dir", tmp_path, *SMALL, *options) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_tokenizer(examples, folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert examples.serve_lm.main(["--model", str(tmp_path), "--prompts", "-"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{")
    assert examples.serve_lm.main(["--model", str(tmp_path), "--prompts", str(tmp_path / "config.json")]) == 2
    assert "expected a tokenizer.json" in capsys.readouterr().err


def test_a_published_model_is_not_written_over(examples, folder, capsys):
    kept = (folder / "tokenizer.json").read_text()
    for options in (["--model", folder], ["--embed-dim", 32, "--num-layers", 1]):
        assert examples.train("--out-dir", folder, *SMALL, *options) == 2
        assert "--out-dir: expected a folder for what is written" in capsys.readouterr().err
    assert (folder / "tokenizer.json").read_text() == kept


def test_what_ends_a_text_is_kept_in_a_checkpoint(examples, folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    config = examples.train_lm.published_config(tmp_path)
    assert ejx.models.decoder_config(config).stop_tokens == (2, 7)
