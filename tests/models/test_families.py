"""Published families beyond their logits: texts from caches, pages, a training step; and what their entries mean."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from tests.models.cases import drawn, GOLDEN, tokens
from tests.models.test_decoder import Served
from tests.models.test_published import folder_of

KINDS = [kind for kind in GOLDEN if "greedy" in GOLDEN[kind]]
# States beside gated attention.
CHEAP = ("qwen3_5_text",)
each = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in CHEAP else pytest.mark.slow) for kind in KINDS]
)


@functools.cache
def model_of(kind: str) -> ejx.models.Decoder:
    with tempfile.TemporaryDirectory() as folder:
        return ejx.models.from_pretrained(folder_of(kind, Path(folder)), dtype="float32")


@functools.cache
def logits_of(kind: str) -> np.ndarray:
    """Those of all tokens, by one pass."""
    return np.asarray(eqx.filter_jit(model_of(kind))(jax.device_put(tokens())))


@each
def test_greedy_texts_with_padding_on_either_side(kind):
    """They are those of whole passes of `transformers`."""
    rows, (long, short) = tokens(), GOLDEN[kind]["greedy"]
    padded, real = np.zeros((3, 13), np.int32), np.zeros((3, 13), bool)
    for row, (source, first, count) in enumerate(((0, 0, 13), (1, 6, 7), (1, 2, 7))):
        padded[row, first : first + count], real[row, first : first + count] = rows[source, :count], True
    texts = ejx.models.generate(
        model_of(kind), jnp.asarray(padded), padding_mask=jnp.asarray(real), max_new_tokens=5, stop_tokens=()
    )
    assert texts.tokens.tolist() == [long, short, short]


@each
def test_pages_are_the_whole(kind):
    served = Served(model_of(kind), tokens()[:, :9])
    if kind == "llama4_text with chunks":
        with pytest.raises(ValueError, match="texts of at most chunk_size=4 tokens in pages"):
            served.step((0, 5), (1, 3))
        return
    for counts in ((5, 3), (1, 1), (3, 5)):
        served.step(*enumerate(counts))
    served.agrees(logits_of(kind)[:, :9])


@each
def test_a_training_step_is_finite(kind):
    def loss(model, rows):
        return model.loss(model.features(rows[:, :-1]), rows[:, 1:])

    model, rows = model_of(kind), jax.device_put(tokens())
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, rows)
    logits = logits_of(kind)[:, :-1].astype(np.float64)
    chosen = np.take_along_axis(logits, tokens()[:, 1:, None], axis=-1)[..., 0]
    expected = np.mean(np.logaddexp.reduce(logits, axis=-1) - chosen)
    assert abs(float(value) - expected) < 1e-5 * abs(expected)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        grad = np.asarray(grad)
        assert np.isfinite(grad).all(), jax.tree_util.keystr(path)
        assert "weight" not in str(path[-1]) or np.any(grad != 0), jax.tree_util.keystr(path)


QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}


def test_a_model_under_another_name():
    config, read = GOLDEN["deepseek_v3"]["config"], ejx.models.decoder_config
    assert read(config | {"model_type": "kimi_k2"}) == read(config)
    nested = {"model_type": "kimi_k25", "text_config": config | {"model_type": "kimi_k2"}}
    assert read(nested) == read(config)
    mistral = GOLDEN["mistral"]["config"]  # as Mistral Small 3 is published
    assert read({"model_type": "mistral3", "text_config": mistral}) == read(mistral)
    # As before transformers 4.52, beside the entries of the vision model.
    vision = GOLDEN["qwen2_5_vl_text"]["config"]["text_config"]
    flat = vision | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}
    assert read(flat) == read(GOLDEN["qwen2_5_vl_text"]["config"])
    left_out = {"model_type": "qwen3_vl_text", "text_config": None}
    assert read(QWEN3 | left_out) == read(QWEN3 | {"rope_theta": 5e5})


def test_an_unknown_name_is_told_the_nearest_one():
    with pytest.raises(
        ValueError, match=r"received 'qwen4'; did you mean qwen[23]\? .*a row of ejx.models.FAMILIES"
    ):
        ejx.models.decoder_config(QWEN3 | {"model_type": "qwen4"})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "scoring_func"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("ministral3", {"rope_parameters": None}, "'rope_scaling' or 'rope_parameters'"),
        (
            "llama",
            {"rope_parameters": GOLDEN["ministral3"]["config"]["rope_parameters"]},
            "llama_4_scaling_beta",
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input"),
        ("gemma4_text", {"enable_moe_block": True}, "it has no experts"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {"parallel_attn": False}, "parallel_attn"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("granitemoehybrid", {"mamba_d_head": 12}, "mamba_d_head: expected 'auto' or the 64 features"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
        ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True}, "mamba_proj_bias"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias"),
        (
            "falcon_h1",
            {"mamba_d_head": 12},
            "mamba_d_head: expected 'auto' or the 48 features of mamba_d_ssm",
        ),
        (
            "nemotron_h",
            {"layers_block_type": ["mlp", "mamba"]},
            "layers_block_type: expected Mamba-2, attention",
        ),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "mlp"]}, "layers_block_type: expected Mamba-2"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h", {"mlp_hidden_act": "silu2"}, "hidden_act: expected one of .*'silu2'"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias"),
        ("zamba2", {"use_long_context": True}, "use_long_context"),
        ("zamba2", {"use_conv_bias": False}, "use_conv_bias"),
        ("zamba2", {"hidden_act": "silu2"}, "hidden_act: expected one of"),
        ("zamba2", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("zamba2", {"num_attention_heads": 3, "num_key_value_heads": 3}, "of the 16 features of hidden_size"),
        ("zamba2", {"n_mamba_heads": 3}, "the 16 features of mamba_expand over mamba_n_heads=3"),
        ("zamba2", {"mamba_ngroups": 3}, "mamba_n_groups: expected a divisor of mamba_n_heads=4"),
        (
            "zamba2",
            {"layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2},
            "type 'full_attention'",
        ),
        ("jamba", {"num_experts_per_tok": 4}, "num_experts_per_tok: expected at most the 3 experts"),
    ],
)
def test_entries_that_would_change_numbers_are_refused(kind, change, message):
    with pytest.raises(ValueError, match=message):
        ejx.models.decoder_config(GOLDEN[kind]["config"] | change)


def test_sizes_of_single_layers():
    """As Gemma 4 is published, and as transformers saves it."""
    read, saved = ejx.models.decoder_config, GOLDEN["gemma4_text"]["config"]
    published = {key: value for key, value in saved.items() if key != "per_layer_config"}
    sizes = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert read(published | sizes) == read(saved)
    layers = [dict(layer.options) for layer in read(saved).layers]
    found = [(layer["head_dim"], layer["num_kv_heads"], layer["keys_as_values"]) for layer in layers]
    assert found == [(8, 2, False), (16, 1, True), (16, 1, True)]


def test_hybrids_as_they_are_published():
    """Other names of the same entries, and what `transformers` completes."""
    read, without = (
        ejx.models.decoder_config,
        lambda config, *names: {name: value for name, value in config.items() if name not in names},
    )
    nemotron = GOLDEN["nemotron_h"]["config"]
    blocks = without(nemotron, "layers_block_type", "conv_kernel", "n_groups")
    pattern = {
        "hybrid_override_pattern": "MEM*-",
        "num_hidden_layers": 5,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
    }
    assert read(blocks | pattern) == read(nemotron)
    layers = read(nemotron).layers
    assert [layer.mixer for layer in layers] == ["mamba2", "mamba2", "attention"]
    assert [type(layer.mlp).__name__ for layer in layers] == ["MoEConfig", "NoneType", "MLPConfig"]
    assert read(nemotron | {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"]}) == read(
        nemotron
    )
    lfm2 = GOLDEN["lfm2"]["config"]
    older = without(lfm2, "layer_types", "tie_word_embeddings", "intermediate_size")
    assert read(older | {"full_attn_idxs": [1], "tie_embedding": True, "block_ff_dim": 60}) == read(lfm2)
    assert read(lfm2 | {"intermediate_size": 40, "block_auto_adjust_ff_dim": False}) == read(lfm2)
    sizes = [read(lfm2 | {"block_ffn_dim_multiplier": factor}).layers[0].mlp for factor in (1.5, None)]
    assert [mlp.hidden_dim for mlp in sizes if isinstance(mlp, ejx.models.MLPConfig)] == [64, 40]
    bamba, jamba = GOLDEN["bamba"]["config"], GOLDEN["jamba"]["config"]
    assert read(bamba | {"mamba_d_head": "auto"}) == read(bamba)
    assert read(jamba | {"mamba_dt_rank": "auto"}) == read(jamba)
    # No rotation where the base is null, here or within the parameters.
    olmo = without(GOLDEN["olmo_hybrid"]["config"], "rope_parameters")
    has_rope = lambda config: "rope" in dict(read(olmo | config).layers[1].options)
    assert has_rope({}) and has_rope({"rope_parameters": None}) and has_rope({"rope_theta": 5e5})
    assert not has_rope({"rope_theta": None, "rope_parameters": None})
    assert not has_rope({"rope_parameters": {"rope_theta": None, "rope_type": "default"}})
    assert read(without(olmo, "layer_types")) == read(
        olmo | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jamba", "lfm2_moe", "nemotron_h"])
def test_experts_of_hybrids_one_by_one(kind, tmp_path):
    """As these models are published: a module for each expert; in Nemotron-H under another root."""
    arrays, names = {}, ("gate_proj", "up_proj", "down_proj")
    names = ("w1", "w3", "w2") if kind == "lfm2_moe" else names
    for name, x in drawn(GOLDEN[kind]["shapes"]).items():
        stem, _, last = name.replace("model.", "backbone." if kind == "nemotron_h" else "model.").rpartition(
            "."
        )
        if not stem.endswith(".experts"):
            arrays[f"{stem}.{last}"] = x
            continue
        parts = dict(zip(names, np.split(x, 2, axis=1))) if last == "gate_up_proj" else {}
        parts = parts or {names[2] if last == "down_proj" else last: x}
        arrays |= {
            f"{stem}.{i}.{w}.weight": part[i].copy() for w, part in parts.items() for i in range(len(part))
        }
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN[kind]["config"]))
    save_file(arrays, tmp_path / "model.safetensors")
    model = ejx.models.from_pretrained(tmp_path, dtype="float32")
    same = lambda a, b: np.testing.assert_array_equal(a, b) if eqx.is_array(a) else None
    jax.tree.map(same, model, model_of(kind))


def test_granite_4_as_it_is_published(tmp_path):
    """Other names of layers, and experts in two matrices with one beside them."""
    kind, arrays = "granitemoehybrid", {}
    config = GOLDEN[kind]["config"]
    own = {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": "auto"}
    assert ejx.models.decoder_config(config | own) == ejx.models.decoder_config(config)
    names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    names |= {"router.weight": "router.layer.weight"}
    for name, array in drawn(GOLDEN[kind]["shapes"]).items():
        for old, new in names.items():
            name = name.replace(f"block_sparse_moe.{old}", f"block_sparse_moe.{new}")
        arrays[name] = array
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    save_file(arrays, tmp_path / "model.safetensors")
    model = ejx.models.from_pretrained(tmp_path, dtype="float32")
    same = lambda a, b: np.testing.assert_array_equal(a, b) if eqx.is_array(a) else None
    jax.tree.map(same, model, model_of(kind))


def test_layers_without_a_rotation():
    ropes = lambda config: [
        dict(layer.options).get("rope") is not None for layer in ejx.models.decoder_config(config).layers
    ]
    small = GOLDEN["smollm3"]["config"]
    assert ropes(small) == [True, False, True]
    assert ropes(
        {k: v for k, v in small.items() if k != "no_rope_layers"} | {"no_rope_layer_interval": 3}
    ) == [True, True, False]
    exaone = GOLDEN["exaone4"]["config"]
    assert ropes(exaone) == [True, False, True]
    assert ropes(exaone | {"sliding_window": None}) == [True] * 3


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    extra = {
        "model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32),
        "mtp.fc.weight": np.ones(2, np.float32),
    }
    with pytest.raises(ejx.CheckpointError, match=r"nothing takes its 'model\.layers\.3\.eh_proj"):
        ejx.models.from_pretrained(folder_of("glm4", tmp_path, change=extra))
    ejx.models.from_pretrained(folder_of("glm4", tmp_path, change=extra, num_nextn_predict_layers=1))


def test_text_positions_of_several_axes_are_those_of_one():
    """Also where each row begins elsewhere, and there are as many rows as axes."""
    x = jax.random.normal(jax.random.key(0), (3, 5, 2, 8))
    plain, axes = ejx.nn.RotaryEmbedding(8), ejx.nn.RotaryEmbedding(8, mrope_section=(1, 1, 2))
    offset = jnp.asarray([0, 4, -2])
    np.testing.assert_array_equal(axes(x, offset=offset), plain(x, offset=offset))


@pytest.mark.parametrize("left", [0, 3])
def test_chunks_are_counted_from_the_first_real_token(left):
    """In whole rows, in segments, in a packed call and after a cache: each chunk as a call of its own."""
    layer = ejx.nn.MultiHeadAttention(16, num_heads=2, chunk_size=4, platform="xla", key=jax.random.key(1))
    plain = ejx.nn.MultiHeadAttention(16, num_heads=2, platform="xla", key=jax.random.key(1))
    x = jax.random.normal(jax.random.key(0), (2, 10, 16))
    expected = jnp.concatenate([plain(x[:, at : at + 4]) for at in (0, 4, 8)], axis=1)
    padded = jnp.concatenate([jnp.full((2, left, 16), jnp.nan), x], axis=1)
    real = jnp.broadcast_to(jnp.arange(left + 10) >= left, (2, left + 10))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    close(layer(padded, padding_mask=real)[:, left:], expected)
    _, cache = layer(padded[:, : left + 6], layer.init_cache(2, 12), padding_mask=real[:, : left + 6])
    close(layer(x[:, 6:], cache)[0], expected[:, 6:])
    if not left:
        close(layer(x), expected)
        packed = layer(x.reshape(20, 16), cu_seqlens=jnp.asarray([0, 10, 20]))
        close(packed.reshape(2, 10, 16), expected)
        halves = layer(x, segment_ids=jnp.asarray([[0] * 6 + [1] * 4] * 2))
        close(halves[:, 6:8], plain(x[:, 6:8]))
        with pytest.raises(ValueError, match="chunk_size: expected None but in a causal layer"):
            ejx.nn.MultiHeadAttention(16, num_heads=2, chunk_size=4, causal=False, key=jax.random.key(1))


def test_queries_grow_with_their_positions():
    """At chosen positions, and by what is before them in a cache."""
    options = {"num_heads": 2, "rope": ejx.nn.RotaryEmbedding(8), "key": jax.random.key(1)}
    layer = ejx.nn.MultiHeadAttention(16, temperature=(0.5, 4, 1), **options)
    plain, x = ejx.nn.MultiHeadAttention(16, **options), jax.random.normal(jax.random.key(0), (1, 9, 16))
    out, _ = layer(x[:, 8:], layer(x[:, :8], layer.init_cache(1, 12))[1])
    np.testing.assert_allclose(out, layer(x)[:, 8:], atol=1e-5)
    # The last query is that of the plain layer, times 1 + 0.5 log(1 + 2).
    factor = 1 + 0.5 * np.log(3)
    scaled = eqx.tree_at(lambda m: m.q_proj.weight, plain, plain.q_proj.weight * factor)
    np.testing.assert_allclose(layer(x)[:, 8], scaled(x)[:, 8], atol=1e-5)
    with pytest.raises(ValueError, match="temperature: expected"):
        ejx.nn.MultiHeadAttention(16, temperature=(0.5, 0, 1), **options)


CHUNKS = pytest.mark.parametrize(
    "kind",
    [
        "exaone4",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("gemma4_text whole", "gpt_oss", "starcoder2")
        ),
    ],
)


@CHUNKS
def test_prompts_in_chunks_over_rolling_windows(kind):
    """Chunks longer and shorter than the window of 4 tokens, and padding in the first one."""
    model, rows = model_of(kind), jnp.asarray(tokens())
    cache, call = model.init_cache(2, 13, rolling=True), eqx.filter_jit(model)
    assert cache.nbytes < model.init_cache(2, 13).nbytes
    padding = jnp.asarray([[True] * 5, [False] * 2 + [True] * 3])
    logits, cache = call(rows[:, :5], cache, padding_mask=padding)
    parts = [logits]
    for start, stop in ((5, 8), (8, 13)):
        logits, cache = call(rows[:, start:stop], cache)
        parts.append(logits)
    whole = call(rows, padding_mask=jnp.pad(padding, ((0, 0), (0, 8)), constant_values=True))
    real = np.ones((2, 13), bool)
    real[1, :2] = False
    # Gemma 4 does not scale its scores, so that float32 moves them more; in float64 there is no difference.
    limit = (5e-5 if kind.startswith("gemma4") else 1e-5) * float(jnp.max(jnp.abs(whole[real])))
    np.testing.assert_allclose(jnp.concatenate(parts, 1)[real], whole[real], atol=limit)


def test_rotations_nested_by_the_type_of_layers():
    """As transformers 5 writes them, and as the models were published."""
    read, nested = ejx.models.decoder_config, GOLDEN["gemma3_text"]["config"]
    rotations = nested["rope_parameters"]
    full, local = rotations["full_attention"], rotations["sliding_attention"]
    flat = {key: value for key, value in nested.items() if key != "rope_parameters"}
    flat |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    if full["rope_type"] != "default":
        flat["rope_scaling"] = full
    assert read(flat) == read(nested)
    other = rotations | {"sliding_attention": local | {"rope_theta": 5e5}}
    thetas = lambda config: [dict(layer.options)["rope"].theta for layer in read(config).layers]
    changed = zip(thetas(nested), thetas(nested | {"rope_parameters": other}), nested["layer_types"])
    assert all((a != b) == (kind == "sliding_attention") for a, b, kind in changed)
    with pytest.raises(ValueError, match="layer_type: expected one of full_attention"):
        read(nested | {"rope_parameters": {"full_attention": full}})


@pytest.mark.parametrize(
    ("kind", "entries", "is_tied"),
    [
        ("llama", {}, False),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gemma", {}, True),
        ("gpt2", {"tie_word_embeddings": False}, False),
    ],
)
def test_a_folder_without_a_head(kind, entries, is_tied, tmp_path):
    """Where the configuration says nothing, the family does."""
    config = {key: value for key, value in GOLDEN[kind]["config"].items() if key != "tie_word_embeddings"}
    arrays = {name: x for name, x in drawn(GOLDEN[kind]["shapes"]).items() if name != "lm_head.weight"}
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    save_file(arrays, tmp_path / "model.safetensors")
    if is_tied:
        assert ejx.models.from_pretrained(tmp_path).head is None
        return
    with pytest.raises(ejx.CheckpointError, match=r"it has no 'lm_head\.weight'"):
        ejx.models.from_pretrained(tmp_path)


def test_gpt2_as_it_is_published(tmp_path):
    """Without a root, with masks beside its projections; and only as many positions as it learned."""
    shapes = GOLDEN["gpt2"]["shapes"]
    arrays = {name.removeprefix("transformer."): x for name, x in drawn(shapes).items()}
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 24, 24), np.float32) for i in range(3)}
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN["gpt2"]["config"]))
    save_file(arrays | masks, tmp_path / "model.safetensors")
    model = ejx.models.from_pretrained(tmp_path, dtype="float32")
    same = lambda a, b: np.testing.assert_array_equal(a, b) if eqx.is_array(a) else None
    jax.tree.map(same, model, model_of("gpt2"))
    with pytest.raises(ValueError, match="sequence_axis: expected None for a model with learned positions"):
        ejx.models.from_config(GOLDEN["gpt2"]["config"], sequence_axis="s", key=jax.random.key(0))


@pytest.mark.usefixtures("unchecked")
def test_more_tokens_than_learned_positions():
    """24: in a row, behind a cache, and in a program; in texts and requests."""
    model, long = model_of("gpt2"), jnp.zeros((2, 26), jnp.int32)
    message = "at most 24 tokens, the positions that the model has, received"
    for given in (None, jnp.asarray([[True] * 26, [False] * 2 + [True] * 24])):
        with pytest.raises(ValueError, match=f"{message} 26"):
            model(long, padding_mask=given)
    _, cache = model(long[:, :24], model.init_cache(2, 32))
    with pytest.raises(ValueError, match=f"{message} 25"):
        model(long[:, :1], cache)
    with pytest.raises(Exception, match=f"{message} more"):
        jax.block_until_ready(eqx.filter_jit(lambda cache: model(long[:, :1], cache)[0])(cache))
    with pytest.raises(
        ValueError, match=r"max_new_tokens: expected .* in 24 positions, .* received 13 \+ 13"
    ):
        ejx.models.generate(model, tokens(), max_new_tokens=13)
    engine = ejx.serving.Engine(model, num_pages=8, page_size=8, max_batch=2)
    with pytest.raises(
        ValueError, match=r"prompt: expected at most 24 tokens including new ones, received 13 \+ 12"
    ):
        engine.submit(tokens()[0].tolist(), max_new_tokens=12)


@pytest.mark.slow
def test_learned_positions_are_those_of_each_text():
    """Padding has none, each segment is a text of its own, and all may be used."""
    model, long = model_of("gpt2"), jnp.asarray(tokens(2, 26))
    real = jnp.broadcast_to(jnp.arange(26) > 1, (2, 26))
    np.testing.assert_allclose(model(long, padding_mask=real)[:, 2:], model(long[:, 2:]), atol=1e-5)
    halves = model(long, segment_ids=jnp.broadcast_to(jnp.arange(26) // 13, (2, 26)))
    np.testing.assert_allclose(halves[:, 13:], model(long[:, 13:]), atol=1e-5)
    texts = ejx.models.generate(model, tokens(), max_new_tokens=12, stop_tokens=())
    assert bool(texts.finite.all()) and [len(text) for text in texts.texts()] == [12, 12]


def test_shared_keys_of_gemma_4(tmp_path):
    """Some files hold projections that no layer reads; and the caches hold keys of half of the layers."""
    kind = "gemma4_text whole"
    unread = {f"model.layers.{i}.self_attn.k_proj.weight": np.ones((2, 2), np.float32) for i in (3, 4, 5)}
    model = ejx.models.from_pretrained(folder_of(kind, tmp_path, change=unread), dtype="float32")
    layers = model.config.layers
    assert [layer.keys_of for layer in layers] == [None, None, None, 1, 2, 1]
    widths: Any = [layer.mlp for layer in layers]
    assert [mlp.hidden_dim for mlp in widths] == [48, 48, 48, 96, 96, 96]
    # Rows of 10 tokens: two key heads of 8 features in layers with a window, one of 16 in the others.
    assert sum(x.size for x in jax.tree.leaves(model.init_cache(1, 10)) if x.ndim > 2) == 3 * 10 * 2 * 16
    with pytest.raises(
        ValueError, match=r"received 4, which reads those of layer 2 \(num_kv_shared_layers\)"
    ):
        ejx.nn.MultiHeadAttention.from_config(GOLDEN[kind]["config"], layer_index=4, key=jax.random.key(0))
    with pytest.raises(
        ValueError, match="sequence_axis: expected None for a model with cross_layer_attention"
    ):
        ejx.models.from_config(GOLDEN[kind]["config"], sequence_axis="s", key=jax.random.key(0))


@pytest.mark.slow
def test_layers_share_blocks(tmp_path):
    """There is one copy of a block. Its gradient is the sum of those of copies, one for each layer."""
    kind = "zamba2 with one block"
    first, second = (f"model.layers.{index}.shared_transformer." for index in (0, 2))
    arrays = drawn(GOLDEN[kind]["shapes"])
    copies = {
        name.replace(first, second): x for name, x in arrays.items() if "shared_transformer" in name
    }  # with low-rank products of both layers
    apart = {name: x for name, x in (arrays | copies).items() if "adapter_list" not in name}
    apart |= {name: x for name, x in arrays.items() if "adapter_list.0" in name}
    apart |= {name: x for name, x in copies.items() if "adapter_list.1" in name}

    def model(arrays: Any, **config: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(GOLDEN[kind]["config"] | config))
        save_file(arrays, tmp_path / "model.safetensors")
        return ejx.models.from_pretrained(tmp_path, dtype="float32")

    shared, unshared = model(arrays), model(apart, num_mem_blocks=2)
    assert [len(one.shared_blocks) for one in (shared, unshared)] == [1, 2]
    loss = lambda model, rows: model.loss(model.features(rows[:, :-1]), rows[:, 1:])
    step, rows = eqx.filter_jit(eqx.filter_value_and_grad(loss)), jnp.asarray(tokens())
    (value, grads), (other, of_copies) = step(shared, rows), step(unshared, rows)
    assert abs(float(value - other)) < 1e-5 * abs(float(other))
    summed = jax.tree.map(jnp.add, *of_copies.shared_blocks)
    for found, expected in zip(jax.tree.leaves(grads.shared_blocks[0]), jax.tree.leaves(summed)):
        np.testing.assert_allclose(found, expected, atol=1e-4 * float(jnp.max(jnp.abs(expected))))
    # A file may hold the copies, if they are equal.
    same = lambda a, b: np.testing.assert_array_equal(a, b) if eqx.is_array(a) else None
    jax.tree.map(same, model(arrays | copies), shared)
    changed = {name: x + 1 for name, x in copies.items() if "q_proj" in name}
    with pytest.raises(
        ejx.CheckpointError, match=r"layers\.2.*the weights of '.*layers\.0.*share this block"
    ):
        model(arrays | copies | changed)


@pytest.mark.slow
def test_updates_of_shared_blocks():
    """Behind the low-rank products that the model has itself."""
    model, rows = model_of("zamba2"), jnp.asarray(tokens())
    updated = ejx.models.add_lora(model, 2, key=jax.random.key(1))
    is_lora = lambda node: isinstance(node, ejx.models.LoRA)
    drawn = lambda node: eqx.tree_at(lambda m: m.b, node, jnp.ones_like(node.b)) if is_lora(node) else node
    blocks = jax.tree.map(drawn, updated.shared_blocks, is_leaf=is_lora)
    updated = eqx.tree_at(lambda m: m.shared_blocks, updated, blocks)
    merged, logits = ejx.models.merge_lora(updated), updated(rows)
    largest = float(jnp.max(jnp.abs(logits)))
    np.testing.assert_allclose(merged(rows), logits, atol=1e-5 * largest)
    assert float(jnp.max(jnp.abs(model(rows) - logits))) > 1e-2 * largest


def test_blocks_that_are_none():
    kind, (layer, *_) = "zamba2", ejx.models.decoder_config(GOLDEN["zamba2"]["config"]).layers
    with pytest.raises(
        ValueError, match=r"layers\[0\]\.shared_block: expected None or the number of one of the 0"
    ):
        ejx.models.DecoderConfig(61, 8, (dataclasses.replace(layer, shared_block=0),))
    with pytest.raises(ValueError, match="shared_block: expected None but in a layer of a mixer alone"):
        dataclasses.replace(layer, shared_block=0, mlp=ejx.models.MLPConfig(8))
    with pytest.raises(ValueError, match="options: expected an entry 'num_kv_heads'"):
        ejx.models.SharedBlockConfig(1, {"num_heads": 2}, ejx.models.MLPConfig(8), 4)
    with pytest.raises(ValueError, match="sequence_axis: expected None for a model with shared blocks"):
        ejx.models.from_config(GOLDEN[kind]["config"], sequence_axis="s", key=jax.random.key(0))


def test_a_head_that_is_missing_is_named(tmp_path):
    """Also where the outer configuration alone says that it is not the embedding."""
    kind = "qwen3_vl_text"
    outer = {"model_type": "qwen3_vl", "text_config": GOLDEN[kind]["config"]["text_config"]}
    with pytest.raises(ejx.CheckpointError, match=r"it has no 'lm_head\.weight'"):
        ejx.models.from_pretrained(folder_of(kind, tmp_path, **outer, tie_word_embeddings=False))
    assert ejx.models.from_pretrained(folder_of(kind, tmp_path)).head is None
