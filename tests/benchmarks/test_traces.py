"""What traces of a device say: kinds of kernels, what ran when, and how much of the sending is hidden."""

import pytest

from benchmarks.measure import by_kind, gpu_spans, hidden


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
    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #14(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
    ]
    ran = [("merge", 7, 9.0, 2.0), ("decode", 7, 1.0, 4.0), ("an operation", 8, 0.0, 12.0)]
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur} for name, tid, ts, dur in ran
    ]
    assert gpu_spans(names + events) == [("decode", 1.0, 5.0), ("merge", 9.0, 11.0)]
    assert hidden(names + events) is None


def test_what_is_hidden_behind_kernels():
    name = lambda what, pid, tid, text: {
        "ph": "M",
        "name": what,
        "pid": pid,
        "tid": tid,
        "args": {"name": text},
    }
    event = lambda pid, tid, text, ts, dur: {
        "ph": "X",
        "name": text,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
    }
    events = [
        *(name("process_name", 1, 0, "/device:GPU:0"), name("process_name", 2, 0, "/host:CPU")),
        *(name("thread_name", 1, 7, "Stream #7(Compute)"), name("thread_name", 1, 9, "Stream #9(NCCL)")),
        name("thread_name", 2, 7, "Stream of a host"),
        *(event(1, 7, "attention", 0, 10), event(1, 7, "attention", 12, 8)),
        *(event(1, 9, "ncclDevKernel_SendRecv", 5, 10), event(1, 9, "ncclDevKernel_SendRecv", 30, 2)),
        event(2, 7, "attention", 30, 2),
    ]
    # 5 to 10 and 12 to 15, of 5 to 15 and 30 to 32.
    assert hidden(events) == pytest.approx(8 / 12)
    assert hidden(events[:5]) is None
