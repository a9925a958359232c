"""An operation of no use, on two platforms, with which the selection chain is tested without any kernel."""

import dataclasses

from ejkernel_eqx.dispatch import Backend, kernel_registry, Platform, Problem

OPERATION = "tests.toy"


@dataclasses.dataclass(frozen=True)
class FastConfig:
    block: int


@dataclasses.dataclass(frozen=True)
class SlowConfig:
    block: int


@kernel_registry.register(OPERATION, Platform.PALLAS, priority=20)
class Fast:
    """Takes lengths up to 100."""

    config_type = FastConfig

    @staticmethod
    def unsupported(problem, device):
        return "takes T up to 100" if problem.dim("T") > 100 else None

    @staticmethod
    def default_config(problem, device):
        return FastConfig(0)

    @staticmethod
    def candidates(problem, device):
        return [FastConfig(0), FastConfig(1)]


@kernel_registry.register(OPERATION, "xla", "any", priority=10)
class Slow:
    """Takes lengths up to 1000."""

    config_type = SlowConfig

    @staticmethod
    def unsupported(problem, device):
        return "takes T up to 1000" if problem.dim("T") > 1000 else None

    @staticmethod
    def default_config(problem, device):
        return SlowConfig(0)

    @staticmethod
    def candidates(problem, device):
        return [SlowConfig(0)]


@kernel_registry.register(OPERATION, Platform.TRITON, Backend.TPU, priority=30)
class Elsewhere(Slow):
    """Needs a TPU, so that it never runs on the machines of the tests."""


def problem(t: int = 64, **flags) -> Problem:
    return Problem.make(OPERATION, dims={"T": t, "D": 8}, dtypes={"x": "float32"}, flags=flags, lengths={"T"})
