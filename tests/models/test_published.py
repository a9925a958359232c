"""Published models: the logits of `transformers`, from its weights; and what cannot be loaded is refused."""

import functools
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from ejkernel_eqx.weights.configs import ALIASES
from tests.models.cases import drawn, ENCODERS, GOLDEN, model_type, tokens


@functools.cache
def weights_of(kind: str) -> dict[str, np.ndarray]:
    return drawn(GOLDEN[kind]["shapes"])


def folder_of(kind: str, folder: pathlib.Path, *, change: dict | None = None, **config) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(GOLDEN[kind]["config"] | config))
    save_file(weights_of(kind) | (change or {}), folder / "model.safetensors")
    return folder


def error_of(logits, golden) -> float:
    """The largest difference, relative to the size of the logits."""
    return float(
        np.max(np.abs(np.asarray(logits)[:, -1, ::3] - golden["logits"])) / np.max(np.abs(golden["logits"]))
    )


# Soft caps and windows are in one, experts and latents in another, two mixers and scales in the third.
CHEAP = ("gemma2", "deepseek_v3", "falcon_h1")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in CHEAP else pytest.mark.slow) for kind in GOLDEN]
)
def test_logits_are_those_of_transformers(kind, tmp_path):
    model = ejx.models.from_pretrained(folder_of(kind, tmp_path), dtype="float32")
    logits = eqx.filter_jit(model)(jnp.asarray(tokens()))
    assert error_of(logits, GOLDEN[kind]) < 1e-5
    assert abs(float(jnp.linalg.norm(logits)) / GOLDEN[kind]["norm"] - 1) < 1e-5  # of all tokens


def test_every_family_has_a_case():
    kinds = {model_type(kind) for kind in (*GOLDEN, *ENCODERS)}
    assert kinds - set(ALIASES) == set(ejx.models.FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(GOLDEN))
