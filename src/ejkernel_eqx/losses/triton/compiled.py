"""Platform `triton`: the host side of the losses. XLA's matrix products, and one kernel in place between them, over chunks of tokens."""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core.arguments import accumulator
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ...launch import given, Launcher, NOTHING, result, result_like
from ...launch.fields import check_fields, one_of, power_of_two, whole
from ...launch.sizes import cdiv, padded
from .. import passes
from ..chunks import Named, product
from ..spec import LossArrays, LossSpec, TOKENS
from ..statistics import (
    devices,
    merged,
    Part,
    place_of,
    results_of,
    Slope,
    slope_of,
    summed,
    Tokens,
    tokens_of,
)
from . import divergence_kernel, kernels

OPAQUE = True
_BYTES = 400 * 10**6
"""Of the logits of a chunk, by default."""
_UNROLLED = 2048
"""Features over which a loop is unrolled."""
_TILES = ((4096, 16), (4096, 8), (8192, 16), (8192, 32))
"""Logits that a program reads at a time, in 16 bits, and its warps; the best first, as measured on an H200."""


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """At most `chunk_size` tokens have logits at a time, and at most `grad_chunk_size` where gradients are computed; a program reads `block_v` of a
    row at a time."""

    chunk_size: Annotated[int, whole(1, 2**30)]
    grad_chunk_size: Annotated[int, whole(1, 2**30)]
    block_v: Annotated[int, power_of_two(128)]
    num_warps: Annotated[int, one_of(1, 2, 4, 8, 16, 32)]
    fast_exp: bool = True
    """Whether NVIDIA's approximate instruction computes exponentials (error 2e-7), with 0 for denormal numbers."""

    __post_init__ = check_fields


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("x") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    return "takes teachers of all words, not of the top k" if problem.flag("teacher") == "top_k" else None


