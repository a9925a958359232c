"""Files that fit their checksum and are wrong all the same, and files of another architecture with the same shapes."""

import datetime
import functools
import io
import json
import logging
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import DecoderConfig, LayerConfig, MLPConfig
from ejkernel_eqx.serialisation import file as serialisation


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.eqx"


def forged(path, header: Callable[[bytes], bytes] = bytes, body: Callable[[bytes], bytes] = bytes) -> None:
    """Changes the header's line and the leaves, and writes the footer that fits them."""
    raw = path.read_bytes()[: -serialisation._FOOTER.size]
    line, _, leaves = raw.partition(b"\n")
    raw = header(line) + b"\n" + body(leaves)
    digest = serialisation.hashlib.sha256(raw).digest()
    path.write_bytes(raw + serialisation._FOOTER.pack(serialisation._MAGIC, len(raw), digest))


def arrays(tree: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def changed(**entries: Any) -> Callable[[bytes], bytes]:
    """The header with other entries; `None` leaves one out."""

    def change(line: bytes) -> bytes:
        known = json.loads(line) | entries
        return json.dumps({k: v for k, v in known.items() if v is not None}).encode()

    return change


# Hyperparameters of modules


class Block(eqx.Module):
    linear: eqx.nn.Linear
    activation: Any
    heads: int = eqx.field(static=True)
    options: Any = eqx.field(static=True)
    mesh: Any = eqx.field(static=True)

    def __init__(self, heads=2, activation: Any = jax.nn.relu, options: Any = (), mesh: Any = None):
        self.linear = eqx.nn.Linear(4, 4, key=jr.key(0))
        self.activation, self.heads, self.options, self.mesh = activation, heads, options, mesh


def attention(num_heads=4, **options) -> Any:
    return ejx.nn.MultiHeadAttention(16, num_heads=num_heads, key=jr.key(0), **options)


def adam(heads) -> Any:
    return optax.adam(1e-3).init(eqx.filter(Block(heads), eqx.is_inexact_array))


def decoder(theta=1e4, **options) -> Any:
    mixer = {"num_heads": 2, "rope": ejx.nn.RotaryEmbedding(8, theta=theta)}
    layer = LayerConfig("attention", mixer, MLPConfig(8))
    return ejx.models.Decoder(DecoderConfig(8, 16, (layer,)), key=jr.key(0), **options)


def activated(function: Any, **options: Any) -> Callable[[], Block]:
    return lambda: Block(activation=functools.partial(function, **options) if options else function)


DIFFERENT = {
    "heads": (attention, lambda: attention(8), r"\.num_heads: expected 8, received 4, and \d more"),
    "mask": (
        *(lambda: attention(causal=True), lambda: attention(causal=False)),
        r"\.attention\.causal: expected False, received True\.",
    ),
    "function": (Block, activated(jax.nn.gelu), r"\.activation: expected 'gelu', received 'relu'"),
    "partial": (
        *(activated(jax.nn.gelu, approximate=True), activated(jax.nn.gelu, approximate=False)),
        r"\.activation\[2\]\.approximate: expected False, received True",
    ),
    "leaf that is no array": (
        *(activated(MLPConfig(8)), activated(MLPConfig(8, use_bias=True))),
        r"\.activation\.use_bias: expected True, received False",
    ),
    "in a list": (lambda: [Block(2)], lambda: [Block(3)], r"\[0\]\.heads: expected 3, received 2"),
    "lengths": (
        *(lambda: Block(options=(1, 2)), lambda: Block(options=(1,))),
        r"\.options: expected \[1\], received \[1, 2\]",
    ),
    "not finite": (
        *(lambda: Block(options={"cap": float("inf")}), lambda: Block(options={"cap": 1.0})),
        r"\.options\.cap: expected 1\.0, received 'inf'",
    ),
    "rotation": (decoder, lambda: decoder(2e4), r"theta: expected 20000\.0, received 10000\.0"),
    "optimiser": (lambda: adam(2), lambda: adam(3), r"\[0\]\.mu\.heads: expected 3, received 2"),
}
ALIKE = {
    "platform and dtypes": (attention, lambda: attention(platform="xla", compute_dtype=jnp.bfloat16)),
    "dropout": (lambda: attention(dropout_rate=0.1), attention),
    "recomputation": (decoder, lambda: decoder(remat="kernels", scan_layers=True)),
    "mesh": (Block, lambda: Block(mesh="a mesh")),
    "functions without a name": (activated(lambda x: x), activated(lambda x: x + 1)),
    "arrays alone": (lambda: eqx.filter(Block(), eqx.is_array), Block),
    "arrays alone, wanted": (Block, lambda: eqx.filter(Block(), eqx.is_array)),
    "dates": (lambda: Block(options={"a": datetime.date(2026, 1, 1)}), lambda: Block(options={"a": 1})),
    "huge integers": (lambda: Block(options=10**5000), lambda: Block(options=-(10**5000))),
    "unknown values": (lambda: Block(options=object()), lambda: Block(options=1)),
    "an option of one side": (lambda: Block(options={"a": 1}), lambda: Block(options={"a": 1, "b": 2})),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_architecture_of_the_same_shapes_is_refused(path, name, caplog):
    make, like, message = DIFFERENT[name]
    model = make()
    ejx.save(path, model)
    with pytest.raises(ejx.CheckpointError, match=message) as caught:
        ejx.load(path, like)
    assert str(path) in str(caught.value) and "strict=False" in str(caught.value)
    ejx.load(path, make)
    caplog.set_level(logging.WARNING, "ejkernel_eqx")
    assert not caplog.records
    loaded = ejx.load(path, like, strict=False)
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "strict=False" in record.getMessage()
    assert jax.tree.structure(loaded) == jax.tree.structure(like())
    jax.tree.map(np.testing.assert_array_equal, *map(arrays, (loaded, model)))


@pytest.mark.parametrize("name", ALIKE)
def test_how_a_model_is_run_may_differ(path, name, caplog):
    make, like = ALIKE[name]
    ejx.save(path, make())
    ejx.load(path, like)
    assert not caplog.records


def test_files_of_earlier_and_later_versions_load(path):
    ejx.save(path, Block(2))
    table = ejx.serialisation.info(path)["modules"]
    assert table[""]["heads"] == 2
    forged(path, changed(modules={"": table[""] | {"new": 3}, ".other": {"x": 1}}))
    assert ejx.load(path, Block(2)).heads == 2
    forged(path, changed(modules=None))
    assert ejx.load(path, Block(3)).heads == 3 and "modules" not in ejx.serialisation.info(path)


# Files that are not what they say

TREE = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, jnp.bfloat16), "k": jr.key(0), "n": 3}
TREE["z"] = np.ones(2)
LEAF = {"path": "['a']", "kind": "array", "dtype": "float32", "shape": [2, 3]}
DEEP = b"[" * 900 + b"]" * 900


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return change


