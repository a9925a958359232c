"""`PlatformHooks`: the questions that dispatch, the tuner and `explain` ask a platform, with default answers."""

from collections.abc import Mapping
from typing import Any

from .device import DeviceFacts
from .problem import Problem

REQUIRED = ("unsupported", "default_config", "candidates", "config_type")


class PlatformHooks:
    """The hooks of an operation's platform, as pure functions of a problem and the facts of a device.

    A platform is any module, class or object with the first four hooks; the others default to those here. How it runs its kernels is up to
    it and its operation.
    """

    config_type: type
    """The class of its configurations, a frozen dataclass."""

    OPAQUE: bool = False
    """Whether JAX cannot see into its kernels."""

    NOTE: str = ""
    """A sentence for `explain`."""

    VERSION: int = 1
    """Incremented when a change of the kernels invalidates known configurations."""

    SOURCE: str | None = None
    """A digest of the kernels' source, if that may change within a version; records of another source in the user's table are ignored."""

    PARTS: Mapping[str, str] = {}
    """The fields of a configuration that are tuned one after the other, and what decides: a direction or names of results. Empty if
    configurations are tuned as a whole."""

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        """The reason why the problem cannot run on a device where the platform is available; `None` if it can."""
        raise NotImplementedError

    def default_config(self, problem: Problem, device: DeviceFacts) -> Any:
        """The configuration for a problem that no table contains."""
        raise NotImplementedError

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[Any]:
        """The configurations worth timing, the default first."""
        raise NotImplementedError

    def unavailable(self, device: DeviceFacts) -> str | None:
        """The reason why the platform cannot run anything on the device; `None` if it can."""
        return None

    def config_unsupported(self, config: Any, problem: Problem, device: DeviceFacts) -> str | None:
        """The reason why a configuration cannot run the problem, as far as can be told without compiling; `None` if no reason is known."""
        return None

    def adapted(self, config: Any, problem: Problem, device: DeviceFacts) -> Any:
        """A configuration measured at a nearby shape or on a similar device, adapted to this one."""
        return config

    def remark(self, config: Any, problem: Problem, device: DeviceFacts) -> str:
        """A sentence for `explain` about a configuration; empty if there is nothing to say."""
        return ""


_HOOKS = ("config_type", *(name for name in vars(PlatformHooks) if not name.startswith("_")))


def missing_hooks(platform: Any) -> list[str]:
    """The required hooks that a platform lacks."""
    absent = object()
    default = {name: vars(PlatformHooks).get(name, absent) for name in REQUIRED}
    known = {name: getattr(platform, name, absent) for name in REQUIRED}
    return [
        name for name, hook in known.items() if getattr(hook, "__func__", hook) in (absent, default[name])
    ]


def hooks_of(platform: Any) -> PlatformHooks:
    """All hooks of a platform: its own, and the defaults for those that it lacks."""
    if isinstance(platform, PlatformHooks):
        return platform
    hooks = PlatformHooks()
    vars(hooks).update({name: getattr(platform, name) for name in _HOOKS if hasattr(platform, name)})
    return hooks
