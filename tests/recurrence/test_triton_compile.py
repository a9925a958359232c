"""The kernels of the linear members, compiled ahead of time for devices that need not be there: the defaults must fit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.dispatch import Backend, DeviceFacts
from ejkernel_eqx.dispatch.device import shared_memory_limit
from ejkernel_eqx.launch import compile_ahead, Launch
from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.example import example_problem
from ejkernel_eqx.recurrence.spec import CONSTANT, KEY, RecurrenceArrays, RecurrenceSpec, SCALAR

pytest.importorskip("triton")
from ejkernel_eqx.recurrence.triton import compiled as triton
from ejkernel_eqx.recurrence.triton.hopper import tile_sizes as hopper
from ejkernel_eqx.recurrence.triton.tile_sizes import Tile

DEVICES = {
    "sm_80": DeviceFacts(Backend.GPU, "A100", "nvidia", "8.0", 108, shared_memory_limit("nvidia", "8.0")),
    "sm_90": DeviceFacts(Backend.GPU, "H100", "nvidia", "9.0", 132, shared_memory_limit("nvidia", "9.0")),
    "sm_100": DeviceFacts(Backend.GPU, "B200", "nvidia", "10.0", 148, shared_memory_limit("nvidia", "10.0")),
    "gfx942": DeviceFacts(Backend.GPU, "MI300X", "amd", "9.4.2", 304, shared_memory_limit("amd", "gfx942")),
}


def request(member: str, dim: int, dtype: str) -> tuple[RecurrenceArrays, RecurrenceSpec]:
    """The shapes of a call: `batched` with every option, `ssd` with shared keys, `packed` with a table of sequences, `long` with so few programs
    that sequences are split."""
    batch, length = {"packed": (1, 300), "long": (1, 20_000)}.get(member, (8, 1000))
    heads, shared = (32, 1) if member == "ssd" else (16, 16)

    def shape(*size: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    arrays = RecurrenceArrays(
        shape(batch, length, shared, dim), shape(batch, length, shared, dim), shape(batch, length, heads, dim)
    )
    if member == "packed":
        arrays = arrays._replace(
            g=shape(batch, heads, dtype="float32"), offsets=shape(batch, 4, dtype="int32")
        )
        return arrays, RecurrenceSpec(0.1, CONSTANT)
    arrays = arrays._replace(
        g=shape(batch, length, heads, dtype="float32"),
        beta=shape(batch, length, heads, dtype="float32"),
        skip=shape(batch, heads, dim, dtype="float32"),
        initial_state=shape(batch, heads, dim, dim, dtype="float32"),
        starts=shape(batch, length, dtype="int32"),
    )
    return arrays, RecurrenceSpec(0.1, SCALAR)


def launches_of(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: Any, backward: bool = True
) -> dict[str, Launch]:
    """What forward and backward would launch; nothing is run."""
    found = {}

    def record(launch, inputs):
        found[launch.label.rpartition(".")[2]] = launch
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def both(arrays):
        results = dict(triton.forward(arrays, spec, config, execute=record))
        if not backward:
            return results
        out, final = results.pop("out"), results.pop("final_state")
        return triton.backward(
            arrays, spec, config, results, {"out": out, "final_state": final}, execute=record
        )

    jax.eval_shape(both, arrays)
    return found


QUICK = {
    ("sm_80", "packed", 128, "bfloat16"),
    ("sm_90", "batched", 128, "bfloat16"),
    ("sm_90", "ssd", 128, "bfloat16"),
    ("sm_90", "long", 128, "bfloat16"),
    ("sm_100", "batched", 64, "bfloat16"),
    ("gfx942", "packed", 64, "bfloat16"),
}
# Bytes a thread, where any, of the tiles that were fastest on an H200, and where smaller ones spill too.
SPILLS = {
    ("sm_80", "batched", 64): {"single": 72, "gradients": 88},
    ("sm_80", "batched", 128): {"gradients": 128},
    ("sm_80", "long", 64): {"gradients": 88},
    ("sm_80", "long", 128): {"local_dstates": 8, "dstates": 16, "gradients": 128},
    ("sm_80", "ssd", 64): {"single": 96, "dstates": 32, "shared_channels": 80},
    ("sm_80", "ssd", 128): {"shared_pairs": 24, "shared_channels": 128},
    ("sm_80", "packed", 128): {"gradients": 8},
    ("sm_90", "batched", 64): {"single": 24},
    ("sm_90", "batched", 128): {"single": 256, "gradients": 392},
    ("sm_90", "long", 64): {"single": 32},
    ("sm_90", "long", 128): {"single": 216, "gradients": 392},
    ("sm_90", "ssd", 64): {"single": 24, "shared_channels": 8},
    ("sm_90", "ssd", 128): {"single": 280, "shared_channels": 176},
    ("sm_90", "packed", 128): {"gradients": 144},
    ("sm_100", "batched", 128): {"gradients": 232},
    ("sm_100", "long", 64): {"local_dstates": 16},
    ("sm_100", "long", 128): {"gradients": 96},
    ("sm_100", "packed", 128): {"gradients": 16},
    ("sm_100", "ssd", 64): {"single": 16, "shared_pairs": 8, "shared_channels": 136},
    ("sm_100", "ssd", 128): {"shared_channels": 32},
}
GRID = [
    (target, member, dim, dtype)
    for target in DEVICES
    for member in ("batched", "ssd", "packed", "long")
    for dim in (64, 128, 256)
    for dtype in ("bfloat16", "float32", "float16")
    if dtype != "float16" or dim == 64  # it is computed as float32
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "target, member, dim, dtype",
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in GRID],
)
def test_defaults_fit(target, member, dim, dtype):
    arrays, spec = request(member, dim, dtype)
    problem = problem_of("linear_attention", arrays, spec)
    assert triton.unsupported(problem, DEVICES[target]) is None
    config = triton.default_config(problem, DEVICES[target])
    assert triton.config_unsupported(config, problem, DEVICES[target]) is None
    launches = launches_of(arrays, spec, config)
    shared = {f"shared_{name}_kernel" for name in ("products", "pairs", "channels", "decays")}
    assert {"states_kernel", "dstates_kernel"} | (shared if member == "ssd" else {"gradients_kernel"}) < set(
        launches
    )
    assert ("single_kernel" in launches) == config.single != ("out_kernel" in launches)
    assert ("local_states_kernel" in launches) == ("local_dstates_kernel" in launches) == (config.splits > 1)
    assert (config.splits > 1) == (member == "long")
    measured = target != "gfx942" and dtype == "bfloat16" and dim <= 128
    most_spills = SPILLS.get((target, member, dim), {}) if measured else None
    for name, launch in launches.items():
        report = compile_ahead(launch, target)
        assert report.fits, (
            f"{name} needs {report.shared} bytes of shared memory, {target} has {report.shared_limit}: {config}"
        )
        if most_spills is not None:
            assert report.spills <= most_spills.get(name.removesuffix("_kernel"), 0), (name, report, config)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_scores_of_a_key_decay_need_not_spill(target):
    problem = example_problem(
        "kernel_delta_attention", {"B": 1, "T": 4096, "H": 16, "D": 128}, "bfloat16", {}
    )
    tile = Tile(32, 64, 4, 1)
    config = next(x for x in triton.candidates(problem, DEVICES[target]) if x.scores == tile)
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct((1, 4096, 16, *sizes), jnp.bfloat16)
    arrays = RecurrenceArrays(*(shape(128) for _ in "qkv"), g=shape(128), beta=shape())
    launch = launches_of(arrays, RecurrenceSpec(0.1, KEY, delta=True), config, backward=False)[
        "delta_key_scores_kernel"
    ]
    assert compile_ahead(launch, target).spills == 0


def test_candidates_begin_with_the_heuristic_and_differ():
    for member in ("batched", "ssd", "packed"):
        arrays, spec = request(member, 128, "bfloat16")
        problem = problem_of("linear_attention", arrays, spec)
        configs = triton.candidates(problem, DEVICES["sm_90"])
        assert configs[0] == triton.default_config(problem, DEVICES["sm_90"])
        assert 1 < len(set(configs)) == len(configs) <= 12


def test_one_kernel_for_the_outputs_by_how_many_programs_there_are(monkeypatch):
    """The heuristic's way, where Hopper's kernel is left out, and that of a configuration that was measured at another batch size, whose other tiles
    stay. Sequences are split where there would be few programs."""
    monkeypatch.setattr(hopper, "tiles", lambda *_: [])
    sm_90 = DEVICES["sm_90"]
    sizes = {"T": 4096, "H": 16, "D": 128}
    small, usual, large = (
        example_problem("lightning_attention", {"B": batch, **sizes}, "bfloat16", {}) for batch in (1, 4, 16)
    )
    config = triton.default_config(usual, sm_90)
    assert config.single and config.out == Tile(128, 32, 4, 3)
    tiles = dataclasses.replace(config, gradients=Tile(128, 32, 4, 1))
    for problem in (small, large):
        fit, heuristic = triton.adapted(tiles, problem, sm_90), triton.default_config(problem, sm_90)
        assert fit == dataclasses.replace(heuristic, gradients=tiles.gradients)
    assert triton.adapted(tiles, small, sm_90).splits == 8 and config.splits == 1
    short = example_problem("lightning_attention", {"B": 1, **sizes, "T": 256}, "bfloat16", {})
    assert not triton.adapted(tiles, short, sm_90).single
    assert triton.adapted(tiles, large, sm_90).out == Tile(128, 64, 4, 2)
    gated = example_problem("gated_linear_attention", {"B": 1, **sizes}, "bfloat16", {})
    first, *others = triton.candidates(gated, sm_90)
    assert first.splits == 8 and {config.splits for config in others} == {4, 8, 16}
    delta = triton.default_config(example_problem("delta_rule", {"B": 4, **sizes}, "bfloat16", {}), sm_90)
    for_delta = example_problem("delta_rule", {"B": 16, **sizes}, "bfloat16", {})
    assert triton.adapted(delta, for_delta, sm_90) == delta and delta.splits == 1
    # What a split of a delta rule makes of the identity takes as many programs again: not for two splits, nor for short ones.
    for batch, length, splits in ((1, 8192, 4), (2, 8192, 1), (1, 4096, 1)):
        few = example_problem("delta_rule", {**sizes, "B": batch, "T": length}, "bfloat16", {})
        assert triton.default_config(few, sm_90).splits == triton.adapted(delta, few, sm_90).splits == splits


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("decay", [KEY, SCALAR])
def test_delta_rules_in_splits_fit(target, decay):
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct((1, 8192, 16, *sizes), jnp.bfloat16)
    gates: Any = shape(128) if decay == KEY else jax.ShapeDtypeStruct((1, 8192, 16), jnp.float32)
    arrays = RecurrenceArrays(*(shape(128) for _ in "qkv"), g=gates, beta=shape())
    spec = RecurrenceSpec(0.1, decay, delta=True)
    config = triton.default_config(problem_of("delta_rule", arrays, spec), DEVICES[target])
    launches = launches_of(arrays, spec, dataclasses.replace(config, splits=4))
    for name in ("delta_local_states_kernel", "delta_local_dstates_kernel", "delta_chain_kernel"):
        report = compile_ahead(launches[name], target)
        assert report.fits and report.spills <= 64, (name, report)
