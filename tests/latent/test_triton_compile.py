"""The kernels of latent attention, compiled ahead of time for devices that need not be there: they fit, and keep their values in registers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.attention.spec import AttentionSpec, RowRanges
from ejkernel_eqx.dispatch import Problem
from ejkernel_eqx.latent.core import problem_of
from ejkernel_eqx.latent.spec import LatentArrays
from ejkernel_eqx.launch import compile_ahead
from tests.compiled import DEVICES, launches_of

pytest.importorskip("triton")
from ejkernel_eqx.latent.triton import compiled as triton

KERNELS = {f"{name}_kernel" for name in ("forward", "key_gradient", "query_gradient")}


def request_of(dtype: str, everything: bool) -> tuple[LatentArrays, AttentionSpec, Problem]:
    """The shapes of DeepSeek's heads, causal; or with every flag on, at lengths that no tile divides."""
    length = 1000 if everything else 4096

    def shape(*size: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    arrays = LatentArrays(
        shape(2, length, 16, 192), shape(2, length, 16, 128), shape(2, length, 64), shape(2, length, 16, 128)
    )
    spec = AttentionSpec(scale=0.1, right=None if everything else 0)
    if everything:
        spec = dataclasses.replace(spec, logits_soft_cap=30.0)
        ids = shape(2, length, dtype="int32")
        arrays = arrays._replace(
            sinks=shape(1, 16, dtype="float32"), q_segments=ids, kv_segments=ids, rows=RowRanges(*[ids] * 3)
        )
    return arrays, spec, problem_of("multi_head_latent_attention", arrays, spec)


# Bytes of stack a thread (on AMD registers), where any; on sm_90 in bfloat16 outside the loops but for a few.
SPILLS: dict[tuple[str, str, bool], dict[str, int]] = {
    ("sm_80", "bfloat16", False): {"key_gradient": 96},
    ("sm_80", "bfloat16", True): {"key_gradient": 24, "query_gradient": 104},
    ("sm_90", "bfloat16", False): {"key_gradient": 40},
    ("sm_90", "bfloat16", True): {"key_gradient": 56},
    ("sm_90", "float32", False): {"forward": 24, "key_gradient": 304, "query_gradient": 232},
    ("sm_90", "float32", True): {"forward": 488, "key_gradient": 1224, "query_gradient": 1024},
    ("sm_100", "bfloat16", True): {"forward": 24, "query_gradient": 56},
    ("gfx942", "bfloat16", True): {"forward": 20, "key_gradient": 56, "query_gradient": 13},
}
QUICK = [("sm_90", "bfloat16", False)]
GRID = [
    (target, dtype, flags)
    for target in DEVICES
    for dtype in ("bfloat16", "float32")
    for flags in (False, True)
    # In float32, where all with flags take long to compile: one of the two for a target, both where spills are counted.
    if dtype == "bfloat16" or target == "sm_90" or flags == (target != "sm_100")
]


@pytest.mark.parametrize(
    "target,dtype,everything",
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in GRID],
)
def test_kernels_fit(target, dtype, everything):
    arrays, spec, problem = request_of(dtype, everything)
    device = DEVICES[target]
    assert triton.unsupported(problem, device) is None
    config = triton.default_config(problem, device)
    assert triton.config_unsupported(config, problem, device) is None

    def both(arrays: LatentArrays, execute: Any) -> Any:
        out, lse = triton.forward(arrays, spec, config, execute=execute)
        return triton.backward(arrays, spec, config, out, lse, out, lse, execute=execute)

    launches = launches_of(both, arrays)
    assert set(launches) == KERNELS
    most = SPILLS.get((target, dtype, everything), {})
    found = {}
    for name, launch in launches.items():
        report = compile_ahead(launch, target)
        assert report.fits, (
            f"{name} needs {report.shared} bytes of shared memory, {target} has {report.shared_limit}: {config}"
        )
        found[name.removesuffix("_kernel")] = report.spills
    if dtype == "bfloat16" or target == "sm_90":
        assert all(spills <= most.get(name, 0) for name, spills in found.items()), found
