"""Every registered implementation of every operation is what dispatch, the tuner and `explain` take it for, and has the kernels that its
family's call asks for."""

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence

import jax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, DeviceFacts, dispatch, Platform, Problem
from ejkernel_eqx.dispatch.labels import label_of
from ejkernel_eqx.tuning.explain import example_problem_of
from tests.compiled import DEVICES
from tests.custom import kernels

TPU = DeviceFacts(Backend.TPU, "TPU v5p")
TOKENS, CHANNELS = {"B": 2, "T": 512, "H": 4, "D": 64}, {"B": 2, "T": 512, "I": 256}
PAGES = {"S": 1024, "H": 8, "K": 2, "D": 64}

# By core: sizes and flags of representative problems.
PROBLEMS: dict[str, Sequence[tuple[dict[str, int], Mapping[str, object]]]] = {
    "attention": [(TOKENS, {}), (TOKENS | {"K": 2}, {"window": "255,0"})],
    "recurrence": [(TOKENS, {}), (TOKENS, {"packed": "offsets"}), (TOKENS, {"step": True})],
    "selective_scan": [(CHANNELS, {}), (CHANNELS, {"step": True})],
    "convolution": [({"B": 2, "T": 512, "C": 256, "W": 4}, {})],
    "normalization": [({"B": 2, "M": 512, "F": 128}, {})],
    "residual": [({"B": 2, "M": 512, "F": 128}, {})],
    "cells": [
        *(({"B": 64, "T": 64, "H": 256}, {"cell": cell}) for cell in ("lstm", "gru")),
        ({"T": 9, "H": 1024}, {"packed": "offsets"}),
    ],
    "matmul": [
        ({"M": 512, "K": 256, "N": 128, "E": 8}, {}),
        (
            {"M": 64, "K": 256, "N": 128, "E": 8},
            {"gated": "pair", "activation": "silu", "transpose_rhs": True},
        ),
        ({"M": 512, "K": 256, "N": 128, "E": 8}, {"stored": "int8"}),
    ],
    "dense_matmul": [
        ({"M": 1, "K": 256, "N": 128}, {"norm": True}),
        ({"M": 8, "K": 256, "N": 128, "N1": 64}, {"bias": True}),
        ({"B": 4, "M": 16, "K": 4096, "N": 6000}, {"gated": True, "activation": "silu", "norm": True}),
        ({"M": 64, "K": 300, "N": 1024}, {"residual": True}),
    ],
    "scaled_matmul": [
        ({"M": 8192, "K": 4096, "N": 14336}, {}),
        ({"B": 2, "M": 40, "K": 300, "N": 200}, {"block": "1x128"}),
        ({"M": 8192, "K": 4096, "N": 14336, "E": 8}, {"block": "1x0"}),
        ({"M": 3, "K": 256, "N": 72}, {"block": "0x0", "x_scale": True}),
    ],
    "rotary_heads": [
        ({"T": 4, "Hq": 8, "Hk": 2, "D": 64}, {"norm": True}),
        ({"B": 2, "T": 512, "Hq": 3, "Hk": 1, "D": 96, "R": 16}, {"interleaved": True}),
    ],
    "losses": [
        ({"N": 512, "E": 64, "V": 1000}, {}),
        ({"M": 2, "N": 64, "E": 64, "V": 50}, {"reduction": "none", "bias": True}),
    ],
    "latent": [(TOKENS | {"D": 96, "V": 64, "Dr": 32}, {})],
    "paged": [(PAGES, {})],
    "pooling": [
        ({"B": 2, "T": 512, "C": 256}, {"masked": True}),
        ({"B": 2, "T": 512, "C": 256, "L": 64}, {"reduction": "max"}),
        ({"T": 512, "C": 256, "S": 8}, {"packed": True, "normalize": True}),
    ],
    "native_sparse": [
        ({"B": 2, "T": 512, "H": 4, "K": 2, "D": 64, "n": 4}, {"window": 128}),
        ({"T": 512, "H": 4, "K": 1, "D": 64, "n": 4, "N": 3}, {"packed": True, "span": 32, "stride": 16}),
    ],
    "native_pages": [
        ({"N": 3, "S": 512, "H": 4, "K": 2, "D": 64, "n": 4}, {"window": 128, "span": 32, "stride": 16})
    ],
    kernels.Square.operation: [({"B": 64, "D": 32}, {})],
    kernels.Opaque.operation: [({"B": 64, "D": 32}, {})],
}
DECODES = ("paged_attention", "ragged_decode_attention")

