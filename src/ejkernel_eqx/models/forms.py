"""The published forms of the families, for `save_pretrained`: the names of arrays that identify each form."""

from typing import NamedTuple

from .config import DecoderConfig, MoEConfig

_ATTENTION = ("attention", "latent_attention")


class Form(NamedTuple):
    """Names of some arrays, separated by spaces. From them the reader knows the names of all. Without any it takes the names of Llama."""

    outer: str = ""
    layer: str = ""
    """In every layer."""
    recurrent: str = ""
    """Besides, in layers without attention."""
    experts: str = ""
    """Besides, in layers with a mixture of experts."""

    def names(self, config: DecoderConfig) -> list[str]:
        """The names for all layers."""
        names = self.outer.split()
        root = next((name.partition(".")[0] for name in names if name.count(".") > 1), "model")
        for index, layer in enumerate(config.layers):
            here = [self.layer, "" if layer.mixer in _ATTENTION else self.recurrent]
            here.append(self.experts if isinstance(layer.mlp, MoEConfig) else "")
            names += [f"{root}.layers.{index}.{name}" for name in " ".join(here).split()]
        return names


_W1 = "block_sparse_moe.gate.weight block_sparse_moe.experts.0.w1.weight"
_INPUT_LINEAR = "block_sparse_moe.input_linear.weight block_sparse_moe.router.layer.weight"
_BACKBONE = Form("backbone.embeddings.weight backbone.norm_f.weight", "mixer.A_log norm.weight")
_SHARED = Form(experts="mlp.shared_experts.gate_proj.weight")
_NEOX = "attention.query_key_value.weight attention.dense.weight mlp.dense_h_to_4h.weight mlp.dense_4h_to_h.weight"
_GPT_OSS = "mlp.router.weight mlp.experts.gate_up_proj mlp.experts.gate_up_proj_bias"

FORMS: dict[str, Form] = {
    "apertus": Form(layer="attention_layernorm.weight feedforward_layernorm.weight"),
    "deepseek_v2": _SHARED,
    "deepseek_v3": _SHARED,
    "falcon_mamba": _BACKBONE,
    "glm4": Form(layer="post_self_attn_layernorm.weight mlp.gate_up_proj.weight"),
    "glm4_moe": _SHARED,
    "glm4_moe_lite": _SHARED,
    "gpt_neox": Form(
        "gpt_neox.embed_in.weight gpt_neox.final_layer_norm.weight embed_out.weight", layer=_NEOX
    ),
    "gpt_oss": Form(layer=_GPT_OSS),
    "granitemoe": Form(experts=_INPUT_LINEAR),
    "granitemoehybrid": Form("", "shared_mlp.input_linear.weight", "mamba.A_log", _INPUT_LINEAR),
    "llama4_text": Form(
        layer="feed_forward.router.weight", experts="feed_forward.shared_expert.gate_proj.weight"
    ),
    "mamba": _BACKBONE,
    "mamba2": _BACKBONE,
    "minimax": Form(layer=_W1),
    "minimax_m2": Form(experts=f"{_W1} block_sparse_moe.e_score_correction_bias"),
    "mixtral": Form(experts=_W1),
    "phi": Form("model.final_layernorm.weight", "self_attn.dense.weight mlp.fc1.weight mlp.fc2.weight"),
    "phi3": Form(layer="self_attn.qkv_proj.weight mlp.gate_up_proj.weight"),
    "qwen3_5_moe_text": Form(recurrent="linear_attn.in_proj_qkv.weight"),
    "qwen3_5_text": Form(recurrent="linear_attn.in_proj_qkv.weight"),
    "qwen3_next": Form(recurrent="linear_attn.A_log"),
    "starcoder2": Form(layer="mlp.c_fc.weight mlp.c_proj.weight"),
}
"""By `model_type`. A family that is not here has the names of Llama."""
ONLY_LIKE = tuple(
    (
        "bamba dots1 falcon falcon_h1 gemma4_text gpt2 jamba kimi_linear lfm2 lfm2_moe nemotron_h "
        "olmo_hybrid opt zamba2"
    ).split()
)
"""Families whose published names or shapes are taken from a published file alone."""
