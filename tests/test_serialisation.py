"""Saving and loading: round trips, atomicity, and one clear error for everything that can be wrong with a file."""

import collections
import json
import os
import stat
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import CheckpointError, EjkernelError
from ejkernel_eqx.serialisation import info, load, save

DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "bfloat16",
    "float16", "float32", "complex64",
]  # fmt: skip


class Block(eqx.Module):
    linear: eqx.nn.Linear
    scale: jax.Array
    rate: float
    steps: int
    name: str = eqx.field(static=True)

    def __init__(self, width: int, name: str = "block", dtype: Any = None, *, key):
        self.linear = eqx.nn.Linear(width, width, dtype=dtype, key=key)
        self.scale = jnp.asarray(1.5, jnp.bfloat16)
        self.rate = 0.1
        self.steps = 3
        self.name = name

    def __call__(self, x):
        return self.linear(x)


def same(a, b):
    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    assert tree_a == tree_b
    for x, y in zip(leaves_a, leaves_b):
        assert type(x) is type(y)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype
            x, y = jr.key_data(x), jr.key_data(y)
        if eqx.is_array_like(x) and hasattr(x, "dtype"):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            assert x == y or x is y
    return True


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.eqx"


@pytest.fixture
def block():
    return Block(4, key=jr.key(0))


# Round trips


def test_module_and_callable(path, block):
    save(path, block, {"width": 4})
    assert callable(block)
    assert same(load(path, like=Block(4, key=jr.key(1))), block)
    assert same(load(path, like=Block), block)
    assert same(load(str(path), like=lambda width: Block(width, key=jr.key(7))), block)


def test_hyperparameters_reach_the_callable(path):
    make = lambda width, depth, *, key: eqx.nn.MLP(width, width, width, depth, key=key)
    model = make(5, 2, key=jr.key(0))
    save(path, model, {"width": 5, "depth": 2})
    loaded = load(path, make)
    np.testing.assert_array_equal(loaded(jnp.arange(5.0)), model(jnp.arange(5.0)))
    assert loaded.activation is not None  # functions come from `like`


