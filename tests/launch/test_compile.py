"""Ahead-of-time compilation, beside interpretation in one process."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.launch import kernels
from tests.launch.launches import compile_ahead, matmul_softmax, one_to_one, run, S, Target, TARGETS


def matmul(block_m=64, block_n=64, block_k=32, num_stages=3, **options):
    a, b = (S(shape, jnp.bfloat16) for shape in ((2 * block_m, 4 * block_k), (4 * block_k, block_n)))
    return matmul_softmax(a, b, block_m, block_n, block_k, num_stages=num_stages, **options)


def copy(scalar=None):
    if scalar is None:
        return one_to_one(kernels.copy_through_kernel, 64, BLOCK=64)
    return one_to_one(kernels.square_kernel, 64, n=scalar, BLOCK=64)


@pytest.mark.few(2)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_all_targets(target):
    report = compile_ahead(matmul(), target)
    assert report.target == target and report.shared_limit == TARGETS[target].shared_limit
    # One stage of both operands takes 8 KiB; with pipelining there is at least one in shared memory.
    assert 8192 <= report.shared <= report.shared_limit and report.fits
    assert 16 <= report.registers <= 512 and report.spills == 0
    assert compile_ahead(copy(), target).shared <= 1024


def test_more_stages_take_more_shared_memory_until_it_no_longer_fits():
    few, many = compile_ahead(matmul(num_stages=2), "sm_80"), compile_ahead(matmul(num_stages=4), "sm_80")
    assert few.shared < many.shared and many.fits
    oversized = compile_ahead(matmul(128, 128, 128, num_stages=5, num_warps=8), "sm_80")
    assert oversized.shared > oversized.shared_limit and not oversized.fits


def test_too_few_warps_spill():
    assert compile_ahead(matmul(64, 128, 32, num_warps=1), "sm_80").spills > 0


@pytest.mark.parametrize("scalar", [1, True, False, 48, 2**31, 2**40, -5])
def test_scalars_of_every_type_compile(scalar):
    assert compile_ahead(copy(scalar), "sm_80").fits


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "float64", "float8_e4m3fn", "uint32"])
def test_array_types_compile(dtype):
    assert compile_ahead(one_to_one(kernels.copy_through_kernel, 64, dtype, BLOCK=64), "sm_90").fits


def test_interpretation_and_compilation_do_not_disturb_each_other():
    launch = matmul(16, 16, 16)
    arrays = {name: jnp.ones(x.shape, x.dtype) for name, x in launch.inputs.items()}
    wider = Target("sm_90 with other limits", "cuda", 90, 32, 1)
    first = run(launch, arrays, interpret=True)
    before = compile_ahead(launch, wider)
    assert not before.fits and before.target == wider.name
    second = run(launch, arrays, interpret=True)
    # Other constants, so that this is a second compilation and not Triton's cache.
    assert compile_ahead(matmul(32, 16, 16), "sm_90").fits
    x = jnp.arange(64.0)
    np.testing.assert_array_equal(run(copy(), {"x": x}, interpret=True)["out"], x)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_allclose(first["out"].astype(jnp.float32), 1 / 16)


def test_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"unknown target 'sm_75'.*gfx942"):
        compile_ahead(copy(), "sm_75")
