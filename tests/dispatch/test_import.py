"""Importing the package: light, without side effects, and without Triton. Each in a fresh process."""

import os
import pathlib
import subprocess
import sys

import ejkernel_eqx

SOURCE = str(pathlib.Path(ejkernel_eqx.__file__).parents[1])


def fresh(program: str, home: pathlib.Path | None = None) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")
    }
    environment |= {"PYTHONPATH": SOURCE, "JAX_PLATFORMS": "cpu"}
    if home is not None:
        environment = {name: value for name, value in environment.items() if not name.startswith("EJKERNEL")}
        environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_changes_nothing(tmp_path):
    """Nor does it write: in a home of its own nothing appears, and it opens no file outside the interpreter's and the package's. Without Triton
    it says so."""
    program = """
import os, sys
import jax, equinox, filelock
environment, config, opened = dict(os.environ), dict(jax.config.values), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import ejkernel_eqx as ejx
every = {name: getattr(ejx, name) for name in ejx.__all__}
inside = tuple(path for path in sys.path if path) + (sys.prefix, sys.base_prefix)
outside = [name for name in opened if not name.startswith(inside)]
assert not outside, outside
assert not [name for name in opened if name.endswith(".json")], opened
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
sys.modules["triton"] = sys.modules["jax_triton"] = None
from ejkernel_eqx.launch import compile_ahead, run, Launch, triton_unavailable, interpreter_unavailable
missing = "triton is not installed (pip install 'ejkernel-eqx[triton]')."
assert triton_unavailable() == missing, triton_unavailable()
assert interpreter_unavailable() == missing, interpreter_unavailable()
x = jax.numpy.ones((4, 2, 16))
assert jax.numpy.allclose(ejx.FlashAttention(causal=True)(x, x, x), x)
try:
    ejx.FlashAttention(platform="triton-interpret")
except ejx.UnsupportedError as error:
    print(error)
print(ejx.explain("flash_attention"))
"""
    text = fresh(program, tmp_path)
    assert "triton-interpret (unusable)" in text and "xla (usable)" in text
    assert text.count("triton is not installed (pip install 'ejkernel-eqx[triton]')") == 2
    assert list(tmp_path.rglob("*")) == []


def test_names_are_loaded_when_they_are_used():
    """No room is imported with the package, nor to list its operations and names, to explain one and to register another."""
    program = """
import sys, time, types
import jax, equinox
before = time.process_time()
import ejkernel_eqx as ejx
assert time.process_time() - before < 0.4
names = dir(ejx)
assert "FlashAttention" in names and "nn" in names and names == sorted(set(names)), names
private = [name for name in names if name.startswith("_") or name in ("TYPE_CHECKING", "dispatch", "core", "paged", "Any", "ast", "sys")]
assert not private, private
operations = ejx.kernel_registry.list_operations()
assert len(operations) == 37 and "flash_attention" in operations, operations
platform = types.SimpleNamespace(
    config_type=int, unsupported=lambda *_: None, default_config=lambda *_: 1, candidates=lambda *_: [1], NOTE="of a third party")
ejx.kernel_registry.register("third.party", "xla")(platform)
ejx.kernel_registry.register("flash_attention", "xla", priority=10)(platform)
assert ejx.kernel_registry.get("flash_attention", "xla").target is platform
rooms = ("attention", "cells", "convolution", "core", "custom", "latent", "losses", "matmul", "models", "nn", "normalization", "paged", "pooling",
    "recurrence", "selective_scan", "sequences", "weights")
loaded = [name for name in sys.modules if name.startswith(tuple(f"ejkernel_eqx.{room}" for room in rooms))]
assert not loaded, loaded
assert ejx.mean_pooling.operation == "mean_pooling" and "ejkernel_eqx.attention" not in sys.modules
print(ejx.explain("third.party"), ejx.explain("gated_delta_rule"))
variables = [variable.name for variable in ejx.env()]
assert variables == [f"EJKERNEL_EQX_{name}" for name in ("CACHE_DIR", "CHECK_VALUES", "LAUNCH", "POLICY")], variables
"""
    text = fresh(program)
    assert "of a third party" in text and "triton-interpret (usable)" in text


def test_names_are_what_they_were_however_they_are_imported():
    program = """
import importlib, inspect, pickle
import ejkernel_eqx.weights  # of the rooms that import one another's parts, the one that is imported first
import ejkernel_eqx.nn
import jax.numpy as jnp
from ejkernel_eqx import attention as room, Mask, matmul, nn
assert ejkernel_eqx.nn is nn and Mask is importlib.import_module("ejkernel_eqx.attention").Mask
from ejkernel_eqx import *
import ejkernel_eqx as ejx
everything = globals()
assert set(ejx.__all__) <= everything.keys()
assert all(everything[name] is getattr(ejx, name) for name in ejx.__all__)
for name in ("dispatch", "tuning", "serialisation", "testing"):
    assert getattr(ejx, name) is importlib.import_module(f"ejkernel_eqx.{name}")
for name in ("nonsense", "_nonsense", "TYPE_CHECKING"):
    try:
        getattr(ejx, name)
    except AttributeError as error:
        assert str(error) == f"module 'ejkernel_eqx' has no attribute {name!r}"
    else:
        raise AssertionError(name)
x = jnp.ones((3, 2, 8))
# The packages of these names are called as the functions.
assert matmul is ejx.matmul is importlib.import_module("ejkernel_eqx.matmul")
assert jnp.array_equal(matmul(jnp.ones(8), x[0]), jnp.array([8.0, 8.0]))
assert room is ejx.attention is importlib.import_module("ejkernel_eqx.attention")
assert jnp.allclose(room(x, x, x)[0], ejx.functional.attention(x, x, x)[0])
assert "sliding_window" in inspect.signature(room).parameters and "**Options:**" in room.__doc__
op = pickle.loads(pickle.dumps(ejx.FlashAttention(causal=True)))
assert op == ejx.FlashAttention(causal=True) and jnp.allclose(op(x, x, x), x)
assert pickle.loads(pickle.dumps(ejx.flash_attention)) is flash_attention
"""
    fresh(program)


def test_a_tuner_is_imported_when_it_is_asked(tmp_path):
    program = """
import sys
import jax, jax.numpy as jnp
import ejkernel_eqx as ejx
q = jax.ShapeDtypeStruct((16, 1, 8), jnp.float32)
ejx.FlashAttention(causal=True)
assert "ejkernel_eqx.tuning" not in sys.modules
op = ejx.FlashAttention(causal=True, platform="xla", tune_for=(q, q, q))
assert "ejkernel_eqx.tuning" in sys.modules
(tier,) = op.plan.tiers
print(tier.value)
"""
    assert fresh(program, tmp_path) == "autotune\n"
