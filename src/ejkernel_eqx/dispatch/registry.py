"""The implementations of each operation, and the questions that dispatch, the tuner and `explain` ask them (`PlatformHooks`). Nothing is
imported before it is looked up."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from .._errors import not_installed
from .._operations import Family, OPERATIONS, PLATFORMS
from .._signatures import check_one_of
from .device import device_facts, DeviceFacts
from .platform import Backend, parse_platform, Platform
from .problem import Problem
from .workload import Workload

T = TypeVar("T")
_PACKAGE = __name__.partition(".")[0]


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

    def by_request(self, problem: Problem, device: DeviceFacts) -> str | None:
        """The reason why the platform runs a problem only if it is requested by name; `None` if it may be chosen."""
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


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One platform's implementation of an operation.

    `target` is a module, class or object with the `PlatformHooks`, or its name, `"package.module"` or `"package.module:object"`, which is
    imported on first use. If a module has an attribute `platform`, that is used.

    `workload` is a function (or its name) that takes this implementation and a problem, and returns the `Workload` to
    tune it with. An implementation without one cannot be tuned.
    """

    operation: str
    platform: Platform
    backend: Backend
    priority: int
    core: str
    target: Any = dataclasses.field(hash=False)
    workload: Any = dataclasses.field(default=None, hash=False)

    def load(self) -> Any:
        """The object behind `target`."""
        return _load(self.target) if isinstance(self.target, str) else self.target

    @property
    def hooks(self) -> PlatformHooks:
        """The hooks of this implementation."""
        return hooks_of(self.load())

    @property
    def version(self) -> int:
        return self.hooks.VERSION

    def make_workload(self, problem: Problem) -> Workload | None:
        """The work to tune this implementation with, or `None`."""
        make = _load(self.workload) if isinstance(self.workload, str) else self.workload
        return make(self, problem) if make is not None else None

    def config_unsupported(self, config: Any, problem: Problem, device: DeviceFacts) -> str | None:
        """The reason why a configuration cannot run, as far as can be told without compiling; `None` if no reason is known."""
        return self.hooks.config_unsupported(config, problem, device)

    def adapted(self, config: Any, problem: Problem, device: DeviceFacts) -> Any:
        """A configuration measured at another shape or on another device, adapted to this one."""
        return self.hooks.adapted(config, problem, device)

    def unusable(self, device: DeviceFacts) -> str | None:
        """The reason why this platform cannot run on the device; `None` if it can."""
        if self.backend is not Backend.ANY and self.backend is not device.backend:
            return (
                f"needs a {self.backend.value.upper()}, the device is {device.kind} ({device.backend.value})"
            )
        try:
            hooks = self.hooks
        except ModuleNotFoundError as error:
            return not_installed(error.name)
        return hooks.unavailable(device)

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        """The reason why this problem cannot run here; `None` if it can. Only plain JAX supports symbolic sizes."""
        reason = self.unusable(device)
        if reason is None and problem.symbolic and self.platform is not Platform.XLA:
            return f"takes sizes that are known when the call is traced, not symbolic sizes for {', '.join(sorted(problem.symbolic))}"
        return reason or self.hooks.unsupported(problem, device)


@functools.cache
def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    loaded: ModuleType = importlib.import_module(module)
    if name:
        return getattr(loaded, name)
    inside = getattr(loaded, "platform", None)
    return loaded if missing_hooks(inside) else inside


def names_of(implementations: Sequence[Implementation]) -> list[str]:
    """A unique name for each: its platform and, if two have the same platform, its backend (`"pallas on gpu"`)."""
    platforms = [i.platform for i in implementations]
    return [
        f"{i.platform.value} on {i.backend.value}" if platforms.count(i.platform) > 1 else i.platform
        for i in implementations
    ]


def of_device(implementations: tuple[Implementation, ...], device: DeviceFacts) -> tuple[Implementation, ...]:
    """The implementations that apply on a device: for each platform the first usable one, or all of them, each with its reason, if none is."""
    if len({i.platform for i in implementations}) == len(implementations):
        return implementations
    usable = {i.platform: i for i in reversed(implementations) if i.unusable(device) is None}
    return tuple(i for i in implementations if usable.get(i.platform, i) is i)