HEADERS = {
    "schema of another type": replaced(b'"schema": 1', b'"schema": "1"'),
    "schema that is not finite": replaced(b'"schema": 1', b'"schema": 1e999'),
    "schema of a list": replaced(b'"schema": 1', b'"schema": ' + DEEP),
    "schema before the first": replaced(b'"schema": 1', b'"schema": 0'),
    "schema that is given twice": replaced(b'"modules"', b'"schema": null, "modules"'),
    "no hyperparameters": changed(hyperparameters=None),
    "hyperparameters of a list": changed(hyperparameters=["width"]),
    "modules of a list": changed(modules=[1]),
    "no leaves": changed(leaves=None),
    "leaves of an object": changed(leaves={"a": 1}),
    "a leaf that is none": changed(leaves=[3]),
    "a leaf without a path": changed(leaves=[{"kind": "int"}]),
    "a leaf with more": changed(leaves=[LEAF | {"more": 1}]),
    "a path of another type": changed(leaves=[LEAF | {"path": 3}]),
    "a kind that is unknown": changed(leaves=[LEAF | {"kind": "object"}]),
    "a kind that is nested": replaced(b'"kind": "array"', b'"kind": ' + DEEP),
    "a dtype that is unknown": changed(leaves=[LEAF | {"dtype": "float7"}]),
    "a dtype of objects": changed(leaves=[LEAF | {"dtype": "object"}]),
    "a dtype of several": changed(leaves=[LEAF | {"dtype": "f4,i4"}]),
    "no dtype": changed(leaves=[{k: v for k, v in LEAF.items() if k != "dtype"}]),
    "a shape of another type": changed(leaves=[LEAF | {"shape": "23"}]),
    "a shape of fractions": changed(leaves=[LEAF | {"shape": [2.0, 3]}]),
    "a shape below zero": changed(leaves=[LEAF | {"shape": [-2, -3]}]),
    "a deep header": lambda line: line[:-1] + b', "more": ' + b"[" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header(path, name):
    ejx.save(path, TREE)
    forged(path, HEADERS[name])
    for read in (ejx.serialisation.info, lambda path: ejx.load(path, TREE)):
        with pytest.raises(ejx.CheckpointError, match=r"model\.eqx.*is damaged: its "):
            read(path)


def test_leaves_that_are_there_twice_and_deep_hyperparameters(path):
    ejx.save(path, {"a": 1.0}, {"width": 0})
    forged(path, replaced(b'"width": 0', b'"width": ' + DEEP))
    with pytest.raises(ejx.CheckpointError, match="do not fit"):
        ejx.load(path, lambda depth: {"a": 1.0})
    forged(path, changed(leaves=2 * [{"path": "['a']", "kind": "float"}]))
    with pytest.raises(ejx.CheckpointError, match="the file has 2 leaves, `like` has 1"):
        ejx.load(path, {"a": 1.0})


def array_at(n: int, change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """The leaves with the n-th array of the file changed."""

    def changed(body: bytes) -> bytes:
        arrays = [b"\x93NUMPY" + rest for rest in body.split(b"\x93NUMPY")[1:]]
        return b"".join(change(array) if i == n else array for i, array in enumerate(arrays))

    return changed


def saved_as(x: Any, **options: Any) -> Callable[[bytes], bytes]:
    file = io.BytesIO()
    np.save(file, x, **options)
    return lambda _: file.getvalue()


HUGE = replaced(b"(2, 3)", b"(999999999999, 3)")
ARRAYS = {
    "another shape": array_at(0, saved_as(np.zeros((3, 2), np.float32))),
    "another dtype": array_at(0, saved_as(np.zeros((2, 3), np.int32))),
    "another byte order": array_at(0, saved_as(np.zeros((2, 3), ">f4"))),
    "a huge shape": array_at(0, HUGE),
    "objects": array_at(0, saved_as(np.asarray([None]), allow_pickle=True)),
    "another width of bfloat16": array_at(1, saved_as(np.zeros(2, np.float32))),
    "another shape of a key": array_at(2, saved_as(np.zeros(4, np.uint32))),
    "an array for a number": array_at(3, saved_as(np.zeros(2, np.int64))),
    "a float for an integer": array_at(3, saved_as(np.asarray(0.5))),
    "an archive": lambda body: b"PK\x03\x04" + body,
    "a pickle": lambda body: b"\x80\x04N." + body,
    "nothing": lambda body: b"",
    "fewer arrays": array_at(4, lambda _: b""),
    "a part of an array": array_at(4, lambda array: array[:-1]),
    "more arrays": lambda body: body + body,
    "no dictionary": array_at(0, replaced(b"{'descr'", b"['descr'")),
    "a header of another language": array_at(0, replaced(b"'descr'", b"'''scr'")),
    "a header of brackets": array_at(0, replaced(b"{'descr': '<f4'", b"((((((((((((((")),
    "a dtype that is unknown": array_at(0, replaced(b"<f4", b"<q9")),
    "a shape of letters": array_at(0, replaced(b"(2, 3)", b"(2, x)")),
    "a version of later": array_at(0, replaced(b"\x93NUMPY\x01", b"\x93NUMPY\x09")),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_forged_array(path, name):
    ejx.save(path, TREE)
    forged(path, body=ARRAYS[name])
    with pytest.raises(ejx.CheckpointError, match=r"model\.eqx' is damaged: (the leaf \"\['|its leaves)"):
        ejx.load(path, TREE)


def test_a_shape_that_no_file_holds(path):
    """Header and model agree, so that memory would be allocated for it."""
    ejx.save(path, TREE)
    entries = [LEAF | {"shape": [999999999999, 3]}, *ejx.serialisation.info(path)["leaves"][1:]]
    forged(path, changed(leaves=entries), array_at(0, HUGE))
    like = eqx.tree_at(lambda t: t["a"], TREE, jax.ShapeDtypeStruct((999999999999, 3), jnp.float32))
    with pytest.raises(ejx.CheckpointError, match="the file is shorter than its array"):
        ejx.load(path, like)


def test_an_array_of_a_foreign_byte_order_as_earlier_versions_wrote_it(path):
    tree = {"x": np.arange(3.0, dtype=np.float32)}
    ejx.save(path, tree)
    forged(path, body=saved_as(tree["x"].view(np.uint32)))
    np.testing.assert_array_equal(ejx.load(path, tree)["x"], tree["x"])