def test_like_is_never_allocated(path):
    seen = []

    def make(n, key):
        x = jnp.zeros((n,))
        seen.append(isinstance(x, jax.core.Tracer))
        return {"x": x, "k": jr.normal(key, (2,))}

    save(path, {"x": jnp.ones((3,)), "k": jnp.ones((2,))}, {"n": 3})
    load(path, make)
    assert seen == [True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_neighbours(path, dtype):
    # A leaf would be misread if one before it took the wrong number of bytes.
    xs = [jr.randint(jr.key(0), shape, 0, 2).astype(dtype) for shape in ((), (0,), (1,), (3, 2))]
    tree = [(x, np.asarray(x), jnp.arange(3)) for x in xs]
    save(path, tree)
    assert same(load(path, like=tree), tree)
    assert same(load(path, like=lambda: jax.tree.map(lambda x: x, tree)), tree)


def test_scalars(path):
    tree: list[Any] = [True, 0, -(2**63), 2**63 - 1, 0.1, float("inf"), -0.0, 1 + 2j]
    tree += [np.float32(0.1), np.int8(-3), np.bool_(True), jnp.bfloat16(1.5).item()]
    tree.append(np.asarray(1.5, jnp.bfloat16)[()])  # a bfloat16 scalar that is not an array
    tree.append(jnp.arange(2))
    save(path, tree)
    like = [type(x)(0) if not eqx.is_array(x) else x for x in tree]
    assert same(load(path, like=like), tree)
    assert same(load(path, like=lambda: like), tree)
    save(path, float("nan"))
    assert np.isnan(load(path, like=float("nan")))
    with jax.enable_x64(True):
        tree = [jnp.asarray([1 / 3], jnp.float64), np.asarray(2**40)]
        save(path, tree)
        assert same(load(path, like=tree), tree)


def test_random_keys(path):
    tree = {"new": jr.key(1), "many": jr.split(jr.key(2), 3), "rbg": jr.key(3, impl="rbg")}
    tree["old"] = jr.PRNGKey(4)
    save(path, tree)
    assert same(load(path, like=tree), tree)
    assert same(load(path, like=lambda: jax.tree.map(lambda x: x, tree)), tree)
    other = {**tree, "new": jr.key(1, impl="rbg")}
    fails(path, r"\['new'\].*random keys rbg\[\], received random keys threefry2x32\[\]", like=other)


def test_layouts_and_byte_order(path):
    x = np.arange(6.0).reshape(2, 3)
    tree = [np.asfortranarray(x), x[:, ::2], x.astype(">f4"), x.T.astype(jnp.bfloat16)]
    save(path, tree)
    for a, b in zip(jax.tree.leaves(load(path, like=tree)), jax.tree.leaves(tree)):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def test_leaves_that_are_not_saved_come_from_like(path):
    save(path, {"f": jnp.sin, "s": "old", "n": None, "x": jnp.ones(2)})
    loaded = load(path, like={"f": jnp.cos, "s": "new", "n": None, "x": jnp.zeros(2)})
    assert loaded["f"] is jnp.cos and loaded["s"] == "new"
    np.testing.assert_array_equal(loaded["x"], np.ones(2))


def test_sharded(path):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
    save(path, {"x": sharded})
    loaded = load(path, like={"x": sharded})["x"]
    assert loaded.sharding == sharded.sharding and np.array_equal(loaded, np.arange(8))
    assert not load(path, like={"x": jnp.zeros(8)})["x"].committed


def test_model_and_optimiser_state(path, block):
    import optax

    optimiser = optax.adamw(1e-3)
    state = optimiser.init(eqx.filter(block, eqx.is_inexact_array))
    save(path, (block, state))
    assert same(load(path, like=(block, state)), (block, state))


def test_equinox_reads_what_follows_the_header(path, block):
    save(path, block)
    with open(path, "rb") as file:
        file.readline()
        assert same(eqx.tree_deserialise_leaves(file, Block(4, key=jr.key(1))), block)


def test_info(path, block):
    nested = {"a": [1, 2.5, None, True, "x"]}
    save(path, block, {"width": 4, "nested": nested, "pair": (1, 2)})
    header = info(path)
    assert header["hyperparameters"] == {"width": 4, "nested": nested, "pair": [1, 2]}
    weight = {"path": ".linear.weight", "kind": "array", "dtype": "float32", "shape": [4, 4]}
    assert header["leaves"][0] == weight
    assert [leaf["kind"] for leaf in header["leaves"]] == ["array", "array", "array", "float", "int"]
    assert json.loads(path.read_bytes().split(b"\n", 1)[0]) == header
    save(path, None)
    assert load(path, like=None) is None and info(path)["leaves"] == []


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=5), ANY_JSON, max_size=4))
def test_any_json_survives(tmp_path_factory, hyperparameters):
    path = tmp_path_factory.mktemp("json") / "x"
    save(path, jnp.ones(1), hyperparameters)
    assert info(path)["hyperparameters"] == hyperparameters
    np.testing.assert_array_equal(load(path, like=jnp.zeros(1)), np.ones(1))


# Conversion while loading


def test_dtype_override(path, block):
    save(path, block, {"width": 4})
    for like in (Block, block, Block(4, dtype=jnp.float16, key=jr.key(0))):
        loaded = load(path, like=like, dtype="bfloat16")
        assert loaded.linear.weight.dtype == loaded.scale.dtype == jnp.bfloat16
        np.testing.assert_array_equal(loaded.linear.weight, block.linear.weight.astype("bfloat16"))
        assert type(loaded.rate) is float and loaded.steps == 3
    with pytest.raises(ValueError, match="dtype: expected a floating-point dtype, received int32"):
        load(path, like=block, dtype=jnp.int32)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        load(path, like=block, dtype=jnp.float64)
    tree = {"i": jnp.arange(3), "k": jr.key(0), "n": np.ones(2, np.float32)}
    save(path, tree)
    loaded = load(path, like=tree, dtype=jnp.dtype("float16"))
    assert loaded["i"].dtype == jnp.int32 and loaded["k"].dtype == tree["k"].dtype
    assert isinstance(loaded["n"], np.ndarray) and loaded["n"].dtype == np.float16


# Atomic


