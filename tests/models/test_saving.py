"""Models saved in their published form: read back bit for bit, under the names of `transformers`, and by `transformers` itself."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import ejkernel_eqx as ejx
from ejkernel_eqx.models.forms import ONLY_LIKE
from tests.models.cases import GOLDEN, model_type, tokens
from tests.models.test_published import error_of, folder_of

# One split and transposed form each: fused projections, rows by head, experts one by one, offset norms and recurrent layers.
CHEAP = ("phi3",)
LIKE = [kind for kind in GOLDEN if model_type(kind) in ONLY_LIKE]
ALONE = [kind for kind in GOLDEN if "text_config" not in GOLDEN[kind]["config"] and kind not in LIKE]
# Their experts and gates are stacked only after `transformers` has read them, and one expert has no router here.
STACKED = ("kimi_linear", "granitemoe", "granitemoehybrid", "gpt_neox", "gpt_oss", "minimax")


def made(kind: str, folder):
    """A model of a family, from a folder within this one."""
    (folder / "in").mkdir()
    return ejx.models.from_pretrained(folder_of(kind, folder / "in"), dtype="float32")


def equal(a, b) -> bool:
    leaves = [jax.tree.leaves(eqx.filter(model, eqx.is_array)) for model in (a, b)]
    return len(leaves[0]) == len(leaves[1]) and all(map(np.array_equal, *leaves))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in CHEAP else pytest.mark.slow) for kind in ALONE]
)
def test_a_model_is_read_back(kind, tmp_path):
    model = made(kind, tmp_path)
    ejx.models.save_pretrained(model, tmp_path / "out")
    assert equal(ejx.models.from_pretrained(tmp_path / "out"), model)
    names, expected = set(load_file(tmp_path / "out" / "model.safetensors")), set(GOLDEN[kind]["shapes"])
    if not any("experts" in name for name in expected) and kind.partition(" ")[0] not in STACKED:
        assert names == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
def test_transformers_reads_it(kind, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = made(kind, tmp_path)
    ejx.models.save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens(), dtype=torch.long), use_cache=False).logits.numpy()
    assert error_of(logits, GOLDEN[kind]) < 1e-5


@pytest.mark.slow
def test_shards_have_an_index_and_nothing_half_written_stays(tmp_path, monkeypatch):
    model = made("mistral", tmp_path)
    ejx.models.save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert equal(ejx.models.from_pretrained(tmp_path / "out"), model)
    with pytest.raises(ValueError, match="path: expected a folder that does not exist or is empty"):
        ejx.models.save_pretrained(model, tmp_path / "out")
    broken = eqx.tree_at(lambda m: m.norm.weight, model, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"norm.*\(32,\).*\(3,\)"):
        ejx.models.save_pretrained(broken, tmp_path / "broken")
    quantised = ejx.quantise(model, "int8")
    with pytest.raises(ValueError, match="QuantizedWeight"):
        ejx.models.save_pretrained(quantised, tmp_path / "broken")
    trained = ejx.with_float8_training(model, where=lambda path: "q_proj" in path)
    with pytest.raises(ValueError, match=r"save ejx\.with_float8_training\(model, False\)"):
        ejx.models.save_pretrained(trained, tmp_path / "broken")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIKE)
def test_a_form_that_only_a_folder_tells(kind, tmp_path):
    model = made(kind, tmp_path)
    with pytest.raises(ValueError, match=f"like: expected the folder.*{model_type(kind)}"):
        ejx.models.save_pretrained(model, tmp_path / "out")
    ejx.models.save_pretrained(model, tmp_path / "out", like=tmp_path / "in")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert set(before) == set(after)
    unused = 2 if kind == "opt" else 0  # the first positions of OPT, which no token has
    for name, x in before.items():
        rows = unused if "embed_positions" in name else 0
        np.testing.assert_array_equal(after[name][rows:], x[rows:])


def test_the_folder_that_a_model_is_like(tmp_path):
    """Its names, its tokenizer and the weights that the model does not have."""
    kind = "qwen2_vl_text"
    (tmp_path / "in").mkdir()
    more = {"visual.patch.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    folder_of(kind, tmp_path / "in", change=more)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    model = ejx.models.from_pretrained(tmp_path / "in", dtype="float32")
    with pytest.raises(ValueError, match="like: expected the folder"):
        ejx.models.save_pretrained(model, tmp_path / "out")
    tuned = eqx.tree_at(lambda m: m.embedding, model, model.embedding + 1)
    ejx.models.save_pretrained(tuned, tmp_path / "out", like=tmp_path / "in")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert set(before) == set(after)
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["model.language_model.embed_tokens.weight"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_updates_are_merged_or_saved_as_adapters(tmp_path):
    model = made("mistral", tmp_path)
    updated = ejx.models.add_lora(model, 2, key=jax.random.key(1))
    is_lora = lambda node: isinstance(node, ejx.models.LoRA)
    drawn = lambda node: eqx.tree_at(lambda m: m.b, node, jax.random.normal(jax.random.key(2), node.b.shape))
    updated = jax.tree.map(lambda node: drawn(node) if is_lora(node) else node, updated, is_leaf=is_lora)
    for name, saved in (("base", model), ("merged", updated)):
        ejx.models.save_pretrained(saved, tmp_path / name)
    ejx.models.save_pretrained(updated, tmp_path / "adapters", adapters=True)
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    arrays = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["r"] == 2 and len(config["target_modules"]) * 2 == len(arrays)
    for name in config["target_modules"]:  # as peft adds them
        a, b = (
            arrays.pop(f"base_model.model.{name}.lora_{letter}.weight").astype(np.float64) for letter in "AB"
        )
        expected = base[f"{name}.weight"] + config["lora_alpha"] / config["r"] * b @ a
        np.testing.assert_allclose(merged.pop(f"{name}.weight"), expected, rtol=1e-5, atol=1e-5)
    assert not arrays and all(np.array_equal(x, base[name]) for name, x in merged.items())
    fused = made("phi3", tmp_path / "in")
    with pytest.raises(ValueError, match=r"published one by one, received one of \.mixer\.q_proj"):
        ejx.models.save_pretrained(
            ejx.models.add_lora(fused, 2, key=jax.random.key(1)), tmp_path / "no", adapters=True
        )
