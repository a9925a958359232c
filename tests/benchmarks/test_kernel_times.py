"""Kernels are sorted into kinds by their names."""

from benchmarks.kernel_times import by_kind


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
