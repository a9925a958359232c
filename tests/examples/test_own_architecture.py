"""The example of an architecture that no family reads: its logits are those of `transformers` for the same weights, and the guide shows it."""

import importlib
import json
import pathlib
import sys

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.cases import GOLDEN, tokens
from tests.models.test_published import error_of, weights_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def example(examples):
    yield importlib.import_module("own_architecture")
    del sys.modules["own_architecture"]


@pytest.mark.slow
def test_the_same_weights_under_other_names(example, tmp_path):
    config = GOLDEN["mistral"]["config"]
    names = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    names |= {
        "n_kv_heads": "num_key_value_heads",
        "hidden_dim": "intermediate_size",
        "norm_eps": "rms_norm_eps",
    }
    same = ("vocab_size", "head_dim", "sliding_window")
    params = {theirs: config[ours] for theirs, ours in [*names.items(), *zip(same, same)]}
    params["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (tmp_path / "params.json").write_text(json.dumps(params))
    inner, outer = (
        {ours: theirs for theirs, ours in part.items()} for part in (example.INNER, example.OUTER)
    )
    arrays = {}
    for name, array in weights_of("mistral").items():
        stem, kind = name.rsplit(".", 1)
        if stem in outer:
            arrays[f"{outer[stem]}.{kind}"] = array
            continue
        _, _, index, part = stem.split(".", 3)
        if part.endswith(("q_proj", "k_proj")):  # a pair of features side by side
            halves = array.reshape(-1, 2, config["head_dim"] // 2, array.shape[-1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        arrays[f"layers.{index}.{inner[part]}.{kind}"] = array
    save_file(arrays, tmp_path / "consolidated.safetensors")
    logits = eqx.filter_jit(example.read(tmp_path))(jnp.asarray(tokens()))
    assert error_of(logits, GOLDEN["mistral"]) < 1e-5


def test_the_guide_shows_it():
    code = (ROOT / "examples" / "own_architecture.py").read_text(encoding="utf-8")
    shown = code.partition('"""\n\n')[2].partition("\n\nif __name__")[0].strip()
    assert shown in (ROOT / "docs" / "guides" / "models.md").read_text(encoding="utf-8")
    assert sum(bool(line) for line in shown.splitlines() if not line.startswith(("import", "from"))) <= 30
