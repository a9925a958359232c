"""The bridge to Pallas on TPU: a toy kernel interpreted, lowered and compiled, over meshes, with the faults that the interpreter must find."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_ahead import facts_of
from ejkernel_eqx.dispatch import Backend, DeviceFacts, Platform
from ejkernel_eqx.launch.pallas import run, TpuLaunch
from ejkernel_eqx.launch.sizes import tile_bytes, too_large_for_vmem
from ejkernel_eqx.parallel import how_split, Leading, opaque, Split
from tests.tpus import compile_ahead, GENERATIONS, lower, needs_libtpu, without_races

ROWS = 16


def scaled_kernel(factors, x, out, total):
    total[...] = x[...] * factors[pl.program_id(0)] + pl.num_programs(0)
    out[...] = total[...]


def scaled_launch(x, kernel=scaled_kernel, **more):
    block = pl.BlockSpec((ROWS, 128), lambda i, factors: (i, 0))
    return TpuLaunch(
        kernel=kernel,
        name="toy.scaled",
        grid=(x.shape[0] // ROWS,),
        in_specs=[block],
        out_specs=[block],
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        scratch=[pltpu.VMEM((ROWS, 128), jnp.float32)],
        scalars=1,
        parallel=(0,),
        **more,
    )


def scaled(factors, x, interpret=True, **more):
    return run(scaled_launch(x, **more), [factors, x], interpret=interpret)[0]


def inputs(programs):
    x = jnp.arange(programs * ROWS * 128, dtype=jnp.float32).reshape(-1, 128)
    return jnp.arange(programs, dtype=jnp.float32) + 2, x


def expected(factors, x):
    return x * jnp.repeat(factors, ROWS)[:, None] + len(factors)


@pytest.mark.usefixtures("no_races")
def test_each_launch_knows_its_own_grid():
    for programs in (2, 3):
        given = inputs(programs)
        assert jnp.array_equal(jax.jit(scaled)(*given), expected(*given))
    assert scaled(*inputs(0)).shape == (0, 128)


@pytest.mark.usefixtures("no_races")
def test_what_was_not_written_is_poison():
    def forgetful(factors, x, out, total):
        out[0] = x[0] + total[0]

    assert jnp.isnan(scaled(*inputs(1), kernel=forgetful)).all()


def test_a_race_is_found():
    def careless(x, out, semaphore):
        copy = pltpu.make_async_copy(x, out, semaphore)
        copy.start()
        out[...] = jnp.zeros(out.shape, out.dtype)
        copy.wait()

    memory = pl.BlockSpec(memory_space=pltpu.VMEM)
    x = jnp.ones((8, 128))
    launch = TpuLaunch(
        kernel=careless,
        name="toy.careless",
        grid=(1,),
        in_specs=[memory],
        out_specs=[memory],
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        scratch=[pltpu.SemaphoreType.DMA],
    )
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError), match=r"RACE DETECTED|found a race"):
        with without_races():
            jax.block_until_ready(run(launch, [x], interpret=True))


def test_lowers():
    text = lower(functools.partial(scaled, interpret=False), *inputs(2)).as_text()
    assert "tpu_custom_call" in text and "ejkernel_eqx.toy.scaled" in text
    # The interpreter takes any block, the compiler does not.
    odd = pl.BlockSpec((12, 100), lambda i: (i, 0))
    launch = TpuLaunch(
        kernel=lambda x, out: None,
        name="toy.odd",
        grid=(2,),
        in_specs=[odd],
        out_specs=[odd],
        outputs=[jax.ShapeDtypeStruct((24, 200), jnp.float32)],
    )
    with pytest.raises(ValueError, match="divisible by 8 and 128"):
        lower(lambda x: run(launch, [x]), jnp.ones((24, 200)))


@needs_libtpu
@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles(generation):
    compiled = compile_ahead(generation, functools.partial(scaled, interpret=False), *inputs(2))
    assert compiled.memory_analysis().output_size_in_bytes == 2 * ROWS * 128 * 4
    large = [pltpu.VMEM((ROWS, 128), jnp.float32), pltpu.VMEM((2**19, 128), jnp.float32)]

    def too_large(factors, x):
        kernel = lambda *refs: scaled_kernel(*refs[:-1])
        return run(dataclasses.replace(scaled_launch(x, kernel), scratch=large), [factors, x])

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        compile_ahead(generation, too_large, *inputs(2))


def test_vmem_is_counted():
    _, x = inputs(2)
    launch = scaled_launch(x, temporaries=1000)
    assert launch.vmem([x.dtype]) == 5 * ROWS * 128 * 4 + 1000
    assert tile_bytes((3, 5, 7), jnp.float32) == 3 * 8 * 128 * 4
    assert tile_bytes((20, 129), jnp.bfloat16) == 32 * 256 * 2
    assert tile_bytes((9,), jnp.int8) == 32 * 128
    assert too_large_for_vmem("forward", "16x16", 10 * 2**20, facts_of("v4")) is None
    assert "has 16777216" in str(too_large_for_vmem("forward", "16x16", 15 * 2**20, facts_of("v4")))
    assert too_large_for_vmem("forward", "16x16", 2**40, DeviceFacts(Backend.CPU, "cpu")) is None


LEADING = Leading(axes={"factors": ("n",), "x": ("rows", "channels"), "out": ("rows", "channels")})


def over_rows(split):
    """The toy over leading axes, as a family's kernels are."""

    def function(arrays, runs):
        call = lambda factors, x: scaled(factors, x)
        return {"out": jnp.stack([call(f, x) for f, x in zip(arrays["factors"], arrays["x"], strict=True)])}

    return lambda factors, x: opaque(function, LEADING, split=split)({"factors": factors, "x": x})["out"]


def batch(rows):
    factors, x = inputs(2)
    return jnp.stack([factors + i for i in range(rows)]), jnp.stack([x + i for i in range(rows)])


@pytest.mark.usefixtures("no_races")
def test_on_an_explicit_mesh():
    given = batch(2)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Explicit,))
    placed = [jax.device_put(x, jax.NamedSharding(mesh, P("dp"))) for x in given]
    found = jax.jit(over_rows(Split.EXPLICIT_OR_REFUSED))(*placed)
    assert jax.typeof(found).sharding.spec[0] == "dp"
    assert jnp.array_equal(found, jax.vmap(expected)(*given))


def test_an_automatic_mesh_is_refused():
    several = DeviceFacts(Backend.TPU, "TPU v5p", count=4)
    assert how_split(Platform.PALLAS, several) is Split.EXPLICIT_OR_REFUSED
    assert how_split(Platform.PALLAS_INTERPRET, several) is Split.EXPLICIT
    given, call = batch(2), over_rows(Split.EXPLICIT_OR_REFUSED)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"expected explicit axes .* platform='xla'"):
        jax.eval_shape(call, *given)
