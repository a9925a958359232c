"""The arguments of `MultiHeadLatentAttention` for a layer of a published model."""

from typing import Any

from ..rotary import RotaryEmbedding
from .configs import Config, layer_type, read_model, refuse, take

_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# What `transformers` takes where the configuration says nothing. A `q_lora_rank` of null means none.
_DEFAULTS: dict[str, dict[str, Any]] = {
    kind: {**_SIZES, "q_lora_rank": 1536, "attention_bias": False} for kind in ("deepseek_v2", "deepseek_v3")
}


def latent_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `MultiHeadLatentAttention`, but for `key`, for one layer of a published model. Dropout is left out.

    **Arguments:**

    - `config`: the dictionary of its `config.json`.
    - `layer_index`: which layer, from 0.

    **Returns:** a dictionary. Raises `ValueError` for a `model_type` or an option that is not known here; `CheckpointError` for entries that are
    missing, of another type or out of bounds.
    """
    config = read_model(config, _DEFAULTS, "MultiHeadLatentAttention")
    layer_type(config, layer_index, lambda index: "")  # which checks the index
    heads = take(config, "num_attention_heads")
    refuse(config, num_key_value_heads=heads)
    return {
        "embed_dim": take(config, "hidden_size"),
        "num_heads": heads,
        "q_lora_rank": config["q_lora_rank"],
        **{name: take(config, name) for name in _SIZES},
        "use_bias": bool(config["attention_bias"]),
        "rope": RotaryEmbedding.from_config(config, interleaved=bool(config.get("rope_interleave", True))),
    }
