"""The problems for which configurations are tuned and shipped, by family."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import ejkernel_eqx as ejx
from benchmarks import attention
from benchmarks.attention import AttentionProblem
from ejkernel_eqx._kernel import selections_of
from ejkernel_eqx.dispatch import Implementation, Problem
from ejkernel_eqx.tuning.explain import example_problem_of


class TuneProblem(NamedTuple):
    """A named problem; `make` returns the problem that its operation passes to an implementation."""

    name: str
    operation: str
    make: Callable[[Implementation], Problem]


class Family(NamedTuple):
    """The problems of one family of operations.

    `also(operation, problem)`: whether another operation of the same kernels may have this problem too.
    """

    problems: Callable[[], list[TuneProblem]]
    tiny: Callable[[], list[TuneProblem]]
    also: Callable[[str, Problem], bool] = lambda operation, problem: False


# Attention


def _attention(problems: Sequence[AttentionProblem]) -> list[TuneProblem]:
    return [TuneProblem(p.name, "flash_attention", functools.partial(attention_problem, p)) for p in problems]


def attention_problem(problem: AttentionProblem, implementation: Implementation) -> Problem:
    inputs = jax.eval_shape(lambda: attention.make_inputs(problem))
    operation = attention.build(problem, implementation.platform.value)
    return selections_of(operation, ejx.inputs(**inputs.learned, **inputs.constants))[0].problem


def _every_attention() -> list[TuneProblem]:
    p = attention
    return _attention(p.ANCHORS + p.FEATURES + p.GRID + p.MODELS + p.HELD_OUT) + _block_sparse()


def _block_sparse() -> list[TuneProblem]:
    """Patterns and maps of blocks, of which a tenth to a half is visible."""
    usual, long, narrow = (
        dict(B=2, T=8192, H=16, D=128),
        dict(T=32768, H=8, D=128),
        dict(B=2, T=8192, H=32, D=64),
    )
    of = functools.partial(named, "block_sparse_attention", causal=False, top_left=True)
    problems = [of(usual, tiles=f"1/{n}") for n in (2, 4, 8)] + [of(usual, block_size=128)]
    problems += [of(long, tiles=f"1/{n}") for n in (4, 16)] + [of(long, block_size=128)]
    return [*problems, of(narrow, tiles="1/4"), of(usual | {"K": 4}, tiles="1/4"), of(usual, block_size=64)]


# Families whose problems are given by sizes and flags


def named(operation: str, dims: Mapping[str, int], dtype: str = "bfloat16", **flags: Any) -> TuneProblem:
    """A problem from sizes and flags, as on the command line."""
    words = [operation, *(f"{name}{size}" for name, size in dims.items()), dtype]
    words += [name if value is True else f"{name}={value}" for name, value in flags.items()]

    def make(implementation: Implementation) -> Problem:
        return example_problem_of(operation)(operation, dict(dims), dtype, flags)

    return TuneProblem(" ".join(words), operation, make)


_MEMBERS = (
    "gated_linear_attention",
    "lightning_attention",
    "kernel_delta_attention",
    "gated_delta_rule",
    "delta_rule",
)


def _recurrence() -> list[TuneProblem]:
    sizes = dict(B=4, T=4096, H=16, D=128)
    problems = [named(member, sizes) for member in _MEMBERS]
    problems += [named("linear_attention", sizes, decay=kind) for kind in ("scalar", "none")]
    problems += [named("state_space_v2", dict(B=4, T=4096, H=64, D=128, V=64))]
    # Layers of published models: GLA's wide values, Qwen3-Next's few keys, small heads, packed documents, float32.
    problems += [named("gated_linear_attention", dict(B=8, T=2048, H=4, D=128, V=256))]
    problems += [named("gated_delta_rule", dict(B=4, T=4096, H=32, D=128, Hq=16, Hk=16))]
    problems += [named("kernel_delta_attention", dict(B=1, T=16384, H=32, D=128))]
    problems += [named("state_space_v2", dict(B=8, T=2048, H=24, D=128, V=64))]
    problems += [named(member, dict(B=8, T=2048, H=12, D=64)) for member in _MEMBERS]
    packed = dict(B=1, T=16384, H=16, D=128, N=16)
    problems += [named(member, packed, packed="offsets") for member in _MEMBERS]
    problems += [
        named(member, sizes, packed="segments") for member in ("gated_delta_rule", "kernel_delta_attention")
    ]
    return problems + [
        named(member, sizes, "float32") for member in ("gated_linear_attention", "gated_delta_rule")
    ]


def _is_plain_linear(operation: str, problem: Problem) -> bool:
    extra = any(problem.flag(name) for name in ("delta", "beta", "skip"))
    return operation == "linear_attention" and not extra


def _selective_scan() -> list[TuneProblem]:
    sizes = (
        dict(B=4, T=4096, I=2048, N=16),
        dict(B=8, T=2048, I=1536, N=16),
        dict(B=1, T=16384, I=4096, N=16),
    )
    return [named("state_space_v1", size) for size in sizes]


def _convolution() -> list[TuneProblem]:
    """Convolutions of Mamba, of Mamba-2 with its keys, of the delta nets' queries, keys and values; packed; long; narrow."""
    sizes = (
        dict(B=4, T=4096, C=4096),
        dict(B=4, T=4096, C=4352),
        dict(B=4, T=4096, C=8192),
        dict(B=8, T=2048, C=2048),
        dict(B=1, T=16384, C=6144),
    )
    problems = [named("causal_conv1d", size) for size in sizes]
    problems += [named("causal_conv1d", sizes[0] | {"W": width}) for width in (2, 3)]
    return problems + [
        named("causal_conv1d", sizes[0], packed=True),
        named("causal_conv1d", dict(B=1, T=16384, C=4096, N=16), packed=True),
        named("causal_conv1d", sizes[0], "float32"),
    ]


