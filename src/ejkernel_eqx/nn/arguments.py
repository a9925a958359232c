"""Checks that all layers share: of the sizes, flags and dtypes of constructors, and of the arrays of calls.

Values are checked when they are known: outside `jit` and other transformations.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .._shapes import is_symbolic
from .._values import check_known
from ..core.arguments import broadcasts as broadcasts
from ..core.arguments import check_flags as check_flags
from ..core.arguments import check_numbers as check_numbers
from ..core.arguments import check_sizes as check_sizes
from ..core.arguments import read_array as read_array
from ..core.arguments import read_sizes as read_sizes

F = TypeVar("F", bound=Callable[..., Any])


def checked(init: F) -> F:
    """A decorator of a constructor, whose arguments are checked as they are declared: an `int` is a size, a `bool` a flag, and a `float` a number,
    not negative if its name ends with `eps`. Where `None` is declared, it is no error. The constructor receives sizes as integers of Python."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        given, declared = signature.bind(*args, **kwargs).arguments, signature.parameters
        init(**{name: _read(name, declared[name].annotation, value) for name, value in given.items()})

    return call  # pyright: ignore[reportReturnType]


def check_fields(instance: Any) -> None:
    """The same checks of the fields of a dataclass, whose sizes become integers of Python."""
    for field in dataclasses.fields(instance):
        value = _read(field.name, field.type, getattr(instance, field.name))
        object.__setattr__(instance, field.name, value)


def _read(name: str, declared: Any, value: Any) -> Any:
    kinds = {*(get_args(declared) or (declared,))}
    if value is None and types.NoneType in kinds:
        return None
    kinds -= {types.NoneType}
    if kinds == {int}:
        return read_sizes(**{name: value})[0]
    if kinds == {bool}:
        check_flags(**{name: value})
    elif kinds in ({float}, {int, float}):
        (check_eps if name.endswith("eps") else check_numbers)(**{name: value})
    return value


def check_divides(name: str, part: int, whole_name: str, whole: int) -> None:
    check_sizes(**{whole_name: whole, name: part})
    if whole % part:
        raise ValueError(
            f"{name}: expected a divisor of {whole_name}={whole}, received {part}; {whole_name} is divided evenly."
        )


def width_of(name: str, factor: Any, of: int, heads: int, what: str) -> int:
    """The width of one head, from `factor` times the width `of`."""
    check_numbers(**{name: factor})
    value = 0 if factor is None else factor * of / heads
    if value != round(value) or value < 1:
        raise ValueError(
            f"{name}: expected a factor that yields a positive integer number of {what}, received one that yields {value}; "
            f"{of} is multiplied by it{f' and divided among {heads} heads' if heads > 1 else ''}."
        )
    return round(value)


def check_eps(**numbers: Any) -> None:
    check_numbers(**numbers)
    for name, number in numbers.items():
        if number is None or number < 0:
            raise ValueError(
                f"{name}: expected a non-negative number, received {number!r}; it is added to a mean square."
            )


def check_key(key: Any) -> None:
    """One PRNG key, typed or raw."""
    is_new = isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_old = isinstance(key, Array | np.ndarray) and key.dtype == jnp.uint32
    if not (is_new or is_old) or key.ndim != (0 if is_new else 1):
        found = f"{key.dtype} of shape {key.shape}" if is_new or is_old else repr(key)
        raise ValueError(
            f"key: expected one PRNG key, received {found}; create one with jax.random.key(0), and map over several with equinox.filter_vmap."
        )


def read_dtype(name: str, dtype: Any) -> Any:
    """A dtype to compute in, or `None`."""
    if dtype is None:
        return None
    found = named_dtype(dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(
            f"{name}: expected a floating dtype of at least 16 bits or None, received "
            f"{dtype if found is None else found.name!r}; for example jnp.bfloat16."
        )
    if found == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{name}: expected at most 32 bits while 64-bit types are disabled, received 'float64'; call "
            "jax.config.update('jax_enable_x64', True), or use float32."
        )
    return found


