"""An operation of no use, on two platforms, with which the selection chain is tested without any kernel."""

import dataclasses
import types
from typing import Any

import equinox as eqx

from ejkernel_eqx import Backend, DeviceFacts, dispatch, kernel_registry, Platform, Problem

OPERATION = "tests.toy"
H200 = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132, 232_448)


@dataclasses.dataclass(frozen=True)
class FastConfig:
    block: int


@dataclasses.dataclass(frozen=True)
class SlowConfig:
    block: int


def hooks(default: Any, **others: Any) -> Any:
    """A platform that takes everything."""
    return types.SimpleNamespace(
        config_type=type(default),
        unsupported=lambda problem, device: None,
        default_config=lambda problem, device: default,
        candidates=lambda problem, device: [default],
        **others,
    )


class Toy:
    """Takes lengths up to `most`."""

    config_type: type
    most: int

    @classmethod
    def unsupported(cls, problem, device):
        return f"takes T up to {cls.most}" if problem.dim("T") > cls.most else None

    @classmethod
    def default_config(cls, problem, device):
        return cls.config_type(0)

    @classmethod
    def candidates(cls, problem, device):
        return [cls.config_type(0), cls.config_type(1)]


@kernel_registry.register(OPERATION, Platform.PALLAS, priority=20)
class Fast(Toy):
    config_type, most = FastConfig, 100

    @classmethod
    def by_request(cls, problem, device):
        return "takes what is new by name only" if problem.flag("new") else None


@kernel_registry.register(OPERATION, "xla", "any", priority=10)
class Slow(Toy):
    config_type, most = SlowConfig, 1000


@kernel_registry.register(OPERATION, Platform.TRITON, Backend.TPU, priority=30)
class Elsewhere(Slow):
    """Needs a TPU, so that it never runs on the machines of the tests."""


def problem(t: int = 64, **flags) -> Problem:
    return Problem.make(OPERATION, dims={"T": t, "D": 8}, dtypes={"x": "float32"}, flags=flags, lengths={"T"})


def record(config: Any, p: Problem, **changed: Any) -> dispatch.Record:
    """Of a measurement here."""
    fields: dict[str, Any] = dict(
        operation=p.operation,
        platform="pallas",
        version=1,
        problem=p.key(),
        exact=p.to_dict(),
        software=dispatch.software(),
        config=None if config is None else dispatch.to_dict(config),
        ms={"forward": 0.5},
        date="2026-11-21T10:00:00+00:00",
    )
    return dispatch.Record(**{**fields, **changed})


def chosen(p: Problem | None = None, *, tuning: bool = False, **how: Any) -> dispatch.Selection:
    """What is taken for a problem by a module that is built now."""
    return dispatch.select(dispatch.take_snapshot(OPERATION, **how), p or problem(), tuning=tuning)


def learn(config: Any, p: Problem | None = None, platform: Platform = Platform.PALLAS) -> None:
    """This process knows a configuration."""
    dispatch.memory_cache.put(platform, (p or problem()).key(), config)


def problem_of(module: Any, *args: Any) -> Problem:
    """What a call of a module asks for."""
    found: list[dispatch.Selection] = []
    with dispatch.on_selection(found.append):
        eqx.filter_eval_shape(module, *args)
    return found[0].problem