def _normalization() -> list[TuneProblem]:
    """Whole rows (Mamba-2), and a norm for each head (gated delta nets, GLA)."""
    whole = [dict(M=16384, F=features) for features in (2048, 4096, 8192)]
    heads = [dict(M=16384 * heads, F=features) for heads, features in ((16, 128), (32, 128), (4, 512))]
    problems = [named("gated_rms_norm", size) for size in whole + heads]
    problems += [named("gated_rms_norm", size, norm_before_gate=True) for size in whole[:1] + heads[:2]]
    return [*problems, named("gated_rms_norm", whole[1], "float32")]


def _pooling() -> list[TuneProblem]:
    """Chunks (sparse attention), rows of sentence encoders, packed sequences and their chunks, segments by id, the largest values."""
    chunks, rows, packed = (
        dict(B=4, T=4096, C=2048, L=64),
        dict(B=64, T=512, C=1024),
        dict(T=16384, C=2048, S=16),
    )
    problems = [
        named("mean_pooling", size) for size in (chunks, chunks | {"L": 16}, chunks | {"L": 1024}, rows)
    ]
    problems += [named("mean_pooling", rows, masked=True), named("mean_pooling", dict(B=4, T=16384, C=4096))]
    problems += [named("mean_pooling", size, reduction="max") for size in (chunks, rows)]
    problems += [named("mean_pooling", packed, packed=True), named("mean_pooling", packed, ordered=True)]
    return [
        *problems,
        named("mean_pooling", dict(T=16384, C=2048, L=64, S=272), packed=True),
        named("mean_pooling", chunks, "float32"),
    ]


def _latent() -> list[TuneProblem]:
    """DeepSeek's heads: long rows of many and of few heads, documents, lengths."""
    sizes = dict(B=1, T=4096, H=128, D=192, V=128, Dr=64)
    operation = "multi_head_latent_attention"
    few = sizes | {"B": 4, "H": 16}
    problems = [
        named(operation, size) for size in (sizes, few, sizes | {"T": 16384, "H": 16}, few | {"T": 1024})
    ]
    problems += [named(operation, few, segments=True), named(operation, few, rows=True)]
    return [*problems, named(operation, few, "float32")]


def _native_sparse() -> list[TuneProblem]:
    """The paper's heads: long rows with compressed keys side by side and overlapping, documents, decodes over dense keys; small heads."""
    operation, sizes = "native_sparse_attention", dict(H=64, K=4, D=128)
    problems = [named(operation, dict(B=1, T=tokens) | sizes) for tokens in (8192, 65536, 16384, 32768)]
    problems += [named(operation, dict(B=1, T=8192) | sizes, given=True)]
    problems += [named(operation, dict(B=1, T=8192) | sizes, span=32, stride=16)]
    problems += [named(operation, dict(T=16384, N=16) | sizes, packed=True)]
    problems += [named(operation, dict(B=rows, T=1, S=65536) | sizes, placed=True) for rows in (1, 8)]
    return [*problems, named(operation, dict(B=4, T=4096, H=16, K=1, D=64))]


def _native_pages() -> list[TuneProblem]:
    """Decodes of few and of many sequences, compressed keys that overlap, and chunks of prompts among decodes."""
    operation, heads = "paged_native_sparse_attention", dict(H=64, K=4, D=128, p=64)
    sizes = ((8, 65536), (64, 8192), (1, 65536), (32, 32768))
    problems = [named(operation, dict(N=N, S=S) | heads) for N, S in sizes]
    problems += [named(operation, dict(N=N, S=S) | heads, span=32, stride=16) for N, S in sizes[:2]]
    return [*problems, named(operation, dict(N=16, T=2048, S=16384) | heads)]


