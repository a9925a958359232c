"""Attention over pages: decoding relative to memory bandwidth, latents and prefills relative to arithmetic, and installed peers.

    python -m benchmarks decode --json decode.json --plot decode.png --markdown decode.md
    python -m benchmarks decode --problems 'N64 S4096|prefill' --time-limit 300
    python -m benchmarks decode --quick                             # tiny problems
    python -m benchmarks decode --render decode.json --plot decode.png --markdown decode.md

Results of peers, which use arithmetic of their own, may be off by ten percent. Bytes are those of visible keys and values, queries, results and
tables, regardless of what else an implementation moves; the memory bandwidth is that of a copy in the same run. Baselines are our FlashAttention on
dense keys, and our 16-bit pages for 8-bit ones.
"""

import dataclasses
import functools
import importlib
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import decode_problems as problems
from benchmarks import prepare, report, runner
from benchmarks.decode_problems import BARS, DecodeProblem, gathered, Inputs, KINDS
from benchmarks.measure import JaxWork, time_in_turn
from benchmarks.peers import is_missing
from benchmarks.prepare import BASELINE, FAILURES, fastest, Implementation, Others, OURS, PEER, Prepared, Row

# Peers

_SPLITS = 16  # Pallas' default


class Peer(NamedTuple):
    """`convert` converts the inputs to the layout of `run`, and is not timed. A baseline is our own implementation on other inputs."""

    name: str
    convert: Callable[[Inputs], Any]
    run: Callable[[Any], Array]
    is_baseline: bool = False


def peers_of(problem: DecodeProblem, gpu: bool) -> Iterator[Peer]:
    """The peers that support this problem, on a GPU including those that need one."""
    yield from baselines_of(problem, gpu)
    yield gather_and_attend(problem, "xla")
    if not gpu:
        return
    if not problem.rope:
        yield gather_and_attend(problem, "cudnn")
    if not problem.rope and not problem.prefill and problem.scales != "head":
        yield pallas(problem)
        yield pallas(problem, fitted=True)
    if problem.kind == "decode" and not is_missing("ejkernel"):
        yield ejkernel(problem)


def baselines_of(problem: DecodeProblem, gpu: bool) -> Iterator[Peer]:
    """FlashAttention on the dense keys of a prefill; 16-bit pages, or those of the queries' dtype, for 8-bit ones."""
    if problem.prefill:
        platform = "triton" if gpu else None

        def dense(inputs: Inputs) -> tuple[Array, ...]:
            return rows(problem, inputs.q), *gathered(problem, inputs)

        def attend(x: tuple[Array, ...]) -> Array:
            flash = ejx.FlashAttention(causal=True, softmax_scale=problem.scale, platform=platform)
            return flash(*x).reshape(-1, problem.H, problem.D)

        yield Peer("FlashAttention", dense, attend, True)
    if problem.scales:
        yield Peer(f"{problem.dtype} pages", problems.plain_pages, problems.ours(problem, None), True)


def rows(problem: DecodeProblem, q: Array) -> Array:
    """Queries in the layout of dense attention, `[N, queries, H, D]`."""
    return q.reshape(problem.N, -1, *q.shape[1:])


# Keys are gathered in every call, as is necessary without attention over pages.


def gather_and_attend(problem: DecodeProblem, implementation: str) -> Peer:
    """`jax.nn`, or plain JAX if values and keys have different channels, which `jax.nn` does not support."""

    def attend(inputs: Inputs) -> Array:
        k, v = gathered(problem, inputs)
        q, lengths = rows(problem, inputs.q), inputs.cache.lengths
        if problem.rope:
            out = _plain(problem, q[:, 0], k[:, :, 0], v[:, :, 0], lengths)
        else:
            options: dict[str, Any] = {"scale": problem.scale, "implementation": implementation}
            options |= {"is_causal": True} if problem.prefill else {"key_value_seq_lengths": lengths}
            out = jax.nn.dot_product_attention(q, k, v, **options)
        return out.reshape(-1, problem.H, problem.D)

    what = "XLA" if problem.rope else f"jax.nn {implementation}"
    return Peer(f"gather + {what}", lambda inputs: inputs, attend)


