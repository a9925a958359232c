"""Latent attention: training compared with FlashAttention of head dim 128, and a decoding step of the layer with its kernel alone.

    python benchmarks/latent.py --json latent.json --plot latent.png
    python benchmarks/latent.py --problems decode --time-limit 300
    python benchmarks/latent.py --problems chunk                       # both forms of a chunk of a prompt
    python benchmarks/latent.py --quick                                # tiny problems
    python benchmarks/latent.py --render latent.json --markdown latent.md

Every result of ours is first compared with the formula in float32, for decoding with the keys and values expanded; speeds are reported only if they
agree. "flash" has as many heads, with keys and values of 128 channels: `of flash` is the speed in operations over its. "kernel" is attention over the
latents alone, on absorbed queries: `over kernel` is the time over its. What is above it are the projections, whose weights a step reads. Of a chunk
of a prompt after others, "absorbed" and "expanded" are the layer in either form; `over kernel` is the time of its own choice over the faster one's.
"""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import command, comparison
from benchmarks.comparison import Implementation
from benchmarks.linear_plot import plot as plot_bars
from benchmarks.measure import StateWork
from benchmarks.prepare import compiled, DIRECTIONS, fastest, input_sets, PeerRow, prepare, Prepared, UNTUNED
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.tuning.check import all_errors

FLASH, KERNEL = "flash", "kernel"
FORMS = {"absorbed": False, "expanded": True}
FLASH_DIM = 128
Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LatentProblem:
    """`B` rows of `T` tokens and `H` heads, causal; or, with `E`, a decoding step of a layer of `E` features, for `B` sequences of `T` tokens; or
    the last `chunk` tokens of each at once."""

    B: int
    T: int
    H: int
    E: int = 0
    chunk: int = 0
    nope: int = 128
    rope: int = 64
    V: int = 128
    R: int = 512
    page: int = 64
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        sizes = f"B{self.B} T{self.T} H{self.H} D{self.nope}+{self.rope} V{self.V}"
        if self.E:
            sizes = f"N{self.B} S{self.T} H{self.H} R{self.R}+{self.rope} E{self.E}"
        kind = f"chunk {self.chunk}" if self.chunk else "decode" if self.E else "train"
        return f"{kind} {sizes}{'' if self.dtype == 'bfloat16' else f' {self.dtype}'}"

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[:1] if self.E else DIRECTIONS

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5

    def flops(self, direction: str, dims: int | None = None) -> float:
        """Operations of attention; `dims`: of a key and a value together."""
        if self.chunk:  # absorbed
            seen = self.chunk * (self.T - (self.chunk - 1) / 2)
            return 2.0 * self.B * seen * self.H * (2 * self.R + self.rope)
        if self.E:
            return 2.0 * self.B * self.T * self.H * (2 * self.R + self.rope)
        pairs = self.B * self.H * self.T * (self.T + 1) / 2
        forward = 2.0 * pairs * (self.nope + self.rope + self.V if dims is None else dims)
        return forward if direction == "forward" else 3.5 * forward


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time."""

    flops: float | None = None
    tflop_per_s: float | None = None
    of_flash: float | None = None
    over_kernel: float | None = None

    @property
    def speed(self) -> str:
        more = f", {self.of_flash:.2f} of flash's" if self.of_flash else ""
        more += f", {self.over_kernel:.2f} of the time of its kernel" if self.over_kernel else ""
        return f"{self.ms:.3f} ms, {self.tflop_per_s:.1f} TFLOP/s{more}"


def random(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.dtype(dtype)) for key, shape in zip(keys, shapes)]


# Training


def make_training(p: LatentProblem, seed: int) -> Arrays:
    lead, names = (p.B, p.T, p.H), ("q", "k", "k_rope", "v", "cotangent")
    shapes = (*lead, p.nope + p.rope), (*lead, p.nope), (p.B, p.T, p.rope), (*lead, p.V), (*lead, p.V)
    return dict(zip(names, random(seed, p.dtype, *shapes)))


def differentiated(call: Callable[..., Array], direction: str, inputs: Arrays) -> Arrays:
    given = {name: x for name, x in inputs.items() if name != "cotangent"}
    if direction == "forward":
        return {"out": call(**given)}
    out, pull = jax.vjp(lambda given: call(**given), given)
    return {"out": out} | pull(inputs["cotangent"])[0]


def training(p: LatentProblem, platform: Any, direction: str) -> Callable[[Arrays], Arrays]:
    return functools.partial(
        differentiated, ejx.MultiHeadLatentAttention(causal=True, platform=platform), direction
    )


def flash(direction: str) -> Callable[[Arrays], Arrays]:
    """Attention on keys as wide as the values."""

    def run(inputs: Arrays) -> Arrays:
        x = inputs["cotangent"][..., :FLASH_DIM]
        given = {"q": inputs["q"][..., : x.shape[-1]], "k": inputs["v"], "v": x, "cotangent": x}
        return differentiated(ejx.FlashAttention(causal=True), direction, given)

    return run


def expected_training(p: LatentProblem, inputs: Arrays) -> dict[str, Arrays]:
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    return {way: jax.jit(training(p, "xla", way), compiler_options=UNTUNED)(wide) for way in p.directions}


# Decoding


def layer_of(p: LatentProblem, platform: Any, seed: int = 0) -> Any:
    sizes: Any = {
        "kv_lora_rank": p.R,
        "qk_nope_head_dim": p.nope,
        "qk_rope_head_dim": p.rope,
        "v_head_dim": p.V,
    }
    sizes |= {"q_lora_rank": 3 * p.R, "dtype": p.dtype, "platform": platform}
    return ejx.nn.MultiHeadLatentAttention(p.E, num_heads=p.H, **sizes, key=jax.random.key(seed))


def weights_of(p: LatentProblem, seed: int) -> list[Array]:
    """The layer's arrays, the same on every platform. They are inputs: as constants of a program, hundreds of megabytes would be compiled."""
    return eqx.filter_jit(lambda: jax.tree.leaves(eqx.filter(layer_of(p, None, seed), eqx.is_array)))()


