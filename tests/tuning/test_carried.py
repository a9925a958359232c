"""A tuned model travels: its file carries what was tuned, to devices of the same kind alone, and nothing is guessed."""

import dataclasses
import json
import logging
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform
from ejkernel_eqx.serialisation import file as serialisation
from tests.tuning.parts import carried, device_facts, memory_cache, plans_of, record_for, store, Tier
from tests.tuning.scaling import (
    OPERATION,
    problem_of,
    QUICK,
    Scale,
    ScaleConfig,
)

pytestmark = pytest.mark.usefixtures("second_wins")


class Model(eqx.Module):
    layers: list[Scale]
    weight: jax.Array

    def __init__(self, **options: Any) -> None:
        self.layers = [Scale(**options), Scale(**options)]
        self.weight = jnp.ones(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


X = jnp.ones(64)


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """`elsewhere()`: a machine whose tables know nothing."""

    def move() -> None:
        monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "other"))
        memory_cache.clear()

    return move


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.eqx"


@pytest.fixture
def tuned():
    """As the tuner would leave it, on a machine whose tables know the winner already."""
    implementation = ejx.kernel_registry.get(OPERATION, Platform.XLA)
    found = record_for(problem_of(X), implementation, config={"block": 2}, ms={"forward": 1.0})
    store(implementation, found, device_facts())
    return ejx.tune(Model(), X, options=QUICK)


def chosen(model: Any) -> list[tuple[Any, str, str]]:
    return [(c.config, c.tier, c.origin) for c in ejx.explain(model, X).choices]


def rewritten(path, change) -> None:
    """The file with another header, its checksum made anew."""
    raw = path.read_bytes()[: -serialisation._FOOTER.size]
    line, _, leaves = raw.partition(b"\n")
    header = json.loads(line)
    change(header)
    raw = json.dumps(header).encode() + b"\n" + leaves
    digest = serialisation.hashlib.sha256(raw).digest()
    path.write_bytes(raw + serialisation._FOOTER.pack(serialisation._MAGIC, len(raw), digest))


def entry(header: dict[str, Any]) -> dict[str, Any]:
    return header["configs"][0]["entries"][0]


@pytest.mark.parametrize("like", [Model, None], ids=["callable", "pytree"])
def test_a_tuned_model_travels(path, tuned, elsewhere, like):
    ejx.save(path, tuned, configs=True)
    elsewhere()
    assert {config for config, _, _ in chosen(Model())} == {"ScaleConfig(block=1)"}
    loaded = ejx.load(path, like or Model())
    found = chosen(loaded)
    assert {config for config, _, _ in found} == {"ScaleConfig(block=2)"}
    assert all(tier == "autotune" and origin.endswith("from a file") for _, tier, origin in found)
    assert eqx.tree_equal(loaded, tuned)
    assert plans_of(loaded) == plans_of(tuned)  # so that a state of an optimiser fits
    again = path.with_suffix(".2")
    ejx.save(again, loaded, configs=True)
    assert serialisation.info(again)["configs"] == serialisation.info(path)["configs"]


def test_without_configs_nothing_travels(path, tuned, elsewhere):
    ejx.save(path, tuned)
    assert "configs" not in serialisation.info(path)
    elsewhere()
    assert {config for config, _, _ in chosen(ejx.load(path, Model))} == {"ScaleConfig(block=1)"}
    ejx.save(path, tuned, configs=True)
    assert {c for c, _, _ in chosen(ejx.load(path, Model, configs=False))} == {"ScaleConfig(block=1)"}


def test_another_device_is_said(path, tuned, elsewhere, caplog):
    ejx.save(path, tuned, configs=True)
    rewritten(path, lambda header: header["configs"][0]["device"].update(kind="NVIDIA H300"))
    elsewhere()
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        loaded = ejx.load(path, Model)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "tuned for NVIDIA H300" in message and "not tuned" in message and "ejx.tune" in message
    assert plans_of(loaded) == plans_of(Model())


def change_record(**changes: Any) -> Any:
    return lambda header: entry(header)["record"].update(changes)


BROKEN = {
    "no list": (lambda h: h.update(configs={"a": 1}), "expected a list of tables, received dict"),
    "no device": (lambda h: h["configs"][0].pop("device"), "a table cannot be read"),
    "no path": (lambda h: entry(h).update(paths=[1]), "expected paths and a record"),
    "unknown field": (change_record(run="import os"), "received unknown fields ['run']"),
    "unknown config": (change_record(config={"block": 2, "exec": "os"}), "received unknown ['exec']"),
    "other version": (change_record(version=7), "is of version 7 of the kernels, this package has 1"),
    "other operation": (change_record(operation="tests.other"), "the choice is one of tests.other"),
    "other problem": (change_record(problem="{}"), "its problem is none of"),
    "no platform": (change_record(platform="quantum"), "does not run on 'quantum'"),
    "other paths": (lambda h: entry(h).update(paths=[".head"]), "there is no kernel at '.head'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_named_and_left_out(case, path, tuned, elsewhere, caplog):
    change, words = BROKEN[case]
    ejx.save(path, tuned, configs=True)
    rewritten(path, change)
    elsewhere()
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        loaded = ejx.load(path, Model)
    (message,) = [record.getMessage() for record in caplog.records]
    assert words in message and str(path) in message
    assert plans_of(loaded) == plans_of(Model()) and bool((loaded(X) == 4 * X).all())


def test_what_was_given_to_a_kernel_stays(path, tuned, elsewhere, caplog):
    ejx.save(path, tuned, configs=True)
    elsewhere()
    given = Model(config=ScaleConfig(1))
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert plans_of(ejx.load(path, given)) == plans_of(given)
    assert not caplog.records
    ejx.save(path, given, configs=True)
    assert serialisation.info(path)["configs"] == []


def test_a_model_that_was_not_tuned_says_so(path, caplog):
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        ejx.save(path, Model(), configs=True)
    assert "no kernel of the model was tuned" in caplog.text
    assert plans_of(ejx.load(path, Model)) == plans_of(Model())


def test_a_denial_travels(tuned):
    """A platform of which every configuration was denied is passed over there, too."""
    known = tuned.layers[0].plan.snapshot
    (((_, key), (found, _)),) = known.pinned.items()
    denied = dataclasses.replace(found, config=None, ms=(), denied="all were wrong")
    pins = {(Platform.XLA, key): (denied, Tier.AUTOTUNE)}
    model = carried.map_plans(lambda _, plan: plan.with_pins(pins), tuned)
    loaded = carried.with_choices(Model(), carried.choices_of_model(model), "file")
    ((known, _),) = loaded.layers[1].plan.pinned.values()
    assert known.denied == "all were wrong"
    with pytest.raises(ejx.UnsupportedError, match="all were wrong"):
        loaded(X)
