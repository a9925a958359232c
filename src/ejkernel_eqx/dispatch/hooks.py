"""`PlatformHooks`: what dispatch, the tuner and `explain` ask of a platform, and what an absent answer means."""

from collections.abc import Mapping
from typing import Any, cast, Protocol, runtime_checkable

from .device import DeviceFacts
from .problem import Problem

REQUIRED = ("unsupported", "default_config", "candidates", "config_type")


@runtime_checkable
class PlatformHooks(Protocol):
    """What a platform of an operation answers, as pure functions of a problem and the facts of a device.

    A platform is any module, class or object with the first four; the others have the answers that stand here where it lacks them. What it
    needs besides to run, its kernels, is between it and its operation.
    """

    @property
    def config_type(self) -> type:
        """The class of its configurations, a frozen dataclass."""
        ...

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        """Why it cannot run the problem on a device where it is available; `None` if it can."""
        ...

    def default_config(self, problem: Problem, device: DeviceFacts) -> Any:
        """The configuration for a problem of which no table knows."""
        ...

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[Any]:
        """The configurations worth timing, the default one first."""
        ...

    def unavailable(self, device: DeviceFacts) -> str | None:
        """Why nothing of it runs on the device; `None` if something does."""
        return None

    def config_unsupported(self, config: Any, problem: Problem, device: DeviceFacts) -> str | None:
        """Why a configuration cannot run the problem, as far as that is known without compiling it; `None` if nothing speaks against it."""
        return None

    def adapted(self, config: Any, problem: Problem, device: DeviceFacts) -> Any:
        """A configuration that was measured at a near shape or on a near device, made fit for this one."""
        return config

    @property
    def OPAQUE(self) -> bool:
        """Whether JAX cannot look into its kernels."""
        return False

    @property
    def NOTE(self) -> str:
        """A sentence for `explain`."""
        return ""

    @property
    def VERSION(self) -> int:
        """Raised when a change of the kernels makes known configurations worthless."""
        return 1

    @property
    def SOURCE(self) -> str | None:
        """A digest of the kernels' text, where that may change under one version: what the user's table says of another text is not asked."""
        return None

    @property
    def PARTS(self) -> Mapping[str, str]:
        """The fields of a configuration that are tuned one after the other, and what decides: a direction, or results by their names; none:
        it is tuned whole."""
        return {}


class _Completed(PlatformHooks):
    """A platform, with the defaults of what it lacks."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("_"):
            return own(name)
        platform = own("_platform")
        return getattr(platform, name) if hasattr(platform, name) else own(name)


def hooks_of(platform: Any) -> PlatformHooks:
    """All that is asked of a platform that may lack what is not required."""
    return cast(Any, _Completed)(platform)