# By core: what a call of the family asks of a platform that JAX looks into, and of an opaque one.
CALL, SAVED = ("arrays", "spec", "config"), ("saved", "cotangents")
APPLY = {"apply": CALL}
LAUNCH = {"forward": (*CALL, "save"), "backward": (*CALL, *SAVED)}
ATTENTION = {"forward": CALL, "backward": (*CALL, "out", "lse", "dout", "dlse")}
STEP = {"step": CALL}
KERNELS: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]] = {
    "attention": (ATTENTION, ATTENTION),
    "recurrence": (APPLY | STEP, LAUNCH | STEP | {"saved_axes": ("arrays", "spec")}),
    "selective_scan": (APPLY | STEP, LAUNCH | STEP),
    "convolution": (APPLY, LAUNCH),
    "normalization": (APPLY, LAUNCH),
    "residual": (APPLY, LAUNCH),
    "cells": (APPLY, LAUNCH),
    "latent": (ATTENTION, ATTENTION),
    "paged": ({"forward": CALL}, {"forward": CALL, "write": ("arrays",)}),
    "matmul": (APPLY, LAUNCH),
    "pooling": (APPLY, LAUNCH),
    "dense_matmul": (APPLY, LAUNCH),
    "scaled_matmul": (APPLY, LAUNCH),
    "rotary_heads": (APPLY, LAUNCH),
    "losses": (LAUNCH, LAUNCH),
    "native_sparse": (LAUNCH, LAUNCH),
    "native_pages": ({"forward": CALL}, {"forward": CALL}),
}

OURS = [
    i
    for operation in ejx.kernel_registry.list_operations()
    for i in ejx.kernel_registry.ordered(operation)
    if isinstance(i.target, str) and i.target.startswith("ejkernel_eqx.")
]
CUSTOM = [
    i for kernel in (kernels.Square, kernels.Opaque) for i in ejx.kernel_registry.ordered(kernel.operation)
]


def each(implementations: list[dispatch.Implementation]) -> pytest.MarkDecorator:
    name = lambda i: f"{i.operation}-{i.platform.value}-{i.backend.value}"
    return pytest.mark.parametrize("implementation", implementations, ids=name)


def loaded(implementation: dispatch.Implementation) -> dispatch.PlatformHooks:
    if implementation.platform in (Platform.TRITON, Platform.TRITON_INTERPRET):
        pytest.importorskip("triton")
    return implementation.hooks


def problems(implementation: dispatch.Implementation, dtype: str = "bfloat16") -> list[Problem]:
    operation = implementation.operation
    # The one operation without a workload takes the problems of its family.
    make = example_problem_of("flash_attention" if operation == "attention" else operation)
    more = {"T": 8} if implementation.core == "paged" and operation not in DECODES else {}
    return [make(operation, dims | more, dtype, dict(flags)) for dims, flags in PROBLEMS[implementation.core]]


def devices(implementation: dispatch.Implementation) -> list[DeviceFacts]:
    """Those that it runs on."""
    gpus = [DEVICES["sm_80"], DEVICES["sm_90"], DEVICES["sm_100"]]
    if implementation.platform is not Platform.CUDA:
        gpus.append(DEVICES["gfx942"])
    everywhere = {Backend.GPU: gpus, Backend.TPU: [TPU], Backend.ANY: [*gpus, TPU, dispatch.device_facts()]}
    return everywhere[implementation.backend]


def test_nothing_is_left_out():
    assert len(OURS) >= 50 and {i.core for i in OURS} == set(KERNELS)
    assert {i.platform for i in CUSTOM} >= {Platform.PALLAS, Platform.TRITON, Platform.XLA}


@each(OURS + CUSTOM)
def test_it_answers_with_the_parameters_of_the_protocol(implementation):
    hooks, asked = loaded(implementation), inspect.getmembers(dispatch.PlatformHooks, inspect.isfunction)
    asked = {name: function for name, function in asked if not name.startswith("_")}
    assert {"unsupported", "default_config", "candidates", "unavailable", "adapted"} <= set(asked)
    for name, function in asked.items():
        _, *parameters = inspect.signature(function).parameters
        assert list(inspect.signature(getattr(hooks, name)).parameters) == parameters, name
    assert set(dispatch.registry.REQUIRED) <= set(dir(implementation.load()))
    assert type(hooks.OPAQUE) is bool and type(hooks.NOTE) is str
    assert type(hooks.VERSION) is int and implementation.version == hooks.VERSION >= 1
    assert set(hooks.PARTS) <= {field.name for field in dataclasses.fields(hooks.config_type)}  # pyright: ignore[reportArgumentType]
    # What only XLA itself fuses, it can look into.
    assert hooks.OPAQUE == (implementation.platform is not Platform.XLA)


