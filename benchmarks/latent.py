"""Latent attention: training compared with FlashAttention at head dim 128, and a decoding step of the layer with its kernel alone.

    python -m benchmarks latent --json latent.json --plot latent.png
    python -m benchmarks latent --problems decode --time-limit 300
    python -m benchmarks latent --problems chunk                       # both forms of a chunk of a prompt
    python -m benchmarks latent --render latent.json --markdown latent.md

The reference is the formula, for decoding with the keys and values expanded. "flash" has as many heads, with keys and values of 128 channels:
`of flash` is the speed in operations over its. "kernel" is attention over the latents alone, on absorbed queries: `over kernel` is the time over its.
What is above it are the projections, whose weights a step reads. Of a chunk of a prompt after others, "absorbed" and "expanded" are the layer in
either form; `over kernel` is the time of its own choice over the faster one's.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import runner
from benchmarks.prepare import (
    Arrays,
    BASELINE,
    DIRECTIONS,
    fastest,
    FORWARD,
    Implementation,
    Inputs,
    prepare,
    prepare_in_place,
    Prepared,
    Row,
    UNTUNED,
)

FLASH, KERNEL = "flash", "kernel"
FORMS = {"absorbed": False, "expanded": True}
FLASH_DIM = 128


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


def random(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.dtype(dtype)) for key, shape in zip(keys, shapes)]


# Training


def make_training(p: LatentProblem, seed: int) -> Inputs:
    lead, names = (p.B, p.T, p.H), ("q", "k", "k_rope", "v", "cotangent")
    shapes = (*lead, p.nope + p.rope), (*lead, p.nope), (p.B, p.T, p.rope), (*lead, p.V), (*lead, p.V)
    arrays = dict(zip(names, random(seed, p.dtype, *shapes)))
    return Inputs(arrays, arrays.pop("cotangent"), {})


def differentiated(call: Callable[..., Array], direction: str, inputs: Inputs) -> Arrays:
    if direction == FORWARD:
        return {"out": call(**inputs.learned)}
    out, pull = jax.vjp(lambda x: call(**x), inputs.learned)
    return {"out": out} | pull(inputs.cotangent)[0]


def training(platform: Any, direction: str) -> Callable[[Inputs], Arrays]:
    operation = ejx.MultiHeadLatentAttention(causal=True, platform=platform)
    return functools.partial(differentiated, operation, direction)


def flash(direction: str) -> Callable[[Inputs], Arrays]:
    """Attention on keys as wide as the values."""

    def run(inputs: Inputs) -> Arrays:
        x = inputs.cotangent[..., :FLASH_DIM]
        learned = {"q": inputs.learned["q"][..., : x.shape[-1]], "k": inputs.learned["v"], "v": x}
        return differentiated(ejx.FlashAttention(causal=True), direction, Inputs(learned, x, {}))

    return run


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
    arguments = dict(zip(("x", "latent", "rope", "q"), random(seed, p.dtype, *shapes)))
    return {**arguments, "weights": weights_of(p, seed)}


def decoding(p: LatentProblem, platform: Any) -> Callable[[Any, Any], tuple[Any, Arrays]]:
    """A step of the layer on tokens and weights, and on pages; and the pages after it."""
    batch = batch_of(p)

    def step(arguments: Any, pages: Any) -> tuple[Any, Arrays]:
        out, pages = layer_with(p, platform, arguments["weights"])(arguments["x"], pages, batch=batch)
        return pages, {"out": out}

    return step


def pages_of(inputs: Any) -> ejx.PagedLatentCache:
    return ejx.PagedLatentCache(inputs["latent"], inputs["rope"])


def prepare_decoding(p: LatentProblem, platform: Any, sets: Sequence[Any]) -> Prepared:
    """Steps in place, as of so many layers: each takes the pages of the last one."""
    arguments = [{name: inputs[name] for name in ("x", "weights")} for inputs in sets]
    return prepare_in_place(decoding(p, platform), arguments, pages_of(sets[0]))


def kernel(p: LatentProblem) -> Callable[[Any], Arrays]:
    batch, op = batch_of(p), ejx.RaggedPagedAttention(softmax_scale=p.scale)
    how: Any = {"query_start_loc": batch.query_start_loc, "max_query_len": 1}
    return lambda inputs: {"out": op(inputs["q"], pages_of(inputs).bind(batch), **how)}


# Chunks


def make_chunk(p: LatentProblem, seed: int) -> dict[str, Any]:
    shapes = (p.B, p.chunk, p.E), (p.B, p.T, p.R), (p.B, p.T, p.rope)
    arguments = dict(zip(("x", "latent", "rope"), random(seed, p.dtype, *shapes)))
    return {**arguments, "weights": weights_of(p, seed)}


def chunked(p: LatentProblem, platform: Any, form: bool | None = None) -> Callable[[Any], Arrays]:
    """The layer on the last tokens of rows whose cache holds those before; expanded or not, or as it chooses itself."""

    def run(inputs: Any) -> Arrays:
        before = jnp.full(p.B, p.T - p.chunk, jnp.int32)
        cache = ejx.nn.LatentCache(inputs["latent"], inputs["rope"], before)
        choice = "ejkernel_eqx.nn.latent_attention.expands"
        with contextlib.nullcontext() if form is None else mock.patch(choice, lambda *_: form):
            return {"out": layer_with(p, platform, inputs["weights"])(inputs["x"], cache)[0]}

    return run


# Measuring


def make_inputs(p: LatentProblem, seed: int) -> Any:
    return (make_chunk if p.chunk else make_decoding if p.E else make_training)(p, seed)


def expected_results(p: LatentProblem, inputs: Any) -> Arrays:
    """The results in float32 on XLA; of decoding, with the pages as they are."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest" if p.E else None):
        if p.chunk:
            return jax.jit(chunked(p, "xla", False), compiler_options=UNTUNED)(wide)
        if p.E:
            return jax.jit(decoding(p, "xla"), compiler_options=UNTUNED)(wide, pages_of(wide))[1]
        return jax.jit(training("xla", p.directions[-1]), compiler_options=UNTUNED)(wide)