def test_a_model_saved_by_transformers(kind, tmp_path):
    """Live, where `transformers` is installed: its own files, in shards; logits and greedy texts."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models.make_golden import logits_of, published

    theirs, ids = published(GOLDEN[kind]["config"])[0], tokens(2, 11)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ours, expected = ejx.models.from_pretrained(tmp_path), logits_of(theirs, ids).numpy()
    logits = np.asarray(eqx.filter_jit(ours)(jnp.asarray(ids)))
    # Float32 alone moves the states of `transformers` by as much.
    limit = 2e-5 if kind.startswith(("qwen3_next", "qwen3_5")) else 1e-5
    assert np.max(np.abs(logits - expected)) / np.max(np.abs(expected)) < limit
    texts = ejx.models.generate(ours, jnp.asarray(ids), max_new_tokens=5, stop_tokens=())
    for _ in range(5):  # without its cache, whose rolling forms are not what is tested
        ids = np.concatenate([ids, torch.argmax(logits_of(theirs, ids)[:, -1:], -1).numpy()], axis=1)
    np.testing.assert_array_equal(texts.tokens, ids[:, -5:])


def test_the_published_dtype_is_kept_but_for_norms(tmp_path):
    model = ejx.models.from_pretrained(folder_of("gemma", tmp_path, dtype="bfloat16"))
    assert model.embedding.dtype == jnp.bfloat16
    layer = model.layer(1)
    assert layer.mixer.q_proj.weight.dtype == jnp.bfloat16
    assert layer.mixer_norm is not None
    expected = 1 + weights_of("gemma")["model.layers.1.input_layernorm.weight"]
    np.testing.assert_array_equal(layer.mixer_norm.weight, expected)  # 1 + w has no room in bfloat16


@pytest.mark.slow
def test_experts_in_files_of_their_own_names(tmp_path):
    """As these models are published: a module for each expert, in `block_sparse_moe`."""
    kind, arrays = "mixtral", {}
    for name, x in weights_of(kind).items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("gate_up_proj"):
            halves = zip(("w1", "w3"), np.split(x, 2, axis=1))
        elif name.endswith("experts.down_proj"):
            halves = [("w2", x)]
        else:
            arrays[name] = x
            continue
        stem = name.rpartition(".")[0]
        arrays |= {f"{stem}.{i}.{w}.weight": part[i].copy() for w, part in halves for i in range(len(part))}
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN[kind]["config"]))
    save_file(arrays, tmp_path / "model.safetensors")
    model = ejx.models.from_pretrained(tmp_path, dtype="float32")
    assert error_of(eqx.filter_jit(model)(jnp.asarray(tokens())), GOLDEN[kind]) < 1e-5


def test_nothing_is_loaded_in_part(tmp_path):
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    folder = folder_of("mistral", tmp_path, change=extra)
    with pytest.raises(ejx.CheckpointError, match="q_norm"):
        ejx.models.from_pretrained(folder, dtype="float32")
    model = ejx.models.from_pretrained(folder, dtype="float32", ignore=("*.q_norm.weight",))
    assert error_of(model(jnp.asarray(tokens())), GOLDEN["mistral"]) < 1e-5


def test_sizes_of_another_configuration(tmp_path):
    with pytest.raises(ejx.CheckpointError, match=r"gate_proj.*\(52, 32\).*\(48, 32\)"):
        ejx.models.from_pretrained(folder_of("mistral", tmp_path, intermediate_size=52), dtype="float32")


SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, ("gelu_tanh", 1e-6, None)),  # gemma-2b
        ("gemma", {}, ("gelu_tanh", 1e-6, None)),
        ("gemma2", {"hidden_act": "silu"}, ("gelu_tanh", 1e-6, 30.0)),  # which it does not read
        ("gemma3_text", {"sliding_window": 1024}, ("gelu_tanh", 1e-6, None)),  # gemma-3-4b's text_config
        ("gemma3_text", {"hidden_activation": "silu"}, ("silu", 1e-6, None)),
        ("phi3", {}, ("silu", 1e-5, None)),
        ("olmo2", {}, ("silu", 1e-5, None)),
        ("gpt_oss", {"num_local_experts": 1}, ("clamped_swiglu", 1e-5, None)),
        ("minimax", {"num_local_experts": 1}, ("silu", 1e-5, None)),
        ("llama", {"hidden_act": "gelu"}, ("gelu", 1e-6, None)),
    ],
)
def test_what_a_configuration_leaves_out(kind, given, expected):
    """As `transformers` completes it."""
    config = ejx.models.decoder_config(SIZES | given | {"model_type": kind})
    mlp = config.layers[0].mlp
    assert isinstance(mlp, ejx.models.MLPConfig)
    assert (mlp.activation, config.norm_eps, config.logits_soft_cap) == expected


def experts_of(layer):
    """How many there are, and how many of them a token goes to."""
    options = dict(layer.mlp.options) if isinstance(layer.mlp, ejx.models.MoEConfig) else None
    return options and (options["num_experts"], options["top_k"])


NEXT = {"num_hidden_layers": 4, "mlp_only_layers": [1]}
DEEPSEEK = {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("mixtral", {}, [(8, 2), (8, 2)]),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}, [(4, 1), (4, 1)]),
        ("minimax", {}, [(8, 2), (8, 2)]),
        ("gpt_oss", {}, [(128, 4), (128, 4)]),
        ("olmoe", {}, [(64, 8), (64, 8)]),
        ("qwen2_moe", {"decoder_sparse_step": 2}, [None, (60, 4)]),
        # As on the models' pages, and as transformers 5 writes it.
        ("qwen3_moe", {"mlp_only_layers": [1], "num_experts": 16}, [(16, 8), None]),
        ("qwen3_moe", {"num_local_experts": 16}, [(16, 8), (16, 8)]),
        ("qwen3_next", NEXT, [(512, 10), None, (512, 10), (512, 10)]),
        ("deepseek_v3", DEEPSEEK, [None, None, (256, 8), None, (256, 8), None]),
    ],
)
def test_which_layers_have_experts(kind, given, expected):
    layers = ejx.models.decoder_config(SIZES | given | {"model_type": kind}).layers
    assert [experts_of(layer) for layer in layers] == expected
    if kind == "qwen3_next":
        assert [layer.mixer for layer in layers] == [*["gated_delta_net"] * 3, "attention"]


def test_a_head_that_differs_from_the_embedding_is_not_lost(tmp_path):
    embedding = weights_of("qwen2")["model.embed_tokens.weight"]
    head = embedding + 1
    saved = lambda head=head, **own: folder_of("qwen2", tmp_path, change={"lm_head.weight": head}, **own)
    with pytest.raises(ejx.CheckpointError, match=r"lm_head.*same weights.*tie_word_embeddings"):
        ejx.models.from_pretrained(saved())
    model = ejx.models.from_pretrained(saved(tie_word_embeddings=False))
    assert model.head is not None
    np.testing.assert_array_equal(model.head.weight, head)
    ejx.models.from_pretrained(saved(embedding))


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_of_images_and_text(tmp_path, root):
    """As gemma-3-4b is published, before and since transformers 4.52."""
    inner = GOLDEN["gemma3_text"]["config"]
    own = {"model_type": "gemma3", "eos_token_id": [1, 6], "text_config": inner | {"eos_token_id": None}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    renamed = {name.replace("model.", root, 1): x for name, x in weights_of("gemma3_text").items()}
    tower = "model.vision_tower" if root.startswith("model") else "vision_tower"
    other = {f"{tower}.patch.weight": np.ones((2, 2), np.float32)}
    save_file(renamed | other, tmp_path / "model.safetensors")
    model = ejx.models.from_pretrained(tmp_path, dtype="float32")
    assert model.config.stop_tokens == (1, 6)
    assert error_of(eqx.filter_jit(model)(jnp.asarray(tokens())), GOLDEN["gemma3_text"]) < 1e-5
    save_file(renamed | {"strange.weight": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ejx.CheckpointError, match=r"nothing takes its 'strange\.weight'"):
        ejx.models.from_pretrained(tmp_path, dtype="float32")


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ejx.CheckpointError, match=r"config\.json.*is not there.*snapshot_download"):
        ejx.models.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ejx.CheckpointError, match="list"):
        ejx.models.from_pretrained(tmp_path)


def test_stop_tokens_stand_in_either_file(tmp_path):
    folder = folder_of("mistral", tmp_path, eos_token_id=None)
    assert ejx.models.from_pretrained(folder).config.stop_tokens == ()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert ejx.models.from_pretrained(folder).config.stop_tokens == (2, 5)
    # Chat models name there what ends a turn, and in the configuration only what ends a document.
    folder = folder_of("mistral", tmp_path, eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert ejx.models.from_pretrained(folder).config.stop_tokens == (2, 7)
    (folder / "generation_config.json").write_text("{}")
    assert ejx.models.from_pretrained(folder).config.stop_tokens == (2,)


def test_stop_tokens_outside_of_the_vocabulary_end_no_text(tmp_path):
    """As in small copies of published models, whose texts `transformers` continues, too."""
    folder = folder_of("mistral", tmp_path, eos_token_id=128001)
    model = ejx.models.from_pretrained(folder)
    assert model.config.stop_tokens == ()
    assert ejx.models.generate(model, [[3, 4]], max_new_tokens=2).lengths.tolist() == [2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 5]}))
    assert ejx.models.from_pretrained(folder).config.stop_tokens == (5,)


def test_a_model_is_saved_and_read_by_its_configuration(tmp_path):
    config, ids = GOLDEN["gemma2"]["config"], jnp.asarray(tokens())
    model = ejx.models.from_config(config, key=jax.random.key(1))
    ejx.save(tmp_path / "model.ejx", model, {"config": config})
    again = ejx.load(tmp_path / "model.ejx", like=ejx.models.from_config)
    logits = model(ids)
    np.testing.assert_array_equal(logits, again(ids))
    assert logits.shape == (2, 13, 61) and float(jnp.max(jnp.abs(logits))) <= 3.0  # its soft cap
