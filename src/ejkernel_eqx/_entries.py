"""The entries of a `config.json`: the type and the bounds of each, in one table, checked where an entry is read."""

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ._errors import CheckpointError

_MOST_LETTERS, _MOST_ITEMS = 200, 4096


class _Kind(NamedTuple):
    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda x: x


def _integers(least: int, most: int) -> _Kind:
    is_whole = lambda x: isinstance(x, int | np.integer) and not isinstance(x, bool)
    return _Kind(f"an integer from {least} to {most}", lambda x: is_whole(x) and least <= x <= most, int)


def _numbers(least: float, most: float) -> _Kind:
    # NaN is in no range.
    is_number = lambda x: isinstance(x, int | float | np.number) and not isinstance(x, bool)
    return _Kind(
        f"a number from {least:g} to {most:g}", lambda x: is_number(x) and bool(least <= x <= most), float
    )


def _lists(of: _Kind, count: int | None = None) -> _Kind:
    right = lambda n: n == count if count else n <= _MOST_ITEMS
    return _Kind(
        f"a list of {count or f'at most {_MOST_ITEMS}'}, each {of.expected}",
        lambda x: isinstance(x, list | tuple) and right(len(x)) and all(map(of.fits, x)),
    )


def _either(*kinds: _Kind) -> _Kind:
    return _Kind(" or ".join(kind.expected for kind in kinds), lambda x: any(kind.fits(x) for kind in kinds))


_TEXT = _Kind(
    f"text of at most {_MOST_LETTERS} letters", lambda x: isinstance(x, str) and len(x) <= _MOST_LETTERS
)
_AUTO = _Kind("'auto'", lambda x: isinstance(x, str) and x == "auto")
_FLAG = _Kind("true or false", lambda x: isinstance(x, bool))
_TABLE = _Kind(
    f"an object of at most {_MOST_ITEMS} entries",
    lambda x: isinstance(x, Mapping) and len(x) <= _MOST_ITEMS and all(map(_TEXT.fits, x)),
)
_LAYERS = _integers(1, 1024)
_INDEX = _integers(0, 2**20)
_SIZE = _integers(1, 2**20)
_COUNT = _integers(0, 2**20)
_LENGTH = _integers(2, 2**40)  # LongRoPE divides by its logarithm
_TOKEN = _integers(0, 2**31 - 1)
_NUMBER = _numbers(-1e30, 1e30)
_POSITIVE = _numbers(1e-30, 1e30)
_UP_FROM_ZERO = _numbers(0.0, 1e30)
_THETA = _numbers(1.001, 1e30)  # YaRN divides by its logarithm

