"""Your own architecture: files that no family of the package reads, as a `Decoder`.

Here they are those of Mistral 7B as Mistral itself publishes it. They have other entries, other names, and a rotation of neighbouring features.

python examples/own_architecture.py FOLDER  # with params.json and consolidated.safetensors
"""

import json
import pathlib
import sys

import equinox as eqx
import jax
import safetensors.numpy

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig

OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
INNER = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
INNER |= {f"attention.w{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"}
INNER |= {f"feed_forward.w{i + 1}": f"mlp.{name}_proj" for i, name in enumerate(("gate", "down", "up"))}


def described(params: dict) -> DecoderConfig:
    rope = ejx.nn.RotaryEmbedding(params["head_dim"], theta=params.get("rope_theta"), interleaved=True)
    attention = {"num_heads": params["n_heads"], "num_kv_heads": params["n_kv_heads"], "rope": rope}
    attention |= {"head_dim": params["head_dim"], "sliding_window": params.get("sliding_window")}
    layer = LayerConfig("attention", attention, MLPConfig(params["hidden_dim"]), norms="pre")
    layers = (layer,) * params["n_layers"]
    return DecoderConfig(params["vocab_size"], params["dim"], layers, params["norm_eps"])


def renamed(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("layers."):
        return f"{OUTER[stem]}.{kind}"
    _, index, part = stem.split(".", 2)
    return f"model.layers.{index}.{INNER[part]}.{kind}"


def read(folder: pathlib.Path) -> Decoder:
    config = described(json.loads((folder / "params.json").read_text()))
    arrays = safetensors.numpy.load_file(folder / "consolidated.safetensors")
    like = eqx.filter_eval_shape(lambda: Decoder(config, key=jax.random.key(0)))
    return ejx.load_published(like, {renamed(name): array for name, array in arrays.items()})


if __name__ == "__main__":
    print(ejx.models.generate(read(pathlib.Path(sys.argv[1])), [[1]], max_new_tokens=8).texts())
