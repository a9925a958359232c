"""Latent attention: training compared with FlashAttention at head dim 128, and a decoding step of the layer with its kernel alone.

    python -m benchmarks latent --json latent.json --plot latent.png
    python -m benchmarks latent --problems decode --time-limit 300
    python -m benchmarks latent --problems chunk                       # both forms of a chunk of a prompt
    python -m benchmarks latent --render latent.json --markdown latent.md

The reference is the formula, for decoding with the keys and values expanded. "flash" has as many heads, with keys and values of 128 channels:
`of flash` is the speed in operations over its. "torch-cudnn" is PyTorch's attention by cuDNN, whose time includes keys with the rotary part of every
head. "kernel" is attention over the latents alone, on absorbed queries: `over kernel` is the time over its.
What is above it are the projections, whose weights a step reads. Of a chunk of a prompt after others, "absorbed" and "expanded" are the layer in
either form; `over kernel` is the time of its own choice over the faster one's.
"""

import contextlib
import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, runner
from benchmarks.peers import attention_backend, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, DIRECTIONS, fastest, Inputs, Others, Prepared, Row
from benchmarks.runner import Errors

FLASH, KERNEL = "flash", "kernel"
FORMS = {"absorbed": False, "expanded": True}
FLASH_DIM = 128


@dataclasses.dataclass(frozen=True)
class LatentProblem(problems.Problem):
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

    def words(self) -> list[str]:
        sizes = f"B{self.B} T{self.T} H{self.H} D{self.nope}+{self.rope} V{self.V}"
        if self.E:
            sizes = f"N{self.B} S{self.T} H{self.H} R{self.R}+{self.rope} E{self.E}"
        kind = f"chunk {self.chunk}" if self.chunk else "decode" if self.E else "train"
        return [kind, sizes]

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


PROBLEMS = problems.load("latent", LatentProblem)


def random(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.dtype(dtype)) for key, shape in zip(keys, shapes)]


# Training


def make_training(p: LatentProblem, seed: int) -> Inputs:
    lead, names = (p.B, p.T, p.H), ("q", "k", "k_rope", "v", "cotangent")
    shapes = (*lead, p.nope + p.rope), (*lead, p.nope), (p.B, p.T, p.rope), (*lead, p.V), (*lead, p.V)
    arrays = dict(zip(names, random(seed, p.dtype, *shapes)))
    return Inputs(arrays, arrays.pop("cotangent"), {})


def training(platform: Any) -> Callable[[Arrays, Arrays], Array]:
    operation = ejx.MultiHeadLatentAttention(causal=True, platform=platform)
    return lambda learned, constants: operation(**learned)


def flash(direction: str) -> Callable[[Inputs], Arrays]:
    """Attention on keys as wide as the values."""
    call = prepare.directed(lambda x, constants: ejx.FlashAttention(causal=True)(**x), direction, True)

    def run(inputs: Inputs) -> Arrays:
        x = inputs.cotangent[..., :FLASH_DIM]
        learned = {"q": inputs.learned["q"][..., : x.shape[-1]], "k": inputs.learned["v"], "v": x}
        return call(Inputs(learned, x, {}))

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


@prepare.reference
def expected_results(p: LatentProblem, inputs: Any) -> Arrays:
    """The results on XLA; of decoding, with the pages as they are."""
    if p.chunk:
        return chunked(p, "xla", False)(inputs)
    if p.E:
        return decoding(p, "xla")(inputs, pages_of(inputs))[1]
    return prepare.directed(training("xla"), p.directions[-1], True)(inputs)


class Latent(runner.Family):
    name, title, description, lists = "latent", "Latent attention", __doc__, PROBLEMS
    groups, with_out = ("anchors", "chunks"), True
    extremes = (
        runner.Extreme("lowest of flash", runner.entry("of_flash"), min),
        runner.Extreme(
            "most time over the kernel", runner.entry("over_kernel"), max, runner.of_kind("decode")
        ),
        runner.Extreme(
            "most time over the faster form", runner.entry("over_kernel"), max, runner.of_kind("chunk")
        ),
    )

    def make_inputs(self, problem: LatentProblem, seed: int = 0) -> Any:
        return (make_chunk if problem.chunk else make_decoding if problem.E else make_training)(problem, seed)

    def ready(self, problem: LatentProblem, platform: Any, sets: Sequence[Any], direction: str) -> Prepared:
        """Decoding in place: steps as of so many layers, each on the pages of the last one."""
        if problem.chunk:
            return prepare.ready(chunked(problem, platform), sets)
        if not problem.E:
            return prepare.ready(self.directed(problem, training(platform), direction), sets)
        arguments = [{name: inputs[name] for name in ("x", "weights")} for inputs in sets]
        return prepare.ready_in_place(decoding(problem, platform), arguments, pages_of(sets[0]))

    def beside(self, problem: LatentProblem, options: Namespace, direction: str) -> Others:
        if problem.chunk:
            runs = {name: chunked(problem, None, form) for name, form in FORMS.items()}
        else:
            runs = {KERNEL: kernel(problem)} if problem.E else {FLASH: flash(direction)}
        for name, run in runs.items():
            make = lambda sets, direction, run=run: prepare.ready(run, sets)
            yield prepare.Implementation(name, make, BASELINE, is_checked=bool(problem.chunk))

    def peers(self, problem: LatentProblem) -> Iterator[TorchPeer]:
        def run(x: dict[str, Any]) -> Any:
            import torch
            from torch.nn.functional import scaled_dot_product_attention

            rope = x["k_rope"][:, :, None].expand(-1, -1, problem.H, -1)
            heads_first = (x["q"], torch.cat([x["k"], rope], -1), x["v"])
            with attention_backend("CUDNN_ATTENTION"):
                out = scaled_dot_product_attention(*(y.transpose(1, 2) for y in heads_first), is_causal=True)
            return out.transpose(1, 2)

        if not problem.E:
            yield TorchPeer("torch-cudnn", "torch", run)

    def complete(self, problem: LatentProblem, inputs: Any, direction: str, rows: list[Row]) -> None:
        p, other = problem, fastest(rows, BASELINE)
        less = p.flops(direction, 2 * min(p.V, FLASH_DIM))
        for row in rows:
            is_flash = row.implementation == FLASH
            runner.rate([row], flops=less if is_flash else p.flops(direction))
            speed = row.ms and other and row.role != BASELINE
            row.numbers["of_flash"] = (
                p.flops(direction) / row.ms * other / less if speed and not p.E else None
            )
            row.numbers["over_kernel"] = row.ms / other if speed and p.E else None

    def errors(self, problem: LatentProblem, row: Row, results: Arrays, expected: Arrays) -> Errors:
        """Absorbed queries, latents and the last projection are each rounded once more."""
        return runner.errors_of(problem.dtype, results, expected, 3.0 if problem.E else 1.0)


FAMILY = Latent(expected=expected_results)
