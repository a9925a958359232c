"""Checks of what a user passes: the arrays of an operation, one at a time, and the sizes, numbers and arrays of a layer.

Errors are raised before anything is computed and name the argument, what was expected, what was received, and the remedy.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._shapes import remedy_of_size
from .._values import checked

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_KINDS = {"floats": jnp.floating, "integers": jnp.integer, "booleans": jnp.bool_}
STATE_DTYPES = ("float32", "bfloat16", "float64")


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"{name}: expected True or False, received {flag!r}; it is a static flag.")


def is_finite(x: Any) -> bool:
    """Returns whether `x` is a finite number of Python or NumPy, which a float can hold."""
    is_number = isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
    try:
        return is_number and math.isfinite(x)
    except OverflowError:  # Python's integers have no bound
        return False


def check_state_dtype(dtype: Any) -> str | None:
    """The name of a state dtype. `None` is kept and means float32, or float64 for float64 operands."""
    return check_dtype("state_dtype", dtype, STATE_DTYPES)


def check_dtype(argument: str, dtype: Any, known: tuple[str, ...] = _DTYPES) -> str | None:
    """The name of a dtype that an option asks for; `None` is kept."""
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in known:
        raise ValueError(f"{argument}: expected one of {', '.join(known)}, received {name}.")
    return name


def array(name: str, x: Any, letters: str, rank: int | None = None) -> Array:
    """`x` as a floating-point array of at least this rank, by default that of `letters` (`"T H D"`)."""
    rank = len(letters.split()) if rank is None else rank
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected an array [..., {letters}], received {type(x).__name__}.")
    if x.ndim < rank:
        raise ValueError(
            f"{name}: expected rank {rank} or more, [..., {letters}], received shape {x.shape}; add the missing axes."
        )
    if str(x.dtype) not in _DTYPES:
        raise ValueError(f"{name}: expected dtype {', '.join(_DTYPES)}, received {x.dtype}; cast it first.")
    return jnp.asarray(x)


def fitting(name: str, x: Any, shape: tuple[int | None, ...], letters: str) -> Array:
    """`x` as an array of exactly this shape; `None` for a free size."""
    x = array(name, x, letters, rank=0)
    if x.ndim != len(shape) or any([w is not None and w != s for s, w in zip(x.shape, shape)]):
        own = letters.split()
        names = ["."] * (len(shape) - len(own)) + own
        expected = ", ".join(n if w is None else str(w) for w, n in zip(shape, names, strict=True))
        layout = f"[..., {letters}]" if len(shape) > len(own) else f"[{letters}]"
        raise ValueError(f"{name}: expected shape [{expected}], received {x.shape}; the layout is {layout}.")
    return x


def check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(
                f"{name}: expected a positive integer, received {size!r}; {remedy_of_size(size, 1)}."
            )


def read_sizes(**sizes: Any) -> tuple[int, ...]:
    """The sizes, checked, as integers of Python: static fields hold no numbers of NumPy."""
    check_sizes(**sizes)
    return tuple(map(int, sizes.values()))


def check_numbers(**numbers: Any) -> None:
    """Finite numbers, or `None` for a default."""
    for name, number in numbers.items():
        is_number = isinstance(number, int | float | np.number | Array) and not isinstance(number, bool)
        if number is not None and not (is_number and np.ndim(number) == 0 and math.isfinite(number)):
            raise ValueError(f"{name}: expected a finite number, received {number!r}; it is static.")


def read_array(name: str, value: Any, kind: str, form: str) -> Array:
    """An array of `kind`: `"floats"`, `"integers"` or `"booleans"`; `form` is the shape as in the docstring."""
    if not isinstance(value, Array | np.ndarray):
        raise ValueError(
            f"{name}: expected an array of {kind} {form}, received {type(value).__name__}; convert it with jnp.asarray."
        )
    if not jnp.issubdtype(value.dtype, _KINDS[kind]):
        remedy = "compare it, as in mask != 0" if kind == "booleans" else "cast it"
        raise ValueError(
            f"{name}: expected {kind} {form}, received {value.dtype} of shape {value.shape}; {remedy}."
        )
    return jnp.asarray(value)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1]))


def accumulator(dtype: Any) -> Any:
    """The dtype of accumulations."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def wide(x: Array) -> Array:
    return x.astype(accumulator(x.dtype))


def rate_of(A_log: Array) -> Array:
    """The rate `e^A`, at least in float32, and finite: the gradient of a decay that leaves nothing is 0, and is multiplied by it."""
    A_log = wide(A_log)
    return jnp.exp(jnp.minimum(A_log, jnp.asarray(math.log(jnp.finfo(A_log.dtype).max) - 1, A_log.dtype)))


def never_positive(name: str, x: Array, kind: str, remedy: str) -> Array:
    """Returns `x` unless a value is known to be positive: a state would grow."""
    say = lambda value: f"{name}: expected {kind} of at most 0, received {value}; {remedy}."
    return checked(x, jnp.max(x, initial=0), lambda x: x > 0, say)


def decaying_rates(A: Array) -> Array:
    """The rates of a state space, unless one is known to be positive."""
    return never_positive("A", A, "rates", "pass -exp(A_log)")


def finite_rate(A: Array) -> Array:
    """Replaces a rate of minus infinity by one so fast that any time step above 0 decays to zero, and a time step of 0 does not decay."""
    return jnp.maximum(A, jnp.asarray(jnp.finfo(A.dtype).min / 4, A.dtype))


def read_gates(array: Array, given: Any) -> Array:
    """The gates `given`, of which none hides those beside it; `ValueError` for numbers above 0 and for minus infinity."""
    say = lambda found: (
        f"log_forget: expected finite numbers up to 0, received {found}; pass jax.nn.log_sigmoid of the gate's logits, and mark where "
        "sequences begin by segment_ids."
    )
    # Of padding they may be NaN.
    show = lambda x: f"{np.nanmin(x)} to {np.nanmax(x)}"
    gates = checked(array, given, lambda x: (x > 0) | (x == -np.inf), say, show)
    # Of e^-104 nothing is left in float32. A number beyond would hide the gates beside it in their sum.
    return jnp.maximum(gates, jnp.asarray(-104, gates.dtype))
