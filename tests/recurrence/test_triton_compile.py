"""The kernels of the linear members, compiled ahead of time for devices that need not be there: the defaults must fit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compiled import DEVICES
from tests.recurrence.cases import (
    CONSTANT,
    example_problem,
    KEY,
    problem_of,
    RecurrenceArrays,
    RecurrenceSpec,
    SCALAR,
)
from tests.recurrence.kernels import compiled, default_config, hopper, launches_of, report_of, Tile


def request(member: str, dim: int, dtype: str) -> tuple[RecurrenceArrays, RecurrenceSpec]:
    """The shapes of a call: `batched` with every option, `ssd` with shared keys, `packed` with a table of sequences and no other option, `long`
    with so few programs that sequences are split."""
    batch, length = {"packed": (1, 300), "long": (1, 20_000)}.get(member, (8, 1000))
    heads, shared = (32, 1) if member == "ssd" else (16, 16)

    def shape(*size: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    keys = shape(batch, length, shared, dim)
    arrays = RecurrenceArrays(keys, keys, shape(batch, length, heads, dim))
    if member == "packed":
        decays = shape(batch, heads, dtype="float32")
        return arrays._replace(g=decays, offsets=shape(batch, 4, dtype="int32")), RecurrenceSpec(
            0.1, CONSTANT
        )
    arrays = arrays._replace(
        g=shape(batch, length, heads, dtype="float32"),
        beta=shape(batch, length, heads, dtype="float32"),
        skip=shape(batch, heads, dim, dtype="float32"),
        initial_state=shape(batch, heads, dim, dim, dtype="float32"),
        starts=shape(batch, length, dtype="int32"),
    )
    return arrays, RecurrenceSpec(0.1, SCALAR)


# Bytes a thread, where any, of the tiles that were fastest on an H200, and where smaller ones spill too.
SPILLS = {
    ("sm_80", "batched"): {"gradients": 128},
    ("sm_80", "long"): {"local_dstates": 8, "dstates": 16, "gradients": 128},
    ("sm_80", "ssd"): {"shared_pairs": 24, "shared_channels": 128},
    ("sm_80", "packed"): {"gradients": 8},
    ("sm_90", "batched"): {"single": 256, "gradients": 392},
    ("sm_90", "long"): {"single": 216, "gradients": 392},
    ("sm_90", "ssd"): {"single": 280, "shared_channels": 176},
    ("sm_100", "batched"): {"gradients": 232},
    ("sm_100", "long"): {"gradients": 96},
    ("sm_100", "ssd"): {"shared_channels": 32},
}
# All options in bfloat16, of the usual width, whose spills were measured; none of them in float32, of the largest width.
MEMBERS = [(name, 128, "bfloat16") for name in ("batched", "ssd", "long")] + [("packed", 256, "float32")]
GRID = [(target, *row) for target in DEVICES for row in MEMBERS]
# The least shared memory of NVIDIA's; and float16, which is computed as float32.
GRID += [
    ("sm_80", "packed", 128, "bfloat16"),
    ("sm_80", "ssd", 256, "float32"),
    ("sm_90", "packed", 64, "float16"),
]
QUICK = {("sm_90", "ssd", 128, "bfloat16")}


@pytest.mark.parametrize(
    "target, member, dim, dtype",
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in GRID],
)
def test_defaults_fit(target, member, dim, dtype):
    arrays, spec = request(member, dim, dtype)
    problem = problem_of("linear_attention", arrays, spec)
    assert compiled.unsupported(problem, DEVICES[target]) is None
    config = default_config(arrays, spec, DEVICES[target])
    assert compiled.config_unsupported(config, problem, DEVICES[target]) is None
    launches = launches_of(arrays, spec, config)
    shared = {f"shared_{name}_kernel" for name in ("products", "pairs", "channels", "decays")}
    own = shared if member == "ssd" else {"gradients_kernel"}
    assert {"states_kernel", "dstates_kernel"} | own < set(launches)
    assert ("single_kernel" in launches) == config.single != ("out_kernel" in launches)
    assert ("local_states_kernel" in launches) == ("local_dstates_kernel" in launches) == (config.splits > 1)
    assert (config.splits > 1) == (member == "long")
    for name, launch in launches.items():
        if member == "long" and name in ("gradients_kernel", "decays_kernel"):
            continue  # as of "batched"
        report = report_of(launch, target)
        if target != "gfx942" and dtype == "bfloat16":
            most = SPILLS[target, member].get(name.removesuffix("_kernel"), 0)
            assert report.spills <= most, (name, report, config)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_scores_of_a_key_decay_need_not_spill(target):
    sizes = {"B": 1, "T": 4096, "H": 16, "D": 128}
    problem = example_problem("kernel_delta_attention", sizes, "bfloat16", {})
    tile = Tile(32, 64, 4, 1)
    config = next(x for x in compiled.candidates(problem, DEVICES[target]) if x.scores == tile)
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct((1, 4096, 16, *sizes), jnp.bfloat16)
    arrays = RecurrenceArrays(*(shape(128) for _ in "qkv"), g=shape(128), beta=shape())
    launches = launches_of(arrays, RecurrenceSpec(0.1, KEY, delta=True), config, backward=False)
    assert report_of(launches["delta_key_scores_kernel"], target).spills == 0


def test_candidates_begin_with_the_heuristic_and_differ():
    for member in ("batched", "ssd", "packed"):
        problem = problem_of("linear_attention", *request(member, 128, "bfloat16"))
        configs = compiled.candidates(problem, DEVICES["sm_90"])
        assert configs[0] == compiled.default_config(problem, DEVICES["sm_90"])
        assert 1 < len(set(configs)) == len(configs) <= 12


def test_one_kernel_for_the_outputs_by_how_many_programs_there_are(monkeypatch):
    """The heuristic's way, where Hopper's kernel is left out, and that of a configuration that was measured at another batch size, whose other tiles
    stay. Sequences are split where there would be few programs."""
    monkeypatch.setattr(hopper, "tiles", lambda *_: [])
    sm_90 = DEVICES["sm_90"]

    def problem(operation: str, batch: int, length: int = 4096) -> Any:
        return example_problem(operation, {"B": batch, "T": length, "H": 16, "D": 128}, "bfloat16", {})

    small, usual, large = (problem("lightning_attention", batch) for batch in (1, 4, 16))
    config = compiled.default_config(usual, sm_90)
    assert config.single and config.out == Tile(128, 32, 4, 3)
    tiles = dataclasses.replace(config, gradients=Tile(128, 32, 4, 1))
    for of in (small, large):
        fit, heuristic = compiled.adapted(tiles, of, sm_90), compiled.default_config(of, sm_90)
        assert fit == dataclasses.replace(heuristic, gradients=tiles.gradients)
    assert compiled.adapted(tiles, small, sm_90).splits == 8 and config.splits == 1
    assert not compiled.adapted(tiles, problem("lightning_attention", 1, 256), sm_90).single
    assert compiled.adapted(tiles, large, sm_90).out == Tile(128, 64, 4, 2)
    first, *others = compiled.candidates(problem("gated_linear_attention", 1), sm_90)
    assert first.splits == 8 and {config.splits for config in others} == {4, 8, 16}
    delta = compiled.default_config(problem("delta_rule", 4), sm_90)
    assert compiled.adapted(delta, problem("delta_rule", 16), sm_90) == delta and delta.splits == 1
    # What a split of a delta rule makes of the identity takes as many programs again: not for two splits, nor for short ones.
    for batch, length, splits in ((1, 8192, 4), (2, 8192, 1), (1, 4096, 1)):
        few = problem("delta_rule", batch, length)
        assert compiled.default_config(few, sm_90).splits == splits
        assert compiled.adapted(delta, few, sm_90).splits == splits


@pytest.mark.slow
@pytest.mark.parametrize("target, decay", [("sm_80", KEY), ("sm_90", SCALAR), ("sm_100", KEY)])
def test_delta_rules_in_splits_fit(target, decay):
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct((1, 8192, 16, *sizes), jnp.bfloat16)
    gates: Any = shape(128) if decay == KEY else jax.ShapeDtypeStruct((1, 8192, 16), jnp.float32)
    arrays = RecurrenceArrays(*(shape(128) for _ in "qkv"), g=gates, beta=shape())
    spec = RecurrenceSpec(0.1, decay, delta=True)
    config = compiled.default_config(problem_of("delta_rule", arrays, spec), DEVICES[target])
    launches = launches_of(arrays, spec, dataclasses.replace(config, splits=4))
    for name in ("delta_local_states_kernel", "delta_local_dstates_kernel", "delta_chain_kernel"):
        report = report_of(launches[name], target)
        assert report.spills <= 64, (name, report)


# Bytes a thread. Of the gradients most are those of strong decays, which are rare and have a branch of their own.
RANK_ONE_SPILLS = {
    ("sm_80", "scores"): 464,
    ("sm_80", "pairs"): 384,
    ("sm_80", "gradients"): 704,
    ("sm_90", "scores"): 744,
    ("sm_90", "gradients"): 864,
    ("sm_100", "scores"): 768,
    ("sm_100", "states"): 256,
    ("sm_100", "dstates"): 264,
    ("sm_100", "gradients"): 440,
}


@pytest.mark.slow
@pytest.mark.parametrize("dim, dtype", [(128, "bfloat16"), (64, "bfloat16"), (128, "float32")])
@pytest.mark.parametrize("target", DEVICES)
def test_transitions_of_rank_one_fit(target, dim, dtype):
    """With every option, and in splits."""
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct((1, 8000, 16, *sizes), jnp.dtype(dtype))
    gates: Any = jax.ShapeDtypeStruct((1, 8000, 16, dim), jnp.float32)
    arrays = RecurrenceArrays(*(shape(dim) for _ in "qkv"), g=gates, a=shape(dim), b=shape(dim))
    state: Any = jax.ShapeDtypeStruct((1, 16, dim, dim), jnp.float32)
    starts: Any = jax.ShapeDtypeStruct((1, 8000), jnp.int32)
    arrays, spec = arrays._replace(initial_state=state, starts=starts), RecurrenceSpec(0.1, KEY)
    config = compiled.default_config(problem_of("dplr_delta_rule", arrays, spec), DEVICES[target])
    config = dataclasses.replace(config, splits=4)
    forward = launches_of(arrays, spec, config, backward=False)
    backward = launches_of(arrays, spec, config)
    for name in "scores local_states states local_dstates dstates pairs gradients".split():
        for launches in (forward, backward):
            if (launch := launches.get(f"rank_one_{name}_kernel")) is None:
                assert launches is forward and name not in ("scores", "local_states", "states")
                continue
            report = report_of(launch, target)
            if target != "gfx942" and dtype == "bfloat16":
                assert report.spills <= RANK_ONE_SPILLS.get((target, name), 0), (name, report, config)
