"""Recurrences on a GPU: the Triton kernels against the float64 reference, and what only a GPU can show.

python -m pytest tests/gpu/test_recurrence_gpu.py -n 8
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.launch import gluon_unavailable
from ejkernel_eqx.recurrence import samples
from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.spec import KEY, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR
from tests.gpu import host
from tests.gpu.host import example_problem
from tests.recurrence.cases import (
    assert_agrees,
    BEFORE,
    Case,
    CASES,
    CLOSED,
    CONSTANT,
    cotangents,
    DPLR,
    make,
    Result,
    run_reference,
    scale_of_constant,
)
from tests.tolerances import assert_close

pytest.importorskip("triton")
from ejkernel_eqx.recurrence.triton import splits as splitting

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATION = "linear_attention"  # the kernels are those of every operation of the core
NEEDS = OPERATION
TRITON = kernel_registry.get(OPERATION, "triton")
REPEATS = 4


@functools.partial(jax.jit, static_argnums=(3, 4))
def run_triton(
    arrays: RecurrenceArrays, dout: Array, dstate: Array, spec: RecurrenceSpec, config: Any
) -> Result:
    kernels = TRITON.load()
    results = dict(kernels.forward(arrays, spec, config))
    out, state = results.pop("out"), results.pop("final_state")
    grads = kernels.backward(arrays, spec, config, results, {"out": dout, "final_state": dstate})
    return Result(out, state, {name: x.astype(getattr(arrays, name).dtype) for name, x in grads.items()})


def on_host(function, *arguments):
    """The float64 reference runs on the CPU, beside the device under test."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*jax.tree.map(np.asarray, arguments[:-1]), arguments[-1])


