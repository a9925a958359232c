"""What a caller may say for a while, by context manager: configurations (`overlay_cache`) and the policy."""

import contextlib
import enum
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from .config import check_config
from .environment import declare
from .registry import kernel_registry


class Policy(enum.StrEnum):
    """How far the selection chain may go for a configuration."""

    HEURISTIC = "heuristic"
    """Overrides, overlays and heuristics only: no table is consulted, nothing is timed."""
    CACHED = "cached"
    """The default: also known configurations. Nothing is timed unless it is asked for, by `tune_for=` or by tuning; then
    what no table knows exactly is."""
    TUNE = "tune"
    """As `CACHED`, but of what is asked for, shipped tables do not suffice: it is tuned unless it was tuned on this machine."""
    FORCE = "force"
    """What is asked for is tuned anew, known or not."""


def _parse_policy(value: "Policy | str") -> Policy:
    try:
        return Policy(value)
    except ValueError:
        names = ", ".join(repr(p.value) for p in Policy)
        raise ValueError(f"expected one of {names}, received {value!r}.") from None


POLICY = declare(
    "EJKERNEL_EQX_POLICY",
    "how far the choice of a configuration may go: " + ", ".join(Policy),
    _parse_policy,
    Policy.CACHED,
)
POLICY_VARIABLE = POLICY.name

_OVERLAY: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("ejkernel_eqx_overlay", default=())
_POLICY: ContextVar[Policy | None] = ContextVar("ejkernel_eqx_policy", default=None)
_TUNING: ContextVar[bool] = ContextVar("ejkernel_eqx_tuning", default=True)


@contextlib.contextmanager
def overlay_cache(entries: Mapping[str, Any]) -> Iterator[None]:
    """While it is open, modules built use these configurations before any table.

    **Arguments:**

    - `entries`: an operation's name (`"flash_attention"`, every problem of it) or a `Problem.key()` (that problem only) to a
      configuration. The innermost overlay wins; a problem's own entry wins over its operation's.

    A module keeps what it was built with: leaving the context changes nothing in it, and what it was built with is part of what its
    compiled calls are found by. The overlay is a context variable: a thread started inside sees it if it runs in a copy of the context
    (`contextvars.copy_context().run`), as `asyncio` tasks do by themselves.

    **Raises:** `ValueError` for a name that is no operation and no key, or a value that is no configuration.
    """
    _check(entries)
    token = _OVERLAY.set(tuple(entries.items()) + _OVERLAY.get())
    try:
        yield
    finally:
        _OVERLAY.reset(token)


def _check(entries: Any) -> None:
    if not isinstance(entries, Mapping):
        raise ValueError(
            f"overlay_cache: expected a mapping of operation names or problem keys to configurations, received {entries!r}."
        )
    known = kernel_registry.list_operations()
    for key, config in entries.items():
        if not isinstance(key, str) or (key not in known and not key.startswith("{")):
            raise ValueError(
                f"overlay_cache: expected a Problem.key() or one of {', '.join(known)}, received {key!r}."
            )
        check_config(config)


def overlay_entries() -> tuple[tuple[str, Any], ...]:
    """The open overlays' entries, innermost first."""
    return _OVERLAY.get()


@contextlib.contextmanager
def policy_override(policy: "Policy | str") -> Iterator[None]:
    """While it is open, modules are built under `policy`: `"heuristic"`, `"cached"`, `"tune"` or `"force"`."""
    try:
        parsed = _parse_policy(policy)
    except ValueError as error:
        raise ValueError(f"policy: {error}") from None
    token = _POLICY.set(parsed)
    try:
        yield
    finally:
        _POLICY.reset(token)


def current_policy() -> Policy:
    """The context's policy, else that of the environment variable `EJKERNEL_EQX_POLICY`, else `CACHED`."""
    return _POLICY.get() or POLICY.read()


@contextlib.contextmanager
def no_tuning() -> Iterator[None]:
    """While it is open, `tune_for=` tunes nothing: modules are built to be filled or looked at, not to be used as they are."""
    token = _TUNING.set(False)
    try:
        yield
    finally:
        _TUNING.reset(token)


def tuning_allowed() -> bool:
    """Whether what is asked for may be tuned here."""
    return _TUNING.get()
