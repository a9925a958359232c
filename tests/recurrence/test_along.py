"""Tokens split over a mesh axis: every member of the linear-time family gives the numbers of one device."""

import functools
import math
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.tolerances import assert_close

T, D, V = 24, 4, 6
AXIS = "sequence"
# Padding at both ends and inside, a segment over three devices, one that ends with a device, and a device of padding alone (of eight).
IDS = jnp.asarray([[-1, 4, 4, 4, 4, 4, 4, -1, 4, 4, 2, 2, 3, 3, 3, -1, -1, -1, 3, 3, 3, 5, 5, -1], [1] * 24])


def decay(seed: int, *shape: int) -> jax.Array:
    return -jnp.abs(normal(seed, *shape)) / 4


def keys(seed: int, heads: int) -> jax.Array:
    x = normal(seed, 2, T, heads, D)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


Q, K, VALUES = normal(0, 2, T, 4, D), keys(1, 2), normal(2, 2, T, 2, V)
BETA = jax.nn.sigmoid(normal(3, 2, T, 2))
STATE = normal(4, 2, 2, D, V)
QKV = {"q": Q, "k": K, "v": VALUES}
SSD = {"x": normal(5, 2, T, 4, V), "dt": 0.3 * normal(6, 2, T, 4), "A": -jnp.exp(normal(7, 4))} | {
    "B": normal(8, 2, T, 2, D),
    "C": normal(9, 2, T, 2, D),
}
MAMBA = {"x": normal(5, 2, T, 6), "dt": 0.3 * normal(6, 2, T, 6), "A": -jnp.exp(normal(7, 6, D))} | {
    "B": normal(8, 2, T, D),
    "C": normal(9, 2, T, D),
}
MAMBA3 = {name: SSD[name][:, :, None] for name in "BC"}
MAMBA3 |= {"x": SSD["x"], "dt": jnp.abs(SSD["dt"]), "g": decay(23, 2, T, 4)}
MAMBA3 |= {"trap": jax.nn.sigmoid(normal(24, 2, T, 4)), "angles": 3 * normal(25, 2, T, 4, 2)}
# The operation, its arguments, those without a token axis, and whether it can be reversed.
CASES: dict[str, Any] = {
    "linear": (ejx.LinearAttention, {}, QKV, True),
    "linear, normalised": (
        functools.partial(ejx.LinearAttention, normalize=True),
        {},
        {"q": jnp.abs(Q), "k": jnp.abs(K), "v": VALUES},
        True,
    ),
    "scalar decay": (ejx.LinearAttention, {}, QKV | {"g": decay(10, 2, T, 2), "initial_state": STATE}, True),
    "constant decay": (ejx.LinearAttention, {"g_gamma": decay(11, 2)}, QKV, True),
    "decay of values": (ejx.LinearAttention, {}, QKV | {"gv": decay(12, 2, T, 2, V)}, False),
    "gla": (ejx.GatedLinearAttention, {}, QKV | {"g": decay(13, 2, T, 2, D), "initial_state": STATE}, True),
    "lightning": (ejx.LightningAttention, {}, QKV | {"initial_state": normal(4, 2, 4, D, V)}, True),
    "delta": (ejx.DeltaRule, {}, QKV | {"beta": BETA, "initial_state": STATE}, True),
    "gated delta": (
        ejx.GatedDeltaRule,
        {},
        QKV | {"v": normal(2, 2, T, 4, V), "g": decay(10, 2, T, 2), "beta": BETA},
        True,
    ),
    "gla, bonus": (
        ejx.GatedLinearAttention,
        {"bonus": normal(21, 4, D)},
        QKV | {"g": decay(13, 2, T, 2, D), "initial_state": STATE},
        True,
    ),
    "dplr": (
        ejx.DPLRDeltaRule,
        {},
        QKV | {"a": keys(22, 2), "b": -0.7 * keys(22, 2), "g": decay(13, 2, T, 2, D), "initial_state": STATE},
        True,
    ),
    "kda": (
        functools.partial(ejx.KernelDeltaAttention, use_qk_l2norm=True),
        {},
        QKV | {"g": decay(13, 2, T, 2, D), "beta": BETA, "initial_state": STATE},
        False,
    ),
    "ssd": (
        functools.partial(ejx.StateSpaceV2, dt_softplus=True, norm="group"),
        {"D": normal(14, 4), "dt_bias": normal(15, 4)},
        SSD | {"z": normal(16, 2, T, 4, V), "initial_state": normal(17, 2, 4, V, D)},
        True,
    ),
    "trapezoid": (
        ejx.StateSpaceV3,
        {"D": normal(14, 4)},
        MAMBA3 | {"initial_state": (normal(17, 2, 4, V, D), normal(26, 2, 4, D + V + 3))},
        True,
    ),
    "trapezoid, ranks": (
        ejx.StateSpaceV3,
        {"mimo_x": normal(27, 4, 2, V), "B_bias": normal(28, 4, 2, D)},
        MAMBA3 | {name: normal(seed, 2, T, 2, 2, D) for seed, name in ((8, "B"), (9, "C"))},
        True,
    ),
    "mamba": (
        functools.partial(ejx.StateSpaceV1, dt_softplus=True),
        {"D": normal(14, 6), "dt_bias": normal(15, 6)},
        MAMBA | {"z": normal(16, 2, T, 6), "initial_state": normal(17, 2, 6, D)},
        True,
    ),
    "convolution": (
        functools.partial(ejx.CausalConv1d, "silu"),
        {"weight": normal(18, 6, 5), "bias": normal(19, 6)},
        {"x": normal(5, 2, T, 6), "initial_state": normal(20, 2, 4, 6)},
        False,
    ),
    "delta product": (
        ejx.DeltaProduct,
        {},
        {"q": Q, "k": jnp.stack([K, keys(23, 2)], 2), "v": normal(24, 2, T, 2, 2, V)}
        | {"beta": jax.nn.sigmoid(normal(25, 2, T, 2, 2)), "g": decay(10, 2, T, 2), "initial_state": STATE},
        True,
    ),
}
WHOLE = {"A", "initial_state"}


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """Two devices as an explicit mesh, more as an automatic one."""
    kind = jax.sharding.AxisType.Explicit if devices == 2 else jax.sharding.AxisType.Auto
    return jax.make_mesh((devices,), (AXIS,), (kind,), devices=jax.devices()[:devices])


