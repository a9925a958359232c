"""What cuDNN is reported to compute wrongly is not chosen, by its version and the shapes. `tests/gpu/test_cudnn_faults_gpu.py` computes it."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import dispatch
from tests.attention.inner import (
    AttentionArrays,
    AttentionSpec,
    Backend,
    cudnn,
    device_facts,
    DeviceFacts,
    kernel_registry,
    Platform,
    problem_of,
)

CAUSAL, WINDOW = {"right": 0, "offset": 0}, {"left": 511, "right": 0, "offset": 0}


def problem_at(sizes, mask):
    t, s, d = sizes
    q, k = (cast(Any, jax.ShapeDtypeStruct((2, n, 4, d), jnp.bfloat16)) for n in (t, s))
    return problem_of("flash_attention", AttentionArrays(q, k, k), AttentionSpec(d**-0.5, **mask))


def card(version, capability="9.0"):
    return DeviceFacts(Backend.GPU, "a card", "nvidia", capability, 132, 232_448, cudnn=version)


ONE, HALF, WIDE, GRAPHS = "single query", "modulo 128 is 64", "head dims above 128", "CUDA graphs"
NEW, MENDED, LAST, OLD = (9, 30, 0), (9, 26, 0), (9, 25, 1), (9, 15, 0)


@pytest.mark.parametrize(
    "sizes, mask, version, denied",
    [
        ((1, 128, 64), {}, NEW, ONE),
        ((2, 128, 64), {}, NEW, None),
        ((704, 704, 64), {}, LAST, HALF),
        ((704, 704, 64), {}, (), HALF),
        ((704, 704, 64), {}, MENDED, None),
        ((768, 704, 64), CAUSAL, LAST, HALF),  # the last queries see the end of the keys
        ((704, 704, 64), CAUSAL, LAST, None),
        ((704, 704, 64), WINDOW, LAST, None),
        ((640, 640, 64), {}, LAST, None),
        ((704, 640, 64), {}, LAST, None),
        ((1024, 1024, 256), WINDOW, NEW, WIDE),
        ((1024, 1024, 256), CAUSAL, NEW, None),
        ((1024, 1024, 128), WINDOW, NEW, None),
        ((1000, 1000, 64), CAUSAL, OLD, GRAPHS),
        ((1000, 1024, 64), {}, OLD, GRAPHS),
        ((1000, 1000, 64), CAUSAL, (9, 15, 1), None),
        ((1024, 1024, 64), CAUSAL, (), None),
    ],
)
def test_what_is_denied(sizes, mask, version, denied):
    reason = cudnn.unsupported(problem_at(sizes, mask), card(version))
    if denied is None:
        assert reason is None
    else:
        assert reason is not None and denied in reason and "reported by" in reason
        assert (".".join(map(str, version)) or "of unknown version") in reason
        assert ("upgrade cuDNN to" in reason) == (denied in (HALF, GRAPHS))


@pytest.mark.parametrize("sizes, mask", [((704, 704, 64), {}), ((1024, 1024, 128), WINDOW)])
def test_faults_of_hopper_are_not_those_of_others(sizes, mask):
    for capability in ("8.0", "10.0"):
        assert cudnn.unsupported(problem_at(sizes, mask), card(LAST, capability)) is None


def test_another_platform_is_chosen_and_explained():
    places = tuple(kernel_registry.of_platform("flash_attention", name) for name in ("cuda", "xla"))
    implementations = tuple(i for found in places for i in found)
    chosen = {}
    for version in (LAST, MENDED):
        device = card(version)
        snapshot = dispatch.Snapshot("flash_attention", implementations, device, dispatch.Policy.HEURISTIC)
        selection = dispatch.select(snapshot, problem_at((704, 704, 64), {}))
        chosen[version] = selection.platform
        assert (HALF in dict(selection.rejected).get("cuda", "")) == (version == LAST)
    assert chosen == {LAST: Platform.XLA, MENDED: Platform.CUDA}


def test_the_version_is_a_fact_of_nvidias_devices():
    assert device_facts().cudnn == () or jax.default_backend() == "gpu"
    assert ejx.DeviceFacts(Backend.GPU, "a card").cudnn == ()