_NAMES: tuple[tuple[_Kind, str], ...] = (
    (_LAYERS, "num_hidden_layers n_layer"),
    (_integers(1, 2**24), "vocab_size vocab_size_per_layer_input"),
    (
        _SIZE,
        "hidden_size n_embd intermediate_size n_inner ffn_dim ffn_hidden_size word_embed_proj_dim num_attention_heads n_head num_key_value_heads "
        "num_global_key_value_heads num_kv_heads num_heads num_householder head_dim global_head_dim rotary_dim kv_lora_rank q_lora_rank "
        "qk_nope_head_dim qk_rope_head_dim v_head_dim state_size conv_kernel conv_size n_groups "
        "short_conv_kernel_size linear_num_key_heads linear_num_value_heads linear_key_head_dim "
        "linear_value_head_dim linear_conv_kernel_dim linear_head_dim linear_num_heads "
        "moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok top_k_experts default_num_experts "
        "attention_chunk_size floor_scale interleave_moe_layer_step intermediate_size_mlp "
        "n_mamba_heads mamba_ngroups num_mem_blocks adapter_rank "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_d_ssm mamba_num_heads mamba_head_dim "
        "ssm_state_size moe_latent_size moe_shared_expert_intermediate_size conv_L_cache block_multiple_of block_ff_dim "
        "attn_layer_period expert_layer_period local_attention global_attn_every_n_layers "
        "proj_low_rank_dim gate_low_rank_dim decay_low_rank_dim a_low_rank_dim v_low_rank_dim "
        "n_group topk_group full_attention_interval sliding_window_pattern no_rope_layer_interval",
    ),
    (
        _COUNT,
        "num_experts num_local_experts n_routed_experts n_shared_experts decoder_sparse_step "
        "num_ln_in_parallel_attn first_k_dense_replace moe_layer_freq max_window_layers num_nextn_predict_layers "
        "attn_layer_offset expert_layer_offset num_dense_layers type_vocab_size "
        "num_kv_shared_layers hidden_size_per_layer_input shared_intermediate_size",
    ),
    (_integers(1, 2**40), "sliding_window"),
    (_either(_SIZE, _lists(_SIZE)), "value_dim"),
    (_either(_SIZE, _AUTO), "time_step_rank mamba_d_head mamba_dt_rank"),
    (_LENGTH, "max_position_embeddings original_max_position_embeddings n_positions"),
    (_either(_TOKEN, _lists(_TOKEN)), "eos_token_id"),
    (_TOKEN, "pad_token_id"),
    (
        _lists(_INDEX),
        "attn_layer_indices full_attn_idxs mlp_only_layers kda_layers layers mrope_section no_rope_layers moe_layers",
    ),
    (
        _lists(_TEXT),
        "layers_block_type layer_types mlp_layer_types modules_to_not_convert ignored_layers ignore targets",
    ),
    (
        _TEXT,
        "mlp_hidden_act mamba_hidden_act hybrid_override_pattern activation activation_function "
        "model_type hidden_act hidden_activation dtype torch_dtype rope_type type topk_method "
        "scoring_func feature_map quant_method fmt version format checkpoint_format pack_dtype strategy "
        "quantization_status position_embedding_type path pooling_mode",
    ),
    (
        _FLAG,
        "is_decoder norm_bias pooling_mode_cls_token pooling_mode_mean_tokens pooling_mode_max_tokens pooling_mode_lasttoken "
        "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens "
        "use_mem_rope use_shared_attention_adapter use_long_context add_bias_linear "
        "mamba_rms_norm mamba_norm_before_gate projectors_bias conv_bias use_expert_bias tie_embedding "
        "block_auto_adjust_ff_dim linear_allow_neg_eigval allow_neg_eigval use_forget_gate "
        "use_parallel_residual use_double_wide_mlp new_decoder_architecture multi_query parallel_attn alibi bias use_qkv_bias "
        "do_layer_norm_before _remove_final_layer_norm enable_bias layer_norm_elementwise_affine add_cross_attention "
        "mamba_conv_bias mamba_proj_bias qk_layernorm attention_k_eq_v enable_moe_block mla_use_nope "
        "attention_bias attention_out_bias mlp_bias qkv_bias use_bias use_qk_norm use_conv_bias tie_word_embeddings use_sliding_window "
        "attn_output_gate rope_interleave scale_attn_weights "
        "scale_attn_by_inverse_layer_idx norm_topk_prob truncate use_short_conv use_output_gate "
        "elementwise_affine use_gk use_gv mrope_interleaved zero_point sym desc_act symmetric is_marlin_format",
    ),
    (_TABLE, "text_config per_layer_config linear_attn_config attn rope_scaling rope_parameters"),
    (_TABLE, "quantization_config config_groups weights sparsity_config transform_config"),
    (_integers(1, 64), "bits num_bits"),
    (_either(_integers(-1, -1), _SIZE), "group_size"),
    (_lists(_SIZE, 2), "weight_block_size block_structure"),
    (_either(_FLAG, _TABLE, _TEXT), "dynamic"),
    (_either(_FLAG, _COUNT), "attn_temperature_tuning"),
    (_either(_FLAG, _TEXT), "use_bidirectional_attention"),
    (
        _numbers(0.0, 1.0),
        "rms_norm_eps layer_norm_epsilon norm_eps mixer_rms_eps layer_norm_eps norm_epsilon",
    ),
    (_THETA, "rope_theta global_rope_theta rotary_emb_base rope_local_base_freq local_rope_theta"),
    (_numbers(1e-6, 1.0), "partial_rotary_factor rotary_pct"),
    (
        _POSITIVE,
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping clip_qkv factor "
        "attention_factor beta_fast beta_slow low_freq_factor high_freq_factor short_mscale long_mscale "
        "expand mamba_expand expand_k expand_v hidden_ratio routed_scaling_factor swiglu_limit swiglu_alpha embedding_multiplier "
        "block_ffn_dim_multiplier key_multiplier lm_head_multiplier attention_in_multiplier attention_out_multiplier "
        "ssm_in_multiplier ssm_out_multiplier "
        "logits_scaling logit_scale residual_multiplier attention_multiplier",
    ),
    (_lists(_POSITIVE, 2), "mlp_multipliers"),
    (_lists(_POSITIVE, 5), "ssm_multipliers"),
    (_UP_FROM_ZERO, "time_step_min mamba_dt_min mscale mscale_all_dim llama_4_scaling_beta attn_scale"),
    (_lists(_POSITIVE), "short_factor long_factor"),
    (_lists(_numbers(0.0, math.inf), 2), "time_step_limit"),
    (
        _NUMBER,
        "clamp_min full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor "
        "linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor",
    ),
)
FIELDS = {name: kind for kind, names in _NAMES for name in names.split()}
"""Every entry that is read anywhere, also within another, such as `factor` in `rope_scaling`."""