INTERRUPTED = {
    "first leaf": OSError("no space left"),
    "last leaf": KeyboardInterrupt(),
    "fsync": OSError("no space left"),
    "replace": KeyboardInterrupt(),
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_interrupted_save_leaves_the_old_file(path, block, monkeypatch, where):
    save(path, block, {"width": 4})
    before, other, calls, real = path.read_bytes(), Block(4, key=jr.key(5)), [], np.save

    def failing(*args, **kwargs):
        calls.append(None)
        if "leaf" not in where or len(calls) == (1 if where == "first leaf" else 3):
            raise INTERRUPTED[where]
        return real(*args, **kwargs)

    monkeypatch.setattr(*((np, "save") if "leaf" in where else (os, where)), failing)
    # Equinox turns an error inside a leaf into its own; what counts is that it comes out, and what it leaves behind.
    with pytest.raises((OSError, KeyboardInterrupt, RuntimeError)):
        save(path, other, {"width": 4})
    with pytest.raises((OSError, KeyboardInterrupt, RuntimeError)):
        calls.clear()
        save(path.parent / "new", other)
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
    save(path, other, {"width": 4})
    assert same(load(path, like=Block), other)


def test_data_is_on_disk_before_the_name_changes(path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(os.path.dirname(a)), replace(a, b))[1])
    save(path, jnp.ones(3))
    assert order[:2] == ["fsync", os.path.dirname(os.path.realpath(path))]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions and links")
def test_permissions_and_links(tmp_path):
    target, link, plain = tmp_path / "target", tmp_path / "link", tmp_path / "plain"
    plain.write_bytes(b"")
    link.symlink_to(target)
    save(link, jnp.ones(2))
    assert link.is_symlink() and target.exists()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.skipif(os.name != "posix", reason="POSIX pipes")
def test_what_is_no_file_is_not_replaced(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="Not a regular file"):
        save(path, jnp.ones(2))
    assert path.is_fifo() and os.listdir(path.parent) == [path.name]


# What can be wrong with a file


def fails(path, pattern, like=None, **kwargs):
    with pytest.raises(CheckpointError, match=pattern) as caught:
        load(path, like=jnp.ones(3) if like is None else like, **kwargs)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, EjkernelError)


def test_truncated_anywhere(path, tmp_path):
    tree = {"a": jnp.ones(3), "b": 1.0, "c": jnp.ones((), jnp.bfloat16)}
    save(path, tree, {"n": 1})
    whole = path.read_bytes()
    cut, called = tmp_path / "cut.eqx", []
    for n in range(len(whole)):
        cut.write_bytes(whole[:n])
        for read in (info, lambda path: load(path, like=called.append)):
            with pytest.raises(CheckpointError, match=r"cut\.eqx.*truncated"):
                read(cut)
    assert not called  # nothing is built from a bad file


def test_appended_or_altered(path):
    save(path, jnp.ones(3))
    whole = path.read_bytes()
    for garbage in (b"\0", b"\n", whole, whole[-48:]):
        path.write_bytes(whole + garbage)
        fails(path, "truncated or something was appended")
    start = whole.index(b"\n")
    for position in (start + 1, start + 100, len(whole) - 49, len(whole) - 1):
        altered = bytearray(whole)
        altered[position] ^= 1
        path.write_bytes(altered)
        fails(path, "damaged")


FOREIGN = {
    b"hello": "not a checkpoint written by ejkernel_eqx.save",
    b"{}\n": "not a checkpoint",
    b'{"format": "other"}\n': "not a checkpoint",
    b"PK\x03\x04" + bytes(99): "not a checkpoint",
    b"\x80\x04": "not a checkpoint",
    b"": "truncated",
    # Whatever a later version changes after the header, this version says that it is too old.
    b'{"format": "ejkernel_eqx", "schema": 99, "something": []}\nrest': "schema 99.*reads up to 1.*Update",
    b'{"format": "ejkernel_eqx", "schema": 1, oh no}\nrest': "header is not valid JSON",
}


@pytest.mark.parametrize("content", FOREIGN)
def test_foreign(path, content):
    path.write_bytes(content)
    fails(path, FOREIGN[content])
    with pytest.raises(CheckpointError, match=FOREIGN[content]):
        info(path)


