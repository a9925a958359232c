"""Checkpoints in parts: a training state over some devices, read on others, by what each has."""

import os
import pathlib
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx import models
from tests.test_serialisation_forged import changed, forged

pytest.importorskip("orbax.checkpoint")

OPTIMISER = optax.adamw(1e-2)
BATCHES = np.random.default_rng(0).integers(0, 48, (4, 8, 9)).astype(np.int32)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """As many of each process."""
    kinds, chosen = (AxisType.Explicit,) * 3, jax.devices()[:: jax.device_count() // devices]
    return jax.make_mesh((devices, 1, 1), models.MESH_AXES, axis_types=kinds, devices=chosen)


def make_state() -> Any:
    layer = models.LayerConfig("attention", {"num_heads": 2, "head_dim": 16}, models.MLPConfig(64))
    model = models.Decoder(models.DecoderConfig(48, 32, (layer,)), platform="xla", key=jax.random.key(0))
    return model, OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array)), 0


def place(state: Any, devices: int) -> Any:
    return models.place(state, make_state()[0], mesh_of(devices))


@eqx.filter_jit
def step(model: Any, optimiser_state: Any, tokens: Any) -> Any:
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda parameters: models.split_cross_entropy(
        eqx.combine(parameters, static)(tokens[0]), tokens[1]
    )
    value, gradients = jax.value_and_grad(loss)(parameters)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        updates, optimiser_state = OPTIMISER.update(gradients, optimiser_state, parameters)
    return eqx.apply_updates(model, updates), optimiser_state, value


def trained(state: Any, devices: int, until: int) -> Any:
    model, optimiser_state, number = state
    losses = []
    while number < until:
        tokens = models.place_tokens(BATCHES[number], mesh_of(devices))
        model, optimiser_state, loss = step(model, optimiser_state, tokens)
        number += 1
        losses.append(np.asarray(loss))
    return (model, optimiser_state, number), losses


def equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        x, y = (np.asarray(jax.random.key_data(z) if keys else z) for z in (x, y))
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


def test_two_devices_write_and_one_and_eight_read(tmp_path):
    path = tmp_path / "checkpoint"
    put = lambda x, devices: jax.device_put(x, NamedSharding(mesh_of(devices), P(None, "data")))
    values = np.random.default_rng(0).standard_normal((3, 16), np.float32)
    others = {
        "key": jax.random.key(1),
        "none": jnp.zeros((0, 2)),
        "codes": jnp.arange(4).astype(jnp.uint4),
        "step": 7,
    }
    state = {"x": put(values, 2), "narrow": put(values.astype(jnp.bfloat16), 2), **others}
    ejx.save(path, state, {"width": 32}, sharded=True)
    assert ejx.serialisation.info(path)["hyperparameters"] == {"width": 32}
    alone = ejx.load(
        path, lambda width: {**state, "x": jnp.zeros((3, 16)), "narrow": jnp.zeros((3, 16), jnp.bfloat16)}
    )
    equal(alone, state)
    assert alone["x"].devices() == alone["narrow"].devices() == {jax.devices()[0]}
    over_eight = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=put(x, 8).sharding)
    like = {**state, "x": over_eight(state["x"]), "narrow": over_eight(state["narrow"])}
    eight = ejx.load(path, like)
    equal(eight, state)
    assert eight["x"].sharding == like["x"].sharding and len(eight["narrow"].devices()) == 8
    narrow = ejx.load(path, like, dtype="bfloat16")["x"]
    equal(narrow, values.astype(jnp.bfloat16))
    assert narrow.sharding == like["x"].sharding


@pytest.mark.slow
def test_training_goes_on_exactly(tmp_path):
    """Bit for bit on as many devices; and the state that eight read is the same."""
    path = tmp_path / "checkpoint"
    state, _ = trained(place(make_state(), 2), 2, 2)
    ejx.save(path, state, sharded=True)
    expected, losses = trained(state, 2, 4)
    found, again = trained(ejx.load(path, place(eqx.filter_eval_shape(make_state), 2)), 2, 4)
    equal(found, expected)
    equal(again, losses)
    like = place(eqx.filter_eval_shape(make_state), 8)
    eight = ejx.load(path, like)
    equal(eight, state)
    for x, wanted in zip(jax.tree.leaves(eight), jax.tree.leaves(like), strict=True):
        assert not eqx.is_array(x) or x.sharding == wanted.sharding


def test_an_older_checkpoint_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path, arrays = tmp_path / "checkpoint", lambda value: {"x": jnp.full((4,), value)}
    for value in (1.0, 2.0):
        ejx.save(path, arrays(value), sharded=True)
        (path / "2024-notes").mkdir(exist_ok=True)  # the user's own
    assert sorted(x.name for x in path.iterdir()) == ["2", "2024-notes", "index.ejx"]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)  # of the index
    with pytest.raises(KeyboardInterrupt):
        ejx.save(path, arrays(3.0), sharded=True)
    monkeypatch.undo()
    equal(ejx.load(path, arrays(0.0)), arrays(2.0))
    ejx.save(path, arrays(4.0), sharded=True)  # over what is left of it
    equal(ejx.load(path, arrays(0.0)), arrays(4.0))


def without_parts(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "1")


def of_other_number(folder: pathlib.Path) -> None:
    """With a checksum that fits."""
    forged(folder / "index.ejx", header=changed(parts="../1"))


def shortened(folder: pathlib.Path) -> None:
    for part in folder.glob("1/**/d/*"):
        part.write_bytes(part.read_bytes()[:10])


@pytest.mark.parametrize(
    "damage, message",
    [
        (without_parts, "parts cannot be read"),
        (of_other_number, "its index names no parts"),
        (shortened, "parts cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    path = tmp_path / "checkpoint"
    ejx.save(path, {"x": jnp.arange(4096.0)}, sharded=True)
    damage(path)
    with pytest.raises(ejx.CheckpointError, match=message):
        ejx.load(path, {"x": jnp.zeros(4096)})


def test_other_folders_and_other_shapes_are_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    with pytest.raises(
        ValueError, match=r"path: expected a checkpoint, an empty folder or none, received .* with 'a.txt'"
    ):
        ejx.save(tmp_path / "texts", {"x": jnp.ones(2)}, sharded=True)
    ejx.save(tmp_path / "checkpoint", {"x": jnp.ones(2)}, sharded=True)
    with pytest.raises(
        ejx.CheckpointError, match="expected array float32\\[3\\], received array float32\\[2\\]"
    ):
        ejx.load(tmp_path / "checkpoint", {"x": jnp.ones(3)})
