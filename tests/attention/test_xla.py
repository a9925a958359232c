import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.attention import reference, xla
from ejkernel_eqx.attention.example import example_problem
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionGrads, AttentionSpec
from ejkernel_eqx.dispatch import Backend, device_facts, DeviceFacts
from tests.attention.cases import Case, CASES, EMPTY, every_fourth, EVERYTHING, make, poison, xla_tiles
from tests.meshes import COLLECTIVE
from tests.tolerances import assert_close, errors, TOLERANCES

DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
TILES = (xla.XlaConfig(xla.XlaTile(64, 48), xla.XlaTile(32, 64)), xla_tiles(32, 128), xla_tiles(512, 512))


class Result(NamedTuple):
    out: Any
    lse: Any
    grads: Any


def cotangents(case: Case, seed: int = 1) -> tuple[Array, Array]:
    """For the output and for the log-sum-exp."""
    rng = np.random.default_rng(seed)
    dout, dlse = (
        rng.standard_normal((case.B, case.T, case.H, case.V)),
        rng.standard_normal((case.B, case.H, case.T)),
    )
    return jnp.asarray(dout, case.dtype), jnp.asarray(dlse, wide(case.dtype))


def wide(dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def _run_xla(
    arrays: AttentionArrays, dout: Array, dlse: Array, spec: AttentionSpec, config: xla.XlaConfig
) -> Result:
    out, lse = xla.forward(arrays, spec, config)
    return Result(out, lse, xla.backward(arrays, spec, config, out, lse, dout, dlse))


run_xla = jax.jit(_run_xla, static_argnums=(3, 4))


@functools.partial(jax.jit, static_argnums=3)
def _run_reference(arrays: AttentionArrays, dout: Array, dlse: Array, spec: AttentionSpec) -> Result:
    given = {n: getattr(arrays, n) for n in DIFFERENTIABLE if getattr(arrays, n) is not None}
    (out, lse), vjp = jax.vjp(lambda given: reference.attend(arrays._replace(**given), spec), given)
    return Result(out, lse, AttentionGrads(**vjp((dout, dlse))[0]))


def run_reference(arrays: AttentionArrays, dout: Array, dlse: Array, spec: AttentionSpec) -> Result:
    """The oracle, in float64 whatever the problem's dtype."""
    host = jax.tree.map(np.asarray, (arrays, dout, dlse))
    with jax.enable_x64(True):
        double = [
            jnp.asarray(x.astype(dtype), dtype)
            for x in jax.tree.leaves(host)
            for dtype in [np.dtype(np.float64) if _inexact(x) else x.dtype]
        ]
        tree = jax.tree.unflatten(jax.tree.structure(host), double)
        return jax.tree.map(np.asarray, _run_reference(*tree, spec))


def _inexact(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def assert_gradient_close(
    actual: Array, exact: np.ndarray, part: np.ndarray | None, dtype: str, name: str
) -> None:
    """As `assert_close`, measuring by the larger of `exact` and its cancelling `part`."""
    if part is None or not part.any():
        return assert_close(actual, exact, dtype, "gradient", name=name)
    for kind, size in (("rms", lambda x: np.sqrt(np.mean(x**2))), ("peak", lambda x: np.abs(x).max())):
        measured = getattr(errors(actual, exact, max(size(exact), size(part))), kind)
        allowed = getattr(TOLERANCES[dtype]["gradient"], kind)
        assert measured <= allowed, f"{name} ({dtype}): {kind} error {measured:.3g}, allowed {allowed:.3g}"


def cancelling_part(arrays: AttentionArrays, dout: Array, expected: Result, spec: AttentionSpec):
    """The part of the exact gradients that goes through `delta = rowsum(dout * out)`, for 16-bit problems.

    A backward is given `out` as it was stored, in 16 bits, so this part is as uncertain as that. Where it is
    larger than the gradient itself (a query with few keys), it is what the error has to be measured by.
    """
    if arrays.q.dtype.itemsize != 2:
        return None
    delta = (np.asarray(dout, np.float64) * expected.out).sum(-1).swapaxes(1, 2)
    return run_reference(arrays, jnp.zeros_like(dout), jnp.asarray(delta, jnp.float32), spec).grads


def check(case: Case, config: xla.XlaConfig, run=run_xla) -> None:
    """Output, log-sum-exp and all gradients against the reference; the same from poisoned arrays, bit for bit."""
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    actual, expected = run(arrays, dout, dlse, spec, config), run_reference(arrays, dout, dlse, spec)
    assert actual.out.dtype == arrays.q.dtype and actual.lse.dtype == wide(case.dtype)
    assert_close(actual.out, expected.out, case.dtype, "forward", name="out")
    assert_close(actual.lse, expected.lse, case.dtype, "forward", name="lse")
    through_delta = cancelling_part(arrays, dout, expected, spec)
    for name in DIFFERENTIABLE:
        gradient, array = getattr(actual.grads, name), getattr(arrays, name)
        if array is None:
            assert gradient is None
            continue
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
        exact, part = getattr(expected.grads, name), getattr(through_delta, name, None)
        assert_gradient_close(gradient, exact, part, case.dtype, f"gradient of {name}")
    poisoned = run(poison(case, arrays), dout, dlse, spec, config)
    for clean, again in zip(jax.tree.leaves(actual), jax.tree.leaves(poisoned), strict=True):
        np.testing.assert_array_equal(np.asarray(clean), np.asarray(again))


@pytest.mark.few(1)
@pytest.mark.parametrize("n", every_fourth(CASES))
def test_agrees_with_reference(n):
    check(CASES[n], TILES[n % len(TILES)])


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [*EMPTY], ids=lambda case: case.name)
def test_empty(case):
    check(case, TILES[0])


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 23, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 31))])
def test_float64(n, enable_x64):
    check(dataclasses.replace(CASES[n], dtype="float64"), TILES[0], run_xla)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data):
    lengths, flag = st.integers(1, 70), st.booleans()
    window = st.one_of(st.none(), st.integers(0, 40))
    pattern = st.sampled_from(
        [None, "BHTS", "1HTS", "B1TS", "BH1S", "BHT1", "1H11", "11TS", "B11S", "111S", "B1T1"]
    )
    kv_heads = data.draw(st.integers(1, 3))
    case = Case(
        name="random",
        B=data.draw(st.integers(1, 3)),
        T=data.draw(lengths),
        S=data.draw(lengths),
        H=kv_heads * data.draw(st.integers(1, 3)),
        K=kv_heads,
        D=data.draw(st.integers(1, 40)),
        V=data.draw(st.integers(1, 40)),
        left=data.draw(window),
        right=data.draw(window),
        offset=data.draw(st.integers(-20, 40)),
        soft_cap=data.draw(st.sampled_from([None, 2.0])),
        bias=data.draw(pattern),
        alibi=data.draw(st.sampled_from([None, "1H", "BH"])),
        sinks=data.draw(st.sampled_from([None, "1H", "BH"])),
        mask=data.draw(pattern),
        segments=data.draw(flag),
        dropout=data.draw(st.sampled_from([0.0, 0.4])),
    )
    forward, backward = (
        xla.XlaTile(data.draw(st.integers(1, 80)), data.draw(st.integers(1, 80))) for _ in range(2)
    )
    check(case, xla.XlaConfig(forward, backward))


