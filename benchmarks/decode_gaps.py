"""Gaps between the launches of a decoding program: 28 layers of attention over pages, one new token for each sequence.

    python -m benchmarks decode-gaps --json gaps.json       # N1 S1024 and N8 S2048, H32 KV8 D128, bf16; needs a GPU
    python -m benchmarks decode-gaps --quick                # a tiny model, anywhere

A layer attends, and its result is the next layer's queries. When appending, it first makes keys and values of its queries and writes them
into its pages. Each program is timed in seven ways: as XLA makes it (on GPUs, launches are recorded as CUDA graphs); with every argument donated
that has a successor, so that memory keeps its addresses and a graph is launched as it was recorded (else it is updated, launch by launch); with
several tokens a call; without graphs; with the merge of splits in the launch that computes them (`together`); both; and with that and smaller
splits. Every result is compared with XLA's in float32, and with every other result of the same configuration bit for bit.

The time of a layer is that of many calls in a row; `call alone` is the host's time for a call with these arguments that does nothing. A trace says
how many kernels a layer has, how long they run, and the gaps between them: XLA launches kernels one by one while it is profiled, so a second trace
keeps graphs (`xla_enable_command_buffers_during_profiling`).
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import problems, report
from benchmarks.measure import host_ms, traced
from ejkernel_eqx._tolerances import errors, TOLERANCES
from ejkernel_eqx.dispatch import device_facts

WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
TRACED_WITH_GRAPHS = {"xla_enable_command_buffers_during_profiling": True}
BOUNDS = report.data("tables")["bars"]["decode-gaps"]
"""Microseconds a layer."""


@dataclasses.dataclass(frozen=True)
class Problem(problems.Problem):
    N: int
    S: int
    layers: int = 28
    H: int = 32
    K: int = 8
    D: int = 128
    p: int = 16
    append: bool = False
    tokens: int = 1
    """Tokens of each sequence in a call, one after the other."""

    @property
    def name(self) -> str:
        return f"N{self.N} S{self.S}" + (", appending" if self.append else "")


PROBLEMS = problems.load("decode-gaps", Problem)


@dataclasses.dataclass(frozen=True)
class Way:
    """`options`: of the compiler. `in_place`: the result takes the place of the queries, and is those of the next call."""

    config: Any
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_place: bool = False
    tokens: int = 1


@dataclasses.dataclass
class Row:
    problem: str
    way: str
    us_per_layer: float | None = None
    bound: float | None = None
    call_alone_us: float | None = None
    """Time of the host for a call with as many arguments that does nothing."""
    launches: int | None = None
    """Launches of a whole program: kernels, copies and calls in its compiled text."""
    error: float | None = None
    traces: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None


# The program


def make_inputs(problem: Problem) -> tuple[Any, ...]:
    """Queries, what is added to new keys and values, the pages of each layer, the table, lengths and the query's beginnings."""
    pages = -(-problem.S // problem.p)
    rng = np.random.default_rng(0)
    table = rng.permutation(problem.N * pages).reshape(problem.N, pages).astype(np.int32)
    keys = iter(jax.random.split(jax.random.key(0), 3 + 2 * problem.layers))

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, problem.dtype)

    q, new = normal(problem.N, problem.H, problem.D), normal(2, problem.N, problem.K, problem.D)
    shape = (problem.N * pages, problem.p, problem.K, problem.D)
    caches = [(normal(*shape), normal(*shape)) for _ in range(problem.layers)]
    lengths = jnp.full(problem.N, problem.S, jnp.int32)
    return q, new, caches, jnp.asarray(table), lengths, jnp.arange(problem.N + 1, dtype=jnp.int32)


def make_step(problem: Problem, platform: ejx.PlatformLike, config: Any) -> Callable[..., tuple[Array, Any]]:
    attend = ejx.RaggedPagedAttention(append=problem.append, platform=platform, config=config)

    def token(q: Array, new: Array, caches: Any, table: Array, lengths: Array, start: Array) -> Any:
        written = []
        for k, v in caches:
            cache = ejx.PagedKVCache(k, v, table, lengths)
            if problem.append:
                mine = q[:, : problem.K] + new[0], q[:, problem.K : 2 * problem.K] + new[1]
                q, cache = attend(q, cache, *mine, query_start_loc=start, max_query_len=1)
            else:
                q = attend(q, cache, query_start_loc=start, max_query_len=1)
            written.append((cache.k, cache.v))
        return q, written

    def step(q: Array, new: Array, caches: Any, *rest: Array) -> Any:
        for _ in range(problem.tokens):
            q, caches = token(q, new, caches, *rest)
        return q, caches

    return step


