"""Published encoders: their features are those of `transformers`, texts in one row are those alone, and their files are read with distrust."""

import functools
import json
import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from tests.models.cases import drawn, encoder_inputs, ENCODERS, GOLDEN, tokens


def folder_of(kind: str, folder: pathlib.Path, arrays: dict | None = None, **config) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(ENCODERS[kind]["config"] | config))
    save_file(drawn(ENCODERS[kind]["shapes"]) if arrays is None else arrays, folder / "model.safetensors")
    return folder


@functools.cache
def model_of(kind: str) -> ejx.models.Encoder:
    with tempfile.TemporaryDirectory() as folder:
        return ejx.models.from_pretrained(folder_of(kind, pathlib.Path(folder)))


def types_of(kind: str, types: np.ndarray) -> dict:
    return {"token_types": jnp.asarray(types)} if model_of(kind).config.num_token_types > 1 else {}


def relative(ours, expected) -> float:
    return float(np.max(np.abs(np.asarray(ours) - expected)) / np.max(np.abs(expected)))


# Learned positions and types of several texts in a row; windows, gates and norms without biases.
CHEAP = (("roberta", "packed"), ("modernbert", "padded"))
CASES = [(kind, form) for kind in ENCODERS for form in ("padded", "packed")]


@pytest.mark.parametrize(
    ("kind", "form"), [pytest.param(*case, marks=() if case in CHEAP else pytest.mark.slow) for case in CASES]
)
def test_features_are_those_of_transformers(kind, form):
    """Of padded rows, and of the same texts in one row, where they do not see each other."""
    case, (ids, real, types) = ENCODERS[kind], encoder_inputs(ENCODERS[kind]["config"])
    model = model_of(kind)
    assert isinstance(model, ejx.models.Encoder)
    rows = {"padding_mask": jnp.asarray(real)}
    if form == "packed":
        texts = np.repeat(np.arange(2), real.sum(1))
        at_ends = lambda x, end: np.concatenate([[end] * 2, x[real], [end] * 3])[None].astype(np.int32)
        ids, types, texts = at_ends(ids, 2), at_ends(types, 0), np.pad(texts, (2, 3), constant_values=-1)
        rows, real = {"segment_ids": jnp.asarray(texts[None], jnp.int32)}, texts[None] >= 0
    features = model(jnp.asarray(ids), **rows, **types_of(kind, types))[real]
    assert relative(features[::5, ::5], np.asarray(case["features"])) < 1e-5
    assert abs(float(jnp.linalg.norm(features)) / case["norm"] - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(ENCODERS))
def test_positions_are_counted_from_the_first_real_token(kind):
    model, rows = model_of(kind), tokens(2, 13)
    real = np.broadcast_to(np.arange(13) > 3, (2, 13))
    found = model(jnp.asarray(rows), padding_mask=jnp.asarray(real))[:, 4:]
    assert relative(found, np.asarray(model(jnp.asarray(rows[:, 4:])))) < 1e-5


@pytest.mark.slow
def test_gradients_reach_every_weight_and_no_other_text():
    model, rows = model_of("bert"), jnp.asarray(tokens(1, 12))
    ids = jnp.asarray([[0] * 7 + [1] * 5])

    def first(model, rows):
        y = model(rows, segment_ids=ids, token_types=(rows % 2))[:, :7]
        return jnp.sum(jnp.sin(y)) if rows.ndim else y

    grads = eqx.filter_grad(first)(model, rows)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.isfinite(grad).all()), jax.tree_util.keystr(path)
        # A bias of the keys moves all scores of a query alike.
        unmoved = "k_proj.bias" in jax.tree_util.keystr(path)
        assert unmoved or bool(jnp.any(grad != 0)), jax.tree_util.keystr(path)
    touched = np.flatnonzero(np.any(np.asarray(grads.body.embedding) != 0, axis=-1))
    assert set(touched) == set(np.asarray(rows)[0, :7].tolist())