def _plain(problem: DecodeProblem, q: Array, k: Array, v: Array, lengths: Any) -> Array:
    """One query `[N, H, D + rope]` on one head of keys `[N, S, D + rope]`."""
    scores = problem.scale * jnp.einsum("nhd,nsd->nhs", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None] < lengths[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nhs,nsd->nhd", weights.astype(v.dtype), v)


# Third-party kernels


def pallas(problem: DecodeProblem, fitted: bool = False, interpret: bool = False) -> Peer:
    """JAX's sample kernel, with its defaults or with enough splits to fill the device and blocks of 128 keys. It does not scale the
    scores; the pages of a head are contiguous."""

    def convert(inputs: Inputs) -> tuple[Any, ...]:
        cache = inputs.cache
        assert isinstance(cache, ejx.PagedKVCache) and cache.page_table is not None
        pages = [jnp.moveaxis(x, 2, 0) for x in (cache.k, cache.v)]
        scales = [None if x is None else jnp.moveaxis(x, 2, 0) for x in (cache.k_scale, cache.v_scale)]
        count = cache.page_table.shape[1]
        splits = pallas_splits(problem, count) if fitted else _SPLITS
        # Pads to a whole number of blocks per split; the padding is never read.
        block = pallas_block(problem.p) if fitted else 8
        width = -count % (splits * min(block, max(1, -(-count // splits))))
        table = jnp.pad(jnp.maximum(cache.page_table, 0), ((0, 0), (0, width)))
        return inputs.q, *pages, table, cache.lengths, *scales

    def run(x: tuple[Any, ...]) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from JAX 0.12 on, where it still works
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        q, k, v, table, lengths, *scales = x
        options: dict[str, Any] = {"interpret": interpret}
        if fitted:
            splits = pallas_splits(problem, -(-problem.S // problem.p))
            options |= {"k_splits": splits, "pages_per_compute_block": pallas_block(problem.p)}
            options |= {"num_warps": 4}
        q = (q * problem.scale).astype(q.dtype)
        return paged_attention(q, k, v, table, lengths, *scales, **options)

    return Peer("Pallas, fitted" if fitted else "Pallas", convert, run)


def pallas_block(page: int) -> int:
    """The number of pages in a block of at most 128 keys; a power of two."""
    return max(1, 128 // page)


def pallas_splits(problem: DecodeProblem, pages: int) -> int:
    """The number of splits, a power of two, for about a thousand programs with at least one block each."""
    splits, programs = 1, problem.N * problem.K
    while splits * programs < 1024 and 2 * splits * pallas_block(problem.p) <= pages:
        splits *= 2
    return splits


def ejkernel(problem: DecodeProblem) -> Peer:
    """Its Triton kernel, with its own choice of splits. Heads come before the tokens of a page."""

    def convert(inputs: Inputs) -> tuple[Any, ...]:
        cache = inputs.cache
        assert isinstance(cache, ejx.PagedKVCache) and cache.page_table is not None
        pages = (jnp.swapaxes(x, 1, 2) for x in (cache.k, cache.v))
        return inputs.q, *pages, cache.lengths, jnp.maximum(cache.page_table, 0)

    def run(x: tuple[Any, ...]) -> Array:
        module = importlib.import_module("ejkernel.kernels._triton.page_attention")
        return module.page_attention(*x, attn_scale=problem.scale, max_context_len=problem.S)

    return Peer("ejKernel", convert, run)


# Measuring


def measure_card(options: Namespace) -> dict[str, float]:
    """TB/s of a copy (read and written) and of a sum (read) of an array that does not fit the cache."""
    count = 2**20 if options.quick else 2**26 if jax.default_backend() == "cpu" else 2**28
    x = jnp.arange(count, dtype=jnp.int32)
    functions = {"copy": lambda x: x ^ 1, "read": lambda x: jnp.sum(x)}
    works = {name: JaxWork(jax.jit(f).lower(x).compile(), [(x,)]) for name, f in functions.items()}
    timings = time_in_turn(works, options.samples, options.sample_ms)
    moved = {"copy": 2 * x.nbytes, "read": x.nbytes}
    return {name: moved[name] / timing.ms / 1e9 for name, timing in timings.items()}


# Showing

BAR_HEADER = ("on one H200", "bar", "worst", "met", "problem")


def _bar_cells(bar: Mapping[str, Any]) -> tuple[str, ...]:
    bound = f"{'<=' if bar['at_most'] else '>='} {bar['bound']:g}"
    measured = "" if bar["measured"] == bar["of"] else f" ({bar['measured']} of {bar['of']} measured)"
    met = "yes" if bar["met"] else "no"
    return bar["what"], bound, f"{bar['value']:.4g}", met, bar["problem"] + measured


def _bar_table(content: Mapping[str, Any], table: Callable[..., str]) -> list[str]:
    bars = content["summary"]["bars"]
    return [table(BAR_HEADER, list(map(_bar_cells, bars)))] if bars else []


def card_line(content: Mapping[str, Any]) -> str:
    card = content["card"]
    return f"A copy runs at {card['copy']:.3g} TB/s (read and written), a sum at {card['read']:.3g} TB/s."


def _usual(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the batch and context that were measured with the most page sizes."""
    size = lambda row: tuple(row[name] for name in ("N", "S", "H", "K", "D", "ragged"))
    pages = {size(row): {other["p"] for other in rows if size(other) == size(row)} for row in rows}
    most = max(pages, key=lambda of: len(pages[of]), default=None)
    return sorted((row for row in rows if size(row) == most), key=lambda row: row["p"])


def _contexts(axis: Any, rows: Sequence[Mapping[str, Any]], copy: float) -> None:
    """Ours (solid) and the fastest peer (dashed) for each batch, at the page size and heads of the first problem."""
    size = lambda row: tuple(row[name] for name in ("p", "H", "K", "D", "ragged"))
    same = [row for row in rows if size(row) == size({**rows[0], "ragged": False})]
    for n, batch in enumerate(sorted({row["N"] for row in same})):
        for role, style in ((OURS, "-"), (PEER, "--")):
            best: dict[int, float] = {}
            for row in same:
                if row["N"] == batch and row["role"] == role:
                    best[row["S"]] = max(best.get(row["S"], 0.0), row["tb_per_s"])
            label = f"{batch} sequence{'s' if batch > 1 else ''}" if role == OURS else None
            points = sorted(best.items())
            axis.plot(*zip(*points) if points else ((), ()), f"o{style}", color=f"C{n}", label=label)
    axis.axhline(copy, color="#444444", linewidth=0.8, label="a copy")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("keys of each sequence")
    axis.legend(fontsize=7)


class Decode(runner.Family):
    name, title, description, lists = "decode", "Attention over pages", __doc__, problems.PROBLEMS
    groups = tuple(group for group in problems.PROBLEMS if group not in ("cpu", "tiny"))
    card: Mapping[str, float] = {}
    packages, platforms, once = ("ejkernel",), "default,xla", True

    def directed(self, problem: DecodeProblem, forward: Callable[..., Array], direction: str) -> Any:
        return lambda inputs: {"out": forward(inputs)}

    def ready(self, problem: DecodeProblem, platform: Any, sets: Sequence[Any], direction: str) -> Prepared:
        run = self.directed(problem, self.ours(problem, platform), direction)
        return prepare.ready(run, sets, in_turn=True)

    def beside(self, problem: DecodeProblem, options: Namespace, direction: str) -> Others:
        def ready(peer: Peer, sets: Sequence[Inputs], direction: str) -> Prepared:
            convert = jax.jit(peer.convert)
            converted = [jax.block_until_ready(convert(inputs)) for inputs in sets]
            return prepare.ready(self.directed(problem, peer.run, direction), converted, in_turn=True)

        for peer in peers_of(problem, jax.default_backend() == "gpu") if options.peers else ():
            role, failures = (BASELINE, FAILURES) if peer.is_baseline else (PEER, (Exception,))
            yield Implementation(peer.name, functools.partial(ready, peer), role, failures=failures)

    def about(self, options: Namespace, chosen: Sequence[DecodeProblem]) -> dict[str, Any]:
        """Measures the bandwidth of the device, with which the problems are compared."""
        self.card = measure_card(options)
        entries = {"card": dict(self.card), "sizes": {p.name: dataclasses.asdict(p) for p in chosen}}
        print(card_line(entries))
        return entries

    def complete(self, problem: DecodeProblem, inputs: Any, direction: str, rows: list[Row]) -> None:
        runner.rate(rows, bytes=problem.bytes(), flops=problem.flops())
        baseline = fastest(rows, BASELINE)
        for row in rows:
            speed, over = row.numbers["tb_per_s"], prepare.ratio(baseline, row)
            row.numbers |= {"kind": problem.kind, "over_baseline": over if row.role == OURS else None}
            row.numbers["of_card"] = speed / self.card["copy"] if speed and self.card else None

    def sum_up(self, rows: Sequence[Row], chosen: Sequence[DecodeProblem]) -> dict[str, Any]:
        """The worst problem for each target, by our fastest implementation, and the lowest ratio for each kind of problem."""
        best: dict[str, Row] = {}
        timed = [row for row in rows if row.role == OURS and row.ms]
        for row in sorted(timed, key=lambda row: row.ms or 0.0):
            best.setdefault(row.problem, row)
        bars = []
        for bar in BARS:
            mine = [best[p.name] for p in bar.problems if p.name in best]
            known = [(row.ms if bar.field == "ms" else row.numbers[bar.field], row.problem) for row in mine]
            known = [(value, problem) for value, problem in known if value is not None]
            if known:
                value, problem = max(known) if bar.at_most else min(known)
                met = value <= bar.bound if bar.at_most else value >= bar.bound
                entry = {"what": bar.what, "bound": bar.bound, "at_most": bar.at_most, "met": met}
                entry |= {"value": value, "problem": problem}
                bars.append(entry | {"measured": len(known), "of": len(bar.problems)})
        lowest = {}
        for kind in KINDS:
            ratios = [(r.ratio, r.problem) for r in best.values() if r.numbers["kind"] == kind and r.ratio]
            if ratios:
                lowest[kind] = dict(zip(("value", "problem"), min(ratios)))
        return {"summary": {"bars": bars, "lowest ratio": lowest}}

    def text(self, content: Mapping[str, Any]) -> str:
        summary = content["summary"]
        lowest = {f"lowest ratio, {kind}": entry for kind, entry in summary["lowest ratio"].items()}
        parts = [card_line(content), self.tables.text({**content, "summary": lowest})]
        return "\n\n".join(parts + _bar_table(content, report.table))

    def markdown(self, content: Mapping[str, Any], picture: str | None) -> str:
        """A table for each kind of problem, as Markdown for the documentation."""
        parts = [self.tables.markdown(content, picture).rstrip(), card_line(content)]
        return "\n\n".join(parts + _bar_table(content, report.markdown_table)) + "\n"

    def panels(self, content: Mapping[str, Any]) -> list[report.Panel]:
        """Bandwidth over context and page size, and the other measurements."""
        every = [row for row in content["rows"] if row["ms"] is not None]
        rows = [{**row, **content["sizes"][row["problem"]]} for row in every]
        of = lambda *kinds: [row for row in rows if row["kind"] in kinds]
        decodes, counted = of(problems.DECODE), of(problems.LATENT, problems.PREFILL)
        flops = "tflop_per_s" if counted and "tflop_per_s" in counted[0] else "tflops"
        label = lambda row: f"{row['implementation']}, {row['ms']:.3f} ms"
        title, draw = "", None
        if decodes:
            title = f"decode, TB/s, pages of {decodes[0]['p']}: ours, and dashed the fastest peer"
            draw = lambda axis: _contexts(axis, decodes, content["card"]["copy"])
        return [
            report.Panel(title, draw=draw),
            report.Panel("decode, TB/s", _usual(decodes), "tb_per_s", label),
            report.Panel("8-bit pages, ms", of(problems.QUANTISED), "ms", label),
            report.Panel("latents and prefills, TFLOP/s", counted, flops, label),
        ]


FAMILY = Decode(make_inputs=problems.make_inputs, expected=problems.expected_results, ours=problems.ours)
