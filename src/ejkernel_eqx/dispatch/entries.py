"""From records in files to what is known about the problems of an implementation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .cache_file import warn_once
from .caches import Known, Table
from .config import from_dict
from .records import Record
from .registry import Implementation


def config_of(record: Record, implementation: Implementation) -> Any | None:
    """The record's configuration, or `None` if all were denied; `ValueError` if it does not fit the implementation."""
    if record.config is None:
        return None
    try:
        config = from_dict(record.config, implementation.hooks.config_type)
        hash(config)
    except TypeError as error:  # a value of a type that the class does not accept
        raise ValueError(f"config: {error}") from None
    return config


def known_of(record: Record, config: Any | None, origin: str) -> Known:
    """Returns what a record says, with its configuration already built."""
    if config is not None:
        sizes = tuple(sorted(record.exact.get("dims", {}).items()))
        return Known(config, tuple(sorted(record.ms.items())), origin, sizes=sizes)
    reasons = [denied.reason for denied in record.denied]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return Known(
        None,
        (),
        origin,
        f"every configuration was denied, {origin}: {reasons[0] if reasons else 'no reason'}{more}",
    )


def fitting(
    implementation: Implementation,
    records: Iterable[Record],
    name: str,
    origin: Callable[[Record], str],
) -> Table:
    """Returns what the records of an implementation's version say; later records replace earlier ones.

    Entries of older versions are skipped silently; entries that no version up to this one can have written are skipped with one warning
    for the file `name`.
    """
    wanted = (implementation.operation, implementation.platform.value)
    ours = [record for record in records if (record.operation, record.platform) == wanted]
    if not ours or not _loads(implementation):
        return {}
    table, refused = {}, []
    for record in ours:
        try:
            if record.version > implementation.version:
                raise ValueError(
                    f"is of version {record.version} of the kernels, this package has {implementation.version}"
                )
            if record.version == implementation.version:
                known = known_of(record, config_of(record, implementation), origin(record))
                table[implementation.platform, record.problem] = known
        except ValueError as error:
            refused.append(f"{record.problem}: {error}")
    _warn(implementation, name, refused)
    return table


def _loads(implementation: Implementation) -> bool:
    """Returns whether the software that the implementation is written with is installed, which its configurations need."""
    try:
        implementation.load()
    except ModuleNotFoundError:
        return False
    return True


def _warn(implementation: Implementation, name: str, refused: Sequence[str]) -> None:
    if refused:
        message = "%s: %d entries of %s on %s do not fit this package and are ignored; the first: %s"
        kind = f"entries of {implementation.operation} on {implementation.platform.value}"
        operation, platform = implementation.operation, implementation.platform.value
        warn_once(name, kind, message, name, len(refused), operation, platform, refused[0])
