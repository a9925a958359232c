"""How much of the time that devices send data is hidden behind kernels, from a trace of `jax.profiler`."""

import gzip
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_SENDS = re.compile(r"nccl|sendrecv|collective.?permute|all.?to.?all", re.IGNORECASE)
Span = tuple[float, float]


def read_trace(folder: pathlib.Path) -> list[Mapping[str, Any]]:
    """The events of the newest trace in a folder."""
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def hidden(events: Iterable[Mapping[str, Any]]) -> float | None:
    """The part of the time of sending kernels in which another stream of the same GPU computes, over all GPUs; `None` if nothing is sent."""
    spans: dict[Any, dict[bool, list[Span]]] = {}
    for event in _on_streams(list(events)):
        kinds = spans.setdefault(event["pid"], {True: [], False: []})
        kinds[bool(_SENDS.search(event["name"]))].append(_span(event))
    sent = sum(_length(_merged(kinds[True])) for kinds in spans.values())
    both = sum(_length(_common(_merged(kinds[True]), _merged(kinds[False]))) for kinds in spans.values())
    return both / sent if sent else None


def gpu_spans(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, begin and end, in microseconds, of all that the streams of all GPUs ran, in order."""
    found = [(event["name"], *_span(event)) for event in _on_streams(list(events))]
    return sorted(found, key=lambda span: span[1])


def _on_streams(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    of_process, of_thread = _names(events, "process_name"), _names(events, "thread_name")
    for event in events:
        device = event.get("pid")
        stream = of_thread.get((device, event.get("tid")), "")
        if event.get("ph") == "X" and "GPU" in of_process.get((device, None), "") and "Stream" in stream:
            yield event


def _span(event: Mapping[str, Any]) -> Span:
    begin, time = float(event["ts"]), float(event.get("dur", 0))
    return begin, begin + time


def _names(events: Sequence[Mapping[str, Any]], what: str) -> dict[tuple[Any, Any], str]:
    return {
        (event.get("pid"), None if what == "process_name" else event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == what
    }


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _common(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    pairs = ((max(a, c), min(b, d)) for a, b in ours for c, d in theirs)
    return [(begin, end) for begin, end in pairs if begin < end]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
