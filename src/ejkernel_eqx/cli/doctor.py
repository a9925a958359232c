"""`doctor`: reports the device, usable platforms, known configurations, and problems."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import platform as python_platform
from typing import Any

from .._errors import EjkernelError, not_installed
from .._operations import OPERATIONS
from ..dispatch import (
    Backend,
    cache_dir,
    current_policy,
    device_fingerprint,
    DeviceFacts,
    kernel_registry,
    names_of,
    Platform,
    Policy,
    policy_override,
    take_snapshot,
    user_caches,
)
from ..dispatch.environment import env
from ..launch.staging import versions_unfit
from ..launch.triton_call import triton_unavailable
from .output import count, FAILED, OK, Outcome, pairs, section, table
from .problems import this_device

HELP = """The first line says which platforms the device can use. If it finds a problem, the exit code is 1.

examples:
  python -m ejkernel_eqx doctor --all
  python -m ejkernel_eqx doctor --json
"""
_PACKAGES = ("ejkernel-eqx", "jax", "jaxlib", "equinox", "optax", "triton", "jax-triton", "libtpu")
_TABLES = ("tuned", "shipped", "borrowed")


_SHOWN = {Platform.TRITON: "Triton", Platform.CUDA: "cuDNN", Platform.PALLAS: "Pallas", Platform.XLA: "XLA"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    everything = "also the platforms of each operation, versions, tables and environment variables"
    parser.add_argument("--all", action="store_true", help=everything)


def run(options: argparse.Namespace) -> Outcome:
    problems: list[str] = []
    # The other sections are reported also without a device: they help to find out why.
    device = None
    try:
        device = this_device()
    except EjkernelError as error:
        problems.append(str(error))
    environment = _environment(problems)
    document: dict[str, Any] = {
        "device": device and dataclasses.asdict(device) | {"fingerprint": device_fingerprint(device)},
        "versions": versions(),
        "operations": _operations(device, problems) if device else {},
        "cache": _cache(problems),
        "policy": _policy(),
        "environment": environment,
        "notes": _notes(device),
        "problems": problems,
    }
    text = _text if options.all else _short_text
    return Outcome(document, lambda: text(document), FAILED if problems else OK)


def _notes(device: DeviceFacts | None) -> list[str]:
    """Notes for the user of this device."""
    if device is not None and device.vendor == "nvidia" and triton_unavailable() is None:
        if (reason := versions_unfit()) is None:
            return []
        return [
            f"jax-triton compiles and launches Triton kernels, one after the other, and Hopper's own kernels are left out: this package {reason}"
        ]
    if device is None or device.backend is not Backend.TPU:
        return []
    return [
        "the Pallas kernels have never run on a TPU: they are interpreted and compiled without one. Before you rely on them, run in a copy of the "
        "repository: python -m pytest -m tpu -n 0"
    ]


def versions() -> dict[str, str | None]:
    """The versions of Python and of the relevant packages; `None` for packages that are not installed."""
    results: dict[str, str | None] = {"python": python_platform.python_version()}
    for package in _PACKAGES:
        try:
            results[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            results[package] = None
    return results


def _versions_text(known: dict[str, str | None]) -> dict[str, str]:
    """The versions as text; for missing packages, how to install them."""
    return {
        name: version or not_installed(name).removeprefix(f"{name} is ") for name, version in known.items()
    }


def _operations(device: DeviceFacts, problems: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The platforms of each operation, in order of preference, with the number of problems in each kind of table."""
    results = {}
    if device.backend is Backend.GPU and importlib.util.find_spec("triton") is None:
        problems.append(
            f"the device is a GPU, but {not_installed('triton')}: Triton kernels, which include most of the fast ones, cannot be used"
        )
    has_triton = versions()["triton"] is not None
    for operation in kernel_registry.list_operations():
        known = kernel_registry.list_implementations(operation, device)
        tables = _known_problems(operation)
        results[operation] = [
            {
                "platform": name,
                "usable": reason is None,
                "reason": reason,
                "by_name_only": i.priority < 0,
                "tunable": i.workload is not None,
                **{table: platforms.count(i.platform) for table, platforms in tables.items()},
            }
            for name, (i, reason) in zip(names_of([i for i, _ in known]), known)
        ]
        problems.extend(
            f"{operation}: triton is installed and the device is a GPU, but the platform cannot be used: {reason}"
            for i, reason in known
            if has_triton
            and reason
            and i.platform is Platform.TRITON
            and device.backend is i.backend is Backend.GPU
        )
    return results


def _known_problems(operation: str) -> dict[str, list[Platform]]:
    """The platform of every tuned problem for this device, by kind of table."""
    with policy_override(Policy.CACHED):  # also tables that the current policy ignores
        snapshot = take_snapshot(operation)
    tables = (snapshot.user, snapshot.shipped, snapshot.borrowed)
    return {name: [platform for platform, _ in table] for name, table in zip(_TABLES, tables)}


