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
