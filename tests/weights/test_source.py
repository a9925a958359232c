"""Where arrays come from: dictionaries, files, shards, and what is wrong with them."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ejkernel_eqx as ejx
from ejkernel_eqx.weights import source, Weights

KEY = jax.random.key(0)


def linear():
    return eqx.nn.Linear(4, 6, key=KEY)


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {"weight": rng.normal(size=(6, 4)).astype(dtype), "bias": rng.normal(size=6).astype(dtype)}


def test_dictionaries_of_numpy_and_jax():
    published = arrays()
    for given in (published, {name: jnp.asarray(x) for name, x in published.items()}):
        layer = ejx.load_published(linear(), given)
        assert (layer.weight == published["weight"]).all() and (layer.bias == published["bias"]).all()


def test_what_is_loaded_is_a_copy():
    published = arrays()
    layer = ejx.load_published(linear(), published)
    before = np.array(layer.weight)
    published["weight"][:] = 0
    assert (layer.weight == before).all()


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    published = arrays()
    given = {name: torch.nn.Parameter(torch.from_numpy(x).bfloat16()) for name, x in published.items()}
    layer = ejx.load_published(linear(), given)
    assert (layer.weight == published["weight"].astype(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_file(tmp_path, dtype):
    published = arrays(dtype)
    safetensors.numpy.save_file(published, tmp_path / "any.safetensors")
    for path in (tmp_path / "any.safetensors", str(tmp_path)):
        layer = ejx.load_published(linear(), path)
        assert layer.weight.dtype == jnp.float32
        assert (layer.weight == published["weight"].astype(np.float32)).all()


def sharded(folder):
    published = arrays()
    table = {"layer.weight": "model-1.safetensors", "layer.bias": "model-2.safetensors"}
    for name, file in table.items():
        safetensors.numpy.save_file({name: published[name.removeprefix("layer.")]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return published


def test_shards(tmp_path):
    published = sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        layer = ejx.load_published(linear(), path, "layer")
        assert (layer.weight == published["weight"]).all() and (layer.bias == published["bias"]).all()


def test_only_what_is_needed_is_opened(tmp_path):
    published = sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    weights = Weights.open(tmp_path, "layer")
    assert (weights.take("weight", (6, 4), jnp.float32) == published["weight"]).all()
    with pytest.raises(ejx.CheckpointError, match=r"model-2\.safetensors' is not there"):
        weights.take("bias", (6,), jnp.float32)


def test_files_are_read_one_array_at_a_time(tmp_path, monkeypatch):
    safetensors.numpy.save_file(arrays(), tmp_path / "model.safetensors")
    read = []
    original = source.FileSource.read
    monkeypatch.setattr(
        source.FileSource, "read", lambda self, name: read.append(name) or original(self, name)
    )
    weights = Weights.open(tmp_path)
    assert weights.shape("weight") == (6, 4) and weights.names() == ["bias", "weight"] and not read
    weights.take("bias", (6,), jnp.float32)
    assert read == ["bias"]


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays(), path)
    whole = path.read_bytes()
    for content in (b"", b"abc", whole[:-3], whole[:20], b"PK\x03\x04" + whole):
        path.write_bytes(content)
        with pytest.raises(ejx.CheckpointError, match=r"model\.safetensors' is not a safetensors file"):
            ejx.load_published(linear(), path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}'])
def test_broken_indices_are_named(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(ejx.CheckpointError, match=r"index\.json' is not the index"):
        ejx.load_published(linear(), tmp_path)


@pytest.mark.parametrize("content", ["", "[" * 10**5, "1" * 5000, '{"weight_map":'], ids=range(4))
def test_indices_that_are_no_json(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ejx.CheckpointError, match=r"index\.json' is not readable as JSON"):
        ejx.load_published(linear(), tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        3,
        None,
        [],
        "",
        ".",
        "..",
        "../model-2.safetensors",
        "sub/../../x",
        "/etc/x",
        "a/b",
        "..\\x",
        "C:x",
        "a\0b",
    ]
    + ["x" * 256],
)
def test_an_index_names_files_beside_it_alone(tmp_path, file):
    """Whatever lies there: the folder above has a file with the array."""
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder)
    safetensors.numpy.save_file({"layer.bias": np.zeros(6, np.float32)}, tmp_path / "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    table = {"layer.weight": "model-1.safetensors", "layer.bias": file}
    index.write_text(json.dumps({"weight_map": table}))
    with pytest.raises(
        ejx.CheckpointError, match=r"weight_map\['layer\.bias'\]: expected the name of a file"
    ) as error:
        ejx.load_published(linear(), folder, "layer")
    assert len(str(error.value)) < 500


def test_files_that_are_links_are_read(tmp_path):
    """As caches of downloads have them: the index beside names that link to another folder."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    published = sharded(blobs)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(pathlib.Path("..") / "blobs" / path.name)
    assert (ejx.load_published(linear(), folder, "layer").bias == published["bias"]).all()


def test_an_index_that_is_not_true(tmp_path):
    sharded(tmp_path)
    safetensors.numpy.save_file({"other": np.zeros(2)}, tmp_path / "model-2.safetensors")
    with pytest.raises(
        ejx.CheckpointError, match=r"'layer\.bias' is in '.*model-2.*', which does not hold it"
    ):
        ejx.load_published(linear(), tmp_path, "layer")


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ejx.CheckpointError, match="found none"):
        ejx.load_published(linear(), tmp_path)
    for name in ("a", "b"):
        safetensors.numpy.save_file(arrays(), tmp_path / f"{name}.safetensors")
    with pytest.raises(ejx.CheckpointError, match=r"found a\.safetensors, b\.safetensors"):
        ejx.load_published(linear(), tmp_path)


@pytest.mark.parametrize("name", ["no.safetensors", "no.json"])
def test_a_path_that_is_not_there(tmp_path, name):
    with pytest.raises(ejx.CheckpointError, match="is not there"):
        ejx.load_published(linear(), tmp_path / name)


def test_numbers_of_eight_bits(tmp_path):
    # NumPy's writer has no name for them, so that a header stands for the file.
    header = json.dumps({"weight": {"dtype": "F8_E4M3", "shape": [6, 4], "data_offsets": [0, 24]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ejx.CheckpointError, match=r"'weight' as F8_E4M3.*scales"):
        ejx.load_published(linear(), path)


@pytest.mark.parametrize(
    "given, message",
    [
        ([("weight", 0)], "state_dict: expected a dictionary of arrays or the path"),
        ({3: np.zeros(2)}, "state_dict: expected names as keys, received 3"),
        (
            {"weight": [[1.0]], "bias": np.zeros(6)},
            r"state_dict\['weight'\]: expected an array .*, received list",
        ),
        (
            {"weight": np.zeros((6, 4), np.int8), "bias": np.zeros(6)},
            "'weight': expected floats, received int8; quantised",
        ),
    ],
)
def test_no_arrays(given, message, unchecked):
    with pytest.raises(ValueError, match=message):
        ejx.load_published(linear(), given)