def split(build: Any, devices: int, ids: Any, check_vma: bool = True, **options: Any) -> Any:
    """The call over devices, as a function of whole arrays."""
    operation, mesh = build(sequence_axis=AXIS, **options), mesh_of(devices)
    tokens = P(None, AXIS)

    def placed(x: Any, spec: P) -> Any:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if devices == 2 else x

    def call(arrays: dict[str, jax.Array], shared: dict[str, jax.Array]) -> Any:
        specs = {name: P() if name in WHOLE else tokens for name in arrays}
        given = {} if ids is None else {"segment_ids": placed(ids, tokens)}
        arrays = {name: placed(x, specs[name]) for name, x in arrays.items()}
        shared = {name: placed(x, P()) for name, x in shared.items()}
        return jax.shard_map(
            lambda arrays, shared, given: operation(**arrays, **shared, **given),
            mesh=mesh,
            in_specs=(specs, P(), tokens),
            out_specs=(tokens, P()),
            check_vma=check_vma,
        )(arrays, shared, given)

    return call


def whole(build: Any, ids: Any, **options: Any) -> Any:
    given = {} if ids is None else {"segment_ids": ids}
    return lambda arrays, shared: build(**options)(**arrays, **shared, **given)


def results_and_gradients(call: Any) -> Any:
    def loss(arrays: Any, shared: Any) -> Any:
        results = call(arrays, shared)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(assert_close, found[0][1], expected[0][1])
    grads = dict(jax.tree_util.tree_leaves_with_path(found[1]))
    for path, x in jax.tree_util.tree_leaves_with_path(expected[1]):
        assert_close(grads[path], x, kind="gradient", name=str(path))


