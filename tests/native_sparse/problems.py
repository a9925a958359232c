"""Problems, configurations and launches of native sparse attention, over rows and over pages: what several tests share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import random_cotangents
from ejkernel_eqx.native_sparse.core import ATTEND
from ejkernel_eqx.native_sparse.native_pages.workload import example_problem as problem_of_pages
from ejkernel_eqx.native_sparse.problems import problem_of, spec_of
from ejkernel_eqx.native_sparse.workload import example_problem, make_arrays
from tests.compiled import DEVICES, executed

__all__ = ["make_arrays", "problem_of", "spec_of"]
OPERATION, PAGES = "native_sparse_attention", "paged_native_sparse_attention"
STEP = [f"{name}_step_kernel" for name in ("compressed", "sliding", "selected", "combine")]
BY_BRANCH = {"block_k": 0, "split_k": 1}


def problem(*given: Any) -> ejx.Problem:
    return example_problem(OPERATION, *given)


def over_pages(*given: Any) -> ejx.Problem:
    return problem_of_pages(PAGES, *given)


def platform_of(operation: str, name: str = "triton") -> Any:
    return ejx.kernel_registry.get(operation, name).load()


def with_step(config: Any, **fields: int) -> Any:
    """The configuration with these fields of its step of decoding."""
    return dataclasses.replace(config, step=dataclasses.replace(config.step, **fields))


def configured(**step: int) -> Any:
    """The interpreted platform's configuration over pages, with these fields of a step."""
    small = over_pages(dict(S=64, H=2, D=16), "float32", {})
    return with_step(platform_of(PAGES, "triton-interpret").default_config(small, DEVICES["sm_90"]), **step)


def names_of(launches: Any) -> list[str]:
    return [launch.function.fn.__name__ for launch in launches]


def launches(problem: ejx.Problem, config: Any, save: bool = True) -> list[Any]:
    """What forward and backward over rows launch, in order; without `save` what the forward does."""
    triton, spec, found = platform_of(OPERATION), spec_of(problem), []

    def record(launch: Any, inputs: Any) -> dict[str, Any]:
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def both(arrays: Any, cotangents: Any) -> Any:
        saved = triton.forward(arrays, spec, config, save=save)
        saved.pop("out")
        return triton.backward(arrays, spec, config, saved, cotangents) if save else saved

    arrays = jax.eval_shape(lambda: make_arrays(problem, spec, 0))
    cotangents = jax.eval_shape(lambda arrays: random_cotangents(ATTEND, arrays, spec, 0), arrays)
    jax.eval_shape(executed(both, record), arrays, cotangents)
    return found
