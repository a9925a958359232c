"""`QuantizedWeight`: a weight matrix in 8 or 4 bits that stands where an array of floats stood."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import wadler_lindig
from jax import Array

from .._shapes import AnyArray
from .format import QuantFormat, SCALES
from .numbers import numbers


class QuantizedWeight(eqx.Module):
    r"""A weight matrix in 8 or 4 bits. It stands where an array of floats stood, such as in `equinox.nn.Linear.weight`:

    $$W_{ij} = (\mathrm{number}(c_{ij}) - z_{b(i,j)}) \, s_{b(i,j)} \, t$$

    with codes $c$, and a scale $s$ and a zero point $z$ for each block $b$ of the format. The factor $t$ of the whole matrix is optional.

    Codes and scales are unsigned integers, the bits of what they stand for. So gradients, optimisers and weight decay, which take the floats of
    a model, pass them by. Products are differentiable in what the weight multiplies. The numbers are computed in float32, and rounded to `dtype`.

    `shape`, `ndim` and `dtype` are those of the array it stands for. `weight @ x`, `x @ weight`, `weight.T`, `weight[i]` along leading axes or
    rows, and `weight.astype(dtype)`, which gives an array, work. Leading axes may be mapped by `jax.vmap` or scanned over.

    - `codes`: uint8, `[..., out, in]`. With 4 bits it is `[..., out, in / 2]`: a byte has two codes along the input,
        the even one in the low half.
    - `scales`: unsigned integers of the bits of a scale, `[..., ceil(out / rows), ceil(in / columns)]`.
    - `zeros`: uint8 of the shape of `scales`, or `None`.
    - `tensor_scale`: uint32 bits of a float32, `[...]`, or `None`.
    - `format`: [`ejkernel_eqx.QuantFormat`][].
    - `dtype`: that of the array it stands for.
    - `transposed`: whether it stands for `[..., in, out]`, as GPT-OSS publishes its experts.
    - `float8_rows`: the [`ejkernel_eqx.ScaledMatmul`][] with which layers multiply many rows by it in float8
        ([`ejkernel_eqx.with_float8_rows`][]), or `None`.
    """

    codes: AnyArray
    scales: AnyArray
    zeros: AnyArray | None
    tensor_scale: AnyArray | None
    format: QuantFormat = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    transposed: bool = eqx.field(static=True)
    float8_rows: Any

    def __init__(
        self,
        codes: Any,
        scales: Any,
        zeros: Any,
        tensor_scale: Any,
        format: Any,
        dtype: Any = jnp.bfloat16,
        transposed: bool = False,
        float8_rows: Any = None,
    ):
        """**Arguments:** the fields; arrays of NumPy or JAX, or `jax.ShapeDtypeStruct`s.

        **Raises:** `ValueError` for arrays that do not fit each other or the format.
        """
        if not isinstance(format, QuantFormat):
            raise ValueError(f"format: expected an ejx.QuantFormat, received {type(format).__name__}.")
        if float8_rows is not None and not callable(float8_rows):
            raise ValueError(f"float8_rows: expected an ejx.ScaledMatmul or None, received {float8_rows!r}.")
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise ValueError(f"dtype: expected that of floats, received {jnp.dtype(dtype)}.")
        _check("codes", codes, "uint8", None)
        *lead, rows, columns = codes.shape
        columns = columns * 8 // format.bits
        blocks = (*lead, *format.blocks(rows, columns))
        _check("scales", scales, f"uint{SCALES[format.scale]}", blocks)
        if format.zeros != (zeros is not None):
            received = "none" if zeros is None else "an array"
            raise ValueError(
                f"zeros: expected {'an array' * format.zeros or 'none'} with {format}, received {received}."
            )
        if zeros is not None:
            _check("zeros", zeros, "uint8", blocks)
        if tensor_scale is not None:
            _check("tensor_scale", tensor_scale, "uint32", tuple(lead))
        self.codes, self.scales, self.zeros, self.tensor_scale = codes, scales, zeros, tensor_scale
        self.format, self.dtype, self.transposed = format, jnp.dtype(dtype), bool(transposed)
        self.float8_rows = float8_rows

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.codes.shape
        columns = columns * 8 // self.format.bits
        return (*lead, columns, rows) if self.transposed else (*lead, rows, columns)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        return self.codes.size * 8 // self.format.bits

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and zero points."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def T(self) -> "QuantizedWeight":
        """The transposed weight: the same codes, which stand for a matrix with its last two axes exchanged."""
        return self._with(transposed=not self.transposed)

    def _with(self, **fields: Any) -> "QuantizedWeight":
        old = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return QuantizedWeight(**(old | fields))

    def astype(self, dtype: Any) -> Array:
        """The numbers as an array, rounded to the weight's dtype and then to this one."""
        x = numbers(self).astype(self.dtype).astype(dtype)
        return jnp.swapaxes(x, -1, -2) if self.transposed else x

    def __matmul__(self, x: Any) -> Array:
        return self.astype(self.dtype) @ x

    def __rmatmul__(self, x: Any) -> Array:
        return x @ self.astype(self.dtype)

    def __getitem__(self, index: Any) -> Any:
        """A part along the first axis: of a stack a weight, or a stack; of a matrix rows of numbers, such as the tokens of an embedding."""
        if self.ndim > 2:
            return jax.tree.map(lambda x: x[index], self)
        if self.transposed:
            return self.astype(self.dtype)[index]
        index, (rows, columns) = jnp.asarray(index), self.format.block
        row = index.reshape(-1)
        block = row // rows if rows else jnp.zeros_like(row)
        # Each row that is taken has scales of its own.
        form = dataclasses.replace(self.format, block=(1, columns))
        zeros = None if self.zeros is None else self.zeros[block]
        part = self._with(codes=self.codes[row], scales=self.scales[block], zeros=zeros, format=form)
        return part.astype(self.dtype).reshape(*index.shape, -1)

    def __pdoc__(self, **options: Any) -> Any:
        # Models show their weights by this, as `repr` does.
        return wadler_lindig.TextDoc(repr(self))

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.dtype.name}{list(self.shape)} as {self.format}{', float8 rows' * (self.float8_rows is not None)})"


def _check(name: str, x: Any, dtype: str, shape: tuple[int, ...] | None) -> None:
    if not (hasattr(x, "dtype") and hasattr(x, "shape")) or str(x.dtype) != dtype:
        raise ValueError(
            f"{name}: expected an array of {dtype}, received {getattr(x, 'dtype', type(x).__name__)}; bits are unsigned."
        )
    if shape is None and len(x.shape) < 2:
        raise ValueError(f"{name}: expected [..., out, in], received shape {x.shape}.")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, as codes and format have it, received {x.shape}.")