def test_files_with_heads_a_root_and_first_names(tmp_path):
    """As bert-base-uncased is published: below `bert`, with gamma and beta, and heads that are left out."""
    arrays = {}
    for name, array in drawn(ENCODERS["bert"]["shapes"]).items():
        if not name.startswith("pooler"):
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            arrays[f"bert.{name}"] = array
    arrays |= {
        "cls.predictions.bias": np.ones(61, np.float32),
        "bert.pooler.dense.bias": np.ones(32, np.float32),
    }
    model = ejx.models.from_pretrained(folder_of("bert", tmp_path, arrays))
    same = lambda a, b: np.testing.assert_array_equal(a, b) if eqx.is_array(a) else None
    jax.tree.map(same, model, model_of("bert"))
    save_file(arrays | {"bert.strange": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ejx.CheckpointError, match=r"nothing takes its 'bert\.strange'"):
        ejx.models.from_pretrained(tmp_path)
    with pytest.raises(
        ejx.CheckpointError, match=r"'bert\.encoder\.layer': expected the weights of 5 layers.*those of 3"
    ):
        ejx.models.from_pretrained(folder_of("bert", tmp_path, arrays, num_hidden_layers=5))


def test_encoders_and_decoders_are_told_apart():
    encoder, decoder = ENCODERS["gemma3_text"]["config"], GOLDEN["gemma3_text"]["config"]
    model = eqx.filter_eval_shape(lambda: ejx.models.from_config(encoder, key=jax.random.key(0)))
    assert isinstance(model, ejx.models.Encoder)
    with pytest.raises(
        ValueError, match=r"expected a decoder, received 'gemma3_text', an encoder.*encoder_config"
    ):
        ejx.models.decoder_config(encoder)
    with pytest.raises(
        ValueError, match="expected an encoder, received 'gemma3_text', a decoder; decoder_config"
    ):
        ejx.models.encoder_config(decoder)
    with pytest.raises(ValueError, match="received 'modern_bert'; did you mean modernbert"):
        ejx.models.encoder_config({"model_type": "modern_bert"})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("modernbert", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("modernbert", {"local_attention": None}, "local_attention"),
        ("bert", {"pad_token_id": -1, "model_type": "roberta"}, "pad_token_id"),
        ("gemma3_text", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
    ],
)
def test_entries_that_would_change_numbers_are_refused(kind, change, message):
    with pytest.raises(ValueError, match=message):
        ejx.models.encoder_config(ENCODERS[kind]["config"] | change)


def test_windows_of_an_encoder_are_on_both_sides():
    layers = lambda kind, **more: [
        dict(layer.options)["sliding_window"]
        for layer in ejx.models.encoder_config(ENCODERS[kind]["config"] | more).body.layers
    ]
    assert layers("modernbert") == [None, (3, 3), (3, 3), None, (3, 3)]
    published = {"layer_types": None, "global_attn_every_n_layers": 2, "local_attention": 128}
    assert layers("modernbert", **published) == [None, (64, 64)] * 2 + [None]
    assert layers("gemma3_text") == [(3, 3), None, (3, 3)]
    assert layers("gemma3_text", sliding_window=None) == [None] * 3


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_told():
    model, ids = model_of("bert"), jnp.asarray(tokens())
    with pytest.raises(ValueError, match="at most 64 tokens, the positions that the model has, received 65"):
        model(jnp.zeros((1, 65), jnp.int32))
    long = jnp.zeros((1, 80), jnp.int32)
    fits = jnp.asarray([[0] * 64 + [1] * 16])
    assert eqx.filter_eval_shape(lambda: model(long, segment_ids=fits)).shape == (1, 80, 32)
    with pytest.raises(ValueError, match=r"at most 64 tokens.*received 70"):
        model(long, segment_ids=jnp.asarray([[0] * 10 + [1] * 70]))
    with pytest.raises(ValueError, match="token_types: expected numbers below 2"):
        model(ids, token_types=ids)
    with pytest.raises(ValueError, match="token_types: expected None"):
        model_of("modernbert")(ids, token_types=jnp.zeros_like(ids))
    with pytest.raises(ValueError, match="token_types: expected shape"):
        model(ids, token_types=ids[:, 1:])
    causal = ejx.models.decoder_config(GOLDEN["gemma2"]["config"])
    with pytest.raises(ValueError, match="causal=False in each layer, received 'attention' in layer 0"):
        ejx.models.EncoderConfig(causal)
    with pytest.raises(ValueError, match="config: expected an EncoderConfig, received DecoderConfig"):
        ejx.models.Encoder(causal, key=jax.random.key(0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="with tie_embeddings, as an encoder has no head"):
        ejx.models.EncoderConfig(ejx.models.decoder_config(GOLDEN["mistral"]["config"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(ENCODERS))
def test_a_model_saved_by_transformers(kind, tmp_path):
    """Live, where `transformers` is installed: its own files, whole and with a head of masked words."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.models.make_golden import features_of, published

    config = ENCODERS[kind]["config"]
    ids, real, types = encoder_inputs(config)
    theirs = published(config)[0]
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    expected = features_of(theirs, config).numpy()
    ours = ejx.models.from_pretrained(tmp_path)
    call = lambda model: model(jnp.asarray(ids), padding_mask=jnp.asarray(real), **types_of(kind, types))[
        real
    ]
    assert relative(call(ours), expected) < 1e-5
    if kind != "gemma3_text":
        headed = transformers.AutoModelForMaskedLM.from_config(theirs.config)
        setattr(headed, headed.base_model_prefix, theirs)
        headed.save_pretrained(tmp_path / "headed")
        assert relative(call(ejx.models.from_pretrained(tmp_path / "headed")), expected) < 1e-5