def layer_with(p: LatentProblem, platform: Any, weights: list[Array]) -> Any:
    """The layer with arrays given."""
    shapes = eqx.filter_eval_shape(lambda: layer_of(p, platform))
    arrays, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), weights), static)


def batch_of(p: LatentProblem) -> ejx.RaggedBatch:
    pages = np.arange(p.B * -(-p.T // p.page)).reshape(p.B, -1)
    return ejx.RaggedBatch.build([1] * p.B, [p.T] * p.B, pages, page_size=p.page)


def make_decoding(p: LatentProblem, seed: int) -> dict[str, Any]:
    count = p.B * -(-p.T // p.page)
    shapes = (p.B, p.E), (count, p.page, p.R), (count, p.page, p.rope), (p.B, p.H, p.R + p.rope)
    given = dict(zip(("x", "latent", "rope", "q"), random(seed, p.dtype, *shapes)))
    return {**given, "weights": weights_of(p, seed)}


def decoding(p: LatentProblem, platform: Any) -> Callable[[Any, Any], tuple[Any, Arrays]]:
    """A step of the layer on tokens and weights, and on pages; and the pages after it."""
    batch = batch_of(p)

    def step(given: Any, pages: Any) -> tuple[Any, Arrays]:
        out, pages = layer_with(p, platform, given["weights"])(given["x"], pages, batch=batch)
        return pages, {"out": out}

    return step


def pages_of(inputs: Any) -> ejx.PagedLatentCache:
    return ejx.PagedLatentCache(inputs["latent"], inputs["rope"])


def prepare_decoding(p: LatentProblem, platform: Any, sets: Sequence[Any]) -> Prepared:
    """Steps in place, as of so many layers: each takes the pages of the last one."""
    step, pages = decoding(p, platform), pages_of(sets[0])
    given = [{name: inputs[name] for name in ("x", "weights")} for inputs in sets]

    def several(runs: int, given: Any, pages: Any) -> tuple[Any, list[Arrays]]:
        results = []
        for _ in range(runs):
            pages, found = step(given, pages)
            pages = jax.lax.optimization_barrier(pages)
            results.append(found)
        return pages, results

    @functools.cache
    def program(runs: int) -> Any:
        function = jax.jit(functools.partial(several, runs), donate_argnums=1)
        return function.lower(given[0], pages).compile()

    copied = lambda: jax.tree.map(jnp.copy, pages)
    once, selection, temporary = compiled(program)
    _, (results,) = once(given[0], copied())
    make = lambda runs: StateWork(program(runs), copied(), given)
    return Prepared(results, make, selection, temporary)


def kernel(p: LatentProblem) -> Callable[[Any], Arrays]:
    batch, op = batch_of(p), ejx.RaggedPagedAttention(softmax_scale=p.scale)
    how: Any = {"query_start_loc": batch.query_start_loc, "max_query_len": 1}
    return lambda inputs: {"out": op(inputs["q"], pages_of(inputs).bind(batch), **how)}


def expected_decoding(p: LatentProblem, inputs: Any) -> dict[str, Arrays]:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        step = jax.jit(decoding(p, "xla"), compiler_options=UNTUNED)
        return {"forward": step(wide, pages_of(wide))[1]}


# Chunks


def make_chunk(p: LatentProblem, seed: int) -> dict[str, Any]:
    shapes = (p.B, p.chunk, p.E), (p.B, p.T, p.R), (p.B, p.T, p.rope)
    given = dict(zip(("x", "latent", "rope"), random(seed, p.dtype, *shapes)))
    return {**given, "weights": weights_of(p, seed)}


def chunked(p: LatentProblem, platform: Any, form: bool | None = None) -> Callable[[Any], Arrays]:
    """The layer on the last tokens of rows whose cache holds those before; expanded or not, or as it chooses itself."""

    def run(inputs: Any) -> Arrays:
        before = jnp.full(p.B, p.T - p.chunk, jnp.int32)
        cache = ejx.nn.LatentCache(inputs["latent"], inputs["rope"], before)
        choice = "ejkernel_eqx.nn.latent_attention.expands"
        with contextlib.nullcontext() if form is None else mock.patch(choice, lambda *_: form):
            return {"out": layer_with(p, platform, inputs["weights"])(inputs["x"], cache)[0]}

    return run


def expected_chunk(p: LatentProblem, inputs: Any) -> dict[str, Arrays]:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        return {"forward": jax.jit(chunked(p, "xla", False), compiler_options=UNTUNED)(wide)}


# Measuring


def implementations(
    p: LatentProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    def prepared(name: str, run: Callable[[Arrays], Arrays]) -> Implementation:
        return Implementation(name, False, lambda sets, direction: prepare(run, sets))

    for name, platform in comparison.platforms(options):
        if p.chunk:
            yield prepared(name, chunked(p, platform))
        elif p.E:
            make = lambda sets, direction, platform=platform: prepare_decoding(p, platform, sets)
            yield Implementation(name, False, make)
        else:
            yield prepared(name, training(p, platform, direction))
    if p.chunk:
        for name, form in FORMS.items():
            yield prepared(name, chunked(p, None, form))
    else:
        yield prepared(KERNEL, kernel(p)) if p.E else prepared(FLASH, flash(direction))


def measure(p: LatentProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    make_inputs = make_chunk if p.chunk else make_decoding if p.E else make_training
    sets = input_sets(functools.partial(make_inputs, p))
    expected = (expected_chunk if p.chunk else expected_decoding if p.E else expected_training)(p, sets[0])
    check = functools.partial(_check, p, expected)
    found = functools.partial(implementations, p, options)
    for direction, rows in comparison.compared(Row, p.name, p.directions, found, sets, check, options):
        mine = [row for row in rows if row.implementation not in (FLASH, KERNEL, *FORMS)]
        beside = fastest(row for row in rows if row.implementation in (FLASH, KERNEL, *FORMS))
        for row in rows:
            row.flops = p.flops(direction, None if p.E or row in mine else 2 * min(p.V, FLASH_DIM))
            row.tflop_per_s = row.flops / row.ms / 1e9 if row.ms else None
        flash_flops = p.flops(direction, 2 * min(p.V, FLASH_DIM))
        for row in mine if beside else ():
            row.of_flash = row.flops / row.ms * beside / flash_flops if row.ms and not p.E else None
            row.over_kernel = row.ms / beside if row.ms and p.E else None
        yield rows


def _check(p: LatentProblem, expected: Mapping[str, Arrays], row: Row, results: Arrays) -> str | None:
    """The error in the results, if any; what is shown beside ours has results of its own."""
    if row.implementation in (FLASH, KERNEL):
        return None
    allowed: dict[str, Tolerance] = {
        name: TOLERANCES[p.dtype]["forward" if name == "out" else "gradient"] for name in results
    }
    if p.E:  # absorbed queries, latents and the last projection are each rounded once more
        allowed = {name: Tolerance(3 * x.rms, 3 * x.peak) for name, x in allowed.items()}
    return comparison.check_errors(row, all_errors(results, expected[row.direction], allowed))


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest speed beside flash, and the most time over the kernel alone or over the faster form."""
    least = comparison.Extreme("lowest of flash", lambda row: row.of_flash, min)
    mine = [row for row in rows if row.implementation == "default"]
    summary = comparison.summary(mine, extremes=(least,))
    for what, kind in (("the kernel", "decode"), ("the faster form", "chunk")):
        most = comparison.Extreme(f"most time over {what}", lambda row: row.over_kernel, max)
        if slowest := comparison.extreme((row for row in mine if row.problem.startswith(kind)), most):
            summary[most.title] = slowest
    return summary


# Showing

HEADER = ("problem", "implementation", "ms", "spread", "TFLOP/s", "of flash", "over kernel", "error")
TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "of flash: speed over that of attention with 128 channels; over kernel: time over that of attention over latents alone",
    "Speed of latent attention",
)


def plot(content: Mapping[str, Any], path: str) -> None:
    plot_bars(content, path, "Latent attention")


# The problems

P = LatentProblem
ANCHORS = (
    P(1, 4096, 128),
    P(64, 4096, 128, E=7168),
    P(4, 4096, 16),
    P(1, 16384, 16),
    P(8, 8192, 128, E=7168),
    P(64, 4096, 16, E=2048),
)
# On both sides of where the layer changes its form.
CHUNKS = tuple(P(B, 8192, 128, 7168, chunk) for B in (1, 8) for chunk in (64, 128, 256, 512, 1024))
_SMALL: Any = {"nope": 16, "rope": 8, "V": 16, "R": 24, "page": 16, "dtype": "float32"}
CPU = (P(1, 256, 2, **_SMALL), P(2, 128, 2, E=64, **_SMALL), P(2, 128, 2, E=64, chunk=32, **_SMALL))
TINY = (P(1, 40, 2, **_SMALL), P(2, 40, 2, E=32, **_SMALL), P(2, 40, 2, E=32, chunk=9, **_SMALL))

# The command

COMPARISON = comparison.Comparison(
    "latent",
    __doc__,
    comparison.Problems(TINY, CPU, ANCHORS + CHUNKS),
    measure,
    Row,
    comparison.Output(summarise, TABLES, plot),
    peers=(),
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