def by_request(problem: Problem, device: DeviceFacts) -> str | None:
    is_narrow = problem.dtype("x") == "float16"
    return (
        "takes float16 if named, as it stores logits in float16, which ends at 65,504" if is_narrow else None
    )


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    words, item = problem.dim("V"), jnp.dtype(problem.dtype("x")).itemsize
    fit = lambda size: max(1, size // 128 * 128 or size)
    # With a teacher a token has two rows of logits.
    rows = 2 if problem.flag("divergence") else 1
    alone = fit(_BYTES // (rows * words * item))
    # The weight's gradient takes memory after the logits of the last chunk do: as much as those of so many tokens.
    chunk = max(alone, fit(problem.dim("E") // rows))
    # One chunk needs no sum in float32, and logits of as many bytes may take its place.
    most = 2 * problem.dim("E") // rows + alone
    every = problem.dim("B") * problem.dim("M") * problem.dim("N")
    is_one = problem.dtype("x") == "bfloat16" and every <= most
    # XLA unrolls a loop of one turn, and then has two sums.
    chunk = fit(chunk // 2) if chunk < every <= 2 * chunk else chunk
    sizes = (most if is_one else chunk, chunk, alone, fit(chunk // 2), 2 * chunk)
    is_nvidia = device.vendor == "nvidia"
    # A thread loads 8 logits at once, of 2 bytes: fewer threads for few words, or where a warp has more.
    each, tiles = 256 if is_nvidia else 512, []
    for block, warps in _TILES:
        block = min(2 * block // item, padded(words, 256))
        tiles.append((block, max(1, min(warps, block // each))))
    pairs = [(sizes[0], tile) for tile in tiles] + [(size, tiles[0]) for size in sizes[1:]]
    made = (TritonConfig(alone, size, block, warps, is_nvidia) for size, (block, warps) in pairs)
    return list(dict.fromkeys(made))


def over_chunks(
    arrays: LossArrays, spec: LossSpec, config: TritonConfig, cotangents: Named
) -> tuple[Named, Named]:
    """As `passes` says."""
    lead, words = arrays.labels.shape, len(arrays.weight) * devices(spec)
    flat = lambda x: x.reshape(-1, *x.shape[3:])
    labels, bias, here = flat(arrays.labels), arrays.bias, len(arrays.weight)
    tokens: Any = {name: flat(x) for name in TOKENS if (x := getattr(arrays, name)) is not None}
    tokens["places"] = place_of(spec, labels, here)
    if cotangents:
        tokens["slope"] = slope_of({name: flat(x) for name, x in cotangents.items()}, spec, words)
    # Rows of logits begin at 16 bytes, without which products of matrices are slow.
    aligned = lambda weight, x: jnp.pad(weight.astype(x.dtype), [(0, -here % 8), (0, 0)])
    shared = {"weight": aligned(arrays.weight, arrays.x), "bias": bias, "teacher_bias": arrays.teacher_bias}
    if arrays.teacher_weight is not None:
        shared["teacher_weight"] = aligned(arrays.teacher_weight, arrays.teacher_x)
    chunk = functools.partial(_chunk, spec, config, shared, here)
    part, dx, sums = _added(chunk, tokens, config.grad_chunk_size if cotangents else config.chunk_size)
    if spec.divergence is not None:
        results = {"losses": part}
    else:
        # The exchange of a call without gradients is one of all tokens.
        part = part if cotangents else merged(part, spec)
        results = results_of(tokens_of(part, words), labels >= 0, spec)
        results["losses"] = jnp.where(labels < words, results["losses"], jnp.nan)
    split = lambda x: x.reshape(*lead, *x.shape[1:])
    sums = {name: x[:here] for name, x in sums.items()}
    return jax.tree.map(split, results), {"x": split(dx), **sums} if cotangents else {}


forward = functools.partial(passes.forward, over_chunks)
backward = functools.partial(passes.backward, over_chunks)


def _added(chunk: Any, tokens: Any, size: int) -> Any:
    """`chunk(tokens, dtype)` of at most `size` tokens at a time: what it returns of each token, and the sums of the others, in this dtype."""
    count = len(tokens["labels"])
    turns = cdiv(count, size) - 1
    size = min(size, 128 * cdiv(count, 128 * (turns + 1)))
    # The first chunk is the one that may be smaller. Its sums are those that others are added to.
    first = count - turns * size
    # A sum that nothing is added to is rounded as soon as it is complete; float16 waits for the scalar that makes a mean of it.
    narrow = tokens["x"].dtype == jnp.bfloat16 and not turns
    each, sums = chunk(jax.tree.map(lambda x: x[:first], tokens), jnp.bfloat16 if narrow else jnp.float32)
    if not turns:
        return *each, sums
    grown = lambda x: jnp.pad(x, [(0, count - first)] + [(0, 0)] * (x.ndim - 1))

    def turn(i: Array, carry: Any) -> Any:
        each, sums = carry
        at = first + i * size
        part_of = lambda x: lax.dynamic_slice_in_dim(x, at, size)
        new, added = chunk(jax.tree.map(part_of, tokens), jnp.float32)
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, at, 0)
        return jax.tree.map(put, each, new), jax.tree.map(jnp.add, sums, added)

    each, sums = lax.fori_loop(0, turns, turn, (jax.tree.map(grown, each), sums))
    return *each, sums


def _chunk(
    spec: LossSpec,
    config: TritonConfig,
    shared: Any,
    here: int,
    tokens: Any,
    dtype: Any,
) -> tuple[tuple[Any, Array | None], Named]:
    """The part of tokens, or their divergences, and `dx`; and what they add to the gradients of weight and bias."""
    x, labels, slope, weight = tokens["x"], tokens["labels"], tokens.get("slope"), shared["weight"]
    # Padding may hold NaN, and 0 NaN is NaN.
    x = jnp.where((labels >= 0)[:, None], x, jnp.zeros_like(x))
    logits = product(x, weight, ((1,), (1,)), x.dtype)
    one: Any = _launch if spec.divergence is None else _launch_with_teacher
    launch = functools.partial(one, spec, config, shared | tokens | {"x": x}, logits, here)
    if slope is None:
        return (launch()[0], None), {}
    is_split = devices(spec) > 1
    if is_split:
        part = merged(launch()[0], spec)
        _, logits = launch(slope, tokens_of(part, here * devices(spec)))
    else:
        part, logits = launch(slope)
    # A sum over devices is one of float32.
    dx = product(logits, weight, ((1,), (0,)), jnp.float32 if is_split else x.dtype)
    sums = {"weight": product(logits, x, ((0,), (0,)), dtype)}
    sums |= {} if shared["bias"] is None else {"bias": jnp.sum(logits, 0, dtype=jnp.float32)}
    return (part, summed(dx, spec).astype(x.dtype)), sums


def _launch(
    spec: LossSpec,
    config: TritonConfig,
    arrays: Any,
    logits: Array,
    words: int,
    slope: Slope | None = None,
    known: Tokens | None = None,
) -> tuple[Part, Array]:
    """The part of these logits, unless what follows from all words is known; and their gradient in their place, if there is a slope."""
    each, has_part = result(len(logits)), known is None
    flags = {"total": spec.label_smoothing != 0, "weighted": spec.has_statistics}
    outputs = dict.fromkeys(("largest", "exponentials", "target"), each if has_part else NOTHING)
    outputs |= {name: each if has_part and flag else NOTHING for name, flag in flags.items()}
    of = {} if slope is None else slope._asdict()
    more = dict.fromkeys((*Slope._fields, "lse", "entropy")) | of | ({} if known is None else known._asdict())
    size = arrays["x"].shape[1]
    numbers = {
        "E": size,
        "FEATURES": size if size <= _UNROLLED else 0,
        "PART": has_part,
        **given(**{name.upper(): of.get(name) for name in Slope._fields[2:]}),
        **{name.upper(): flag for name, flag in flags.items()},
    }
    made = _in_place(kernels.rows_kernel, spec, config, arrays | more, logits, words, numbers, outputs)
    part = {
        name: made[name] for name in ("largest", "exponentials", "target", *(n for n in flags if flags[n]))
    }
    return Part(**part), made.get("logits", logits)


def _launch_with_teacher(
    spec: LossSpec, config: TritonConfig, arrays: Any, logits: Array, words: int, slope: Slope | None = None
) -> tuple[Array, Array]:
    """The divergence of each token; and the gradient of the student's logits in their place, if there is a slope."""
    if (teacher := arrays.get("teacher_logits")) is None:
        x = arrays["teacher_x"]
        # Float16 ends at 65,504.
        dtype = x.dtype if x.dtype == jnp.bfloat16 else accumulator(x.dtype)
        teacher = product(x, arrays["teacher_weight"], ((1,), (1,)), dtype)
    numbers = {
        "TEACHER_STRIDE": teacher.shape[1],
        "TEACHER_CAP": spec.teacher_soft_cap or 0.0,
        "DIVERGENCE": spec.divergence,
        "BETA": spec.beta,
        **given(TEACHER_BIAS=arrays["teacher_bias"]),
    }
    arrays |= {"teacher": teacher, "of_p": None if slope is None else slope.of_p}
    outputs = {"losses": result(len(logits))}
    kernel = divergence_kernel.divergence_kernel
    made = _in_place(kernel, spec, config, arrays, logits, words, numbers, outputs)
    return made["losses"], made.get("logits", logits)


def _in_place(
    kernel: Any,
    spec: LossSpec,
    config: TritonConfig,
    arrays: Any,
    logits: Array,
    words: int,
    numbers: Any,
    outputs: Any,
) -> Named:
    """Launches a program for each row of logits. With a slope the logits are an output as well."""
    has_slope = arrays["of_p"] is not None
    numbers |= {
        "V": words,
        "STRIDE": logits.shape[1],
        "CAP": spec.logits_soft_cap or 0.0,
        "TEMPERATURE": spec.temperature,
        "SLOPE": has_slope,
        "FAST": config.fast_exp,
        **given(BIAS=arrays["bias"]),
    }
    launcher = Launcher("losses", arrays, numbers, arrays["x"])
    if not has_slope:
        return launcher(kernel, config, outputs, len(logits), {"before": None, "logits": logits})
    # Outputs are in the order of the kernel's parameters.
    outputs = {"logits": result_like(logits)} | outputs
    return launcher(kernel, config, outputs, len(logits), {"before": logits}, aliases={"before": "logits"})


interpreted = Interpreted(__name__, TritonConfig(5, 4, 128, 1), fast_exp=False)
"""The same kernels on the host, with small chunks: platform `triton-interpret`."""
