"""Importing the package: light, without side effects, and without Triton. Each in a fresh process."""

import os
import pathlib
import subprocess
import sys

import pytest

import ejkernel_eqx

SOURCE = str(pathlib.Path(ejkernel_eqx.__file__).parents[1])


def fresh(program: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")
    }
    environment |= {"PYTHONPATH": SOURCE, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_changes_nothing():
    fresh("""
import os, sys
import jax, equinox
environment, config = dict(os.environ), dict(jax.config.values)
import ejkernel_eqx as ejx
assert dict(os.environ) == environment
assert dict(jax.config.values) == config
import jax._src.xla_bridge as bridge
assert not bridge._backends, "importing must not start a backend"
for name in ("flash_attention", "attention", "scaled_dot_product_attention"):
    assert name in ejx.kernel_registry.list_operations()
loaded = [name for name in sys.modules if name.split(".")[0] in ("triton", "jax_triton", "torch")]
assert not loaded, loaded
heavy = [name for name in sys.modules if name.startswith("ejkernel_eqx.attention.triton.compiled") or name == "ejkernel_eqx.attention.cudnn"]
assert not heavy, heavy
""")


@pytest.mark.slow
def test_everything_but_triton_works_without_it():
    text = fresh("""
import sys
sys.modules["triton"] = sys.modules["jax_triton"] = None
import importlib.machinery, importlib.util
import jax, jax.numpy as jnp
import ejkernel_eqx as ejx
x = jnp.ones((4, 2, 16))
assert jnp.allclose(ejx.FlashAttention(causal=True)(x, x, x), x)
assert jax.grad(lambda x: ejx.FlashAttention()(x, x, x).sum())(x).shape == x.shape
try:
    ejx.FlashAttention(platform="triton-interpret")
except ejx.UnsupportedError as error:
    print(error)
print(ejx.explain("flash_attention"))
""")
    assert "on platform 'triton-interpret': triton is not installed (pip install" in text.split("\n")[0]
    assert "triton-interpret (unusable)" in text and "xla (usable)" in text
    assert text.count("triton is not installed (pip install 'ejkernel-eqx[triton]')") == 2