def _matmul() -> list[TuneProblem]:
    """Plain products and decoding; experts of published models as the layer applies them, gate and up at once, then down; gathered tokens, 8 bits.
    In order of importance: a time limit omits the last ones."""
    operation = "grouped_matmul"
    models = (  # rows of a batch, features, those of an expert, experts, experts of a token
        (16384, 4096, 14336, 8, 2),
        (32768, 2048, 1408, 64, 6),
        (65536, 2048, 768, 128, 8),
        (16384, 2880, 2880, 32, 4),
    )

    def plain(model: tuple[int, ...], rows: int) -> dict[str, int]:
        return dict(M=rows, K=model[1], N=model[2], E=model[3])

    def layer(model: tuple[int, ...], rows: int) -> list[TuneProblem]:
        up = plain(model, rows)
        return [
            named(operation, up, gated="pair", activation="silu", transpose_rhs=True),
            named(operation, up | {"K": up["N"], "N": up["K"]}, transpose_rhs=True),
        ]

    decode = dict(M=64, K=2048, N=1408, E=64)
    problems = [named(operation, plain(model, model[0])) for model in models[:2]]
    problems.append(named(operation, decode))
    for model in models:
        problems += layer(model, model[0])
    for tokens in (64, 16, 1):
        for model in models:
            problems += layer(model, tokens * model[-1])
    problems += [named(operation, plain(model, model[0])) for model in models[2:]]
    up = dict(M=32768, L=5461, K=2048, N=1408, E=64)
    clipped: Any = dict(gated="interleaved", activation="silu", clipped=True, bias=True, gathered=True)
    return [
        *problems,
        named(operation, decode, stored="int8"),
        named(operation, decode, stored="float8_e4m3fn"),
        named(operation, up, gated="halves", activation="silu", transpose_rhs=True, gathered=True),
        named(operation, plain(models[0], models[0][0]), stored="float8_e4m3fn"),
        named(operation, dict(M=16384, L=4096, K=2880, N=2880, E=32), **clipped),
        named(operation, dict(M=8192, K=1024, N=2048, E=8), "float32"),
    ]


def _paged() -> list[TuneProblem]:
    usual = dict(N=64, S=4096, H=32, K=8, D=128)
    # Decoding: pages, batch and context, the heads of published models, windows with sinks, dense keys.
    problems = [named("paged_attention", usual | {"p": p}) for p in (16, 32, 64, 128)]
    contexts = (
        (1, 8192),
        (1, 131072),
        (8, 2048),
        (8, 16384),
        (16, 4096),
        (64, 1024),
        (256, 1024),
        (256, 4096),
    )
    problems += [named("paged_attention", usual | {"N": N, "S": S, "p": 16}) for N, S in contexts]
    problems += [named("paged_attention", usual | {"N": N, "S": S, "p": 64}) for N, S in contexts[:3]]
    heads = ((64, 8, 128), (32, 32, 128), (16, 2, 64), (28, 4, 128), (16, 1, 256))
    problems += [named("paged_attention", usual | {"H": H, "K": K, "D": D, "p": 16}) for H, K, D in heads]
    problems += [named("paged_attention", usual | {"H": 64, "D": 64, "p": 16}, window=True, sinks=True)]
    problems += [
        named("ragged_decode_attention", dict(B=N, S=S, H=32, K=8, D=128)) for N, S in contexts[1:5:2]
    ]
    for scales in ("token", "head"):
        for kv in ("int8", "float8_e4m3fn"):
            problems += [named("paged_attention", usual | {"p": 16}, scales=scales, kv=kv)]
    problems += [named("paged_attention", usual | {"p": 64}, scales="token", kv="int8")]
    # Latents of DeepSeek: all heads on one device, or an eighth of them.
    latent = dict(D=576, V=512, p=64)
    sizes = ((64, 4096, 128), (8, 8192, 128), (1, 32768, 128), (64, 4096, 16))
    problems += [named("paged_attention", dict(N=N, S=S, H=H) | latent, latent=True) for N, S, H in sizes]
    problems += [
        named("paged_attention", dict(N=64, S=4096, H=128) | latent, latent=True, scales="token", kv=kv)
        for kv in ("int8", "float8_e4m3fn")
    ]
    # Prompts: whole, several, a chunk after many keys.
    prompt = dict(N=1, T=8192, S=8192, H=32, K=8, D=128)
    problems += [named("prefill_paged_attention", prompt | {"p": p}) for p in (16, 64)]
    problems += [
        named("prefill_paged_attention", prompt | {"N": 4, "S": 2048, "Q": 2048, "p": 16}),
        named("prefill_paged_attention", prompt | {"T": 2048, "S": 16384, "p": 16}),
        named("prefill_paged_attention", prompt | {"H": 16, "K": 2, "D": 64, "p": 16}),
        named("prefill_paged_attention", prompt | {"p": 16}, scales="token", kv="int8"),
        named("prefill_paged_attention", dict(N=1, T=2048, S=8192, H=128) | latent, latent=True),
    ]
    # Decodes mixed with chunks of prompts; drafts of a few tokens, verified as a tree.
    problems += [named("ragged_paged_attention", usual | {"T": 2048, "p": p}) for p in (16, 64)]
    problems += [
        named("ragged_paged_attention", usual | {"T": 512, "Q": 512, "N": 16, "p": 16}),
        named("ragged_paged_attention", usual | {"T": 2048, "p": 16}, scales="token", kv="int8"),
        named("ragged_paged_attention", dict(N=64, T=1024, S=4096, H=128) | latent, latent=True),
    ]
    drafts = usual | {"T": 256, "Q": 4, "p": 16}
    return [
        *problems,
        named("ragged_paged_attention", drafts),
        named("unified_attention", drafts, qq_bias=True),
        named("unified_attention", usual | {"T": 2048, "p": 16}, alibi_slopes=True),
        named("paged_attention", usual | {"p": 16}, "float32"),
    ]


