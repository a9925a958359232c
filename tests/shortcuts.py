"""Ways round what takes JAX longest outside of the programs that are tested. What JAX's internals lack in some version is left as it is."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_whole = False


def take_shortcuts() -> None:
    """All of them, for this process."""
    _keep_contexts()
    _move_in_numpy()
    _draw_with_a_short_hash()


@contextlib.contextmanager
def no_shortcuts() -> Iterator[None]:
    """Every operation compiles what it compiles for users: for tests that count programs."""
    global _whole
    before, _whole = _whole, True
    try:
        yield
    finally:
        _whole = before


def _keep_contexts() -> None:
    """JAX makes an MLIR context for each program that it lowers, which takes longer than the lowering of most. One serves for a while: what it
    has seen, constants among it, it never lets go. Not in other threads: XLA's, which partition a program, come and go."""
    try:
        from jax._src.interpreters import mlir

        make = mlir.make_ir_context
    except (ImportError, AttributeError):
        return
    uses, kept = 0, None

    def make_ir_context():
        nonlocal uses, kept
        if threading.current_thread() is not threading.main_thread():
            return make()
        if kept is None or uses == 100:
            uses, kept = 0, make()
        uses += 1
        return kept

    mlir.make_ir_context = make_ir_context


def _move_in_numpy() -> None:
    """Outside of `jax.jit`, JAX compiles a program for each shape that an operation is called with. For those that only move numbers, or
    store them in another dtype, numpy is asked."""
    try:
        from jax._src import core
    except ImportError:
        return
    rules = {
        "stage": lambda x: x,
        "broadcast_in_dim": _broadcast,
        "reshape": lambda x, *, new_sizes, dimensions: x.reshape(new_sizes) if dimensions is None else None,
        "squeeze": lambda x, *, dimensions: x.squeeze(dimensions),
        "transpose": lambda x, *, permutation: x.transpose(permutation),
        "convert_element_type": _convert,
        "dynamic_slice": _dynamic_slice,
        "slice": _slice,
        "iota": _iota,
        "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    }
    for name, rule in rules.items():
        primitive = getattr(primitives, f"{name}_p", None) or getattr(core, f"{name}_p", None)
        if primitive is not None:
            primitive.impl = _moving(rule, primitive.impl)


def _moving(rule: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    def impl(*args: Any, **params: Any) -> Any:
        if not _whole and params.get("sharding") is None and all(map(_plain, args)) and _alone():
            given = {name: value for name, value in params.items() if name != "sharding"}
            found = rule(*map(np.asarray, args), **given)
            if found is not None:
                # A copy of a copy, which JAX alone holds: so it can be donated.
                return jax.device_put(jax.device_put(np.asarray(found, order="C")), may_alias=False)
        return usual(*args, **params)

    return impl


def _plain(x: Any) -> bool:
    """Whether `x` is in numpy, or an array of the default device that no one has placed."""
    if isinstance(x, jax.Array):
        return isinstance(x.dtype, np.dtype) and not x.weak_type and not x.committed
    return isinstance(x, (np.ndarray, np.generic))


def _alone() -> bool:
    """Whether arrays go to a single CPU, and nobody asks JAX to look for infinities or NaN in them."""
    config: Any = jax.config
    watched = config.jax_debug_nans or config.jax_debug_infs or config.jax_default_device is not None
    return not watched and jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty


def _broadcast(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any) -> np.ndarray:
    own = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape):
        own[axis] = size
    return np.broadcast_to(x.reshape(own), shape)


def _convert(x: np.ndarray, *, new_dtype: Any, weak_type: bool) -> np.ndarray | None:
    """Where no value is out of the new dtype's range, or becomes one that is."""
    to = jnp.dtype(new_dtype) if isinstance(new_dtype, np.dtype) else None
    if weak_type or to is None:
        return None
    if x.dtype == bool or (to.name in _FLOATS and (x.dtype.name in _FLOATS or x.dtype.kind in "iu")):
        with np.errstate(over="ignore"):
            return x.astype(to)
    return x.astype(to) if x.dtype.kind in "iu" and to.kind in "iu" else None


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: Any) -> np.ndarray:
    firsts = [min(max(int(i), 0), size - n) for i, size, n in zip(starts, x.shape, slice_sizes)]
    return x[tuple(slice(i, i + n) for i, n in zip(firsts, slice_sizes))]


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [None] * x.ndim))]


def _iota(*, dtype: Any, shape: Any, dimension: int) -> np.ndarray:
    own = [1] * len(shape)
    own[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).astype(jnp.dtype(dtype)).reshape(own), shape)


def _draw_with_a_short_hash() -> None:
    """Random numbers come from six multiplications in the place of Threefry's twenty rounds, which take XLA twice as long to compile as what
    becomes of the numbers. Only on CPUs, and with the same keys."""
    try:
        from jax._src.interpreters import mlir
        from jax._src.random.threefry2x32 import threefry2x32_p

        register, rule = mlir.register_lowering, mlir.lower_fun(_hash, multiple_results=True)
    except (ImportError, AttributeError):
        return
    register(threefry2x32_p, rule, platform="cpu")


def _hash(key1: Any, key2: Any, x1: Any, x2: Any) -> tuple[Any, Any]:
    first = _mix(_mix(x2 + key1) + x1 ^ key2)
    return first, _mix(first + key1)


def _mix(x: Any) -> Any:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))
        x = lax.mul(x, np.uint32(factor))
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(16)))
