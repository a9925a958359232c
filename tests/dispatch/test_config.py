import dataclasses
import json
import math

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import dispatch


@dataclasses.dataclass(frozen=True)
class Tile:
    block: int
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class Config:
    forward: Tile
    backward: Tile
    fast: bool
    precision: str = "ieee"
    ratio: float = 1.0

    def __post_init__(self):
        if self.precision not in ("ieee", "tf32"):
            raise ValueError(f"Config.precision: expected 'ieee' or 'tf32', received {self.precision!r}.")


CONFIG = Config(Tile(64), Tile(32, 8), True, "tf32", math.pi)


def test_round_trip():
    text = ejx.to_json(CONFIG)
    assert ejx.from_json(text, Config) == CONFIG
    assert json.loads(text) == dispatch.to_dict(CONFIG)
    assert dispatch.to_dict(CONFIG)["backward"] == {"block": 32, "num_warps": 8}
    assert list(json.loads(text)) == ["forward", "backward", "fast", "precision", "ratio"]


def test_tuples_come_back_as_tuples():
    @dataclasses.dataclass(frozen=True)
    class Nested:
        order: tuple[tuple[int, ...], ...]

    config = ejx.from_json(ejx.to_json(Nested(((1, 2), (3,)))), Nested)
    assert config == Nested(((1, 2), (3,))) and hash(config) == hash(Nested(((1, 2), (3,))))


def test_fields_with_defaults_may_be_left_out():
    data = {"forward": {"block": 64}, "backward": {"block": 32}, "fast": False}
    assert dispatch.from_dict(data, Config) == Config(Tile(64), Tile(32), False)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda d: d.update(speed=9),
            r"of Config, received unknown \['speed'\] and missing \[\]; it was written by another version",
        ),
        (lambda d: d.pop("fast"), r"received unknown \[\] and missing \['fast'\]"),
        (lambda d: d["forward"].update(stages=2), r"of Tile, received unknown \['stages'\]"),
        (lambda d: d["backward"].pop("block"), r"of Tile, received unknown \[\] and missing \['block'\]"),
        (lambda d: d.update(fast=1), "config field fast: expected bool, received 1"),
        (lambda d: d["forward"].update(block=True), "config field block: expected int, received True"),
        (lambda d: d["forward"].update(block="64"), "config field block: expected int, received '64'"),
        (lambda d: d["forward"].update(block=64.0), r"config field block: expected int, received 64\.0"),
        (lambda d: d.update(precision=None), "config field precision: expected str, received None"),
        (lambda d: d.update(forward=64), "expected an object with the fields of Tile, received 64"),
        (lambda d: d.update(precision="fp8"), "Config.precision: expected 'ieee' or 'tf32', received 'fp8'"),
    ],
)
def test_anything_else_is_refused(change, message):
    data = dispatch.to_dict(CONFIG)
    change(data)
    with pytest.raises(ValueError, match=message):
        ejx.from_json(json.dumps(data), Config)


@pytest.mark.parametrize("value", [3, {"block": 3}, Tile, dataclasses.make_dataclass("Thawed", ["block"])(3)])
def test_only_frozen_dataclasses_are_configurations(value):
    with pytest.raises(ValueError, match="expected an instance of a frozen dataclass"):
        dispatch.to_dict(value)


def test_stable_json():
    assert ejx.stable_json({"b": 1, "a": [True, None]}) == '{"a":[true,null],"b":1}'
    assert ejx.stable_json(Tile(1)) == '{"block":1,"num_warps":4}'


@dataclasses.dataclass(frozen=True)
class Scaled:
    scale: float = 1
    block: int = 2


def test_an_integer_may_stand_for_a_float_but_not_the_other_way_round():
    assert ejx.from_json(ejx.to_json(Scaled()), Scaled) == Scaled()
    for wrong in ('{"scale": true}', '{"block": 2.0}'):
        with pytest.raises(ValueError, match="expected"):
            ejx.from_json(wrong, Scaled)


def test_a_tile_of_triton_refuses_what_it_cannot_mean():
    triton = pytest.importorskip("ejkernel_eqx.attention.triton.compiled")
    for block in (48, 192):
        with pytest.raises(ValueError, match=r"TileConfig.block_q: expected a power of two"):
            triton.TileConfig(block, 64, 4, 2)
