"""Pooling in PyTorch, and by flash-linear-attention if it is installed."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.linear_peers import missing, Peer
from benchmarks.pooling_problems import PoolProblem, tables

Tensors = dict[str, Any]


def _tables(problem: PoolProblem) -> Callable[[], dict[str, Any]]:
    """The tables on the device, made once."""

    @functools.cache
    def made() -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(table).cuda() for name, table in tables(problem).items()}

    return made


def _fla(problem: PoolProblem) -> Callable[[Tensors], Any]:
    given = _tables(problem)

    def run(tensors: Tensors) -> Any:
        from fla.ops.utils.pooling import mean_pooling

        x = tensors["x"].view(problem.B, problem.T, problem.H, problem.D)
        out = mean_pooling(x, problem.L, given().get("cu_seqlens"))
        return out.view(*problem.lead, -1, problem.channels)

    return run


def _torch(problem: PoolProblem) -> Callable[[Tensors], Any]:
    given, largest = _tables(problem), problem.reduction == "max"

    def run(tensors: Tensors) -> Any:
        x = tensors["x"]
        if problem.L:
            cut = x.view(problem.B, -1, problem.L, problem.channels)
            return cut.max(2).values if largest else cut.mean(2)
        mask = given().get("mask")
        if mask is None:
            return x.max(1).values if largest else x.mean(1)
        mask = mask[..., None]
        if largest:
            return x.masked_fill(~mask, float("-inf")).max(1).values
        return (x * mask).sum(1) / mask.sum(1).to(x.dtype)

    return run


def _segment_reduce(problem: PoolProblem) -> Callable[[Tensors], Any]:
    given = _tables(problem)

    def run(tensors: Tensors) -> Any:
        import torch

        offsets = given()["cu_seqlens"].long()
        return torch.segment_reduce(tensors["x"], problem.reduction, offsets=offsets, axis=0)

    return run


def peers_of(problem: PoolProblem) -> Iterator[Peer]:
    """The installed peers that support the problem."""
    absent = missing()
    if "torch" in absent:
        return
    if problem.L and problem.reduction == "mean" and "fla" not in absent:
        yield Peer("fla", "fla", _fla(problem))
    if not problem.N:
        yield Peer("torch", "torch", _torch(problem))
    elif not problem.L:
        yield Peer("torch", "torch", _segment_reduce(problem))
