"""`PlatformHooks`: what dispatch, the tuner and `explain` ask a platform, and the defaults for missing answers."""

from collections.abc import Mapping
from typing import Any, cast, Protocol, runtime_checkable

from .device import DeviceFacts
from .problem import Problem

REQUIRED = ("unsupported", "default_config", "candidates", "config_type")


@runtime_checkable
class PlatformHooks(Protocol):
    """The hooks of an operation's platform, as pure functions of a problem and the facts of a device.

    A platform is any module, class or object with the first four hooks; the others default to the answers given here. How it runs its
    kernels is up to it and its operation.
    """

    @property
    def config_type(self) -> type:
        """The class of its configurations, a frozen dataclass."""
        ...

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        """Why the problem cannot run on a device where the platform is available; `None` if it can."""
        ...

    def default_config(self, problem: Problem, device: DeviceFacts) -> Any:
        """The configuration for a problem that no table contains."""
        ...

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[Any]:
        """The configurations worth timing, the default first."""
        ...

    def unavailable(self, device: DeviceFacts) -> str | None:
        """Why the platform cannot run anything on the device; `None` if it can."""
        return None

    def config_unsupported(self, config: Any, problem: Problem, device: DeviceFacts) -> str | None:
        """Why a configuration cannot run the problem, as far as can be told without compiling; `None` if no reason is known."""
        return None

    def adapted(self, config: Any, problem: Problem, device: DeviceFacts) -> Any:
        """A configuration measured at a nearby shape or on a similar device, adapted to this one."""
        return config

    def remark(self, config: Any, problem: Problem, device: DeviceFacts) -> str:
        """A sentence for `explain` about a configuration; empty if there is nothing to say."""
        return ""

    @property
    def OPAQUE(self) -> bool:
        """Whether JAX cannot see into its kernels."""
        return False

    @property
    def NOTE(self) -> str:
        """A sentence for `explain`."""
        return ""

    @property
    def VERSION(self) -> int:
        """Incremented when a change of the kernels invalidates known configurations."""
        return 1

    @property
    def SOURCE(self) -> str | None:
        """A digest of the kernels' source, if that may change within a version; records of another source in the user's table are ignored."""
        return None

    @property
    def PARTS(self) -> Mapping[str, str]:
        """The fields of a configuration that are tuned one after the other, and what decides: a direction or names of results. Empty if
        configurations are tuned as a whole."""
        return {}


class _Completed(PlatformHooks):
    """A platform with defaults for the hooks it lacks."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("_"):
            return own(name)
        platform = own("_platform")
        return getattr(platform, name) if hasattr(platform, name) else own(name)


def hooks_of(platform: Any) -> PlatformHooks:
    """All hooks of a platform, which may lack the optional ones."""
    return cast(Any, _Completed)(platform)
