"""The inner parts of attention that this room's tests name, in one place: whoever moves one edits this file alone. Triton's are in `tritons.py`."""

from ejkernel_eqx._kernel import choices_of, inputs, selections_of, with_plan
from ejkernel_eqx.attention import cudnn, philox, reference, samples, workload, xla
from ejkernel_eqx.attention.arguments import MaskInputs, parse_window, resolve, ScoreInputs, ScoreOptions
from ejkernel_eqx.attention.core import LSE_NAME, OUT_NAME, problem_of
from ejkernel_eqx.attention.example import example_problem
from ejkernel_eqx.attention.masks import pattern, tile_lists, tile_shape, tile_table
from ejkernel_eqx.attention.masks.bounds import classify, evaluate, interval, tiles
from ejkernel_eqx.attention.reference import visibility
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges
from ejkernel_eqx.attention.xla import XlaConfig, XlaTile
from ejkernel_eqx.dispatch import (
    Backend,
    BOTH,
    device_facts,
    DeviceFacts,
    FORWARD,
    from_dict,
    Implementation,
    kernel_registry,
    Known,
    memory_cache,
    Platform,
    Problem,
    to_dict,
    Workload,
)  # fmt: skip
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable, run, TARGETS
from ejkernel_eqx.launch.sizes import cdiv, padded

__all__ = [
    "BOTH", "FORWARD", "LSE_NAME", "OUT_NAME", "TARGETS", "AttentionArrays", "AttentionGrads", "AttentionSpec", "Backend", "DeviceFacts",
    "Implementation", "Known", "MaskInputs", "Platform", "Problem", "RowRanges", "ScoreInputs", "ScoreOptions", "Workload", "XlaConfig", "XlaTile",
    "cdiv", "choices_of", "classify", "compile_ahead", "cudnn", "device_facts", "evaluate", "example_problem", "from_dict", "gluon_unavailable",
    "inputs", "interval", "kernel_registry", "memory_cache", "padded", "parse_window", "pattern", "philox", "problem_of", "reference",
    "resolve", "run", "samples", "selections_of", "tile_lists", "tile_shape", "tile_table", "tiles", "to_dict", "visibility", "with_plan",
    "workload", "xla",
]  # fmt: skip
