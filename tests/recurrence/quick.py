"""`quick` is `jax.jit`: the whole suite compiles quickly (`tests/conftest.py`)."""

import jax

quick = jax.jit