@each(OURS + CUSTOM)
def test_its_configurations_can_be_kept_and_run(implementation):
    hooks = loaded(implementation)
    for device in devices(implementation):
        for problem in problems(implementation):
            default = hooks.default_config(problem, device)
            candidates = hooks.candidates(problem, device)
            assert candidates[0] == default and len(set(candidates)) == len(candidates)
            for config in candidates:
                dispatch.config.check_config(config)
                assert type(config) is hooks.config_type
                assert hooks.config_unsupported(config, problem, device) is None
                assert ejx.from_json(ejx.to_json(config), hooks.config_type) == config
                label = label_of(
                    dispatch.Selection(problem, implementation, config, dispatch.Tier.HEURISTIC, ())
                )
                (read,) = ejx.labels_to_configs([label])
                assert read.config == config and read.platform == implementation.platform.value, read.reason
            adapted = hooks.adapted(default, problem, device)
            assert type(adapted) is hooks.config_type
            assert hooks.config_unsupported(adapted, problem, device) is None


@each(OURS + CUSTOM)
def test_it_says_what_it_cannot_do_without_doing_anything(implementation):
    hooks = loaded(implementation)

    def reasons(dtype: str) -> list[str | None]:
        found = []
        ask = lambda: found.extend(
            hooks.unsupported(problem, device)
            for device in devices(implementation)
            for problem in problems(implementation, dtype)
        )
        assert not jax.make_jaxpr(ask)().eqns
        return found

    assert set(reasons("bfloat16")) == {None}
    if implementation in OURS and implementation.platform is not Platform.XLA:
        assert all(
            reason and reason.startswith("takes ") and "float64" in reason for reason in reasons("float64")
        )
    else:
        assert set(reasons("float64")) == {None}


@each(OURS + CUSTOM)
def test_it_says_where_it_does_not_run(implementation):
    loaded(implementation)
    for device in (TPU, dispatch.device_facts(), DeviceFacts(Backend.GPU, "Old", "nvidia", "7.5")):
        reason = implementation.unusable(device)
        if implementation.backend not in (Backend.ANY, device.backend):
            needs = implementation.backend.value.upper()
            assert reason == f"needs a {needs}, the device is {device.kind} ({device.backend.value})"
        elif implementation.backend is Backend.GPU:
            assert reason == "needs compute capability 8.0 or newer, the device has 7.5"
        else:
            assert reason is None


@each(OURS)
def test_it_has_the_kernels_of_its_family(implementation):
    opaque, platform = loaded(implementation).OPAQUE, implementation.load()
    wanted = KERNELS[implementation.core][opaque]
    if implementation.platform is Platform.CUDA:  # a vendor's call with a derivative of its own
        wanted = {"attend": ("arrays", "spec")}
    for name, parameters in wanted.items():
        taken = inspect.signature(getattr(platform, name)).parameters.values()
        # What its own family may ask for besides has a default.
        extra = [p for p in taken if p.kind is p.KEYWORD_ONLY and p.name not in parameters]
        assert all(p.default is not p.empty for p in extra), name
        assert tuple(p.name for p in taken if p not in extra) == parameters, name


# What kernels are compiled for: not for each length, and in float32 not for products of less than its precision.

TRITON = [i for i in OURS if i.platform is Platform.TRITON]
ONE_PER_CORE = list({i.core: i for i in reversed(TRITON)}.values())


def _shorter(problem: Problem, by: int) -> Problem:
    """The problem with every length reduced, so that it stays in its bucket."""
    dims = {n: size - by if n in problem.lengths and size > 16 else size for n, size in problem.dims}
    return dataclasses.replace(problem, dims=tuple(sorted(dims.items())))


@pytest.mark.few(5)
@each(ONE_PER_CORE)
def test_neighbouring_lengths_share_kernels(implementation):
    """They are told apart by whether tiles are full, and by nothing else."""
    hooks, device = loaded(implementation), DEVICES["sm_90"]
    problem = problems(implementation)[0]
    config = hooks.default_config(problem, device)
    kernels = []
    for by in (3, 5):
        work = implementation.make_workload(_shorter(problem, by))
        assert work is not None and work.launches is not None
        kernels.append([(launch.function, launch.constants) for launch in work.launches(config)])
    assert kernels[0] and kernels[0] == kernels[1]


@each(TRITON)
def test_products_of_float32_are_not_rounded_to_tf32(implementation):
    """Neither by default nor in any configuration that a tuner may choose."""
    hooks = loaded(implementation)
    for device in devices(implementation):
        for problem in problems(implementation, "float32"):
            for config in hooks.candidates(problem, device):
                assert '"tf32"' not in json.dumps(ejx.to_json(config)), (device.kind, config)
