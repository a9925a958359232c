"""The kernels of latent attention, compiled ahead of time for devices that need not be there: they fit, and keep their values in registers."""

from typing import Any

import pytest

import ejkernel_eqx as ejx
from tests.compiled import DEVICES, launches_of
from tests.latent.cases import call_of, OPERATION

pytest.importorskip("triton")
triton = ejx.kernel_registry.get(OPERATION, "triton").load()
TRITON = {f"{name}_kernel" for name in ("forward", "key_gradient", "query_gradient")}
HOPPER = {"hopper_forward_kernel", "hopper_backward_kernel"}
FLAGS = ("sinks", "q_segments", "kv_segments", "rows")

# Bytes of stack a thread (on AMD registers), where any; on sm_90 in bfloat16 outside the loops but for a few.
SPILLS: dict[tuple[str, str, bool], dict[str, int]] = {
    ("sm_80", "bfloat16", True): {"key_gradient": 24, "query_gradient": 104},
    ("sm_90", "bfloat16", False): {"hopper_backward": 72},
    ("sm_90", "bfloat16", True): {"hopper_forward": 24, "key_gradient": 56},
    ("sm_90", "float32", False): {"forward": 24, "key_gradient": 304, "query_gradient": 232},
    ("sm_100", "bfloat16", True): {"forward": 24, "query_gradient": 56},
    ("gfx942", "bfloat16", True): {"forward": 20, "key_gradient": 56, "query_gradient": 13},
}


@pytest.mark.parametrize(
    "target, dtype, everything",
    [
        ("sm_90", "bfloat16", False),
        *(pytest.param(target, "bfloat16", True, marks=pytest.mark.slow) for target in DEVICES),
        # sm_100 has the shared memory of sm_90.
        *(
            pytest.param(target, "float32", False, marks=pytest.mark.slow)
            for target in ("sm_80", "sm_90", "gfx942")
        ),
    ],
)
def test_kernels_fit(target, dtype, everything):
    length, flags = (1000, FLAGS) if everything else (4096, ())
    arrays, spec, problem = call_of(length, *flags, heads=16, dtype=dtype)
    device = DEVICES[target]
    assert triton.unsupported(problem, device) is None
    config = triton.default_config(problem, device)
    assert triton.config_unsupported(config, problem, device) is None

    def both(arrays: Any) -> Any:
        out, lse = triton.forward(arrays, spec, config)
        return triton.backward(arrays, spec, config, out, lse, out, lse)

    launches = launches_of(both, arrays)
    if config.key_gradient.hopper_programs:
        assert set(launches) == HOPPER
    elif config.forward.hopper_programs:
        assert set(launches) == {"key_bounds_kernel", *HOPPER, *TRITON} - {
            "forward_kernel",
            "hopper_backward_kernel",
        }
    else:
        assert set(launches) == TRITON
    most = SPILLS.get((target, dtype, everything), {})
    for name, launch in launches.items():
        report = ejx.launch.compile_ahead(launch, target)
        assert report.fits, (name, report, config)
        if dtype == "bfloat16" or target == "sm_90":
            assert report.spills <= most.get(name.removesuffix("_kernel"), 0), (name, report)
