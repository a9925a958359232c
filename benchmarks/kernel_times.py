"""The device's time by kernel, from a trace of a few runs."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax

KINDS = (
    ("attention", r"attention|fmha|flash|_fprop_|_bprop_|sdpa|dot_do_o|convert_dq"),
    ("matmul", r"gemm|nvjet|cutlass|wgmma|matmul|splitK|cublas"),
    ("copy", r"memcpy|memset|copy|concatenate|dynamic.update|dynamic.slice|transpose|slice"),
    ("reduction", r"reduce|norm|softmax"),
    ("elementwise", r"fusion|loop_|convert|add|multiply|broadcast|select|wrapped"),
)


def kernel_times(run: Callable[[], Any], runs: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches per run of each kernel, longest first; `run` must return arrays to wait for."""
    with tempfile.TemporaryDirectory() as folder:
        jax.block_until_ready(run())
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(runs)])
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                times[event.name] += event.duration_ns / 1e6 / runs
                counts[event.name] += 1
    return {name: (times[name], counts[name] // runs) for name in sorted(times, key=lambda n: -times[n])}


def by_kind(times: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Milliseconds per run of each kind of kernel."""
    found: dict[str, float] = collections.defaultdict(float)
    for name, (ms, _) in times.items():
        found[next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), "other")] += ms
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))