def implementations(
    p: LatentProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    def ours(platform: Any, sets: Sequence[Any], direction: str) -> Prepared:
        if p.E and not p.chunk:
            return prepare_decoding(p, platform, sets)
        return prepare(chunked(p, platform) if p.chunk else training(platform, direction), sets)

    def beside(name: str, run: Callable[[Any], Arrays], is_checked: bool = False) -> Implementation:
        return Implementation(name, lambda sets, direction: prepare(run, sets), BASELINE, is_checked)

    yield from runner.ours(options, ours)
    if p.chunk:
        for name, form in FORMS.items():
            yield beside(name, chunked(p, None, form), is_checked=True)
    else:
        yield beside(KERNEL, kernel(p)) if p.E else beside(FLASH, flash(direction))


def complete(p: LatentProblem, inputs: Any, direction: str, rows: list[Row]) -> None:
    less = p.flops(direction, 2 * min(p.V, FLASH_DIM))
    other = fastest(rows, BASELINE)
    for row in rows:
        is_flash = row.implementation == FLASH
        runner.rate([row], flops=less if is_flash else p.flops(direction))
        speed = row.ms and other and row.role != BASELINE
        row.numbers["of_flash"] = p.flops(direction) / row.ms * other / less if speed and not p.E else None
        row.numbers["over_kernel"] = row.ms / other if speed and p.E else None


def errors(
    p: LatentProblem, inputs: Any, row: Row, results: Arrays, expected: Mapping[str, Array]
) -> runner.Errors:
    """Absorbed queries, latents and the last projection are each rounded once more."""
    return runner.errors_of(p.dtype, results, expected, 3.0 if p.E else 1.0)


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

FAMILY = runner.Family(
    "latent",
    __doc__,
    TINY,
    CPU,
    ANCHORS + CHUNKS,
    make_inputs,
    implementations,
    expected_results,
    runner.Tables(
        ("problem", "implementation", "ms", "spread", "TFLOP/s", "of flash", "over kernel", "error"),
        "of flash: speed over that of attention with 128 channels; over kernel: time over that of attention over latents alone",
        "Speed of latent attention",
    ),
    "Latent attention",
    errors=errors,
    complete=complete,
    extremes=(
        runner.Extreme("lowest of flash", runner.entry("of_flash"), min),
        runner.Extreme("most time over the kernel", runner.entry("over_kernel"), max, "decode"),
        runner.Extreme("most time over the faster form", runner.entry("over_kernel"), max, "chunk"),
    ),
    packages=(),
)
