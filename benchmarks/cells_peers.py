"""Recurrent cells on cuDNN: by PyTorch, and the LSTM by JAX's `jax.experimental.rnn`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.cells_problems import Arrays, CellProblem, Forward, Inputs
from benchmarks.measure import torch_work
from benchmarks.prepare import Prepared

PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def jax_cudnn(problem: CellProblem) -> Forward:
    """Takes float32 alone, so inputs and parameters are cast; products are in TF32."""
    from jax.experimental import rnn

    def run(learned: Arrays) -> Array:
        wide = {name: a.astype(jnp.float32) for name, a in learned.items()}
        weights = jnp.concatenate([wide[name].reshape(-1) for name in PARAMETERS])
        zeros = jnp.zeros((1, problem.B, problem.H), jnp.float32)
        lengths = jnp.full(problem.B, problem.T, jnp.int32)
        sizes: Any = (problem.I, problem.H, 1, 0.0, False)
        results: Any = rnn.lstm(wide["x"], zeros, zeros, weights, lengths, *sizes)
        return results[0].astype(problem.dtype)

    return run


def torch_layer(problem: CellProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
    """PyTorch's layer on the same data. It has one set of parameters, those of the first inputs, in the layout of cuDNN."""
    import torch

    jax.block_until_ready(sets)
    dtype = getattr(torch, problem.dtype)
    module = getattr(torch.nn, problem.cell)(problem.I, problem.H, batch_first=True)
    module = module.to(device="cuda", dtype=dtype)
    with torch.no_grad():
        for name in PARAMETERS:
            getattr(module, f"{name}_l0").copy_(torch.from_dlpack(sets[0].learned[name]))
    module.flatten_parameters()
    parameters = [getattr(module, f"{name}_l0") for name in PARAMETERS]

    def run(x: Any, cotangent: Any) -> tuple[Any, ...]:
        if backward:
            return torch.autograd.grad(module(x)[0], [x, *parameters], cotangent)
        with torch.no_grad():
            return (module(x)[0],)

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        x, cotangent = (torch.from_dlpack(a).clone() for a in (inputs.learned["x"], inputs.cotangent))
        return x.requires_grad_(backward), cotangent

    torch_sets = [tensors(inputs) for inputs in sets]
    run(*torch_sets[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(*torch_sets[0])
    torch.cuda.synchronize()
    outputs = sum(x.numel() * x.element_size() for x in found)
    temporary = torch.cuda.max_memory_allocated() - before - outputs
    names = ("x", *PARAMETERS) if backward else ("out",)
    return Prepared(
        dict(zip(names, (jnp.from_dlpack(x.detach().contiguous()) for x in found))),
        lambda runs: torch_work(run, torch_sets, runs),
        temporary_bytes=temporary,
    )
