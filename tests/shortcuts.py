"""Ways round what takes JAX longest outside of the programs that are tested, which are left to XLA. They reach into JAX's internals: where a version
lacks what they look for, it does as it does for users."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_whole = False


def take_shortcuts() -> None:
    """Those that leave operations out of XLA, for this process."""
    _compute_in_numpy()
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


def keep_contexts() -> None:
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


def _compute_in_numpy() -> None:
    """Outside of `jax.jit`, JAX compiles a program for each operation and shape. Of those that move numbers, count, compare or do what IEEE 754 has
    one result of, numpy has the same results: it is asked for them, alone or a few at a time."""
    try:
        from jax._src import core, pjit

        usual = pjit._pjit_call_impl_python
    except (ImportError, AttributeError):
        return
    for name, rule in _RULES.items():
        primitive = getattr(primitives, f"{name}_p", None) or getattr(core, f"{name}_p", None)
        if primitive is not None:
            primitive.impl = _alone(rule, primitive.impl)

    uses: MutableMapping[Any, int] = weakref.WeakKeyDictionary()

    def call(*args: Any, **params: Any) -> Any:
        jaxpr, found = params["jaxpr"], None
        if not _whole and _on_one_cpu() and all(map(_plain, args)) and uses.get(jaxpr, 0) < _OFTEN:
            uses[jaxpr] = uses.get(jaxpr, 0) + 1
            found = _results(params, args)
        return usual(*args, **params) if found is None else ([*map(_placed, found)], None, None, [])

    pjit._pjit_call_impl_python = call


def _alone(rule: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of a primitive."""

    def impl(*args: Any, **params: Any) -> Any:
        if not _whole and all(map(_plain, args)) and not any(map(_is_python, args)) and _on_one_cpu():
            found = _applied(rule, params, [np.asarray(x) for x in args])
            if found is not None and not isinstance(found, list):
                return _placed(found)
        return usual(*args, **params)

    return impl


def _placed(x: np.ndarray) -> jax.Array:
    """A copy of a copy, which JAX alone holds: so it can be donated."""
    return jax.device_put(jax.device_put(np.asarray(x, order="C")), may_alias=False)


def _results(params: dict[str, Any], args: tuple[Any, ...]) -> list[np.ndarray] | None:
    """Those of a program as `jax.jit` is about to compile it; `None` if numpy cannot say."""
    jaxpr = params["jaxpr"]
    specified = any(
        type(x).__name__ != "UnspecifiedValue" for x in (*params["in_shardings"], *params["out_shardings"])
    )
    if specified or any(params["donated_invars"]) or params["compiler_options_kvs"] or jaxpr.consts:
        return None
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if len(inner.eqns) > _SHORT or inner.effects or any(x.aval.weak_type for x in inner.outvars):
        return None
    if not all(isinstance(x.aval.dtype, np.dtype) for x in (*inner.invars, *inner.outvars)):
        return None
    return _interpreted(inner, [np.asarray(x, v.aval.dtype) for x, v in zip(args, inner.invars, strict=True)])


def _interpreted(jaxpr: Any, args: list[np.ndarray]) -> list[np.ndarray] | None:
    values = dict(zip(jaxpr.invars, args, strict=True))
    read = lambda x: np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]
    for eqn in jaxpr.eqns:
        given, name = [*map(read, eqn.invars)], eqn.primitive.name
        if name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            found = None if inner.consts else _interpreted(getattr(inner, "jaxpr", inner), given)
        else:
            found = _applied(_RULES[name], eqn.params, given) if name in _RULES else None
        if found is None:
            return None
        for variable, x in zip(eqn.outvars, found if isinstance(found, list) else [found], strict=True):
            if (x.shape, x.dtype) != (variable.aval.shape, variable.aval.dtype):
                return None
            values[variable] = x
    return [*map(read, jaxpr.outvars)]


def _applied(rule: Callable[..., Any], params: dict[str, Any], args: list[np.ndarray]) -> Any:
    """`None` also where an operation has a parameter that its rule does not know."""
    given = {name: x for name, x in params.items() if x is not None}
    with np.errstate(all="ignore"):
        try:
            return rule(*args, **given)
        except TypeError:
            return None


def _plain(x: Any) -> bool:
    """Whether `x` is in Python or numpy, or an array of the default device that no one has placed."""
    if isinstance(x, jax.Array):
        return isinstance(x.dtype, np.dtype) and not x.weak_type and not x.committed
    return isinstance(x, (np.ndarray, np.generic)) or _is_python(x)


def _is_python(x: Any) -> bool:
    """Whether the dtype of `x` is a weak one."""
    return type(x) in (bool, int, float)


def _on_one_cpu() -> bool:
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


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any = None) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [None] * x.ndim))]


def _iota(*, dtype: Any, shape: Any, dimension: int) -> np.ndarray:
    own = [1] * len(shape)
    own[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).astype(jnp.dtype(dtype)).reshape(own), shape)


def _reduced(of: Callable[..., Any]) -> Callable[..., Any]:
    """Of what has elements: numpy has no largest of nothing."""
    return lambda x, *, axes: of(x, axis=axes) if x.size else None


def _pieces(x: np.ndarray, *, sizes: Any, axis: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _chosen(which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool and len(cases) == 2 else None


_RULES: dict[str, Callable[..., Any]] = {
    "stage": lambda x: x,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *, new_sizes: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: x.squeeze(dimensions),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "convert_element_type": _convert,
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "split": _pieces,
    "iota": _iota,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "select_n": _chosen,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "square": np.square,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "reduce_and": _reduced(np.all),
    "reduce_or": _reduced(np.any),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_sum": lambda x, *, axes: x.sum(axes, dtype=x.dtype) if x.dtype.kind in "iu" else None,
    "is_finite": np.isfinite,
}
# So many operations at a time, and the same ones so many times: after that, compiling them is less than finding them again.
_SHORT, _OFTEN = 6, 10


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
