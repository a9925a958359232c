"""The models that `train_lm.py` trains: decoders of bytes by the names of their layers, or published ones."""

import dataclasses
import pathlib
from typing import Any

import equinox as eqx
import jax
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, MoEConfig
from ejkernel_eqx.models.pretrained import read_config

VOCABULARY = 256  # bytes
NUM_EXPERTS = 8


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What must match between a checkpoint and a run; stored in its header."""

    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mixer: str = "attention"
    mlp: str = "dense"
    vocab_size: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    def config(self) -> DecoderConfig:
        """Layers of a mixer and a SwiGLU, or experts, each preceded by a norm. The pattern of `mixer` repeats."""
        hidden = -(-8 * self.embed_dim // 3 // 32) * 32
        mlp: Any = MLPConfig(hidden)
        if self.mlp != "dense":  # the two experts of a token have as many features together
            mlp = MoEConfig({"hidden_dim": hidden // 2, "num_experts": NUM_EXPERTS, "top_k": 2})
        layers = []
        for name in self.mixer.split(","):
            mixer, options = MIXERS[name]
            layers.append(LayerConfig(mixer, options(self), mlp))
        repeats = self.num_layers // len(layers)
        return DecoderConfig(self.vocab_size, self.embed_dim, (*layers,) * repeats, norm_eps=1e-5)


def _heads(arch: Architecture) -> dict[str, Any]:
    return {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads}


def _rotated(arch: Architecture) -> dict[str, Any]:
    return _heads(arch) | {"rope": ejx.nn.RotaryEmbedding(arch.head_dim)}


def _latent(arch: Architecture) -> dict[str, Any]:
    """Multi-head latent attention, in DeepSeek's proportions."""
    dim = arch.head_dim
    sizes = {"kv_lora_rank": 4 * dim, "qk_nope_head_dim": dim, "qk_rope_head_dim": 2 * -(-dim // 4)}
    return {"num_heads": arch.num_heads} | sizes


def _delta(arch: Architecture) -> dict[str, Any]:
    return {"num_k_heads": arch.num_kv_heads, "num_v_heads": arch.num_heads, "head_dim": arch.head_dim}


# By the name of `--mixer`: the name in `ejx.models.MIXERS`, and the arguments of its layer in `ejx.nn`.
MIXERS = {
    "attention": ("attention", _rotated),
    "mla": ("latent_attention", _latent),
    "nsa": ("native_sparse_attention", _rotated),
    "mamba1": ("mamba1", lambda arch: {}),
    "mamba2": ("mamba2", lambda arch: {"head_dim": arch.head_dim, "state_size": 2 * arch.head_dim}),
    "gla": ("gated_linear_attention", _heads),
    "lightning": ("lightning_attention", lambda arch: {"num_heads": arch.num_heads}),
    "kda": (
        "kimi_delta_attention",
        lambda arch: {"num_heads": arch.num_heads, "head_dim": arch.head_dim},
    ),
    "gated_deltanet": ("gated_delta_net", _delta),
}


def make_model(arch: Architecture, platform: str | None = None, *, key: Array, **options: Any) -> Decoder:
    """The decoder, with random weights; `options` are `scan_layers` and `remat`."""
    return Decoder(arch.config(), platform=platform, key=key, **options)


def cast(model: Decoder, dtype: Any) -> Decoder:
    """The model with floating-point arrays in `dtype`, except the rates of recurrent layers and the routers of experts; the optimiser keeps the
    float32 ones."""

    def one(path, x):
        names = [getattr(part, "name", None) for part in path]
        stays = names[-1] in ("A_log", "D", "dt_bias") or "gate" in names
        return x.astype(dtype) if eqx.is_inexact_array(x) and not stays else x

    return jax.tree_util.tree_map_with_path(one, model)


def published_config(folder: pathlib.Path) -> dict[str, Any]:
    """The configuration of a published model, with its stop tokens, as `from_pretrained` reads them."""
    config = dict(read_config(folder / "config.json"))
    if (beside := folder / "generation_config.json").is_file():
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        if (stop := read_config(beside).get("eos_token_id")) is not None:
            text["eos_token_id"] = stop
    return config
