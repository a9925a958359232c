"""Defines when Hopper's single pass is used, with which tiles, and why not."""

from typing import Any

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable
from ...spec import CONSTANT, NONE, SCALAR

CHUNK = 64
WIDTH = 64
"""Value channels of a group of warps; a program has one or two."""
LEAST_TOKENS = 1024
"""Tokens of a split from which on this kernel is the default; for fewer the tuner times it."""
GENTLE = 48.0
"""The largest distance from half of a chunk's log2 decay at which powers of two times operands are far from bfloat16's limits."""
LEAST_SHARED = 32
"""Heads that share queries and keys, from which on a kernel of its own computes their products once. It takes as long as about 15 heads gain."""
LEAST_ROWS = 8192
"""Tokens of all rows from which on that kernel is used: for fewer, another launch takes longer than it saves."""
_MULTIPROCESSORS = 132

Sizes = tuple[int, int]


def tiles(problem: Problem, splits: int, device: DeviceFacts) -> list[Sizes]:
    """Value channels of a program and stages, best first; none if the kernel cannot run the problem."""
    fits = lambda sizes: unfit(sizes[0], splits, problem, device) is None
    results = list(filter(fits, ((2 * WIDTH, 3), (WIDTH, 4), (WIDTH, 2))))
    programs = splits * problem.dim("B") * problem.dim("R") * problem.dim("V") // (2 * WIDTH)
    if 2 * programs <= (device.num_multiprocessors or _MULTIPROCESSORS):
        results.sort(key=lambda sizes: sizes[0])
    return results


def unfit(block_v: int, splits: int, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the kernel cannot run the problem on the device, as a clause without its subject; `None` if it can."""
    return gluon_unavailable(device) or problem_unfit(block_v, splits, problem)


def problem_unfit(block_v: int, splits: int, problem: Problem) -> str | None:
    """`unfit` for any device."""
    if problem.flag("step") or problem.flag("delta") or problem.flag("decay") not in (NONE, CONSTANT, SCALAR):
        return "is for sequences of members without a delta rule and without a decay per channel"
    if problem.flag("packed"):
        return "takes no packed sequences"
    if problem.dtype("qkv") != "bfloat16":
        return f"takes bfloat16, not {problem.dtype('qkv')}"
    dim, values = problem.dim("D"), problem.dim("V")
    if dim not in (64, 128) or values % WIDTH:
        return f"takes 64 or 128 key channels and whole {WIDTH} value channels, not {dim} and {values}"
    if block_v not in (WIDTH, 2 * WIDTH):
        return f"has programs of {WIDTH} or {2 * WIDTH} value channels, not {block_v}"
    shared = problem.dim("R") // max(problem.dim("Hq"), problem.dim("Hk"))
    if block_v > WIDTH and (shared % 2 if values == WIDTH else values % block_v):
        return f"has programs of {block_v} value channels where these are one head's, or of two heads that share queries and keys"
    if problem.dim("T") % (CHUNK * splits) or not problem.dim("T"):
        return (
            f"takes whole chunks of {CHUNK} tokens in each of {splits} splits, not {problem.dim('T')} tokens"
        )
    return None


def config_unfit(config: Any, problem: Problem) -> str | None:
    """The reason why it cannot run the problem with a configuration that has it in `out`, on any device."""
    if not config.single or config.chunk_size != CHUNK or config.out.num_warps != 4:
        return f"is for single=True, chunk_size={CHUNK} and num_warps=4"
    return problem_unfit(config.out.block_v, config.splits, problem)