# Numbers that are computed with; elsewhere null says that there is none.
_NEVER_NULL = frozenset(
    "local_attention global_attn_every_n_layers "
    "max_window_layers sliding_window_pattern full_attention_interval routed_scaling_factor swiglu_limit swiglu_alpha "
    "no_rope_layer_interval embedding_multiplier logits_scaling logit_scale residual_multiplier attention_multiplier "
    "attention_in_multiplier attention_out_multiplier key_multiplier ssm_in_multiplier ssm_out_multiplier time_step_min "
    "attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset "
    "rms_norm_eps layer_norm_epsilon norm_eps mixer_rms_eps linear_head_dim linear_num_heads linear_conv_kernel_dim "
    "full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor mlp_alpha_factor "
    "mlp_beta_factor".split()
)


class Entries(Mapping[str, Any]):
    """A configuration, read-only, with what `transformers` takes where it says nothing. An entry is checked when it is read: `CheckpointError`
    where its value is of another type than the table says, or out of its bounds."""

    def __init__(self, config: Mapping[str, Any], path: str = "", defaults: Mapping[str, Any] | None = None):
        """`path`: what stands before the names in messages."""
        self._config, self._path, self._defaults = config, path, defaults or {}
        self._checked: dict[str, Any] = {}

    def over(self, defaults: Mapping[str, Any]) -> "Entries":
        """The same entries, with these defaults below those that it has."""
        below = Entries(self._config, self._path, {**defaults, **self._defaults})
        below._checked = self._checked
        return below

    def __getitem__(self, name: str) -> Any:
        if name not in FIELDS:
            raise RuntimeError(f"{name!r} is read from a configuration and not in the table of its entries.")
        if name not in self._config:
            return self._defaults[name]
        if name not in self._checked:
            self._checked[name] = self._read(name)
        return self._checked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._defaults, *self._config)))

    def __len__(self) -> int:
        return len({*self._defaults, *self._config})

    def inner(self, name: str) -> "Entries":
        """The entries of an object in this one; none where it is absent or null."""
        value = self.get(name) if name in FIELDS else _checked(self._path + name, self.raw(name), _TABLE)
        return Entries(value or {}, f"{self._path}{name}.")

    def raw(self, name: str) -> Any:
        """An entry unchecked, whatever its name: the keys of an object may be those of the model."""
        return self._config.get(name)

    def changed(self, **entries: Any) -> "Entries":
        """The same entries, but for these."""
        below: Any = self._config.maps if isinstance(self._config, ChainMap) else [self._config]
        return Entries(ChainMap(entries, *below), self._path, self._defaults)

    def known(self) -> dict[str, Any]:
        """All entries but nulls: checked if the table has them."""
        read = {name: self[name] if name in FIELDS else self.raw(name) for name in self._config}
        return {name: value for name, value in read.items() if value is not None}

    def wrong(self, name: str, expected: str, remedy: str = "correct the config.json") -> CheckpointError:
        """The error of an entry that does not fit the others."""
        value = self.get(name) if name in FIELDS else self.raw(name)
        return CheckpointError(
            f"config: {self._path}{name}: expected {expected}, received {shown(value)}{'' if name in self._config else ' by default'}; "
            f"{remedy}."
        )

    def check_divides(self, part: str, whole: str) -> None:
        """Returns where both are there, one of the two sizes divides the other."""
        if self.get(part) and self.get(whole) and self[whole] % self[part]:
            raise self.wrong(part, f"a divisor of {whole}={self[whole]}")

    def _read(self, name: str) -> Any:
        value = _plain(self._config[name])
        is_null = value is None and name not in _NEVER_NULL
        return None if is_null else _checked(self._path + name, value, FIELDS[name])


def _checked(name: str, value: Any, kind: _Kind) -> Any:
    if not kind.fits(value):
        raise CheckpointError(
            f"config: {name}: expected {kind.expected}, received {shown(value)}; correct the config.json."
        )
    return kind.read(value)


def entries_of(config: Any) -> Entries:
    if isinstance(config, Entries):
        return config
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config: expected the dictionary of a config.json, received {type(config).__name__}; json.load reads it, and a configuration of "
            "transformers gives it by to_dict()."
        )
    return Entries(config)


def _plain(value: Any) -> Any:
    """The value, where `transformers` writes infinity, which JSON does not have, as `{"__float__": "Infinity"}`."""
    if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        return [_infinity(item) for item in value]
    return _infinity(value)


def _infinity(value: Any) -> Any:
    is_marked = isinstance(value, Mapping) and len(value) == 1 and value.get("__float__") == "Infinity"
    return math.inf if is_marked else value


def shown(value: Any) -> str:
    """A value in a message, short whatever it is, in the words of JSON."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, Mapping):
        return f"an object of {len(value)} entries"
    if isinstance(value, list | tuple):
        is_short = len(value) <= 4 and not any(isinstance(item, list | tuple) for item in value)
        return f"[{', '.join(map(shown, value))}]" if is_short else f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    is_number = isinstance(value, int | float | np.number)
    return repr(value) if is_number else f"a value of type {type(value).__name__}"
