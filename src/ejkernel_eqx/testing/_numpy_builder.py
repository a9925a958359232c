"""The numpy side of the interpreter: virtual memory, and a builder that computes where Triton's would emit code.

Used for the functions of a `@triton.jit` kernel; see `_interpreter.py`. Every value is held for all programs that run together: the first axis of
its array counts the programs `P`, or is 1 if they share one value; a block's own axes follow, and a scalar has none.
"""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from scipy import special
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorDescHandle, TensorHandle

_OF_ONE_NAME = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
_NUMPY_DTYPES = {getattr(tl, name): jnp.dtype(name) for name in _OF_ONE_NAME.split()} | {
    tl.int1: np.dtype(np.bool_),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_TRITON_DTYPES = {data_type: dtype for dtype, data_type in _NUMPY_DTYPES.items()}
_POINTER_DTYPE = np.dtype(np.uint64)


def numpy_dtype(dtype):
    """The numpy dtype that holds elements of Triton's scalar, pointer or block type."""
    dtype = dtype.scalar
    return _POINTER_DTYPE if dtype.is_ptr() else _NUMPY_DTYPES[dtype]


class Handle(TensorHandle):
    """`TensorHandle` without its size check, which costs more than most of the operations."""

    def __init__(self, data, dtype):
        self.data = data
        self.dtype = dtype
        self.attr = {}


class Memory:
    """The arrays of one launch in a virtual address space. They are far apart, so that a wrong offset from one array cannot
    reach another, and addresses are never real, so that it cannot reach the process either."""

    _WINDOW = 44  # each array owns 2^44 addresses, and starts in their middle

    def __init__(self):
        self._arrays = []
        self._views = {}
        self._overwritten = None

    def begin(self, *, revocable):
        """Programs start. If `revocable`, their stores can be undone."""
        self._overwritten = [] if revocable else None

    def take_back(self):
        """Restores the state in which the programs started."""
        for flat, index, before in reversed(self._overwritten or ()):
            flat[index] = before
        self._overwritten = []

    def add(self, name, array, *, writable):
        """Register a contiguous array; returns the kernel's pointer to it."""
        self._arrays.append((name, array, writable))
        pointer = tl.pointer_type(_TRITON_DTYPES[array.dtype])
        return tl.tensor(Handle(np.array([self._base(len(self._arrays))], np.uint64), pointer), pointer)

    def _base(self, number):
        return (number << self._WINDOW) + (1 << (self._WINDOW - 1))

    def load(self, addresses, dtype):
        flat, index = self._locate(addresses, dtype, writing=False)
        return flat[index]

    def store(self, addresses, values):
        flat, index = self._locate(addresses, values.dtype, writing=True)
        if self._overwritten is not None:
            self._overwritten.append((flat, index, flat[index]))
        flat[index] = values

    def _locate(self, addresses, dtype, *, writing):
        """The flat array behind `addresses`, and their positions in it."""
        if addresses.size == 0:
            return np.empty(0, dtype), np.empty(addresses.shape, np.intp)
        number = int(addresses.flat[0]) >> self._WINDOW
        action = "store to" if writing else "load from"
        if not 1 <= number <= len(self._arrays):
            raise IndexError(
                f"{action} an address outside all arrays (an offset from a null or wild pointer)"
            )
        name, array, writable = self._arrays[number - 1]
        if writing and not writable:
            raise IndexError(f"store to {name!r}, which is an input")
        # Below the base this wraps around to a huge number, so one comparison checks both bounds.
        offset = addresses - np.uint64(self._base(number))
        if int(offset.max()) > array.nbytes - dtype.itemsize:
            signed = offset.view(np.int64) // dtype.itemsize
            raise IndexError(
                f"{action} {name!r} out of bounds: elements {signed.min()} to {signed.max()} of "
                f"{array.nbytes // dtype.itemsize}"
            )
        key = number, dtype
        if key not in self._views:
            self._views[key] = array.reshape(-1).view(dtype)
        return self._views[key], (offset // np.uint64(dtype.itemsize)).astype(np.intp)


def poison(dtype) -> np.generic:
    """The initial value of outputs: NaN, the largest integer, or True."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.type("nan")
    return np.bool_(True) if dtype == np.bool_ else dtype.type(np.iinfo(dtype).max)


def _poisoned(shape, dtype):
    return np.full(shape, poison(dtype), dtype)


def alike(*arrays):
    """The arrays with first axes (those of the programs) of equal length."""
    count = max(array.shape[0] for array in arrays)
    return [
        array if array.shape[0] == count else np.broadcast_to(array, (count, *array.shape[1:]))
        for array in arrays
    ]


def _beside(data, rank):
    """A scalar's values with `rank` axes in total, to combine with a block."""
    return data.reshape(data.shape[0], *(1,) * (rank - 1))


def _along(offset, axis, block_shape):
    """The indices along one axis of a block that starts at an offset."""
    along = np.arange(block_shape[axis]).reshape(
        1, *(n if axis == i else 1 for i, n in enumerate(block_shape))
    )
    return _beside(offset.data, len(block_shape) + 1).astype(np.int64) + along


def _places(base, indices, strides, extents, block_shape, *, bounded):
    """Addresses of a block in an array of `extents`, and where they lie within the axes that are `bounded`."""
    rank = len(block_shape) + 1
    dtype = base.get_element_ty()
    addresses, inside = _beside(base.data, rank), np.ones((1,) * rank, bool)
    for axis, (index, stride, extent) in enumerate(zip(indices, strides, extents)):
        step = _beside(stride.data, rank).astype(np.int64) * max(1, dtype.primitive_bitwidth // 8)
        addresses = addresses + (index * step).astype(np.uint64)
        if axis in bounded:
            inside = inside & (index >= 0) & (index < _beside(extent.data, rank))
    count = max(addresses.shape[0], inside.shape[0])
    shape = (count, *block_shape)
    return Handle(np.broadcast_to(addresses, shape), base.dtype.scalar), np.broadcast_to(inside, shape)


class _Descriptor(TensorDescHandle):
    def validate(self):
        itemsize = self.base.dtype.element_ty.primitive_bitwidth // 8
        assert self.ndim == len(self.strides) == len(self.block_shape) >= 1, (
            "a descriptor needs a stride for each axis"
        )
        assert (self.base.data % 16 == 0).all(), "base must be 16-byte aligned"
        for stride in self.strides[:-1]:
            assert (stride.data * itemsize % 16 == 0).all(), "stride must be 16-byte aligned"
        assert (self.strides[-1].data == 1).all(), "last dim must be contiguous"

    def materialize_pointers(self, offsets):
        self._check_start(offsets[-1])
        shape = self.block_shape
        indices = [_along(offset, axis, shape) for axis, offset in enumerate(offsets)]
        return _places(self.base, indices, self.strides, self.shape, shape, bounded=range(self.ndim))

    def rows(self, rows, offset):
        """Addresses of the columns from an offset on, for arbitrary rows, and whether they are inside."""
        self._check_start(offset)
        shape = (rows.data.shape[-1], self.block_shape[-1])
        indices = [rows.data[..., None].astype(np.int64), _along(offset, 1, shape)]
        return _places(self.base, indices, self.strides, self.shape, shape, bounded=range(2))

    def _check_start(self, offset):
        itemsize = self.base.dtype.element_ty.primitive_bitwidth // 8
        assert (offset.data * itemsize % 16 == 0).all(), "block offset start must be 16-byte aligned"


def _quotient(lhs, rhs):
    """Integer division towards zero, as on the device."""
    return (lhs - np.fmod(lhs, rhs)) // rhs


def _high_product(lhs, rhs):
    """The upper half of the full unsigned product."""
    bits = lhs.dtype.itemsize * 8
    unsigned = np.dtype(f"u{lhs.dtype.itemsize}")
    a, b = lhs.view(unsigned), rhs.view(unsigned)
    if bits < 64:
        wide = np.dtype(f"u{2 * lhs.dtype.itemsize}")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(unsigned).view(lhs.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + ((a0 * b0) >> half)
    return (a1 * b1 + (middle >> half) + (((middle & low) + a0 * b1) >> half)).view(lhs.dtype)


def _matmul_operand(data, accumulator):
    """Products are exact in float32 for half precision; integers are widened to the accumulator's type."""
    if data.dtype == np.float64:
        return data
    return data.astype(accumulator.dtype if data.dtype.kind in "iub" else np.float32, copy=False)


def _one_pass_operand(data):
    """A float32 operand of a single-pass tf32 product: the hardware truncates it to 11 bits."""
    return (np.ascontiguousarray(data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _missing(what):
    def create(self, *_, **__):
        raise NotImplementedError(
            f"{what} cannot be interpreted; select an alternative by a constexpr of the kernel"
        )

    return create


class NumpyBuilder(InterpreterBuilder):
    """Triton's interpreting builder with exact types, checked memory and correct bfloat16 arithmetic."""

    memory: Any  # a `Memory`, while a grid runs
    programs: Any  # their places in the grid [P, 3], while some run

    def __init__(self):
        super().__init__()
        self.memory = self.programs = None
        self.lines = []  # what these programs print
        # Overflow checks triple the cost of integer operations, and kernels rely on wrap-around.
        self.options = InterpreterOptions(
            sanitize_overflow=False,
            allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
        )

    def get_bf16(self, value):
        return Handle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)

    def create_get_program_id(self, axis):
        number = self.programs[:, axis].astype(np.int32)
        return Handle(number[:1] if (number == number[0]).all() else number, tl.int32)

    # Memory

    def create_load(self, pointers, *_):
        return self._load(pointers, None, None)

    def create_masked_load(self, pointers, mask, other, *_, **__):
        return self._load(pointers, np.asarray(mask.data), other)

    def _load(self, pointers, mask, other):
        dtype = pointers.get_element_ty()
        data_type = numpy_dtype(dtype)
        if mask is None or mask.all():
            return Handle(self.memory.load(pointers.data, data_type), dtype)
        parts = (pointers.data, mask) if other is None else (pointers.data, mask, other.data)
        shape = np.broadcast_shapes(*(part.shape for part in parts))
        mask = np.broadcast_to(mask, shape)
        result = _poisoned(shape, data_type) if other is None else np.broadcast_to(other.data, shape).copy()
        result[mask] = self.memory.load(np.broadcast_to(pointers.data, shape)[mask], data_type)
        return Handle(result, dtype)

    def create_store(self, pointers, value, *_):
        self._store(pointers, value, None)

    def create_masked_store(self, pointers, value, mask, *_, **__):
        self._store(pointers, value, np.asarray(mask.data))

    def _store(self, pointers, value, mask):
        parts = (pointers.data, value.data) if mask is None else (pointers.data, value.data, mask)
        addresses, values, *masks = np.broadcast_arrays(*parts)
        data_type = numpy_dtype(pointers.get_element_ty())
        assert values.dtype == data_type, (values.dtype, data_type)
        if mask is None or mask.all():
            self.memory.store(addresses, values)
        else:
            self.memory.store(addresses[masks[0]], values[masks[0]])

    def create_addptr(self, pointer, offset):
        bytes_each = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))
        return Handle(pointer.data + bytes_each * offset.data.astype(np.uint64), pointer.dtype)

    create_make_block_ptr = _missing("a block pointer, which Triton 3.8 has no more,")

    def create_make_tensor_descriptor(self, base, shape, strides, tensor_shape, is_signed, padding="zero"):
        descriptor = _Descriptor(base, shape, strides, tensor_shape, padding)
        descriptor.validate()
        return descriptor

    create_atomic_cas = _missing("an atomic comparison")

    def create_atomic_rmw(self, operation, pointers, value, mask, *_):
        """An addition of integers, in the order of the programs; what was there before. (A sum of others depends on the order on a device.)"""
        data_type = numpy_dtype(pointers.get_element_ty())
        if operation != ir.ATOMIC_OP.ADD or data_type.kind not in "iu":
            raise NotImplementedError("an atomic other than an addition of integers cannot be interpreted")
        parts = (pointers.data, value.data, mask.data)
        shape = np.broadcast_shapes(
            (len(self.programs), *[1] * (pointers.data.ndim - 1)), *(x.shape for x in parts)
        )
        addresses, values, is_active = (np.broadcast_to(x, shape) for x in parts)
        before = np.zeros(shape, data_type)
        for at in zip(*np.nonzero(is_active), strict=True):
            place = addresses[at].reshape(1)
            before[at] = self.memory.load(place, data_type)[0]
            self.memory.store(place, (before[at] + values[at]).astype(data_type).reshape(1))
        return Handle(before, value.dtype)

    create_inline_asm = _missing("inline assembly")
    create_extern_elementwise = _missing("a libdevice function")

    def create_descriptor_gather(self, descriptor, rows, offset, result_type):
        places, inside = descriptor.rows(rows, offset)
        padding = np.zeros if descriptor.padding == ir.PADDING_OPTION.PAD_ZERO else _poisoned
        dtype = places.get_element_ty()
        return self._load(places, inside, Handle(padding((1, 1, 1), numpy_dtype(dtype)), dtype))

    def create_descriptor_scatter(self, descriptor, value, rows, offset):
        places, inside = descriptor.rows(rows, offset)
        self._store(places, value, inside)

    def create_print(self, prefix, hex, values, isSigned):
        """Prints one line per program and value, as on a device, once the programs have ended."""
        show = (lambda x: f"0x{x:02x}") if hex else None
        for n, index in enumerate(self.programs):
            for value in values:
                data = value.data[n if value.data.shape[0] > 1 else 0]
                text = np.array2string(data, formatter={"all": show} if show else None)
                words = (str(tuple(map(int, index))), prefix, text)
                self.lines.append(" ".join(word for word in words if word))

    def print_lines(self):
        for line in self.lines:
            print(line)
        self.lines = []

    # Casts and arithmetic: Triton's builder computes all of them by these methods, but for a few that follow.

    def cast_impl(self, source, dtype):
        return Handle(source.data.astype(numpy_dtype(dtype), copy=False), dtype.scalar)

    def binary_op(self, lhs, rhs, operation):
        data = operation(lhs.data, rhs.data)
        if data.dtype == np.bool_:  # a comparison
            return Handle(data, tl.int1)
        dtype = lhs.dtype.scalar
        return Handle(data.astype(numpy_dtype(dtype), copy=False), dtype)

    def unary_op(self, source, operation):
        dtype = source.dtype.scalar
        return Handle(operation(source.data).astype(numpy_dtype(dtype), copy=False), dtype)

    def create_fp_to_fp(self, source, dtype, rounding_mode):
        if rounding_mode is not None and rounding_mode.name != "RTNE":
            raise NotImplementedError(f"rounding mode {rounding_mode.name} cannot be interpreted")
        return self.cast_impl(source, dtype)

    def create_bitcast(self, source, dtype):
        data_type = numpy_dtype(dtype)
        data = source.data if source.data.dtype != np.bool_ else source.data.astype(np.uint8)
        if data_type == np.bool_:
            return Handle(data != 0, dtype.scalar)
        return Handle(np.ascontiguousarray(data).view(data_type), dtype.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    create_idiv = lambda self, lhs, rhs: self.binary_op(lhs, rhs, _quotient)
    create_ashr = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.right_shift)
    create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    create_umulhi = lambda self, lhs, rhs: self.binary_op(lhs, rhs, _high_product)
    create_fabs = lambda self, source: self.unary_op(source, np.abs)
    create_rsqrt = lambda self, source: self.unary_op(source, lambda x: 1 / np.sqrt(x))
    create_erf = lambda self, source: self.unary_op(source, special.erf)

    def create_fma(self, x, y, z):
        return Handle(x.data * y.data + z.data, z.dtype.scalar)

    def create_select(self, condition, lhs, rhs):
        which, rank = condition.data, max(lhs.data.ndim, rhs.data.ndim)
        if which.ndim < rank:
            which = _beside(which, rank)
        return Handle(np.where(which, lhs.data, rhs.data), rhs.dtype.scalar)

    def create_dot(self, a, b, accumulator, input_precision, *_):
        total = accumulator.data
        lhs, rhs = _matmul_operand(a.data, total), _matmul_operand(b.data, total)
        if input_precision == ir.INPUT_PRECISION.TF32 and a.data.dtype == b.data.dtype == np.float32:
            lhs, rhs = _one_pass_operand(lhs), _one_pass_operand(rhs)
        product = np.matmul(lhs, rhs)
        return Handle((product + total).astype(total.dtype, copy=False), accumulator.dtype.scalar)

    # Shapes

    def create_make_range(self, result_type, start, stop):
        return Handle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, result_type, source):
        data, shape = source.data, result_type.shape
        return Handle(
            np.broadcast_to(_beside(data, len(shape) + 1), (data.shape[0], *shape)), source.dtype.scalar
        )

    def create_unsplat(self, source):
        return Handle(source.data.reshape(source.data.shape[0]), source.dtype.scalar)

    def create_broadcast(self, source, shape):
        return Handle(np.broadcast_to(source.data, (source.data.shape[0], *shape)), source.dtype.scalar)

    def create_expand_dims(self, source, axis):
        return Handle(np.expand_dims(source.data, axis + 1), source.dtype.scalar)

    def create_reshape(self, source, shape, allow_reorder):
        return Handle(source.data.reshape(source.data.shape[0], *shape), source.dtype.scalar)

    def create_trans(self, source, permutation):
        return Handle(
            np.transpose(source.data, (0, *(axis + 1 for axis in permutation))), source.dtype.scalar
        )

    def create_cat(self, lhs, rhs):
        return Handle(np.concatenate(alike(lhs.data, rhs.data), axis=1), lhs.dtype.scalar)

    def create_join(self, lhs, rhs):
        return Handle(np.stack(alike(lhs.data, rhs.data), axis=-1), lhs.dtype.scalar)

    def create_split(self, source):
        return tuple(Handle(source.data[..., n], source.dtype.scalar) for n in range(2))

    def create_gather(self, source, indices, axis):
        return Handle(
            np.take_along_axis(*alike(source.data, indices.data), axis=axis + 1), source.dtype.scalar
        )

    def create_histogram(self, source, bins, mask):
        real = np.ones((1, 1), bool) if mask is None else mask.data
        shape = np.broadcast_shapes(source.data.shape, real.shape)
        rows = zip(np.broadcast_to(source.data, shape), np.broadcast_to(real, shape))
        # Numbers outside the bins are not counted.
        counts = [
            np.bincount(row[is_real & (row >= 0) & (row < bins)], minlength=bins) for row, is_real in rows
        ]
        return Handle(np.stack(counts).astype(np.int32), tl.int32)