def test_repeats_bit_for_bit():
    arrays, spec = make(EVERYTHING)
    first, second = (run_xla(arrays, *cotangents(EVERYTHING), spec, TILES[0]) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_vmap():
    arrays, spec = make(dataclasses.replace(EVERYTHING, B=4))
    dout, dlse = cotangents(dataclasses.replace(EVERYTHING, B=4))
    expected = run_xla(arrays, dout, dlse, spec, TILES[0])
    # What is shared by the batch is shared by the mapped axis too.
    axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, arrays)
    split = jax.tree.map(lambda x: x if x.shape[0] == 1 else x.reshape(2, 2, *x.shape[1:]), arrays)
    mapped = jax.vmap(run_xla, in_axes=(axes, 0, 0, None, None))(
        split, dout.reshape(2, 2, *dout.shape[1:]), dlse.reshape(2, 2, *dlse.shape[1:]), spec, TILES[0]
    )
    for name in ("out", "lse"):
        a, b = getattr(mapped, name), getattr(expected, name)
        assert_close(a.reshape(b.shape), b)
    for name in DIFFERENTIABLE:
        a, b = getattr(mapped.grads, name), getattr(expected.grads, name)
        a = a.reshape(b.shape) if b.shape[0] == 4 else a.sum(0)
        assert_close(a, b, kind="gradient", name=name)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, "1H1S"])
@pytest.mark.parametrize(
    "flags", [dict(), dict(right=0, sinks="1H", alibi="1H", dropout=0.1), dict(rows="packed")]
)
def test_memory_is_linear_in_length(flags, optimised, bias):
    temporary = []
    for length in (4096, 8192):
        case = Case(B=1, T=length, S=length, H=2, K=1, D=32, V=32, bias=bias, **flags)
        arrays, spec = make(case)
        dout, dlse = cotangents(case)
        config = xla.default_config(None, device_facts())
        compiled = optimised(run_xla.lower(arrays, dout, dlse, spec, config))
        analysis = compiled.memory_analysis()
        assert analysis is not None
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] <= 2.2 * temporary[0], temporary