def same(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(bool(jnp.array_equal(a, b)) for a, b in pairs)


def default_config(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> Any:
    return host.default_config(OPERATION, problem_of(OPERATION, arrays, spec))


def masked(case: Case, arrays: RecurrenceArrays, result: Result) -> Result:
    """As the core has it: what tokens of no sequence give is zero."""
    if arrays.offsets is None:
        return result
    tokens = jnp.arange(case.T)
    real = (tokens[None] >= arrays.offsets[:, :1]) & (tokens[None] < arrays.offsets[:, -1:])

    def clean(name: str, x: Array) -> Array:
        if name in ("skip", "initial_state") or (name == "g" and case.decay == "constant"):
            return x
        return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    grads = {name: clean(name, x) for name, x in result.grads.items()}
    return Result(clean("out", result.out), result.final_state, grads)


IN_16_BITS = [
    dataclasses.replace(case, dtype=dtype, name=f"{case.name}, {dtype}")
    for case in (*CLOSED, DPLR[-1])
    for dtype in ("bfloat16", "float16")
]


@pytest.mark.parametrize("case", [*CASES, *CLOSED, *DPLR, *BEFORE, *IN_16_BITS], ids=lambda case: case.name)
def test_triton(case):
    """Output, final state and all gradients; the same bit for bit when run again."""
    arrays, spec = make(case)
    config = default_config(arrays, spec)
    dout, dstate = cotangents(case)
    actual = run_triton(arrays, dout, dstate, spec, config)
    exact = on_host(run_reference, arrays, dout, dstate, spec)
    scales = {}
    if case in IN_16_BITS and case.decay == CONSTANT:
        scales = {"g": on_host(scale_of_constant, arrays, dout, dstate, spec)}
    assert_agrees(case, masked(case, arrays, actual), exact, scales)
    for _ in range(REPEATS - 1):
        again = run_triton(arrays, dout, dstate, spec, config)
        assert same(masked(case, arrays, actual), masked(case, arrays, again))


WHOLE = Case(T=512, D=128, V=128, decay=SCALAR, dtype="bfloat16")
EVERYTHING: dict[str, Any] = dict(beta=1.0, skip=True, initial_state=True)
MANY: dict[str, Any] = dict(B=1, Hq=1, Hk=1, Hv=32, Hg=32, Hb=32, V=64, beta=1.0)
HOPPER = [
    dataclasses.replace(WHOLE, name="one a token"),
    dataclasses.replace(WHOLE, name="everything", **EVERYTHING),
    dataclasses.replace(WHOLE, name="none", decay=NONE),
    dataclasses.replace(WHOLE, name="none, everything", decay=NONE, **EVERYTHING),
    dataclasses.replace(WHOLE, name="constant", decay=CONSTANT, log_decays=-0.02),
    dataclasses.replace(WHOLE, name="strong", log_decays=-50.0),
    dataclasses.replace(WHOLE, name="taken apart", log_decays=-0.9, skip=True, initial_state=True),
    dataclasses.replace(WHOLE, name="mixed", log_decays="mixed", skip=True),
    dataclasses.replace(WHOLE, name="closed", log_decays="closed", initial_state=True),
    dataclasses.replace(WHOLE, name="heads that share", Hq=1, Hk=1, Hv=4, Hg=4, Hb=4, V=64, **EVERYTHING),
    dataclasses.replace(WHOLE, name="many heads that share", **MANY | EVERYTHING),
    dataclasses.replace(WHOLE, name="many heads that share, mixed", log_decays="mixed", **MANY),
    dataclasses.replace(WHOLE, name="many heads that share, closed", log_decays="closed", D=64, **MANY),
    dataclasses.replace(WHOLE, name="64 channels", D=64, V=64, Hv=4, Hg=2, state_dtype="bfloat16"),
    dataclasses.replace(WHOLE, name="256 values", V=256, Hv=4, Hg=1, decay=CONSTANT),
]


@functools.cache
def exact_of(case: Case) -> Result:
    arrays, spec = make(case)
    return on_host(run_reference, arrays, *cotangents(case), spec)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("block_v, stages", [(128, 3), (64, 4), (64, 2)])
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.name)
def test_hoppers_single_pass(case, block_v, stages, splits, monkeypatch):
    """Output and final state; the same bit for bit when run again, on a device that is full."""
    monkeypatch.setattr("ejkernel_eqx.recurrence.triton.hopper.tile_sizes.LEAST_ROWS", 0)
    if (reason := gluon_unavailable(device_facts())) is not None:
        pytest.skip(f"Hopper's kernel {reason}")
    arrays, spec = make(case)
    config = default_config(arrays, spec)
    tile = dataclasses.replace(config.out, block_k=case.D, block_v=block_v, num_warps=4, num_stages=stages)
    config = dataclasses.replace(
        config, single=True, splits=splits, out=dataclasses.replace(tile, hopper=True)
    )
    if TRITON.load().config_unsupported(config, problem_of(OPERATION, arrays, spec), device_facts()):
        pytest.skip("no tile of this problem")
    forward = jax.jit(lambda arrays: TRITON.load().forward(arrays, spec, config))
    actual = forward(arrays)
    exact = exact_of(case)
    assert_close(actual["out"], exact.out, case.dtype, "forward", name="out")
    assert_close(actual["final_state"], exact.final_state, case.dtype, "forward", name="final_state")
    many = arrays._replace(
        **{
            name: jnp.tile(x, (32, *(1,) * (x.ndim - 1)))
            for name, x in arrays._asdict().items()
            if x is not None
        }
    )
    found = forward(many)
    for name in ("out", "final_state"):
        assert same(found[name], jnp.tile(actual[name], (32, *(1,) * (actual[name].ndim - 1))))


LONG = Case(T=1000, D=128, V=128, decay=SCALAR, dtype="bfloat16", initial_state=True)
SPLIT = [
    dataclasses.replace(LONG, name="one a token"),
    dataclasses.replace(LONG, name="slow", log_decays=-0.002, skip=True),
    dataclasses.replace(LONG, name="constant", decay=CONSTANT, log_decays=-0.01),
    dataclasses.replace(LONG, name="by key", decay=KEY),
    dataclasses.replace(LONG, name="delta", delta=True, beta=1.0),
    dataclasses.replace(LONG, name="delta, packed", delta=True, beta=1.0, packing="offsets"),
    dataclasses.replace(LONG, name="delta by key", decay=KEY, delta=True, beta=1.0),
    dataclasses.replace(
        LONG, name="delta by key, segments", decay=KEY, delta=True, beta=1.0, packing="segments"
    ),
    dataclasses.replace(LONG, name="dplr", decay=KEY, rank_one=1.0),
    dataclasses.replace(LONG, name="dplr, segments", decay=KEY, rank_one=1.0, packing="segments"),
]


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_sequences_in_splits(case, monkeypatch):
    """Output, final state and all gradients; the same bit for bit when run again."""
    monkeypatch.setattr(splitting, "LEAST_PIECE", 2)
    arrays, spec = make(case)
    config = dataclasses.replace(default_config(arrays, spec), splits=3)
    if config.out.hopper:  # takes whole splits only
        config = dataclasses.replace(config, out=dataclasses.replace(config.out, hopper=False, block_v=64))
    dout, dstate = cotangents(case)
    actual = run_triton(arrays, dout, dstate, spec, config)
    exact = on_host(run_reference, arrays, dout, dstate, spec)
    assert_agrees(case, masked(case, arrays, actual), exact)
    again = run_triton(arrays, dout, dstate, spec, config)
    assert same(masked(case, arrays, actual), masked(case, arrays, again))


@pytest.mark.parametrize("decay", ["none", "constant", "one a token", "by key", "normalized"])
def test_states_past_the_largest_float16(decay):
    """Four in every key and value, and queries as small as make outputs that float16 holds; and the same backward, from the last state."""
    length, heads, dim = 4608, 2, 128
    four = jnp.full((2, length, heads, dim), 4, jnp.float16)
    q, k, v = jnp.full_like(four, 2**-5), four, four
    zeros: Any = {
        "constant": {"g_gamma": jnp.zeros(heads)},
        "one a token": {"g": jnp.zeros((2, length, heads))},
        "by key": {"gk": jnp.zeros((2, length, heads, dim))},
    }.get(decay, {})

    def run(platform):
        module = ejx.LinearAttention(normalize=decay == "normalized", platform=platform)

        def total(q, initial):
            state = (initial, initial[..., 0]) if module.normalize else initial
            out, final = module(q, k, v, initial_state=state, **zeros)
            return 2e5 * jax.tree.leaves(final)[0].sum() + 2**-8 * out.astype(jnp.float32).sum(), (out, final)

        initial = jnp.ones((2, heads, dim, dim))
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(q, initial)

    ((_, results), gradients), ((_, expected), wanted) = run("triton"), run("xla")
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 65504
    assert bool(jnp.isfinite(expected[0]).all())
    for actual, exact in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert_close(actual, exact, "float16")
    # All values are alike: a weighted mean of them does not depend on its weights. What cancels in its gradient is this large.
    scale = 2**-8 * 4 / 2**-5 if decay == "normalized" else None
    for actual, exact in zip(gradients, wanted, strict=True):
        assert_close(actual, exact, "float16", "gradient", scale=scale)


LAYERS = {
    "gated_linear_attention": {},
    "lightning_attention": {},
    "linear_attention": {"decay": "scalar"},
    "kernel_delta_attention": {},
    "gated_delta_rule": {},
    "delta_rule": {},
    "dplr_delta_rule": {},
    "state_space_v2": {},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("packed", [None, "segments", "offsets"])
@pytest.mark.parametrize("operation", LAYERS)
def test_layers_at_their_size(operation, packed, dtype):
    """Sizes, chunks and configurations as in a model, against the recurrence token by token; repeated on a full device."""
    dims = dict(B=2, T=1000, H=16, D=128) | ({"N": 5} if packed == "offsets" else {})
    dims |= {"V": 64} if operation == "state_space_v2" else {}
    check_layer(operation, dims, LAYERS[operation] | ({"packed": packed} if packed else {}), dtype)


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kernel_delta_attention", "state_space_v2"])
def test_narrow_layers_at_their_size(operation):
    check_layer(operation, dict(B=2, T=1000, H=12, D=64), LAYERS[operation], "bfloat16")


def check_layer(operation, dims, flags, dtype):
    problem = example_problem(operation, dims, dtype, flags)
    config, work = host.default_config(operation, problem), host.work_of(operation, problem)
    inputs = work.make_inputs(1)
    run = jax.jit(work.run, static_argnums=1)
    with jax.default_matmul_precision("highest"):
        exact = work.reference(inputs)
    actual = run(inputs, config)
    for name, allowed in work.tolerances.items():
        kind = "forward" if name in work.forward else "gradient"
        assert_close(actual[name], exact[name], dtype, kind, name=name)
        assert allowed.rms > 0
    for _ in range(REPEATS - 1):
        assert same(actual, run(inputs, config))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("member", ["delta_product", "state_space_v3"])
def test_operations_of_these_kernels(member, dtype):
    """Operations that only prepare operands, with gradients, over the same on XLA."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    normal = lambda *shape: jax.random.normal(next(keys), (2, 500, *shape))
    if member == "delta_product":
        make: Any = functools.partial(ejx.DeltaProduct, use_qk_l2norm=True)
        arrays = [normal(4, 128).astype(dtype), *(normal(2, 4, 128).astype(dtype) for _ in range(2))]
        arrays += [jax.nn.sigmoid(normal(2, 4)).astype(dtype)]
        named = {"g": jax.nn.log_sigmoid(normal(4) + 2)}
    else:
        make, dt = ejx.StateSpaceV3, jax.nn.softplus(normal(4) - 2)
        ranks = (normal(2, 1, 64).astype(dtype) for _ in range(2))
        arrays = [
            normal(4, 64).astype(dtype),
            dt,
            -dt,
            *ranks,
            jax.nn.sigmoid(normal(4)),
            0.1 * normal(1, 16),
        ]
        named = {"D": jnp.ones(4)}

    def run(platform):
        def total(arrays, named):
            out, state = make(platform=platform)(*arrays, **named)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves((out, state))), out

        (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(arrays, named)
        return out, jax.tree.leaves(gradients)

    (out, gradients), (exact, wanted) = run("triton"), run("xla")
    assert_close(out, exact, dtype)
    for n, (gradient, other) in enumerate(zip(gradients, wanted, strict=True)):
        assert_close(gradient, other, dtype, "gradient", name=str(n))


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("operation", LAYERS)
def test_a_step(operation, slots):
    problem = example_problem(
        operation, dict(B=16, H=16, D=128), "bfloat16", LAYERS[operation] | {"step": True, "slots": slots}
    )
    config, work = host.default_config(operation, problem), host.work_of(operation, problem)
    arrays = work.make_inputs(0)
    if slots:
        arrays = arrays._replace(indices=arrays.indices.at[3].set(-1))
    actual = jax.jit(work.run, static_argnums=1)(arrays, config)
    with jax.default_matmul_precision("highest"):
        exact = work.reference(arrays)
    assert_close(actual["out"], exact["out"], "bfloat16", "forward", name="out")
    assert_close(actual["state"], exact["state"], "float32", "forward", name="state")


def test_a_donated_state_is_written_in_place():
    delta = ejx.GatedDeltaRule(platform="triton")
    rows, heads, dim = 64, 16, 128
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (rows, heads, dim), jnp.bfloat16) / dim**0.5 for key in keys)
    g, beta = jnp.full((rows, heads), -0.1), jnp.full((rows, heads), 0.5, jnp.bfloat16)
    state = jnp.ones((rows, heads, dim, dim))
    kept = delta.step(q, k, v, g, beta, state)[1]
    step = jax.jit(lambda state: delta.step(q, k, v, g, beta, state)[1], donate_argnums=0)
    analysis = step.lower(state).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= state.nbytes and analysis.temp_size_in_bytes < state.nbytes // 8
    assert same(step(state), kept)


def test_vmap_is_one_batched_call():
    gla = ejx.GatedLinearAttention(platform="triton")
    case = Case(B=3, T=100, decay="key", D=64, V=64, dtype="bfloat16")
    arrays, _ = make(case)
    assert arrays.g is not None
    operands = (arrays.q, arrays.k, arrays.v, arrays.g)

    def loss(q, k, v, g):
        out, state = gla(q, k, v, g)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state)

    together = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*operands)
    mapped = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 3))))(*operands)
    assert same(together, mapped)


def test_memory_of_a_state_space_is_linear_and_small():
    """Forward and backward: under three times what goes in and out, at the size of a layer."""
    sizes = {}
    for length in (2048, 4096):
        problem = example_problem("state_space_v2", dict(B=4, T=length, H=64, D=128, V=64), "bfloat16", {})
        config, work = host.default_config("state_space_v2", problem), host.work_of("state_space_v2", problem)
        inputs = jax.eval_shape(lambda work=work: work.make_inputs(0))
        compiled = jax.jit(lambda x, work=work, config=config: work.run(x, config)).lower(inputs).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        whole = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        assert analysis.temp_size_in_bytes < 3 * whole
        sizes[length] = analysis.temp_size_in_bytes
    assert sizes[4096] < 2.2 * sizes[2048]


# Offsets past 2^31 elements, and grids past 65535 programs. Rows repeat, so that a slice below is the oracle.


@pytest.mark.memory(42)
@pytest.mark.parametrize("key_dim, value_dim", [(128, 16), (16, 128)])
@pytest.mark.parametrize(
    "member",
    [
        # Decays by key are in float32: twice the size of the keys.
        pytest.param("gated_linear_attention", marks=pytest.mark.memory(62)),
        "gated_delta_rule",
        "lightning_attention",
    ],
)
def test_rows_past_two_to_the_31_elements(member, key_dim, value_dim):
    """Keys of more than 2**31 numbers, then values: both together are too much for most cards."""
    heads, length = 32, 2048
    rows = 2**31 // (length * heads * 128) + 2
    problem = example_problem(member, dict(B=2, T=length, H=heads, D=key_dim, V=value_dim), "bfloat16", {})
    few, spec = samples.make_inputs(problem, 0).arrays, samples.spec_of(problem)
    many = jax.tree.map(lambda x: jnp.tile(x, (rows // 2, *(1,) * (x.ndim - 1))), few)
    kernels = TRITON.load()
    config = default_config(few, spec)

    @jax.jit
    def run(arrays):
        results = dict(kernels.forward(arrays, spec, config))
        out, state = results.pop("out"), results.pop("final_state")
        grads = kernels.backward(arrays, spec, config, results, {"out": out, "final_state": state})
        return out, state, grads["q"], grads["k"], grads["v"]

    small, large = run(few), run(many)
    assert max(many.k.size, many.v.size) > 2**31
    for a, b in zip(small, large, strict=True):
        for first in (0, rows // 2 // 2 * 2, rows - 2):
            assert bool(jnp.array_equal(a, b[first : first + 2]))


@pytest.mark.parametrize("member", ["gated_linear_attention", "gated_delta_rule", "lightning_attention"])
def test_very_many_short_rows(member):
    problem = example_problem(member, dict(B=8, T=5, H=16, D=16), "bfloat16", {})
    few, spec = samples.make_inputs(problem, 0).arrays, samples.spec_of(problem)
    many = jax.tree.map(lambda x: jnp.tile(x, (600, *(1,) * (x.ndim - 1))), few)  # 76,800 heads in all
    config = default_config(few, spec)
    kernels = TRITON.load()
    run = jax.jit(lambda arrays: kernels.forward(arrays, spec, config))
    small, large = run(few), run(many)
    assert bool(jnp.array_equal(small["out"], large["out"][-8:]))
    assert bool(jnp.array_equal(small["final_state"], large["final_state"][-8:]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_hard_keys_through_the_operation(dtype):
    """Keys of cosine 0.9. What is written for them nearly cancels: of bfloat16 outputs (`benchmarks/LOG.md`) no more is left than the
    tolerance allows, so a fault would not be told from it."""
    hard = next(case for case in CASES if case.name == "kda-correlated")
    case = dataclasses.replace(hard, dtype=dtype, beta=1.0, D=128, V=128)
    arrays, _ = make(case)
    assert arrays.g is not None and arrays.beta is not None
    kda = {name: ejx.KernelDeltaAttention(platform=name) for name in ("triton", "xla")}
    wide = [x.astype(jnp.float32) for x in arrays[:5] if x is not None]
    actual = kda["triton"](arrays.q, arrays.k, arrays.v, arrays.g, arrays.beta)
    with jax.default_matmul_precision("highest"):
        exact = kda["xla"](*wide)
    for a, b in zip(actual, exact, strict=True):
        assert_close(a, b, dtype, "forward", name="result")
