"""Small random models of every published kind: configurations as in `config.json`, weights drawn by name, tokens."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}
_GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LOCAL_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ONE_EXPERT = {"num_local_experts": 1, "num_experts_per_tok": 1}
_GPT_OSS = (
    _SMALL
    | {"head_dim": 16, "sliding_window": 5, "layer_types": _TYPES}
    | {"rope_parameters": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 150000.0}}
)
_NEXT = (
    _SMALL
    | {"head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
)
_MINIMAX = (
    _SMALL
    | {"head_dim": 8, "block_size": 4}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"full_attn_alpha_factor": 1.5, "linear_attn_alpha_factor": 2.0}
    | {"mlp_alpha_factor": 1.25, "mlp_beta_factor": 0.5}
)

_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
_DEEPSEEK = (
    _SMALL
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    | {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
    }
)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SMALL
    | {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 16, "rope_theta": 500000.0}}
    | {"attention_bias": True, "mlp_bias": True},
    "mistral": _SMALL | {"sliding_window": 5, "head_dim": 16},
    "qwen2": _SMALL | {"tie_word_embeddings": True},
    "qwen3": _SMALL | {"head_dim": 12},
    "phi3": _SMALL
    | {"max_position_embeddings": 32, "original_max_position_embeddings": 8}
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        }
    },
    "gemma": _SMALL | {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": _SMALL
    | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": _SMALL
    | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "layer_types": _TYPES}
    | {"rope_parameters": {"sliding_attention": _LOCAL, "full_attention": _GLOBAL}},
    "gpt_oss": _GPT_OSS | _ONE_EXPERT,
    "olmo2": _SMALL,
    "mamba": _MAMBA | {"conv_kernel": 4, "expand": 2, "time_step_rank": 4},
    "falcon_mamba": _MAMBA | {"conv_kernel": 4, "expand": 2, "time_step_rank": 4},
    "mamba2": _MAMBA | {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "qwen3_next": _NEXT | {"mlp_only_layers": [0, 1, 2, 3], "num_experts": 2},
    "minimax": _MINIMAX | _ONE_EXPERT,
    "mixtral": _SMALL | _LOCAL_MIXTURE | {"sliding_window": 5},
    "olmoe": _SMALL | _MIXTURE | {"norm_topk_prob": True},
    "qwen2_moe": _SMALL
    | _MIXTURE
    | {"shared_expert_intermediate_size": 24, "num_hidden_layers": 4, "decoder_sparse_step": 2}
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "qwen3_moe": _SMALL
    | _MIXTURE
    | {"head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [1]}
    | {"use_sliding_window": True, "sliding_window": 6},
    "qwen3_next with experts": _NEXT | _MIXTURE | {"shared_expert_intermediate_size": 24},
    "gpt_oss with experts": _GPT_OSS | _LOCAL_MIXTURE,
    "deepseek_v2": _DEEPSEEK
    | {"q_lora_rank": None, "n_shared_experts": 2}
    | {"rope_parameters": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v2 with groups": _DEEPSEEK
    | {"q_lora_rank": 12, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
    | {"routed_scaling_factor": 2.0, "attention_bias": True},
    "deepseek_v3": _DEEPSEEK
    | {"q_lora_rank": 12, "n_group": 3, "topk_group": 2}
    | {"rope_parameters": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    "minimax with experts": _MINIMAX | _LOCAL_MIXTURE,
}


def model_type(kind: str) -> str:
    return kind.partition(" ")[0]


def drawn(shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float32 weights of these names and shapes, each from its own name."""

    def one(name: str, shape: Any) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(name.encode()))
        value = random.standard_normal(tuple(shape)).astype(np.float32)
        if "norm" in name:
            return (0.2 * value + (0.0 if "bias" in name else 1.0)).astype(np.float32)
        if name.endswith("A_log"):
            return np.log(1 + np.abs(value)).astype(np.float32)
        return (0.3 * value).astype(np.float32)

    return {name: one(name, shape) for name, shape in shapes.items()}


def tokens(rows: int = 2, length: int = 13) -> np.ndarray:
    return np.random.default_rng(7).integers(3, 61, (rows, length)).astype(np.int32)