def compared(name: str, devices: int, ids: Any, check_vma: bool = True, **options: Any) -> None:
    build, shared, arrays, _ = CASES[name]
    over = split(build, devices, ids, check_vma, **options)
    one = whole(build, ids, **options)
    assert_same(*(results_and_gradients(call)(arrays, shared) for call in (over, one)))


OF_TWO = ("lightning", "gated delta", "ssd", "mamba", "convolution")
QUICK = {("linear", 8), ("lightning", 2)}


@pytest.mark.parametrize(
    "name, devices",
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in (*((name, 8) for name in CASES), *((name, 2) for name in OF_TWO))
    ],
)
def test_numbers_of_one_device(name, devices):
    """Two have whole rows, of one member of each family; eight have segments, from the end where that can be."""
    options = {"reverse": True} if devices == 8 and CASES[name][-1] else {}
    compared(name, devices, IDS if devices == 8 else None, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated delta", "mamba"])
def test_without_checks_of_varying_axes(name):
    compared(name, 4, IDS, check_vma=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated delta", "dplr", "gla, bonus", "mamba", "convolution"])
def test_interpreted_kernels(name):
    compared(name, 2, IDS, platform="triton-interpret")


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.integers(-1, 2), min_size=24, max_size=24), st.sampled_from(["gla", "mamba", "convolution"])
)
@pytest.mark.slow
def test_segments_wherever_devices_end(ids, name):
    compared(name, 8, jnp.asarray([ids, ids[::-1]], jnp.int32))


def sizes_in(lines: list[str]) -> list[int]:
    """Of the arrays that lines of a compiled program name."""
    return [math.prod(map(int, x.split(","))) for line in lines for x in re.findall(r"\[([\d,]+)\]", line)]


@pytest.mark.parametrize("name", ["gla", "gated delta", "convolution"])
def test_only_states_are_gathered(name):
    """Devices exchange one state each, and for delta rules its transition: nothing that has tokens."""
    build, shared, arrays, _ = CASES[name]
    text = jax.jit(split(build, 8, None)).lower(arrays, shared).compile().as_text() or ""
    gathered = re.findall(r"= (.*?) all-gather(?:-start)?\(", text)
    assert gathered and "all-to-all" not in text and "collective-permute" not in text
    heads = arrays["v"].shape[-2] if "v" in arrays else 1
    assert max(sizes_in(gathered)) <= 8 * 2 * heads * D * max(D, V)


def test_a_call_outside_of_shard_map_has_all_tokens():
    arrays = QKV | {"g": decay(13, 2, T, 2, D)}
    calls = [ejx.GatedLinearAttention(sequence_axis=axis)(**arrays) for axis in (AXIS, None)]
    for found, expected in zip(*calls, strict=True):
        assert jnp.array_equal(found, expected)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    arrays = QKV | {"g": decay(13, 2, T, 2, D)}
    with pytest.raises(ValueError, match="sequence_axis: expected an axis that shard_map has made manual"):
        split(lambda sequence_axis: ejx.GatedLinearAttention(sequence_axis="x"), 8, None)(arrays, {})
    row = {name: x[0] for name, x in arrays.items()}
    operation = ejx.GatedLinearAttention(sequence_axis=AXIS)
    packed = lambda row: operation(**row, cu_seqlens=jnp.asarray([0, 3]))
    call = jax.shard_map(packed, mesh=mesh_of(8), in_specs=P(AXIS), out_specs=P())
    with pytest.raises(ValueError, match="cu_seqlens: expected None in a call whose tokens are split"):
        call(row)
    with pytest.raises(ValueError, match="sequence_axis: expected the name of a mesh axis or None"):
        ejx.DeltaRule(sequence_axis=3)  # pyright: ignore[reportArgumentType]
