"""Launches by parameter name, configurations that check themselves, and sizes of tiles."""

import dataclasses
import functools
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.dispatch import from_json, to_json
from ejkernel_eqx.launch import executing, given, Launcher, Options, result_like, run
from ejkernel_eqx.launch.fields import (
    Block,
    check_fields,
    Count,
    Float32Dot,
    one_of,
    power_of_two,
    Registers,
    whole,
)
from ejkernel_eqx.launch.sizes import cdiv, fitting, shared_memory_of, too_large
from tests.compiled import DEVICES


@dataclasses.dataclass(frozen=True)
class Tile:
    block: int
    num_warps: int = 4
    num_stages: int = 3


def launcher(x, bias, state, **numbers: Any) -> Launcher:
    pytest.importorskip("triton")
    arrays = {"x": x, "bias": bias, "state": state, "unused": x}
    numbers = {"n": x.size, "SCALE": 2.0, "UNUSED": 1, **given(BIAS=bias), **numbers}
    return Launcher("tests", arrays, numbers, x)


@pytest.fixture(autouse=True)
def interpreted():
    with executing(functools.partial(run, interpret=True)):
        yield


@pytest.mark.parametrize("biased", (False, True))
def test_a_kernel_takes_what_its_parameters_name(biased):
    from tests.launch.kernels import mixed_kernel

    x, state = jnp.arange(11.0), jnp.ones(11)
    bias = 10 * x if biased else None
    outputs = {"new_state": result_like(state), "out": result_like(x)}
    aliases = {"state": "new_state"}
    results = launcher(x, bias, state)(mixed_kernel, Tile(4), outputs, cdiv(11, 4), aliases=aliases)
    np.testing.assert_array_equal(results["new_state"], 1 + np.arange(11.0))
    np.testing.assert_array_equal(results["out"], (12 if biased else 2) * np.arange(11.0))

    launch, inputs = launcher(x, bias, state).launch(mixed_kernel, Tile(4), outputs, 3, aliases=aliases)
    assert launch.label == "ejkernel_eqx.tests.mixed_kernel" and launch.grid == (3,)
    assert launch.scalars == {"n": 11} and launch.constants == {"BLOCK": 4, "BIAS": biased, "SCALE": 2.0}
    assert (launch.num_warps, launch.num_stages, launch.max_registers) == (4, 3, 0)
    assert launch.aliases == {"state_ptr": "new_state_ptr"}
    assert (inputs["bias_ptr"] is x) == (not biased)  # stands in for what the call does not have


def test_a_launch_has_the_last_word():
    from tests.launch.kernels import mixed_kernel

    x, other = jnp.arange(3.0), jnp.ones(3)
    outputs = {"new_state": result_like(x), "out": result_like(x)}
    make = functools.partial(launcher(x, None, x).knowing({"bias": other}, BIAS=True).launch, mixed_kernel)
    launch, inputs = make(Options(8), outputs, 1, {"x": other}, name="other", BLOCK=8, SCALE=3.0)
    assert launch.label == "ejkernel_eqx.tests.other" and (launch.num_warps, launch.num_stages) == (8, 2)
    assert launch.constants == {"BLOCK": 8, "BIAS": True, "SCALE": 3.0}
    assert inputs["x_ptr"] is other and inputs["bias_ptr"] is other
    with pytest.raises(AssertionError, match=r"mixed_kernel has no parameters \['SCALES'\]"):
        make(Options(8), outputs, 1, BLOCK=8, SCALES=3.0)
    with pytest.raises(ValueError, match=r"parameters \['BLOCK'\] are missing"):
        make(Options(8), outputs, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    block: Block = 16
    count: Count = 1
    registers: Registers = 0
    float32_dot: Float32Dot = "ieee"
    chunk: Annotated[int, power_of_two(most=64)] = 1
    turns: Annotated[int, whole(2)] = 2
    sides: Annotated[int, one_of(3, 5)] = 3
    anything: int = -1

    __post_init__ = check_fields


@pytest.mark.parametrize(
    "field, good, bad, expected",
    [
        ("block", (16, 128), (0, 8, 48, -16), "a power of two from 16"),
        ("count", (1, 3), (0, -1), "a positive int"),
        ("registers", (0, 255), (-1, 256), "an int from 0 to 255"),
        ("float32_dot", ("tf32x3", "ieee", "tf32"), ("fp8", ""), "'tf32x3', 'ieee' or 'tf32'"),
        ("chunk", (1, 64), (0, 3, 128), "a power of two up to 64"),
        ("turns", (2, 9), (1,), "an int from 2"),
        ("sides", (3, 5), (4,), "3 or 5"),
        ("anything", (-5, 0), (), ""),
    ],
)
def test_fields_say_what_they_may_be(field, good, bad, expected):
    for value in good:
        config = Config(**{field: value})
        assert from_json(to_json(config), Config) == config
    for value in bad:
        with pytest.raises(ValueError) as caught:
            Config(**{field: value})
        assert str(caught.value) == f"Config.{field}: expected {expected}, received {value!r}."


def test_what_fits():
    device = dataclasses.replace(DEVICES["sm_80"], shared_memory=1000)
    assert fitting([10, 2000, 1000], lambda tile: tile, device) == [10, 1000]
    assert too_large("forward", "64x32", 2, 1000, device) is None
    reason = (
        "forward with 64x32 tiles and 2 stages takes about 1001 bytes of shared memory, the device has 1000"
    )
    assert too_large("forward", "64x32", 2, 1001, device) == reason
    assert shared_memory_of(dataclasses.replace(device, shared_memory=0)) == 49_152