def _place(mesh, arrays):
    """Batch over `data`, heads over `model`, whatever is broadcast on every device."""
    axes = dict(
        q="b.h.", k="b.h.", v="b.h.", bias="bh..", mask="bh..", q_segments="b.", kv_segments="b.", seeds="bh."
    )
    axes |= dict(alibi_slopes="bh", sinks="bh")

    def place(name, x):
        letters = zip(axes[name], x.shape, strict=True)
        spec = [None if n == 1 else {"b": "data", "h": "model"}.get(letter) for letter, n in letters]
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return AttentionArrays(**{n: place(n, x) for n, x in arrays._asdict().items() if x is not None})


@pytest.mark.few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "flags, reduced",
    [
        pytest.param(dict(), 0, marks=pytest.mark.slow),
        pytest.param(dict(right=0), 0, marks=pytest.mark.slow),
        (dict(right=0, segments=True, mask="B1TS", dropout=0.2, soft_cap=2.0, bias="BHTS", sinks="BH"), 0),
        # A gradient summed over the batch is one reduction for each array.
        (dict(bias="1HTS"), 1),
        (dict(bias="1H1S", sinks="1H"), 2),
    ],
)
def test_sharding_moves_no_operand(axis_type, flags, reduced):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type, axis_type))
    case = Case(B=4, T=48, S=80, H=8, K=4, D=16, V=24, **flags)
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    expected = run_xla(arrays, dout, dlse, spec, xla_tiles(32, 32))
    sharded = _place(mesh, arrays)
    dout = jax.device_put(dout, NamedSharding(mesh, P("data", None, "model")))
    dlse = jax.device_put(dlse, NamedSharding(mesh, P("data", "model")))
    with jax.set_mesh(mesh):
        text = run_xla.lower(sharded, dout, dlse, spec, xla_tiles(32, 32)).compile().as_text() or ""
        actual = run_xla(sharded, dout, dlse, spec, xla_tiles(32, 32))
    found = collections.Counter(COLLECTIVE.findall(text))
    assert set(found) <= {"all-reduce"} and found["all-reduce"] <= reduced, found
    assert actual.out.sharding.is_equivalent_to(sharded.q.sharding, 4)
    for name in ("out", "lse"):
        assert_close(getattr(actual, name), getattr(expected, name))
    for name in DIFFERENTIABLE:
        if getattr(arrays, name) is not None:
            assert_close(
                getattr(actual.grads, name), getattr(expected.grads, name), kind="gradient", name=name
            )


def test_a_constant_mask_is_not_reduced_while_compiling():
    """XLA would fold the reduction of a mask that a jitted function closes over, with an evaluator that takes seconds for what runs in
    microseconds."""
    x, mask = jnp.ones((1, 16, 1, 8)), jnp.asarray(np.tri(16, dtype=bool))
    attend = lambda x: ejx.FlashAttention(platform="xla")(x, x, x, mask=mask)
    for function, count in ((attend, 1), (jax.grad(lambda x: attend(x).sum()), 2)):
        text = jax.jit(function).lower(x).as_text()
        assert text.count("optimization_barrier") == count


def test_inside_shard_map():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    case = Case(B=2, T=33, S=33, H=4, K=4, D=8, V=8, right=0)
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    config = xla_tiles(16, 16)
    rows: Any = P("data", None, "model")
    heads: Any = P("data", "model")
    mapped = jax.shard_map(
        lambda q, k, v, dout, dlse: run_xla(AttentionArrays(q, k, v), dout, dlse, spec, config),
        mesh=mesh,
        in_specs=(rows, rows, rows, rows, heads),
        out_specs=Result(rows, heads, AttentionGrads(rows, rows, rows)),
    )
    actual = jax.jit(mapped)(arrays.q, arrays.k, arrays.v, dout, dlse)
    expected = run_xla(arrays, dout, dlse, spec, config)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, kind="gradient")


@pytest.mark.parametrize("block", [0, -1, True])
def test_config_is_validated(block):
    with pytest.raises(ValueError, match="block_k"):
        xla.XlaTile(64, block)


@pytest.mark.parametrize(
    ("dtype", "heads", "memory", "side"),
    [
        ("bfloat16", 16, 140, 1024),
        ("float32", 16, 140, 512),
        ("bfloat16", 16, 8, 512),
        ("bfloat16", 512, 8, 256),
    ],
)
def test_a_gpu_takes_the_largest_tile_that_its_memory_holds_often(dtype, heads, memory, side):
    device = DeviceFacts(Backend.GPU, "a GPU", memory=memory * 10**9)
    problem = example_problem("flash_attention", {"B": 4, "T": 4096, "H": heads, "D": 64}, dtype, {})
    tile = xla.XlaTile(side, side)
    assert (
        xla.default_config(problem, device) == xla.XlaConfig(tile, tile) == xla.candidates(problem, device)[0]
    )
    assert len(xla.candidates(problem, device)) == 12
