"""Hopper's single pass without a Hopper: what it takes, its numbers by emulation, and that every tile of it compiles without products that wait for
one another."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.dispatch import from_dict, to_dict
from tests.attention import hopper_emulation
from tests.compiled import DEVICES, executed, waits
from tests.recurrence.cases import (
    Case,
    CONSTANT,
    cotangents,
    make,
    NONE,
    problem_of,
    RecurrenceArrays,
    RecurrenceSpec,
    run_reference,
    SCALAR,
)
from tests.recurrence.kernels import compiled as triton
from tests.recurrence.kernels import gluon_unavailable, launches_of, report_of, run, Tile
from tests.recurrence.kernels import hopper as tile_sizes
from tests.tolerances import assert_close

HOPPER = DEVICES["sm_90"]
_MISSING = gluon_unavailable(HOPPER)
needs_gluon = pytest.mark.skipif(_MISSING is not None, reason=f"Hopper's kernel {_MISSING}")


def call(
    decay: Any = SCALAR,
    batch: int = 4,
    tokens: int = 4096,
    heads: int = 16,
    shared: int = 16,
    dim: int = 128,
    values: int = 128,
    dtype: str = "bfloat16",
    with_: tuple[str, ...] = (),
) -> tuple[RecurrenceArrays, RecurrenceSpec]:
    """The shapes of a call, and its description."""

    def shape(*size: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    keys = shape(batch, tokens, shared, dim)
    arrays = RecurrenceArrays(keys, keys, shape(batch, tokens, heads, values))
    if decay != NONE:
        lead = (batch, tokens) if decay == SCALAR else (batch,)
        arrays = arrays._replace(g=shape(*lead, heads, dtype="float32"))
    options = {
        "beta": shape(batch, tokens, heads, dtype="float32"),
        "skip": shape(batch, heads, values, dtype="float32"),
        "initial_state": shape(batch, heads, dim, values, dtype="float32"),
        "starts": shape(batch, tokens, dtype="int32"),
        "offsets": shape(batch, 3, dtype="int32"),
    }
    return arrays._replace(**{name: options[name] for name in with_}), RecurrenceSpec(0.1, decay)


def problem(*args: Any, **kwargs: Any) -> Any:
    return problem_of("linear_attention", *call(*args, **kwargs))


def configured(of: Any, block_v: int, stages: int, **changes: Any) -> Any:
    config = dataclasses.replace(triton.default_config(of, HOPPER), **changes)
    return dataclasses.replace(
        config, single=True, out=Tile(64 if of.dim("D") <= 64 else 128, block_v, 4, stages, True)
    )


def single_of(of: Any, config: Any) -> tuple[Any, Any]:
    """The single pass that a call would launch, and before it the products, if any."""
    launches = launches_of(*of, config=config, backward=False)
    return list(launches.values())[-1], launches.get("masked_products_kernel")


@pytest.mark.parametrize(
    "of, block_v, splits, reason",
    [
        (problem(with_=("starts",)), 128, 1, "takes no packed sequences"),
        (problem(with_=("offsets",)), 128, 1, "takes no packed sequences"),
        (problem(dtype="float16"), 128, 1, "takes bfloat16, not float16"),
        (problem(dim=96), 128, 1, "takes 64 or 128 key channels"),
        (problem(values=96), 64, 1, "and whole 64 value channels, not 128 and 96"),
        (problem(tokens=4000), 64, 1, "whole chunks of 64 tokens in each of 1 splits, not 4000 tokens"),
        (problem(), 64, 3, "whole chunks of 64 tokens in each of 3 splits, not 4096 tokens"),
        (problem(values=192), 128, 1, "of two heads that share queries and keys"),
        (problem(), 32, 1, "has programs of 64 or 128 value channels, not 32"),
    ],
)
def test_what_it_does_not_take(of, block_v, splits, reason):
    assert reason in (tile_sizes.problem_unfit(block_v, splits, of) or "")
    config = configured(of, block_v, 3, splits=splits)
    assert "hopper=True" in (triton.config_unsupported(config, of, HOPPER) or "")


def test_a_configuration_for_a_call_that_it_cannot_run_raises():
    with pytest.raises(ValueError, match=r"expected hopper=False in out, received True: .* not 4000 tokens"):
        launches_of(*call(tokens=4000), configured(problem(tokens=4000), 128, 3))


def test_it_is_not_for_other_devices():
    of = problem()
    config = configured(of, 128, 3)
    assert "compute capability 9.0" in (triton.config_unsupported(config, of, DEVICES["sm_80"]) or "")
    for name, device in DEVICES.items():
        if name != "sm_90":
            assert not any(config.out.hopper for config in triton.candidates(of, device))


@needs_gluon
def test_it_is_the_default_for_long_sequences():
    for of in (problem(), problem(CONSTANT, batch=1, tokens=65536), problem(NONE, batch=8, tokens=1024)):
        config = triton.default_config(of, HOPPER)
        assert config.single and config.out.hopper
        assert triton.config_unsupported(config, of, HOPPER) is None
    for of in (
        problem(tokens=4000),
        problem(tokens=960),
        problem(with_=("starts",)),
        problem(dtype="float32"),
    ):
        assert not triton.default_config(of, HOPPER).out.hopper


@needs_gluon
def test_the_tuner_times_it():
    """Programs of two groups where these are enough, else of one; a configuration survives JSON."""
    for of, first in (
        (problem(), 64),
        (problem(batch=8), 128),
        (problem(heads=64, shared=1, values=64), 128),
    ):
        found = [config for config in triton.candidates(of, HOPPER) if config.out.hopper]
        assert found[0].out.block_v == first
        for config in found:
            assert triton.config_unsupported(config, of, HOPPER) is None
            assert from_dict(to_dict(config), triton.config_type) == config


@needs_gluon
def test_what_products_are_given_and_what_is_taken_apart():
    """Products of queries and keys where many heads share them and have write strengths, for enough tokens; decays where these have none."""
    ssd: dict[str, Any] = dict(heads=64, values=64, with_=("beta",))
    for of, products, gentle in (
        (call(shared=1, **ssd), True, False),
        (call(shared=2, **ssd), True, False),
        (call(shared=8, **ssd), False, False),
        (call(shared=1, **ssd, batch=2), True, False),
        (call(shared=1, **ssd, batch=1), False, False),
        (call(heads=64, shared=1, values=64), False, True),
        (call(CONSTANT, heads=64, shared=1, with_=("beta",)), False, False),
        (call(NONE), False, False),
    ):
        single, given = single_of(of, configured(problem_of("linear_attention", *of), 128, 3))
        assert single.constants["PRODUCTS"] == products == bool(given)
        assert (single.constants["GENTLE"] > 0) == gentle


def odd(**more: Any) -> Case:
    sizes = dict[str, Any](B=2, T=256, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, D=64, V=64, dtype="bfloat16")
    return Case(**(sizes | more))


# With value channels of a program, stages and splits. Products are given for four heads with write strengths.
EMULATED = {
    "beta": (odd(decay=SCALAR, beta=1.0, Hv=4, Hg=4, Hb=4, skip=True, keys="normal"), 128, 2, 1),
    "beta of all heads": (odd(decay=SCALAR, beta=1.0, Hv=2, Hg=2, initial_state=True), 64, 2, 2),
    "decays of all heads": (odd(decay=SCALAR, beta=1.0, Hv=2, Hb=2, log_decays="mixed"), 128, 3, 1),
    "beta, closed": (odd(decay=SCALAR, beta=1.0, Hv=4, Hg=4, Hb=4, log_decays="closed"), 128, 2, 2),
    "two tiles of values": (odd(decay=SCALAR, Hg=2, Hb=2, beta=1.0, V=128, D=128), 128, 2, 1),
    "scalar, mixed": (odd(decay=SCALAR, Hv=2, Hg=2, log_decays="mixed"), 64, 3, 1),
    "constant and beta": (odd(decay=CONSTANT, beta=1.0, Hv=2, Hg=2, Hb=2), 64, 2, 1),
    "none": (odd(Hq=2, Hk=2, Hv=2, Hg=2, Hb=2, D=128, V=128, initial_state=True), 128, 2, 1),
}


@pytest.mark.parametrize(
    "case, block_v, stages, splits",
    [
        pytest.param(*of, id=name, marks=() if name == "beta" else pytest.mark.slow)
        for name, of in EMULATED.items()
    ],
)
def test_results(case, block_v, stages, splits, monkeypatch):
    """The kernel's own code, with threads for its warps; what stands around it is interpreted."""
    monkeypatch.setattr(tile_sizes, "LEAST_SHARED", 4)
    monkeypatch.setattr(tile_sizes, "LEAST_ROWS", 0)
    folder = "ejkernel_eqx.recurrence.triton"
    kernels = pytest.importorskip(f"{folder}.hopper.single_kernel", exc_type=ImportError)
    device = hopper_emulation.Device(kernels, importlib.import_module(f"{folder}.tile"))
    arrays, spec = make(case)
    config = configured(problem_of("linear_attention", arrays, spec), block_v, stages, splits=splits)

    def emulated(launch, inputs):
        return device.run(launch, inputs) if launch.is_gluon else run(launch, inputs, interpret=True)

    actual = executed(triton.forward, emulated)(arrays, spec, config)
    exact = run_reference(arrays, *cotangents(case), spec)
    assert_close(actual["out"], exact.out, "bfloat16", "forward", name="out")
    assert_close(actual["final_state"], exact.final_state, "bfloat16", "forward", name="final state")


COMPILED = {
    "scalar": (call(), 128, 1, 40),
    "everything": (call(with_=("beta", "skip", "initial_state")), 128, 2, 120),
    "constant, splits": (call(CONSTANT, batch=1), 128, 8, 48),
    "heads that share": (call(heads=64, shared=1, values=64, with_=("beta", "skip")), 128, 1, 16),
    "64 channels": (call(dim=64, values=64), 64, 1, 0),
}


@needs_gluon
@pytest.mark.parametrize(
    "of, block_v, splits, spills",
    [
        pytest.param(*of, id=name, marks=() if name == "scalar" else pytest.mark.slow)
        for name, of in COMPILED.items()
    ],
)
def test_tiles_compile(of, block_v, splits, spills):
    config = configured(problem_of("linear_attention", *of), block_v, 3, splits=splits)
    launch, products = single_of(of, config)
    assert launch.is_gluon
    assert report_of(launch, "sm_90").spills <= spills
    assert not waits(launch)
    assert products is None or not report_of(products, "sm_90").spills
