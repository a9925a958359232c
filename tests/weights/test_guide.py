"""The guide's program runs as it stands, in a folder with a small model."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

DOCS = pathlib.Path(__file__).parents[2] / "docs"
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
SHAPES = {
    "input_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (32, 16),
    "self_attn.k_proj.weight": (16, 16),
    "self_attn.v_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "post_attention_layernorm.weight": (16,),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}


@pytest.mark.slow
def test_guide(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arrays = {f"model.layers.1.{name}": np.full(shape, 0.1, np.float32) for name, shape in SHAPES.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    text = (DOCS / "guides" / "weights.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    names = {"__name__": "guide"}
    with jax.numpy_rank_promotion("allow"):
        exec(compile(program, "weights.md", "exec"), names)
    assert "nothing takes its 'model.layers.1.self_attn.k_norm.weight'" in capsys.readouterr().out
    filled: object = names["filled"]
    assert {str(x.dtype) for x in jax.tree.leaves(filled) if hasattr(x, "dtype")} == {"bfloat16"}
