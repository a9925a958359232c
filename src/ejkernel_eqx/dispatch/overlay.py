"""Context managers that set configurations (`overlay_cache`) and the policy temporarily."""

import contextlib
import enum
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from .config import check_config
from .environment import declare
from .registry import kernel_registry


class Policy(enum.StrEnum):
    """Says how far the selection chain may go for a configuration."""

    HEURISTIC = "heuristic"
    """Overrides, overlays and heuristics only: tables are not consulted, and nothing is timed."""
    CACHED = "cached"
    """The default: also configurations from tables. Nothing is timed unless requested by `tune_for=` or by tuning; then problems
    that no table contains exactly are."""
    TUNE = "tune"
    """As `CACHED`, but shipped tables do not suffice for tuning requests: problems are tuned unless they were tuned on this machine."""
    FORCE = "force"
    """Requested problems are always tuned again."""


def _parse_policy(value: "Policy | str") -> Policy:
    try:
        return Policy(value)
    except ValueError:
        names = ", ".join(repr(p.value) for p in Policy)
        raise ValueError(f"expected one of {names}, received {value!r}.") from None


POLICY = declare(
    "EJKERNEL_EQX_POLICY",
    "where configurations may come from: " + ", ".join(Policy),
    _parse_policy,
    Policy.CACHED,
)
POLICY_VARIABLE = POLICY.name

T = TypeVar("T")
_OVERLAY: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("ejkernel_eqx_overlay", default=())
_POLICY: ContextVar[Policy | None] = ContextVar("ejkernel_eqx_policy", default=None)
_TUNING: ContextVar[bool] = ContextVar("ejkernel_eqx_tuning", default=True)


@contextlib.contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside this context a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def overlay_cache(entries: Mapping[str, Any]) -> Iterator[None]:
    """Modules built inside this context use these configurations before any table.

    **Arguments:**

    - `entries`: maps the name of an operation (`"flash_attention"`, for all its problems) or a `Problem.key()` (that problem only) to a
      configuration. The innermost overlay wins, and a problem's own entry wins over its operation's.

    A module keeps the configurations it was built with after the context is left, and they are part of the key of its compiled calls.
    The overlay is a context variable: a thread started inside sees it if it runs in a copy of the context
    (`contextvars.copy_context().run`), as `asyncio` tasks do automatically.

    **Raises:** `ValueError` for a name that is neither an operation nor a key, or a value that is not a configuration.
    """
    _check(entries)
    with within(_OVERLAY, tuple(entries.items()) + _OVERLAY.get()):
        yield


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
    """The entries of the open overlays, innermost first."""
    return _OVERLAY.get()


@contextlib.contextmanager
def policy_override(policy: "Policy | str") -> Iterator[None]:
    """Modules built inside this context follow `policy`: `"heuristic"`, `"cached"`, `"tune"` or `"force"`."""
    try:
        parsed = _parse_policy(policy)
    except ValueError as error:
        raise ValueError(f"policy: {error}") from None
    with within(_POLICY, parsed):
        yield


def current_policy() -> Policy:
    """The context's policy, else that of the environment variable `EJKERNEL_EQX_POLICY`, else `CACHED`."""
    return _POLICY.get() or POLICY.read()


@contextlib.contextmanager
def no_tuning() -> Iterator[None]:
    """Inside this context `tune_for=` tunes nothing, for modules that are built to be filled or inspected."""
    with within(_TUNING, False):
        yield


def tuning_allowed() -> bool:
    """Returns whether tuning requests are honoured here."""
    return _TUNING.get()
