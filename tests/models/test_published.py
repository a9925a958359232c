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
from tests.models.cases import CONFIGS, drawn, model_type, tokens

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())


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


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_logits_are_those_of_transformers(kind, tmp_path):
    model = ejx.models.from_pretrained(folder_of(kind, tmp_path), dtype="float32")
    logits = eqx.filter_jit(model)(jnp.asarray(tokens()))
    assert error_of(logits, GOLDEN[kind]) < 1e-5
    assert abs(float(jnp.linalg.norm(logits)) / GOLDEN[kind]["norm"] - 1) < 1e-5  # of all tokens


def test_every_family_has_a_case():
    assert set(map(model_type, CONFIGS)) == set(ejx.models.FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_model_saved_by_transformers(kind, tmp_path):
    """Live, where `transformers` is installed: another random model, its own files, in shards; logits and greedy texts."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[model_type(kind)](**CONFIGS[kind])
    config._attn_implementation = "eager"
    torch.manual_seed(len(kind))
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "A_log" not in name and "dt" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ours = ejx.models.from_pretrained(tmp_path)
    ids = tokens(2, 11)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids, dtype=torch.long), use_cache=False).logits.numpy()
    logits = np.asarray(eqx.filter_jit(ours)(jnp.asarray(ids)))
    assert np.max(np.abs(logits - expected)) / np.max(np.abs(expected)) < 1e-5
    texts = ejx.models.generate(ours, jnp.asarray(ids), max_new_tokens=5, stop_tokens=())
    grown = ids
    for _ in range(5):  # without its cache, whose rolling forms are not what is tested
        with torch.no_grad():
            last = theirs(torch.tensor(grown, dtype=torch.long), use_cache=False).logits[:, -1]
        grown = np.concatenate([grown, last.argmax(-1).numpy()[:, None]], axis=1)
    np.testing.assert_array_equal(texts.tokens, grown[:, -5:])


def test_the_published_dtype_is_kept_but_for_norms(tmp_path):
    model = ejx.models.from_pretrained(folder_of("gemma", tmp_path, dtype="bfloat16"))
    assert model.embedding.dtype == jnp.bfloat16
    layer = model.layer(1)
    assert layer.mixer.q_proj.weight.dtype == jnp.bfloat16
    assert layer.mixer_norm is not None
    expected = 1 + weights_of("gemma")["model.layers.1.input_layernorm.weight"]
    np.testing.assert_array_equal(layer.mixer_norm.weight, expected)  # 1 + w has no room in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "minimax with experts"])
def test_experts_in_files_of_their_own_names(kind, tmp_path):
    """As these models are published: a module for each expert, in `block_sparse_moe`."""
    arrays = {}
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


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"model_type": "t5"}, "model_type: expected one of .*llama.*received 't5'"),
        ("gpt_oss with experts", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("mixtral", {"hidden_act": "xielu"}, "hidden_act: expected one of .*xielu"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act: expected one of .*xielu"),
        ("llama", {"intermediate_size": None}, "'intermediate_size'"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation: expected the same as hidden_act"),
        # The reason that no conversion of the weights removes.
        (
            "gpt_oss",
            {"swiglu_limit": 5.0, "quantization_config": {"quant_method": "mxfp4"}},
            "swiglu_limit",
        ),
        ("gpt_oss with experts", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_other_models_are_refused(kind, change, message):
    with pytest.raises(ValueError, match=message):
        ejx.models.decoder_config(GOLDEN[kind]["config"] | change)


@pytest.mark.parametrize(
    ("outside", "message"),
    [
        ({"model_type": "paligemma"}, "both directions"),
        ({"model_type": "gemma3", "quantization_config": {"quant_method": "int8"}}, "quantization_config"),
    ],
)
def test_what_stands_beside_a_text_config_is_read(outside, message):
    with pytest.raises(ValueError, match=message):
        ejx.models.decoder_config(outside | {"text_config": GOLDEN["gemma"]["config"]})


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


def test_layers_of_qwen3_next_by_default():
    given = {"model_type": "qwen3_next", "num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3]}
    layers = ejx.models.decoder_config(SIZES | given).layers
    assert [layer.mixer for layer in layers] == [*["gated_delta_net"] * 3, "attention"]
    layers = ejx.models.decoder_config(SIZES | given | {"mlp_only_layers": [1]}).layers
    assert [experts_of(layer) for layer in layers] == [(512, 10), None, (512, 10), (512, 10)]


def test_which_layers_of_deepseek_have_experts():
    """From `first_k_dense_replace` on, each whose index `moe_layer_freq` divides."""
    given = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
    }
    layers = ejx.models.decoder_config(
        SIZES | given | {"num_key_value_heads": SIZES["num_attention_heads"]}
    ).layers
    assert [experts_of(layer) is not None for layer in layers] == [False, False, True, False, True, False]


def experts_of(layer):
    """How many there are, and how many of them a token goes to."""
    if not isinstance(layer.mlp, ejx.models.MoEConfig):
        return None
    options = dict(layer.mlp.options)
    return options["num_experts"], options["top_k"]


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("mixtral", {}, [(8, 2), (8, 2)]),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}, [(4, 1), (4, 1)]),
        ("minimax", {}, [(8, 2), (8, 2)]),
        ("gpt_oss", {}, [(128, 4), (128, 4)]),
        ("olmoe", {}, [(64, 8), (64, 8)]),
        ("qwen2_moe", {"decoder_sparse_step": 2}, [None, (60, 4)]),
        (
            "qwen3_moe",
            {"mlp_only_layers": [1], "num_experts": 16},
            [(16, 8), None],
        ),  # as on the models' pages
        ("qwen3_moe", {"num_local_experts": 16}, [(16, 8), (16, 8)]),  # as transformers 5 writes it
    ],
)
def test_experts_that_a_configuration_leaves_out(kind, given, expected):
    layers = ejx.models.decoder_config(SIZES | given | {"model_type": kind}).layers
    assert [experts_of(layer) for layer in layers] == expected


def test_a_head_that_differs_from_the_embedding_is_not_lost(tmp_path):
    embedding = weights_of("qwen2")["model.embed_tokens.weight"]
    for head in (embedding, embedding + 1):
        folder = folder_of("qwen2", tmp_path, change={"lm_head.weight": head})
        if head is embedding:
            ejx.models.from_pretrained(folder)
            continue
        with pytest.raises(ejx.CheckpointError, match=r"lm_head.*same weights.*tie_word_embeddings"):
            ejx.models.from_pretrained(folder)
        model = ejx.models.from_pretrained(
            folder_of("qwen2", tmp_path, change={"lm_head.weight": head}, tie_word_embeddings=False)
        )
        assert model.head is not None
        np.testing.assert_array_equal(model.head.weight, head)


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_of_images_and_text(tmp_path, root):
    """As gemma-3-4b is published, before and since transformers 4.52."""
    inner = GOLDEN["gemma3_text"]["config"]
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gemma3", "eos_token_id": [1, 6], "text_config": inner | {"eos_token_id": None}}
        )
    )
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
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ejx.CheckpointError, match=r"config\.json.*JSON"):
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


def test_random_weights_of_a_published_architecture():
    model = ejx.models.from_config(GOLDEN["gemma2"]["config"], key=jax.random.key(0))
    logits = model(jnp.asarray(tokens()))
    assert logits.shape == (2, 13, 61) and float(jnp.max(jnp.abs(logits))) <= 3.0  # its soft cap


def test_a_model_is_saved_and_read_by_its_configuration(tmp_path):
    config = GOLDEN["qwen2"]["config"]
    model = ejx.models.from_config(config, key=jax.random.key(1))
    ejx.save(tmp_path / "model.ejx", model, {"config": config})
    again = ejx.load(tmp_path / "model.ejx", like=ejx.models.from_config)
    ids = jnp.asarray(tokens())
    np.testing.assert_array_equal(model(ids), again(ids))
