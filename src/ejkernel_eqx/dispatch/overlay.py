"""What a caller may say for a while, by context manager: configurations (`overlay_cache`) and the policy."""

import contextlib
import enum
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

POLICY_VARIABLE = "EJKERNEL_EQX_POLICY"


class Policy(enum.StrEnum):
    """How far the selection chain may go for a configuration."""

    HEURISTIC = "heuristic"
    """Overrides, overlays and heuristics only: no table is consulted."""
    CACHED = "cached"
    """The default: also known configurations. Nothing is ever timed."""
    TUNE = "tune"
    """Unknown problems given by `tune_for=` are tuned."""
    FORCE = "force"
    """Problems given by `tune_for=` are tuned anew, known or not."""


_OVERLAY: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("ejkernel_eqx_overlay", default=())
_POLICY: ContextVar[Policy | None] = ContextVar("ejkernel_eqx_policy", default=None)


@contextlib.contextmanager
def overlay_cache(entries: Mapping[str, Any]) -> Iterator[None]:
    """While it is open, modules built use these configurations before any table.

    **Arguments:**

    - `entries`: an operation's name (`"flash_attention"`, every problem of it) or a `Problem.key()` (that problem only) to a
      configuration. The innermost overlay wins; a problem's own entry wins over its operation's.

    A module keeps what it was built with: leaving the context changes nothing in it.
    """
    token = _OVERLAY.set(tuple(entries.items()) + _OVERLAY.get())
    try:
        yield
    finally:
        _OVERLAY.reset(token)


def overlay_entries() -> tuple[tuple[str, Any], ...]:
    """The open overlays' entries, innermost first."""
    return _OVERLAY.get()


@contextlib.contextmanager
def policy_override(policy: "Policy | str") -> Iterator[None]:
    """While it is open, modules are built under `policy`: `"heuristic"`, `"cached"`, `"tune"` or `"force"`."""
    token = _POLICY.set(_parse_policy(policy, "policy"))
    try:
        yield
    finally:
        _POLICY.reset(token)


def current_policy() -> Policy:
    """The context's policy, else that of the environment variable `EJKERNEL_EQX_POLICY`, else `CACHED`."""
    return _POLICY.get() or _parse_policy(
        os.environ.get(POLICY_VARIABLE, Policy.CACHED), f"environment variable {POLICY_VARIABLE}"
    )


def _parse_policy(value: "Policy | str", name: str) -> Policy:
    try:
        return Policy(value)
    except ValueError:
        names = ", ".join(repr(p.value) for p in Policy)
        raise ValueError(f"{name}: expected one of {names}, received {value!r}.") from None
