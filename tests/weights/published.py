"""Small random models of `transformers`: one layer of each, its weights, and what it makes of an input."""

import dataclasses
import functools
import importlib
import zlib
from typing import Any

import numpy as np

from ejkernel_eqx import nn

_SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
_HEADS = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_WIDE = {**_HEADS, "head_dim": 8}
_WINDOW = {**_WIDE, "sliding_window": 4}
_EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2}
_NEXT = {**_WIDE, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_NEXT |= {"shared_expert_intermediate_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MIXTURE = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 12}
_LOCAL_MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 4}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_DEEPSEEK = {**_HEADS, **_LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 12, "q_lora_rank": 8}
_DEEPSEEK |= {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4}
_DEEPSEEK |= {"topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
_MAMBA = {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
_KIMI = {**_HEADS, **_LATENT, "num_experts": 2, "num_experts_per_token": 1, "moe_intermediate_size": 8}
_KIMI |= {"pad_token_id": 0, "linear_head_dim": 8, "linear_num_heads": 2}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 16}
_QWEN2_WINDOW = {**_HEADS, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
_GPT2 = {"vocab_size": 32, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64}
_GPT2 |= {"scale_attn_by_inverse_layer_idx": True}
_QWEN2_MOE = {**_HEADS, **_MIXTURE, "shared_expert_intermediate_size": 10, "mlp_only_layers": [0]}
_QWEN3_MOE = {**_WIDE, **_MIXTURE, "norm_topk_prob": True, "decoder_sparse_step": 2}
TOKENS = 11


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer of a model: what is built of it here, and of which configuration there."""

    layer: Any
    model_type: str
    options: dict[str, Any]
    layer_index: int = 0


_attention = functools.partial(Case, nn.MultiHeadAttention)
_experts = functools.partial(Case, nn.MixtureOfExperts)
CASES = {
    "llama": _attention("llama", _HEADS),
    "llama3": _attention("llama", {**_WIDE, "attention_bias": True, "rope_parameters": _LLAMA3}),
    "mistral": _attention("mistral", _WINDOW),
    "qwen2": _attention("qwen2", _HEADS),
    "qwen2_window": _attention("qwen2", _QWEN2_WINDOW, 1),
    "qwen3": _attention("qwen3", _WIDE),
    "gemma": _attention("gemma", _WIDE),
    "gemma2_window": _attention("gemma2", {**_WINDOW, "query_pre_attn_scalar": 5}),
    "gemma2": _attention("gemma2", {**_WINDOW, "attn_logit_softcapping": 1.0}, 1),
    "gemma3_window": _attention("gemma3_text", {**_WINDOW, "query_pre_attn_scalar": 5}),
    "gemma3": _attention("gemma3_text", {**_WINDOW, "num_hidden_layers": 6}, 5),
    "gpt_oss_window": _attention("gpt_oss", {**_WINDOW, **_EXPERTS}),
    "gpt_oss": _attention("gpt_oss", {**_WIDE, **_EXPERTS, "rope_parameters": _YARN}, 1),
    "olmo2": _attention("olmo2", _HEADS),
    "phi3": _attention("phi3", {**_HEADS, "sliding_window": 4, "pad_token_id": 0}),
    "gpt_neox": _attention("gpt_neox", {**_SIZES, "num_attention_heads": 2, "max_position_embeddings": 64}),
    "gpt2": _attention("gpt2", _GPT2, 1),
    "qwen3_next_attention": _attention("qwen3_next", _NEXT, 3),
    "minimax_attention": _attention("minimax", {**_WIDE, **_EXPERTS}),
    "mixtral_experts": _experts("mixtral", {**_HEADS, **_LOCAL_MIXTURE}),
    "qwen2_moe_experts": _experts("qwen2_moe", _QWEN2_MOE, 1),
    "qwen3_moe_experts": _experts("qwen3_moe", _QWEN3_MOE, 1),
    "olmoe_experts": _experts("olmoe", {**_HEADS, **_MIXTURE}),
    "gpt_oss_experts": _experts("gpt_oss", {**_WIDE, **_LOCAL_MIXTURE}),
    "minimax_experts": _experts("minimax", {**_WIDE, **_LOCAL_MIXTURE, "block_size": 8}),
    "qwen3_next_experts": _experts(
        "qwen3_next", {**_NEXT, **_MIXTURE, "shared_expert_intermediate_size": 10}
    ),
    "deepseek_v2_experts": _experts("deepseek_v2", _DEEPSEEK, 1),
    "deepseek_v2_groups": _experts("deepseek_v2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}, 1),
    "deepseek_v3_experts": _experts("deepseek_v3", _DEEPSEEK, 1),
    "mamba": Case(nn.Mamba1Mixer, "mamba", {**_MAMBA, "use_bias": True}),
    "falcon_mamba": Case(nn.Mamba1Mixer, "falcon_mamba", {**_MAMBA, "intermediate_size": 24}),
    "mamba2": Case(nn.Mamba2Mixer, "mamba2", {**_MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 2}),
    "qwen3_next": Case(nn.GatedDeltaNet, "qwen3_next", _NEXT),
    "qwen3_5": Case(nn.GatedDeltaNet, "qwen3_5_text", _NEXT),
    "qwen3_5_attention": _attention("qwen3_5_text", _NEXT, 3),
    "minimax": Case(nn.LightningAttention, "minimax", {**_WIDE, **_EXPERTS, "block_size": 8}, 1),
    "kimi_linear": Case(nn.KimiDeltaAttention, "kimi_linear", _KIMI),
}


def array(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random numbers that a name, a shape and a seed decide."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    scale = 0.4 if len(shape) > 1 else 0.2
    return (scale * rng.standard_normal(shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Published:
    """One layer as `transformers` has it."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Of its state dict, the names without the layer's prefix."""
    x: np.ndarray
    y: np.ndarray

    def state_dict(self, prefix: str = "") -> dict[str, np.ndarray]:
        return {prefix + name: array(name, shape) for name, shape in self.shapes.items()}


@functools.cache
def live(name: str) -> Published:
    """The layer built and run by `transformers`, in float32."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, **case.options)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval().to(torch.float32)
    prefix, module = _layer(model, case)
    biases = (pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias"))
    with torch.no_grad():
        for full, value in (*model.named_parameters(), *biases):
            value.copy_(torch.from_numpy(array(full.removeprefix(prefix), tuple(value.shape))))
    seen: dict[str, np.ndarray] = {}

    def note(_, args: Any, kwargs: Any, out: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        seen.update(x=x.numpy(), y=(out[0] if isinstance(out, tuple) else out).numpy())

    module.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(torch.from_numpy(np.random.default_rng(0).integers(0, 32, (1, TOKENS))), use_cache=False)
    shapes = {
        full.removeprefix(prefix): tuple(value.shape)
        for full, value in model.state_dict().items()
        if full.startswith(prefix)
    }
    return Published(config.to_dict(), shapes, seen["x"], seen["y"])


def _layer(model: Any, case: Case) -> tuple[str, Any]:
    """The mixer of a layer, or its experts, and the prefix of its names."""
    mixers = ("self_attn", "linear_attn", "attention", "attn", "mixer")
    names = ("mlp",) if case.layer is nn.MixtureOfExperts else mixers
    for full, module in model.named_modules():
        parts = full.split(".")
        if len(parts) == 3 and parts[1] == str(case.layer_index) and parts[2] in names:
            return f"{full}.", module
    raise AssertionError(f"no such part in layer {case.layer_index}")