def _cache(problems: list[str]) -> dict[str, Any]:
    folder = cache_dir()
    writable = _writable(folder)
    if not writable:
        problems.append(
            f"cache folder {folder} cannot be written: tuning results are known only to the process that tunes"
        )
    files = [
        {"path": str(cache.path), "device": cache.path.parent.name, "records": len(cache)}
        for cache in user_caches()
    ]
    set_aside = [str(path) for path in sorted(folder.glob("*/*.broken-*"))]
    return {"folder": str(folder), "writable": writable, "files": files, "set_aside": set_aside}


def _writable(folder: pathlib.Path) -> bool:
    """Tells whether files can be created in the folder or else in its nearest existing parent."""
    # The root is its own parent, which ends the search.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _policy() -> str | None:
    with contextlib.suppress(ValueError):  # already listed among the environment's problems
        return current_policy().value


def _environment(problems: list[str]) -> list[dict[str, Any]]:
    rows = []
    for variable in env():
        row = {"name": variable.name, "text": variable.text, "description": variable.description}
        # An invalid value stays None and becomes a problem; the other variables are still read.
        results = {"value": None, "default": variable.default}
        try:
            results["value"] = variable.read()
        except ValueError as error:
            problems.append(str(error))
        rows.append(row | {name: None if value is None else str(value) for name, value in results.items()})
    return rows


def summary(document: dict[str, Any]) -> str:
    """One line: the platforms that some operation of the package can use on this device, and of the others why not."""
    device, operations = document["device"], document["operations"]
    rows = [row for name in OPERATIONS for row in operations.get(name, ())]
    if device is None:
        return "no device"
    usable, unusable = [], []
    for platform, shown in _SHOWN.items():
        here = [row for row in rows if row["platform"] == platform.value]
        if any(row["usable"] and not row["by_name_only"] for row in here):
            usable.append(shown)
        elif reason := next((row["reason"] for row in here if row["reason"]), None):
            unusable.append(f"{shown}: {reason.partition(',')[0]}")
    *several, last = usable
    names = f"{', '.join(several)} and {last}" if several else last
    return "; ".join([f"{names} usable on {device['kind']}", *unusable])


def _short_text(document: dict[str, Any]) -> str:
    more = "" if document["problems"] else "no problems found; --all shows more"
    parts = [*document["notes"], *(f"PROBLEM: {problem}" for problem in document["problems"]), more]
    return "\n".join([summary(document), *filter(None, parts)])


def _text(document: dict[str, Any]) -> str:
    variables = [
        (row["name"], row["text"] or "-", row["value"] or "-", row["description"])
        for row in document["environment"]
    ]
    environment = table(("variable", "set to", "in force", "meaning"), variables)
    problems = document["problems"]
    return "\n\n".join(
        (
            summary(document),
            section("device", _device_text(document["device"])),
            section("versions", pairs(_versions_text(document["versions"]), 13)),
            section("operations", _operations_text(document["operations"])),
            section("cache", _cache_text(document["cache"])),
            section(f"environment (policy in force: {document['policy'] or 'invalid'})", environment),
            *([section("notes", "\n".join(document["notes"]))] if document["notes"] else []),
            section("PROBLEMS", "\n".join(problems)) if problems else "no problems found",
        )
    )


def _device_text(device: dict[str, Any] | None) -> str:
    if device is None:
        return "none"
    facts = {
        "kind": device["kind"],
        "backend": device["backend"].value,
        "devices": device["count"],
        "capability": device["compute_capability"],
        "processors": device["num_multiprocessors"],
        "shared memory": device["shared_memory"] and f"{device['shared_memory']} bytes",
        "vmem": device["vmem"] and f"{device['vmem']} bytes",
        "memory": device["memory"] and f"{device['memory'] / 2**30:.1f} GiB",
        "runtime": device["runtime"],
        "cudnn": ".".join(map(str, device["cudnn"])),
        "fingerprint": device["fingerprint"],
    }
    return pairs(facts, 13)


def _operations_text(operations: dict[str, list[dict[str, Any]]]) -> str:
    rows = [
        (
            operation if n == 0 else "",
            row["platform"],
            ("if named" if row["by_name_only"] else "usable") if row["usable"] else "unusable",
            *(str(row[name]) if row["usable"] and row["tunable"] else "-" for name in _TABLES),
            row["reason"] or "",
        )
        for operation, known in operations.items()
        for n, row in enumerate(known)
    ]
    known = table(("operation", "platform", "state", *_TABLES, "reason"), rows, right=_TABLES)
    return f"{known}\nnumber of tuned problems: by the user, shipped for this device, borrowed from the nearest device"


def _cache_text(cache: dict[str, Any]) -> str:
    lines = [f"{cache['folder']} ({'writable' if cache['writable'] else 'NOT writable'})"]
    lines.extend(
        f"{file['device']}/{pathlib.Path(file['path']).name}: {count(file['records'], 'record')}"
        for file in cache["files"]
    )
    lines.extend(f"renamed, as it could not be read: {path}" for path in cache["set_aside"])
    return "\n".join(lines)