def test_other_files(path):
    with pytest.raises(FileNotFoundError):
        load(path, like=jnp.ones(3))
    eqx.tree_serialise_leaves(path, jnp.ones(3))
    fails(path, "tree_deserialise_leaves")


# What can be wrong with `like`


WRONG = {
    "shape": (
        lambda block: Block(5, key=jr.key(0)),
        r"'\.linear\.weight': expected array float32\[5,5\], received array float32\[4,4\].*info",
    ),
    "dtype": (
        lambda block: Block(4, dtype=jnp.float16, key=jr.key(0)),
        r"'\.linear\.weight': expected array float16\[4,4\], .*dtype='float16'",
    ),
    "no array": (
        lambda block: eqx.tree_at(lambda b: b.scale, block, 1.0),
        r"'\.scale': expected a Python float, received array bfloat16\[\]",
    ),
    "array": (
        lambda block: eqx.tree_at(lambda b: b.rate, block, jnp.ones(())),
        r"'\.rate': expected array float32\[\], received a Python float",
    ),
    "integer": (
        lambda block: eqx.tree_at(lambda b: b.rate, block, 1),
        r"'\.rate': expected a Python int, received a Python float",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shape_dtype_and_kind(path, block, name):
    save(path, block, {"width": 4})
    make, message = WRONG[name]
    fails(path, message, like=make(block))


def test_integer_dtypes_are_not_overridden(path):
    save(path, {"x": jnp.ones(2, jnp.int32)})
    message = r": expected array float32\[2\], received array int32\[2\]"
    fails(path, message, like={"x": jnp.ones(2)}, dtype=jnp.float32)


@pytest.mark.parametrize(
    "keys, words",
    [
        ("abcd", r"`like` has \"\['d'\]\" .*which is not in the file"),
        (("a", "aa", "b", "c"), r"`like` has \"\['aa'\]\" .*which is not in the file"),
        ("ab", r"the file has \"\['c'\]\" .*which is not in `like`"),
        ("bc", r"the file has \"\['a'\]\" .*which is not in `like`"),
    ],
)
def test_wrong_structure(path, keys, words):
    save(path, dict.fromkeys("abc", jnp.ones(2)))
    fails(path, words, like=dict.fromkeys(keys, jnp.ones(2)))


def test_same_leaves_in_another_order(path):
    One, Two = (collections.namedtuple("Tree", names) for names in ("a b", "b a"))
    save(path, One(jnp.ones(2), jnp.zeros(2)))
    fails(path, r"the file has '\.a' where `like` has '\.b'", like=Two(jnp.ones(2), jnp.zeros(2)))


def test_hyperparameters_that_do_not_fit_the_callable(path, block):
    save(path, block, {"width": 4, "colour": "red"})
    fails(path, "hyperparameters.*'colour': 'red'.*Block.*colour", like=Block)
    save(path, block)
    fails(path, "do not fit.*Block.*width", like=Block)


# What cannot be saved


@pytest.mark.parametrize(
    "value",
    [jnp.bfloat16, jnp.ones(2), {1: 2}, float("nan"), [object()], {"a": {2: 3}}, np.float32(1), {1, 2}],
)
def test_hyperparameters_must_be_json(path, value):
    with pytest.raises(ValueError, match=r"hyperparameters\['bad'\] cannot be stored as JSON"):
        save(path, jnp.ones(1), {"good": 1, "bad": value})
    assert not path.exists()


def test_hyperparameters_need_string_keys(path, unchecked):
    with pytest.raises(ValueError, match="hyperparameters: expected strings as keys, received 3"):
        save(path, jnp.ones(1), {3: 1})  # pyright: ignore[reportArgumentType]
    assert not path.exists()


def test_leaves_that_cannot_be_saved(path):
    deleted = jnp.ones(2)
    deleted.delete()
    for x, words in (
        (np.asarray([None]), "object"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "holds no values"),
        (2**63, "64 bits"),
        (deleted, "deleted"),
    ):
        with pytest.raises(ValueError, match=rf"\['x'\].*{words}"):
            save(path, {"x": x})
    with pytest.raises(ValueError, match="holds no values"):
        jax.jit(lambda x: save(path, x))(jnp.ones(2))
    assert not path.exists()
