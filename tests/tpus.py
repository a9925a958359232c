"""What can be known of Pallas kernels for TPU without one: that they lower and compile, and what they compute, race and read when interpreted."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks import tpu_ahead
from ejkernel_eqx.launch import executing
from ejkernel_eqx.launch.pallas import TpuLaunch

GENERATIONS = tuple(tpu_ahead.TOPOLOGIES)
FACTS = {name: tpu_ahead.facts_of(name) for name in GENERATIONS}
"""By generation, the facts that configurations are chosen by."""

_NO_LIBTPU = tpu_ahead.libtpu_unavailable()


def needs_libtpu(test: Any) -> Any:
    """Marks a test that compiles for TPUs. It is slow, and skipped where libtpu is not installed; `.ci/run` installs it."""
    return pytest.mark.slow(pytest.mark.skipif(_NO_LIBTPU is not None, reason=str(_NO_LIBTPU))(test))


def lower(function: Callable[..., Any], *arrays: Any) -> Any:
    """The call lowered for TPUs, which checks blocks and operations; needs no libtpu. Arrays may be `jax.ShapeDtypeStruct`s."""
    return tpu_ahead.lower_for_tpu(function, *arrays)


def compile_ahead(generation: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """The call compiled by libtpu for one device of a generation, which checks that it fits."""
    return tpu_ahead.compile_for_tpu(generation, function, *arrays)


def launches_of(function: Callable[..., Any], *arrays: Any) -> dict[str, tuple[TpuLaunch, tuple[Any, ...]]]:
    """What `function(*arrays)` would launch, by the launch's name, each with the shapes of its arrays; nothing is run."""
    found: dict[str, tuple[TpuLaunch, tuple[Any, ...]]] = {}

    def record(launch: TpuLaunch, given: Sequence[Any]) -> tuple[Any, ...]:
        found[launch.name] = launch, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)
        return tuple(jax.numpy.zeros(x.shape, x.dtype) for x in launch.outputs)

    with executing(record):
        jax.eval_shape(lambda *arrays: function(*arrays), *arrays)
    return found


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """Kernels interpreted inside have no races. JAX before 0.11 only notes them, and an error leaves the interpreter's memory behind."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    pltpu.reset_tpu_interpret_mode_state()
    try:
        yield
        found = interpret_pallas_call.races
        assert found is None or not found.races_found, (
            "the interpreter found a race; its report is in the captured output"
        )
    finally:
        pltpu.reset_tpu_interpret_mode_state()
