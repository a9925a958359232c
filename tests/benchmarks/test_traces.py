"""What traces of a device say: kinds of kernels, what ran when, and how much of the sending is hidden."""

import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from benchmarks.measure import by_kind, gpu_spans, hidden, Span, traced


def test_kinds():
    times = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": (3.0, 1),
        "nvjet_tst_128x256_64x4": (2.0, 2),
        "loop_multiply_fusion_3": (0.5, 1),
        "input_reduce_fusion": (0.25, 1),
        "MemcpyD2D": (0.5, 1),
        "something": (1.0, 1),
        "sm90_xmma_gemm_bf16": (1.0, 1),
    }
    found = by_kind(times)
    assert found == {
        "attention": 3.0,
        "matmul": 3.0,
        "other": 1.0,
        "elementwise": 0.5,
        "copy": 0.5,
        "reduction": 0.25,
    }


def test_what_a_gpu_ran():
    """A profile of streams, of what XLA adds to them, and of a host."""
    data = ProfileData.from_text_proto(
        """
        planes { name: "/device:GPU:0"
          lines { name: "Stream #14(Compute)" timestamp_ns: 1000
            events { metadata_id: 1 offset_ps: 8000000 duration_ps: 2000000 }
            events { metadata_id: 2 duration_ps: 4000000 } }
          lines { name: "XLA Ops" events { metadata_id: 2 duration_ps: 12000000 } }
          event_metadata { key: 1 value { id: 1 name: "merge" } }
          event_metadata { key: 2 value { id: 2 name: "decode" } } }
        planes { name: "/host:CPU"
          lines { name: "Stream of a host" events { metadata_id: 1 duration_ps: 1000000 } }
          event_metadata { key: 1 value { id: 1 name: "merge" } } }
        """
    )
    spans = gpu_spans(data)
    assert spans == [("/device:GPU:0", "decode", 1.0, 5.0), ("/device:GPU:0", "merge", 9.0, 11.0)]
    assert hidden(spans) is None


def test_a_trace_of_a_host_has_no_spans(tmp_path):
    assert traced(lambda: jnp.ones(3) + 1, tmp_path) == []
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_what_is_hidden_behind_kernels():
    kernels = [Span("a", "attention", 0, 10), Span("a", "attention", 12, 20), Span("b", "attention", 30, 32)]
    sends = [Span("a", "ncclDevKernel_SendRecv", begin, end) for begin, end in ((5, 15), (30, 32))]
    # 5 to 10 and 12 to 15, of 5 to 15 and 30 to 32: another device's kernels hide nothing.
    assert hidden(kernels + sends) == pytest.approx(8 / 12)
    assert hidden(kernels) is None
