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
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, report, runner
from benchmarks.measure import JaxWork, time_in_turn
from benchmarks.peers import is_missing
from benchmarks.prepare import BASELINE, FAILURES, FORWARD, Implementation, Others, OURS, PEER, Prepared, Row
from ejkernel_eqx.paged import reference
from ejkernel_eqx.paged.cache.quantise import dequantise, LARGEST, quantise
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec

DECODE, LATENT, QUANTISED, PREFILL = KINDS = ("decode", "latent", "8-bit pages", "prefill")


@dataclasses.dataclass(frozen=True)
class DecodeProblem(problems.Problem):
    """`N` sequences of `S` keys in pages of `p`, with one query each or, to `prefill`, a query at every key.

    `H` query heads on `K` key heads of `D` channels. With `rope`, the pages hold a latent of `D` channels, one head, and `rope` more
    channels for the scores. `pages`: their dtype if it differs from that of the queries, with a scale for each `"token"` and head, or for
    each `"head"`. `ragged`: lengths from a quarter of `S` keys to `S`.
    """

    N: int
    S: int
    p: int = 16
    H: int = 32
    K: int = 8
    D: int = 128
    rope: int = 0
    prefill: bool = False
    pages: str | None = None
    scales: str | None = None
    ragged: bool = False
    directions: ClassVar = (FORWARD,)

    def __post_init__(self):
        assert self.K == 1 or not self.rope, "a latent is one head"
        assert (self.pages in LARGEST) == (self.scales is not None)
        assert not (self.prefill and (self.ragged or self.rope or self.scales))

    @property
    def kind(self) -> str:
        if self.prefill:
            return PREFILL
        return QUANTISED if self.scales else LATENT if self.rope else DECODE

    def words(self) -> list[str]:
        heads = f"H{self.H} KV{self.K} D{self.D}"
        return [
            "prefill" if self.prefill else "decode",
            f"N{self.N} S{self.S} p{self.p}",
            f"latent H{self.H} D{self.D}+{self.rope}" if self.rope else heads,
            "ragged" if self.ragged else "",
            f"{self.pages} {self.scales}" if self.scales else "",
        ]

    @property
    def stored(self) -> Any:
        return jnp.dtype(self.pages or self.dtype)

    @property
    def scale(self) -> float:
        return (self.D + self.rope) ** -0.5

    @property
    def tokens(self) -> int:
        """The number of queries of all sequences."""
        return self.N * (self.S if self.prefill else 1)

    def lengths(self) -> np.ndarray:
        """int32 `[N]`."""
        if not self.ragged:
            return np.full(self.N, self.S, np.int32)
        result = np.random.default_rng(0).integers(self.S // 4, self.S + 1, self.N)
        result[0] = self.S
        return result.astype(np.int32)

    def flops(self) -> float:
        """The operations of both products, over pairs of a query and a visible key."""
        lengths = self.lengths().astype(np.int64)
        pairs = int((lengths * (lengths + 1) // 2 if self.prefill else lengths).sum())
        return 2.0 * pairs * self.H * (2 * self.D + self.rope)

    def bytes(self) -> int:
        """The minimum bytes read and written: visible keys and values with their scales, queries, results and tables."""
        size, keys = jnp.dtype(self.dtype).itemsize, int(self.lengths().sum())
        a_key = (self.D + self.rope if self.rope else 2 * self.K * self.D) * self.stored.itemsize
        a_key += 8 * self.K if self.scales == "token" else 0
        tables = 4 * (int((-(-self.lengths() // self.p)).sum()) + self.N)
        return keys * a_key + self.tokens * self.H * (2 * self.D + self.rope) * size + tables


class Inputs(NamedTuple):
    """Queries `[tokens, H, D]` (`D + rope` for a latent), the bound cache, and where each sequence's queries begin and end."""

    q: Array
    cache: ejx.PagedKVCache | ejx.PagedLatentCache
    query_start_loc: Array


def make_inputs(problem: DecodeProblem, seed: int = 0) -> Inputs:
    """Standard normal inputs, with pages in random order; different for every seed."""
    lengths = problem.lengths()
    need = -(-lengths // problem.p)
    numbers = np.random.default_rng(seed).permutation(int(need.sum())).astype(np.int32)
    table = np.full((problem.N, int(need.max())), -1, np.int32)
    for row, mine in zip(table, np.split(numbers, np.cumsum(need)[:-1]), strict=True):
        row[: len(mine)] = mine
    key = jax.random.key(seed, impl="rbg")
    q, first, second, first_scale, second_scale = _random(problem, len(numbers), key)
    kind = ejx.PagedLatentCache if problem.rope else ejx.PagedKVCache
    cache = kind(first, second, jnp.asarray(table), jnp.asarray(lengths), first_scale, second_scale)
    each = problem.S if problem.prefill else 1
    return Inputs(q, cache, each * jnp.arange(problem.N + 1, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(problem: DecodeProblem, pages: int, key: Array) -> tuple[Array | None, ...]:
    """Queries, then both kinds of pages, then their scales."""
    keys = jax.random.split(key, 3)
    heads, width = () if problem.rope else (problem.K,), problem.D + problem.rope
    widths = (problem.D, problem.rope) if problem.rope else (problem.D, problem.D)
    made = [
        _stored(problem, jax.random.normal(key, (pages, problem.p, *heads, width), jnp.float32))
        for key, width in zip(keys[1:], widths)
    ]
    q = jax.random.normal(keys[0], (problem.tokens, problem.H, width), problem.dtype)
    return q, *(stored for stored, _ in made), *(scale for _, scale in made)


def _stored(problem: DecodeProblem, x: Array) -> tuple[Array, Array | None]:
    if problem.scales is None:
        return x.astype(problem.stored), None
    if problem.scales == "token":
        return quantise(x, problem.stored)
    scale = jnp.max(jnp.abs(x), (0, 1, x.ndim - 1)) / LARGEST[problem.stored.name]
    return quantise(x, problem.stored, scale)[0], scale


def ours(problem: DecodeProblem, platform: str | None) -> Callable[[Inputs], Array]:
    """Our operation on such inputs. The call builds it, and raises if the platform does not support this device."""
    options: dict[str, Any] = {"softmax_scale": problem.scale, "platform": platform}

    def decode(inputs: Inputs) -> Array:
        return ejx.PagedAttention(**options)(inputs.q, inputs.cache)

    def prefill(inputs: Inputs) -> Array:
        attend = ejx.PrefillPagedAttention(**options)
        start = inputs.query_start_loc
        return attend(inputs.q, inputs.cache, query_start_loc=start, max_query_len=problem.S)

    return prefill if problem.prefill else decode


def gathered(problem: DecodeProblem, inputs: Inputs) -> tuple[Array, Array]:
    """Each sequence's dense keys and values, `[N, S, K, D]` (for a latent: with its rotary part, and alone), in the queries' dtype."""
    first, second = inputs.cache.gather(problem.S, dtype=inputs.q.dtype)
    if problem.rope:
        first, second = jnp.concatenate([first, second], -1)[:, :, None], first[:, :, None]
    return first, second


def plain_pages(inputs: Inputs) -> Inputs:
    """Converts pages to the queries' dtype."""
    cache, dtype = inputs.cache, inputs.q.dtype
    names = ("latent", "rope") if isinstance(cache, ejx.PagedLatentCache) else ("k", "v")
    pages = (dequantise(getattr(cache, name), getattr(cache, f"{name}_scale"), dtype) for name in names)
    return inputs._replace(cache=type(cache)(*pages, cache.page_table, cache.lengths))


@prepare.reference
def expected_results(problem: DecodeProblem, inputs: Inputs) -> dict[str, Array]:
    """The result of the reference, in float32."""
    cache, start = inputs.cache, inputs.query_start_loc
    assert cache.page_table is not None and cache.lengths is not None
    if isinstance(cache, ejx.PagedLatentCache):
        scales = {"k_scale": cache.latent_scale, "rope_scale": cache.rope_scale}
        pages: dict[str, Any] = {"k": cache.latent[:, :, None], "v": None, "rope": cache.rope[:, :, None]}
        pages |= {name: None if x is None else x[..., None] for name, x in scales.items()}
    else:
        pages = {"k": cache.k, "v": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
    arrays = PagedArrays(
        q=inputs.q,
        page_table=cache.page_table,
        q_start=start[:-1],
        q_len=jnp.diff(start),
        kv_len=cache.lengths,
        **pages,
    )
    longest = problem.S if problem.prefill else 1
    spec = PagedSpec(
        problem.scale, max_query_len=longest, latent=problem.rope > 0, scales=problem.scales, return_lse=True
    )
    return {"out": reference.attend(arrays, spec)["out"]}


class Bar(NamedTuple):
    """The target for `field` of our rows on one H200: a minimum or, with `at_most`, a maximum. `first`: so many problems of the group."""

    what: str
    group: str
    field: str
    bound: float
    at_most: bool = False
    first: int | None = None

    @property
    def problems(self) -> tuple[DecodeProblem, ...]:
        return PROBLEMS[self.group][: self.first]


PROBLEMS = problems.load("decode", DecodeProblem)
BARS = [Bar(**entries) for entries in report.data("tables")["bars"]["decode"]]


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
        yield Peer(f"{problem.dtype} pages", plain_pages, ours(problem, None), True)


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
    name, title, description, lists = "decode", "Attention over pages", __doc__, PROBLEMS
    groups = tuple(group for group in PROBLEMS if group not in ("cpu", "tiny"))
    card: Mapping[str, float] = {}
    packages, platforms, once, in_turn = ("ejkernel",), "default,xla", True, True

    def directed(self, problem: DecodeProblem, forward: Callable[..., Array], direction: str) -> Any:
        return lambda inputs: {"out": forward(inputs)}

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
        baseline = prepare.fastest(rows, BASELINE)
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
        decodes, counted = of(DECODE), of(LATENT, PREFILL)
        flops = "tflop_per_s" if counted and "tflop_per_s" in counted[0] else "tflops"
        label = lambda row: f"{row['implementation']}, {row['ms']:.3f} ms"
        title, draw = "", None
        if decodes:
            title = f"decode, TB/s, pages of {decodes[0]['p']}: ours, and dashed the fastest peer"
            draw = lambda axis: _contexts(axis, decodes, content["card"]["copy"])
        return [
            report.Panel(title, draw=draw),
            report.Panel("decode, TB/s", _usual(decodes), "tb_per_s", label),
            report.Panel("8-bit pages, ms", of(QUANTISED), "ms", label),
            report.Panel("latents and prefills, TFLOP/s", counted, flops, label),
        ]


FAMILY = Decode(make_inputs=make_inputs, expected=expected_results, ours=ours)
