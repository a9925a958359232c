"""Reads the arguments of `MultiHeadLatentAttention` from the configuration of a published model."""

from typing import Any

from ..rotary import RotaryEmbedding
from .configs import Config, layer_type, read_model, refuse, take, taken


def latent_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `MultiHeadLatentAttention` for one layer of a published model. Dropout is not read.

    **Arguments:**

    - `config`: the content of its `config.json`.
    - `layer_index`: the index of the layer, from 0.

    **Returns:** a dictionary of all arguments except `key`.

    **Raises:** `ValueError` for a `model_type` or an option that is not supported. `CheckpointError`, which is a `ValueError`, for entries that are
    missing, of another type or out of bounds.
    """
    config = read_model(config, "MultiHeadLatentAttention")
    layer_type(config, layer_index, lambda *_: "")  # which checks the index
    heads, has_rope = take(config, "num_attention_heads"), config["model_type"] != "kimi_linear"
    is_interleaved = bool(config.get("rope_interleave", True))
    refuse(config, num_key_value_heads=heads, mla_use_nope=not has_rope)
    return {
        **taken(config, "embed_dim=hidden_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
        "num_heads": heads,
        "q_lora_rank": config.get("q_lora_rank"),  # null means none
        "use_bias": bool(config["attention_bias"]),
        "rope": has_rope and RotaryEmbedding.from_config(config, interleaved=is_interleaved),
    }