def lowered(problem: Problem, platform: ejx.PlatformLike, way: Way) -> Any:
    problem = dataclasses.replace(problem, tokens=way.tokens)
    step = jax.jit(make_step(problem, platform, way.config), donate_argnums=(0, 2) if way.in_place else 2)
    return step.lower(*jax.eval_shape(lambda: make_inputs(problem)))


class Programs:
    """The programs of a problem, all compiled side by side: by the name of the way, as it says and, on GPUs, with graphs kept while traced."""

    def __init__(self, problem: Problem, platform: ejx.PlatformLike, ways: Mapping[str, Way]):
        self._pool = concurrent.futures.ThreadPoolExecutor()
        self._made = {}
        for name, way in ways.items():
            program = lowered(problem, platform, way)
            kept = [TRACED_WITH_GRAPHS] if not way.options and jax.default_backend() == "gpu" else []
            for options in (way.options, *kept):
                compiling = self._pool.submit(program.compile, dict(options) or None)
                self._made[name, options is TRACED_WITH_GRAPHS] = compiling

    def __call__(self, name: str, kept: bool = False) -> Any:
        """`None` if there is no such program."""
        compiling = self._made.get((name, kept))
        return None if compiling is None else compiling.result()


def default_config(problem: Problem) -> Any:
    """The Triton configuration that is chosen without tables."""
    from ejkernel_eqx.paged.example import example_problem
    from ejkernel_eqx.paged.triton import compiled as triton

    sizes = {name: getattr(problem, name) for name in ("N", "S", "H", "K", "D", "p")}
    sizes |= {"T": problem.N, "Q": 1}
    example = example_problem("ragged_paged_attention", sizes, problem.dtype, {})
    return triton.default_config(example, device_facts())