class KernelRegistry:
    """Maps operations to their implementations, by platform and backend, best first."""

    def __init__(self) -> None:
        self._table: dict[str, dict[tuple[Platform, Backend], Implementation]] = {}

    def add(self, implementation: Implementation) -> None:
        """Adds an implementation. It replaces one of the same operation, platform and backend only if its priority is equal or higher."""
        places = self._table.setdefault(implementation.operation, {})
        place = implementation.platform, implementation.backend
        if place not in places or implementation.priority >= places[place].priority:
            places.pop(place, None)
            places[place] = implementation

    def remove(self, implementation: Implementation) -> None:
        """Removes a registered implementation."""
        del self._table[implementation.operation][implementation.platform, implementation.backend]

    def register(
        self,
        operation: str,
        platform: Platform | str,
        backend: Backend | str = Backend.ANY,
        *,
        priority: int = 0,
        core: str = "",
        workload: Any = None,
    ) -> Callable[[T], T]:
        """A decorator that registers a class or object as the implementation of `operation` on `platform`."""

        def decorate(target: T) -> T:
            missing = missing_hooks(target)
            if missing:
                raise ValueError(
                    f"register({operation!r}, {str(platform)!r}): expected an object with {', '.join(REQUIRED)}, received {target!r} without "
                    f"{', '.join(missing)}; see the documentation of PlatformHooks."
                )
            place = parse_platform(platform), Backend(backend)
            self.add(Implementation(operation, *place, priority, core or operation, target, workload))
            return target

        return decorate

    def list_operations(self) -> list[str]:
        return sorted(self._table)

    def ordered(self, operation: str) -> list[Implementation]:
        """All implementations of the operation, highest priority first; among equal ones of a platform, the latest first."""
        if operation not in self._table:
            check_one_of("operation", operation, self.list_operations())
        latest = reversed(self._table[operation].values())
        return sorted(latest, key=lambda i: (-i.priority, i.platform.value))

    def of_platform(self, operation: str, platform: Platform | str) -> list[Implementation]:
        """The implementations on one platform, those usable on the default device first; `ValueError` if the operation does not have it."""
        known = [i for i in self.ordered(operation) if i.platform is parse_platform(platform)]
        if not known:
            raise self._unknown(operation, platform, None)
        return sorted(known, key=lambda i: len(known) > 1 and i.unusable(device_facts()) is not None)

    def _unknown(self, operation: str, platform: Any, backend: Any) -> ValueError:
        names = [name.value for name in dict.fromkeys(i.platform for i in self.ordered(operation))]
        return ValueError(
            f"platform: expected one of {names} for {operation}, received {platform!r} on backend {backend!r}; omit both to choose automatically."
        )

    def list_implementations(
        self, operation: str, device: DeviceFacts | None = None
    ) -> list[tuple[Implementation, str | None]]:
        """All implementations with the reason why each is unusable here (`None` if usable), highest priority first."""
        facts = device or device_facts()
        return [(i, i.unusable(facts)) for i in self.ordered(operation)]

    def get(
        self, operation: str, platform: Platform | str | None = None, backend: Backend | str | None = None
    ) -> Implementation:
        """The implementation on `platform` (among several, the one usable on the default device, else the first); without a platform, the
        best usable one.

        An explicit platform is never replaced; `ValueError` if the operation does not have it.
        """
        if platform is not None:
            known = self.of_platform(operation, platform)
        else:
            known = [
                i for i in self.ordered(operation) if i.priority >= 0 and i.unusable(device_facts()) is None
            ]
        if backend is not None:
            known = [i for i in known if i.backend in (Backend(backend), Backend.ANY)]
        if not known:
            raise self._unknown(operation, platform, backend)
        return known[0]

    def validate_signatures(self, operation: str, functions: Iterable[str]) -> None:
        """Asserts that the named functions of all implementations of an operation take the same parameters."""
        for function in functions:
            seen: dict[tuple[str, ...], Platform] = {}
            for implementation in self.ordered(operation):
                member = getattr(implementation.load(), function, None)
                if member is not None:
                    seen.setdefault(tuple(inspect.signature(member).parameters), implementation.platform)
            if len(seen) > 1:
                raise ValueError(f"{operation}.{function}: the platforms disagree on its parameters: {seen}.")


def implementations_of(operation: str, family: Family) -> Iterator[Implementation]:
    """The implementations of an operation of a family, each by the names of its modules."""
    room = f"{_PACKAGE}.{family.room}"
    for name in family.platforms:
        backend, priority, module = PLATFORMS[name]
        platform = Platform(name)
        # cuDNN tunes itself.
        is_tunable = family.is_tunable and platform is not Platform.CUDA
        workload = f"{room}.workload:workload" if is_tunable else None
        target = f"{room}.{module}"
        yield Implementation(operation, platform, Backend(backend), priority, family.core, target, workload)


kernel_registry = KernelRegistry()
for _operation, _family in OPERATIONS.items():
    for _implementation in implementations_of(_operation, _family):
        kernel_registry.add(_implementation)
