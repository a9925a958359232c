"""Several processes: process 0 decides, all use its decision, and none waits forever.

They exchange a few kilobytes of text through the key-value store of JAX's distributed runtime, because collectives on devices time out
after tens of seconds and tuning takes longer.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from .._errors import TuningError
from ..dispatch import (
    device_facts,
    from_dict,
    kernel_registry,
    Known,
    memory_cache,
    of_device,
    parse_platform,
    Platform,
    to_dict,
)
from ..dispatch.known import joined, Key, Table
from ..dispatch.persistent import user_table

PATIENCE = 300.0
"""Seconds that a process waits for the others to reach the same point, not counting the time for tuning."""

_POLL, _EVERY = 1.0, 60.0
"""Seconds between looks at the store, and between messages to who waits."""
_LOG = logging.getLogger("ejkernel_eqx")
_rounds = itertools.count(1)


class Round:
    """One call that every process makes, in the same order, with its steps in the same order too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._store: Any = _store() if jax.process_count() > 1 else None
        self._rank = jax.process_index()
        self._prefix = f"ejkernel_eqx/{next(_rounds)}"
        self._steps = itertools.count(1)

    def decide(self, question: str, make: Callable[[], str], patience: float = 0.0) -> str:
        """The result of process 0's `make()` in every process; `TuningError` in all if their questions differ."""
        if self._store is None:
            return make()
        step = next(self._steps)
        self._compare(step, question)
        if self._rank == 0:
            self._put(f"{step}/answer", make())
        return self._get(f"{step}/answer", patience)

    def agree(self, statement: str) -> None:
        """`TuningError` in all processes if their statements differ."""
        if self._store is not None:
            self._compare(next(self._steps), statement)

    def _compare(self, step: int, statement: str) -> None:
        expected = _digest(f"{self.name} {statement}")
        self._put(f"{step}/stated/{self._rank}", expected)
        if self._rank == 0:
            stated = [self._get(f"{step}/stated/{rank}") for rank in range(jax.process_count())]
            different = [str(rank) for rank, digest in enumerate(stated) if digest != expected]
            if different:
                raise TuningError(
                    f"{self.name}: processes {', '.join(different)} differ from process 0 in what they tune or would run; every process must make "
                    "the same call, with the same shapes, on the same kind of device, under the same policy."
                )
            self._put(f"{step}/compared", expected)
        self._get(f"{step}/compared")

    def _put(self, key: str, value: str) -> None:
        try:
            self._store.key_value_set(f"{self._prefix}/{key}", value)
        except jax.errors.JaxRuntimeError as error:
            raise self._unreachable(error) from error

    def _get(self, key: str, patience: float = 0.0) -> str:
        """The value of a key as soon as it exists; `TuningError` if a process has failed, or none sets it in time."""
        start = told = time.monotonic()
        while True:
            try:
                return self._store.blocking_key_value_get(f"{self._prefix}/{key}", int(_POLL * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._unreachable(error) from error
            for failed, reason in self._store.key_value_dir_get(f"{self._prefix}/failed/"):
                raise TuningError(f"{self.name}: process {failed.rsplit('/', 1)[-1]} failed: {reason}")
            now = time.monotonic()
            if now - told >= _EVERY:
                told = now
                _LOG.warning(
                    "%s: process %d has waited %.0f of %.0f s for the others",
                    self.name,
                    self._rank,
                    now - start,
                    PATIENCE + patience,
                )
            if now - start > PATIENCE + patience:
                raise TuningError(
                    f"{self.name}: process {self._rank} has waited {PATIENCE + patience:.0f} s for the others; every process must make this call."
                )

    def _unreachable(self, error: Exception) -> TuningError:
        return TuningError(f"{self.name}: cannot reach the other processes: {error}")

    def report(self, error: BaseException) -> None:
        """Reports to the other processes why this one fails."""
        if self._store is not None:
            self._put(f"failed/{self._rank}", f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def taking_part(name: str) -> Iterator[Round]:
    """A `Round` in which an exception in one process is raised in all."""
    together = Round(name)
    try:
        yield together
    except BaseException as error:
        together.report(error)
        raise


def _store() -> Any:
    """The key-value store of the distributed runtime; the only place that accesses JAX's internals for it."""
    try:
        from jax._src.distributed import global_state
    except ImportError as error:
        raise TuningError(_NO_STORE) from error
    client = getattr(global_state, "client", None)
    methods = ("key_value_set", "blocking_key_value_get", "key_value_dir_get")
    if client is None or not all(hasattr(client, method) for method in methods):
        raise TuningError(_NO_STORE)
    return client


_NO_STORE = (
    f"tuning with several processes needs the key-value store of JAX's distributed runtime, which is not available here with JAX {jax.__version__}; "
    "call jax.distributed.initialize(), or tune in one process and let the others read its table (`python -m ejkernel_eqx cache export`)."
)


def share(
    together: Round,
    operations: Iterable[str],
    question: str,
    make: Callable[[], Table],
    patience: float = 0.0,
) -> Table:
    """The result of process 0's `make()` in every process. From then on, all know exactly what process 0 knows about these operations."""
    if jax.process_count() == 1:
        return make()
    names = sorted(operations)

    def encoded() -> str:
        answers = make()
        return json.dumps([encode(answers), encode({**_in_files(names), **_in_memory(names)})])

    answers, known = map(decode, json.loads(together.decide(question, encoded, patience)))
    _install({**known, **answers}, names)
    together.agree(digest_of(_in_memory(names)))
    return answers


def replan_together(operations: Iterable[str]) -> None:
    """Shares what process 0 knows about some operations with all processes. A single process reads its own tables."""
    if jax.process_count() > 1:
        names = sorted(operations)
        with taking_part("ejx.replan") as together:
            share(together, names, json.dumps(names), dict)


def _in_files(operations: Iterable[str]) -> Table:
    """Reads the user's files on some operations; several processes do not when modules are built."""
    device = device_facts()
    known = (tuple(kernel_registry.ordered(operation)) for operation in operations)
    implementations = (i for several in known for i in of_device(several, device))
    return joined(user_table(implementation, device) for implementation in implementations)


def _in_memory(operations: Iterable[str]) -> Table:
    return joined(memory_cache.table(operation, tuple(Platform)) for operation in operations)


def _install(table: Table, operations: Iterable[str]) -> None:
    """Replaces what memory holds about some operations by a table."""
    replaced = _in_memory(operations)
    kept = [(key, known) for key, known in memory_cache.items() if key not in replaced]
    memory_cache.clear()
    for (platform, key), known in (*kept, *table.items()):
        memory_cache.put(platform, key, known)


def encode(table: Table) -> str:
    """Canonical JSON of a table."""
    rows = [(*row, known.ms, known.origin, known.denied, known.sizes) for row, known in _rows(table)]
    return json.dumps(rows, sort_keys=True)


def decode(text: str) -> Table:
    """The inverse of `encode`."""
    table: dict[Key, Known] = {}
    for name, key, config, ms, origin, denied, sizes in json.loads(text):
        platform = parse_platform(name)
        if config is not None:
            operation = json.loads(key)["operation"]
            config_type = kernel_registry.get(operation, platform).hooks.config_type
            config = from_dict(config, config_type)
        times, sizes = tuple(map(tuple, ms)), tuple(map(tuple, sizes))
        table[platform, key] = Known(config, times, origin, denied, sizes)
    return table


def digest_of(table: Table) -> str:
    """A digest that differs between tables that choose differently; times and origins are ignored."""
    return _digest(json.dumps([row for row, _ in _rows(table)], sort_keys=True))


def _rows(table: Table) -> list[tuple[tuple[str, str, dict[str, Any] | None], Known]]:
    """Pairs what determines choices, as JSON-compatible values, with everything else that is known."""
    return [
        ((platform.value, key, None if known.config is None else to_dict(known.config)), known)
        for (platform, key), known in sorted(table.items(), key=lambda entry: entry[0])
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
