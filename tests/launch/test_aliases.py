"""What is aliased has a buffer of its own, whatever the caller gives: as staged here, and for both of jax-triton's ways to be called."""

import functools
import importlib
import sys
import types
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.paged.spec import WriteArrays
from ejkernel_eqx.paged.triton.write_kernel import write
from tests.launch import launches
from tests.launch.launches import own_call, run, TARGETS

triton_call = importlib.import_module("ejkernel_eqx.launch.triton_call")
_run = importlib.import_module("ejkernel_eqx.launch.by_name")

# Stands for jax-triton's, which cannot be imported everywhere: arrays in, arrays out, and nothing known of what is between.
call_p = Primitive("call_of_a_test")
call_p.multiple_results = True


@call_p.def_abstract_eval
def _types(*_, types, aliases):
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in types]


def _call_03(*operands, out_shape, enable_fp_fusion, input_output_aliases=None, **_):
    arrays = [x for x in operands if not isinstance(x, int)]
    return call_p.bind(*arrays, types=out_shape, aliases=tuple((input_output_aliases or {}).items()))


def _call_04(*operands, out_type, backend_options, kernel, input_output_aliases=None, **named):
    flat = [*operands, *(named[name] for name in kernel.arg_names if isinstance(named.get(name), jax.Array))]
    numbers = [i for i, x in enumerate(flat) if isinstance(x, int)]
    aliases = {i - sum(n < i for n in numbers): out for i, out in (input_output_aliases or {}).items()}
    arrays = [x for x in flat if not isinstance(x, int)]
    return call_p.bind(*arrays, types=out_type, aliases=tuple(aliases.items()))


@pytest.fixture(params=["own", "jax-triton 0.3", "jax-triton 0.4"], autouse=True)
def staged(request, monkeypatch):
    """Launches are staged here, or by a call that has the signature of one version."""
    if request.param == "own":
        monkeypatch.setattr(_run, "own_target", lambda: TARGETS["sm_90"])
        monkeypatch.setattr(own_call, "begin", lambda launch, target: None)
        return
    is_04 = request.param == "jax-triton 0.4"
    monkeypatch.setattr(triton_call, "triton_unavailable", lambda: None)
    monkeypatch.setattr(triton_call, "_takes_options", lambda: is_04)
    monkeypatch.setattr(_run, "own_target", lambda: None)
    staging = types.SimpleNamespace(triton_call=_call_04 if is_04 else _call_03)
    monkeypatch.setitem(sys.modules, "jax_triton", staging)


def aliases_of(call: Any) -> dict[int, int]:
    """Which operand each output in place is."""
    if call.primitive is call_p:
        return dict(call.params["aliases"])
    launch = call.params["launch"].launch
    arrays = [name for name in launch.arguments if name in launch.inputs]
    return {arrays.index(x): launch.results.index(y) for x, y in launch.aliases.items()}


def calls_among(found: list[Any]) -> list[Any]:
    return [eqn for eqn in found if eqn.primitive in (call_p, own_call._call_p)]


def equations(jaxpr: Any) -> list[Any]:
    inner = [x for eqn in jaxpr.eqns for x in eqn.params.values() if hasattr(getattr(x, "jaxpr", x), "eqns")]
    return [*jaxpr.eqns, *(eqn for x in inner for eqn in equations(getattr(x, "jaxpr", x)))]


def assert_kept_apart(function: Any, *arguments: Any, pairs: int) -> None:
    """Every aliased operand of every call is a result of one barrier that no other operand is, and its output goes to one barrier alone."""
    found = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    calls = calls_among(found)
    assert calls and all(len(aliases_of(call)) == pairs for call in calls)
    for call in calls:
        operands = [call.invars[index] for index in aliases_of(call)]
        results = [call.outvars[index] for index in aliases_of(call).values()]
        assert all(sum(x is y for y in call.invars) == 1 for x in operands)
        (before,) = [eqn for eqn in found if any(x is y for x in operands for y in eqn.outvars)]
        (after,) = [eqn for eqn in found if any(x is y for x in results for y in eqn.invars)]
        for barrier, passing in ((before, before.outvars), (after, after.invars)):
            assert barrier.primitive.name == "optimization_barrier" and len(passing) == pairs
        assert all(any(x is y for y in before.outvars) for x in operands)


def added(pool, amount, slots):
    launch = launches.added(len(pool), len(amount), pool.shape[1])
    return run(launch, {"pool": pool, "amount": amount, "slots": slots})


@pytest.mark.parametrize("dtype, pairs", [(jnp.float32, 2), (jnp.int8, 4)])
def test_equal_caches_stay_two(dtype, pairs):
    """Keys and values of one layer, made where the compiler sees that they are equal, or one array twice."""
    new, slots = jnp.ones((3, 2, 4)), jnp.arange(3, dtype=jnp.int32)

    def cache(each):
        pages = {name: each((5, 2, 2, 4), dtype) for name in "kv"}
        scales = {f"{name}_scale": each((5, 2, 2), jnp.float32) for name in "kv"} if dtype == jnp.int8 else {}
        return pages | scales

    once = functools.cache(jnp.zeros)
    for each in (jnp.zeros, once):
        call = lambda new, each=each: write(WriteArrays(cache(each), {"k": new, "v": new}, slots))
        assert_kept_apart(call, new, pairs=pairs)


def test_a_state_is_no_other_operand():
    same = jnp.zeros((3, 1))
    slots = jnp.arange(3, dtype=jnp.int32)
    assert_kept_apart(lambda x: added(x, x[:, 0], slots), same, pairs=1)
    # A constant of the program, and again in a loop over stacked states.
    assert_kept_apart(lambda amount: added(same, amount, slots), same[:, 0], pairs=1)
    stack = jnp.zeros((2, 3, 1))
    step = lambda amount, pool: (amount, added(pool, amount, slots)["new_pool"])
    assert_kept_apart(lambda amount, stack: jax.lax.scan(step, amount, stack), same[:, 0], stack, pairs=1)


def test_within_a_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    slots = jnp.arange(3, dtype=jnp.int32)
    place = lambda pool, amount: added(pool, amount, slots)["new_pool"]
    call = jax.shard_map(place, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert_kept_apart(call, jnp.zeros((6, 1)), jnp.zeros(3), pairs=1)


def test_a_call_without_aliases_has_no_barrier():
    found = equations(jax.make_jaxpr(lambda x: run(launches.square(8), {"x": x}))(jnp.ones(8)).jaxpr)
    assert found == calls_among(found) and len(found) == 1