def ways(problem: Problem, platform: str | None) -> dict[str, Way]:
    if platform == "xla":
        return {"xla": Way(None), "xla, in place": Way(None, in_place=True)}
    default = default_config(problem)
    together = dataclasses.replace(default, together=True)
    smaller = dataclasses.replace(together, split_k=min(64, -(-problem.S // 64)), chunk_size=64)
    return {
        "default": Way(default),
        "default, in place": Way(default, in_place=True),
        "default, in place, 4 tokens a call": Way(default, in_place=True, tokens=4),
        "default, no graphs": Way(default, WITHOUT_GRAPHS),
        "together": Way(together),
        "together, no graphs": Way(together, WITHOUT_GRAPHS),
        "together, 64 keys a split": Way(smaller),
    }


def count_launches(text: str) -> int:
    """Instructions of the entry computation, and of loops' bodies, that are a launch or a copy."""
    named = (" custom-call(", " fusion(", " copy(", " copy-start(", " dot(", " broadcast(", " iota(")
    inside, count = False, 0
    for line in text.splitlines():
        if line.endswith("{"):
            inside = line.startswith("ENTRY")
        count += inside and any(name in line for name in named)
    return count


# Measuring


class Steps:
    """A program that takes its own caches again and again and, in place, its own result as queries."""

    def __init__(self, program: Any, problem: Problem, way: Way):
        self.program, self.in_place = program, way.in_place
        self.inputs = list(make_inputs(problem))
        self._first = jnp.copy(self.inputs[0])

    def restart(self) -> None:
        """Attends with the first queries again."""
        self.inputs[0] = jnp.copy(self._first)

    def __call__(self) -> Array:
        out, self.inputs[2] = self.program(*self.inputs)
        if self.in_place:
            self.inputs[0] = out
        return out


def time_call(call: Callable[[], Any], samples: int, calls: int) -> float:
    """The median of the microseconds of one of many calls in a row."""
    return statistics.median(1e3 * host_ms(call, calls) for _ in range(samples))


def call_alone(problem: Problem, samples: int, calls: int) -> float:
    """Times a program with the same arguments that returns queries and caches."""
    shapes = jax.eval_shape(lambda: make_inputs(problem))
    function = jax.jit(lambda q, new, caches, *rest: (q, caches), donate_argnums=(0, 2))
    return time_call(
        Steps(function.lower(*shapes).compile(), problem, Way(None, in_place=True)), samples, calls
    )


def time_layer(steps: Steps, problem: Problem, samples: int, calls: int) -> float:
    for _ in range(3):  # graphs are made in the second call
        jax.block_until_ready(steps())
    return time_call(steps, samples, calls) / problem.layers / problem.tokens


def trace(steps: Steps, problem: Problem, calls: int = 5) -> dict[str, Any]:
    """Kernels a layer, their microseconds by name, and the gaps between those that follow one another within a call."""
    call = lambda: jax.block_until_ready(steps())
    call()
    spans = traced(lambda: [call() for _ in range(calls)][-1])
    if not spans:
        return {}
    gaps = [later.begin - earlier.end for earlier, later in itertools.pairwise(spans)]
    within = sorted(gap for gap in gaps if gap < 50.0)  # not those between calls
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name, []).append(span.end - span.begin)
    each = calls * problem.layers * problem.tokens
    return {
        "kernels_per_layer": len(spans) / each,
        "busy_us_per_layer": sum(map(sum, times.values())) / each,
        "median_gap_us": statistics.median(within) if within else None,
        "us_by_kernel": {
            name: {"per_layer": len(result) / each, "median_us": statistics.median(result)}
            for name, result in sorted(times.items(), key=lambda item: -sum(item[1]))
        },
    }


@functools.lru_cache
def exact_step(problem: Problem) -> Callable[..., tuple[Array, Any]]:
    with jax.default_matmul_precision("highest"):
        program = jax.jit(make_step(problem, "xla", None))
        shapes = jax.eval_shape(lambda: make_inputs(problem))
        return program.lower(*shapes).compile()


def expected_result(problem: Problem) -> np.ndarray:
    """XLA's result in float32, token by token."""
    inputs = list(make_inputs(problem))
    inputs[:3] = jax.tree.map(lambda x: x.astype(jnp.float32), inputs[:3])
    program = exact_step(dataclasses.replace(problem, dtype="float32", tokens=1))
    for _ in range(problem.tokens):
        inputs[0], inputs[2] = program(*inputs)
    return np.asarray(inputs[0])


def check(row: Row, problem: Problem, out: Array, expected: np.ndarray, like: Array) -> None:
    found, allowed = errors(out, expected), TOLERANCES[problem.dtype]["forward"]
    row.error = found.rms
    if not (found.rms <= allowed.rms and found.peak <= allowed.peak):
        row.reason = f"wrong: relative RMS error {found.rms:.1e}, largest {found.peak:.1e}"
    elif not np.array_equal(np.asarray(out), np.asarray(like)):
        row.reason = "two runs of one configuration differ"


def chosen_ways(problem: Problem, options: argparse.Namespace) -> dict[str, Way]:
    return {name: way for name, way in ways(problem, options.platform).items() if options.ways.search(name)}


def measure(problem: Problem, programs: Programs, options: argparse.Namespace) -> Iterator[Row]:
    expected, outs = {}, {}
    alone = call_alone(problem, options.samples, options.calls)
    for name, way in chosen_ways(problem, options).items():
        several = dataclasses.replace(problem, tokens=way.tokens)
        if way.tokens not in expected:
            expected[way.tokens] = expected_result(several)
        row = Row(problem.name, name, bound=BOUNDS.get(problem.name), call_alone_us=alone)
        program = programs(name)
        row.launches = count_launches(program.as_text() or "")
        steps = Steps(program, several, way)
        for _ in range(3):  # without a graph, while one is made, and with one
            steps.restart()
            out = jnp.copy(steps())
            check(row, several, out, expected[way.tokens], outs.setdefault((way.config, way.tokens), out))
            if row.reason:
                break
        if row.reason:
            yield row
            continue
        row.us_per_layer = time_layer(steps, several, options.samples, options.calls)
        row.traces["one by one"] = trace(steps, several)
        if (kept := programs(name, kept=True)) is not None:
            kept = Steps(kept, several, way)
            time_layer(kept, several, 1, 1)
            row.traces["graphs"] = trace(kept, several)
        yield row


def show(rows: Sequence[Row]) -> str:
    shown = []
    for row in rows:
        one, graphs = row.traces.get("one by one", {}), row.traces.get("graphs", {})
        times = report.number(row.us_per_layer) if row.reason is None else row.reason
        shown.append(dataclasses.asdict(row) | one | {"time": times, "gap": graphs.get("median_gap_us")})
    return report.table_of("decode-gaps", shown)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = report.parser("decode-gaps", __doc__).parse_args(arguments)
    options.platform = options.platform or ("triton" if jax.default_backend() == "gpu" else "xla")
    if options.quick:
        options.samples, options.calls = 2, 2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    chosen = [p for p in PROBLEMS["tiny" if options.quick else "anchors"] if options.problems.search(p.name)]
    programs = {p: Programs(p, options.platform, chosen_ways(p, options)) for p in chosen}
    rows = []
    for problem in chosen:
        for row in measure(problem, programs[problem], options):
            said = row.reason or f"{row.us_per_layer:.2f} us a layer"
            print(f"{row.problem}, {row.way}: {said}", flush=True)
            rows.append(row)
            # After every row: what was measured is kept if the rest is not.
            report.save(options, bounds=BOUNDS, rows=[dataclasses.asdict(row) for row in rows])
    print(show(rows))
    return int(any(row.reason for row in rows))