def _asks_for(operation: str, problem: Problem) -> bool:
    """Tells whether an operation of attention over pages may have a problem of another one."""
    if (operation == "ragged_decode_attention") != bool(problem.flag("ranged")):
        return False
    if operation == "absorbed_latent_attention" and not problem.flag("latent"):
        return False
    if problem.flag("alibi_slopes") or problem.flag("qq_bias"):
        return operation == "unified_attention"
    decodes = problem.dim("Q") == 1 and problem.dim("T") == problem.dim("N")
    return decodes or operation not in ("paged_attention", "ragged_decode_attention")


def _cells() -> list[TuneProblem]:
    """Large and small weights, by the number of rows; a GRU has a gate less."""
    sizes = (
        dict(B=64, T=512, H=1024),
        dict(B=256, T=512, H=256),
        dict(B=64, T=512, H=512),
        dict(B=1024, T=128, H=128),
        dict(B=16, T=512, H=2048),
        dict(B=1, T=512, H=512),
    )
    problems = [named("recurrent", size, cell=cell) for size in sizes for cell in ("lstm", "gru")]
    problems += [named("recurrent", size, cell="rnn") for size in sizes[:2]]
    return problems + [
        named("recurrent", dict(B=1, T=16384, H=256, S=64), packed="offsets"),
        named("recurrent", sizes[1], packed="marks"),
        named("recurrent", sizes[1], "float32"),
    ]


def _tiny(operation: str, dims: Mapping[str, int], **flags: Any) -> Callable[[], list[TuneProblem]]:
    return lambda: [named(operation, dims, "float32", **flags)]


FAMILIES: dict[str, Family] = {
    "attention": Family(_every_attention, lambda: _attention(attention.TINY), lambda *_: True),
    "recurrence": Family(
        _recurrence, _tiny("lightning_attention", dict(B=1, T=64, H=2, D=16)), _is_plain_linear
    ),
    "selective_scan": Family(_selective_scan, _tiny("state_space_v1", dict(B=1, T=32, I=16, N=4))),
    "convolution": Family(_convolution, _tiny("causal_conv1d", dict(B=1, T=32, C=16))),
    "paged": Family(_paged, _tiny("paged_attention", dict(N=2, S=160, p=16, H=2, D=16)), _asks_for),
    "cells": Family(_cells, _tiny("recurrent", dict(B=2, T=8, H=16))),
    "latent": Family(_latent, _tiny("multi_head_latent_attention", dict(B=1, T=32, H=2, D=24, V=16, Dr=8))),
    "matmul": Family(_matmul, _tiny("grouped_matmul", dict(M=32, K=16, N=16, E=4))),
    "native_sparse": Family(
        _native_sparse,
        _tiny("native_sparse_attention", dict(T=48, H=2, K=1, D=16, n=3), block=8, window=8),
    ),
    "native_pages": Family(
        _native_pages,
        _tiny(
            "paged_native_sparse_attention",
            dict(N=2, S=48, H=2, K=1, D=16, n=3, p=16),
            block=8,
            window=8,
        ),
    ),
    "normalization": Family(_normalization, _tiny("gated_rms_norm", dict(M=32, F=16))),
    "pooling": Family(_pooling, _tiny("mean_pooling", dict(B=2, T=32, C=16, L=8))),
}