def read_weight_dtype(dtype: Any) -> Any:
    """The dtype of parameters; default float32 (float64 in JAX's 64-bit mode)."""
    return jnp.result_type(float) if dtype is None else read_dtype("dtype", dtype)


def named_dtype(dtype: Any) -> Any:
    """`dtype` as a NumPy dtype, or `None` if it is not one."""
    try:
        return jnp.dtype(dtype)
    except TypeError:
        return None


def read_batch_shape(batch_shape: Any) -> tuple[int, ...]:
    is_size = lambda x: is_symbolic(x) or (isinstance(x, int | np.integer) and not isinstance(x, bool))
    given = (batch_shape,) if is_size(batch_shape) else batch_shape
    is_shape = isinstance(given, Sequence) and not isinstance(given, str)
    shape: tuple[Any, ...] | None = tuple(given) if is_shape else None
    if shape is None or not all(is_size(size) and size >= 0 for size in shape):
        raise ValueError(
            f"batch_shape: expected a size or a tuple of sizes, received {batch_shape!r}; () means one sequence, and an integer B means (B,)."
        )
    return tuple(size if is_symbolic(size) else int(size) for size in shape)


def read_features(name: str, x: Any, form: str, letter: str, features: int) -> Array:
    """Tokens `[..., T, features]`."""
    x = read_array(name, x, "floats", form)
    if x.ndim < 2 or x.shape[-1] != features:
        raise ValueError(
            f"{name}: expected {form} with {letter} = {features}, received shape {x.shape}; "
            "time is the second-to-last axis, and a single token has T = 1."
        )
    return x


def check_tokens(name: str, value: Any, kind: str, of: str, x: Any, form: str = "[..., T]") -> None:
    """One entry of `kind` per token, or `None`."""
    if value is None:
        return
    shape = read_array(name, value, kind, form).shape
    if shape != x.shape[:-1]:
        raise ValueError(
            f"{name}: expected shape {x.shape[:-1]}, one entry per token of {of}, received {shape}; broadcast it first."
        )


def read_tokens(x: Any, features: int, padding_mask: Any, segment_ids: Any) -> Array:
    """The tokens `[..., T, features]` of a layer, with checks of what there is one of per token."""
    x = read_features("x", x, "[..., T, E]", "E", features)
    check_tokens("padding_mask", padding_mask, "booleans", "x", x)
    check_tokens("segment_ids", segment_ids, "integers", "x", x)
    return x


def read_packed(x: Array, cu_seqlens: Any, others: Mapping[str, Any], remedy: str) -> Array:
    """The offsets of the packed sequences of `x [T, E]`, with which none of the `others` is passed."""
    offsets = read_array("cu_seqlens", cu_seqlens, "integers", "[N + 1]")
    if (other := next((name for name, value in others.items() if value is not None), None)) is not None:
        raise ValueError(f"cu_seqlens: expected None with {other}, received both; {remedy}.")
    if x.ndim != 2 or offsets.ndim != 1 or not offsets.size:
        raise ValueError(
            f"cu_seqlens: expected offsets [N + 1] and x of shape [T, E], received {offsets.shape} and {x.shape}; pack all sequences into "
            "one row."
        )
    return offsets


def check_slots(name: str, slots: Any, count: int) -> None:
    """The slot of each row, of `count`: in range and distinct, if the values are known; negative means no slot."""

    def check(values: Any) -> None:
        used = np.asarray(values).reshape(-1)
        used = used[used >= 0]
        if np.any(used >= count):
            raise ValueError(
                f"{name}: expected slots below {count}, the number of slots of the state, received {int(used.max())}; -1 means no slot."
            )
        numbers, times = np.unique(used, return_counts=True)
        if np.any(times > 1):
            raise ValueError(
                f"{name}: expected distinct slots, received {int(numbers[times > 1][0])} {int(times.max())} times; each sequence needs its own slot."
            )

    if slots is not None:
        check_known(slots, check)


def is_known(x: Any) -> bool:
    return not isinstance(x, Tracer) and (not isinstance(x, Array) or x.is_fully_addressable)
