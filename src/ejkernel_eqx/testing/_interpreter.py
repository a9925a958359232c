"""The interpreter: the body of a `@triton.jit` function run as Python, on numpy arrays, many programs at a time.

Triton's own front end emits every operation through a builder object. Here that builder computes with numpy
instead (`_numpy_builder.py`). Three mechanisms let a kernel's source run unchanged:

- its body is rewritten once (cached): an assigned Python number becomes a tensor, `range` yields tensors, and a
  test evaluates a tensor, all as in compiled code;
- while a grid runs, the functions of `triton.language` are replaced by ones bound to the numpy builder, and calling a
  `JITFunction` runs its rewritten body. Everything is restored at the end;
- reductions and scans are computed on whole arrays, in the compiler's tree order for a general combine function.

Programs of a grid run together, with a leading axis for them on every array, as long as they take the same path. Where
a branch or loop bounds differ (`Parted`), their stores and prints are undone, and those that agree
restart together. If one fails, they restart one by one.

Stricter than a device, on purpose: addresses are virtual and every access is checked, a masked load without `other`
returns poison, inputs cannot be written, and a block of several elements has no truth value. More lenient:
dots have no minimum size, and float32 products are exact except for a single pass of `"tf32"`. Atomics other than additions
of integers, inline assembly and libdevice calls are not supported.
"""

import ast
import contextlib
import functools
import inspect
import textwrap

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime import jit

from ._numpy_builder import alike, Handle, Memory, numpy_dtype, NumpyBuilder

BUILDER = NumpyBuilder()
SEMANTIC = TritonSemantic(BUILDER)


def run_grid(function, inputs, outputs, scalars, constants, grid):
    """Run all programs of `grid`; `outputs` are written in place. The caller holds `language_lock`."""
    memory = Memory()
    arguments = {name: memory.add(name, array, writable=False) for name, array in inputs.items()}
    arguments |= {name: memory.add(name, array, writable=True) for name, array in outputs.items()}
    arguments |= {name: _scalar(value) for name, value in scalars.items()}
    arguments |= constants
    body = _rewritten(function.fn)
    extents = tuple(grid) + (1,) * (3 - len(grid))
    programs = np.indices(extents).reshape(3, -1).T
    # A stack, next group last. Each entry counts how often it was split from others.
    waiting = [(programs[i : i + _TOGETHER], 0) for i in range(0, len(programs), _TOGETHER)][::-1]
    with _interpreted_language(), np.errstate(all="ignore"):
        BUILDER.memory = memory
        BUILDER.set_grid_dim(*extents)
        try:
            while waiting:
                programs, depth = waiting.pop()
                waiting += [(part, depth + 1) for part in _run(body, arguments, programs, depth)][::-1]
        finally:
            BUILDER.memory = BUILDER.programs = None


# Enough programs that Python's overhead is small relative to numpy's, few enough that their blocks stay in the processor's caches.
_TOGETHER = 64
# Programs that are split this often have little in common and run one by one.
_PARTINGS = 8


class Parted(BaseException):  # a kernel's body must not catch it
    """The programs differ in a value that determines control flow."""

    def __init__(self, values):
        self.values = values  # [P, ...]


def _run(body, arguments, programs, depth):
    """Run the programs together. If they have to be split, returns the groups still to be run; their effects are undone."""
    BUILDER.programs = programs
    alone = len(programs) == 1
    BUILDER.memory.begin(revocable=not alone)
    BUILDER.lines = []
    try:
        body(**arguments)
    except Parted as parted:
        assert not alone, "a single program cannot differ from itself"
        BUILDER.memory.take_back()
        values = parted.values.reshape(len(programs), -1)
        _, group = np.unique(values, axis=0, return_inverse=True)
        if depth >= _PARTINGS:
            group = np.arange(len(programs))
        return [programs[group.reshape(-1) == n] for n in range(group.max() + 1)]
    except Exception as error:
        if not alone:  # one by one, the failing program is known
            BUILDER.memory.take_back()
            return list(programs[:, None])
        BUILDER.print_lines()
        # The caller reports it, once, with the kernel's name.
        error.triton_program = tuple(map(int, programs[0]))  # pyright: ignore[reportAttributeAccessIssue]
        raise
    BUILDER.print_lines()
    return []


def _one(data, what):
    """The value of a scalar, or of a block of one element, that all programs must have in common."""
    if data.size != data.shape[0]:
        raise ValueError(f"a block of shape {data.shape[1:]} {what}")
    data = data.reshape(-1)
    if data.size > 1 and np.unique(data).size > 1:  # NaN counts as a single value
        raise Parted(data)
    return data[0]


def _tensor(data, dtype):
    """A Triton tensor from numpy data whose first axis is that of the programs."""
    if data.ndim == 1:
        return tl.tensor(Handle(data, dtype), dtype)
    return tl.tensor(Handle(data, dtype), tl.block_type(dtype, list(data.shape[1:])))


def _scalar(value):
    if value == 1:
        return value  # a compile-time constant in a real launch, without a tensor's methods
    dtype = SEMANTIC.to_tensor_type(value)
    return _tensor(np.array([value], numpy_dtype(dtype)), dtype)


# --- Rewriting a function's body


class _Rewriter(ast.NodeTransformer):
    """Rewrites assignments and loops to the compiler's semantics."""

    def visit_Assign(self, node):
        self.generic_visit(node)
        node.value = _call("_assigned", node.value)
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is None:
            return node
        is_constant = ast.unparse(node.annotation).endswith("constexpr")
        value = node.value if is_constant else _call("_assigned", node.value)
        return ast.copy_location(ast.Assign(targets=[node.target], value=value), node)

    def visit_For(self, node):
        self.generic_visit(node)
        loop = node.iter
        if isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id == "range":
            loop.func.id = "_loop"
        return node

    # A tensor is an object and hence always true in Python, so every test has to evaluate it.

    def visit_If(self, node):
        self.generic_visit(node)
        node.test = _call("_truth", node.test)
        return node

    visit_While = visit_IfExp = visit_Assert = visit_If  # pyright: ignore[reportAssignmentType]

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _call("_truth", node.operand)
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        name = "_both" if isinstance(node.op, ast.And) else "_either"
        *earlier, result = node.values
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        for value in reversed(earlier):
            result = _call(name, value, ast.Lambda(args=nothing, body=result))
        return result

    def visit_Compare(self, node):
        if len(node.ops) > 1:
            raise ValueError(f"Triton has no chained comparison: {ast.unparse(node)}")
        return self.generic_visit(node)


def _call(name, *arguments):
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(arguments), keywords=[])


def _truth(value):
    if not isinstance(value, tl.tensor):
        return bool(value)
    words = "has no truth value: use `&`, `|` and `tl.where`, not `and`, `or`, `if`"
    return bool(_one(value.handle.data.astype(bool), words))


def _both(first, second):
    return second() if _truth(first) else first


def _either(first, second):
    return first if _truth(first) else second()


def _assigned(value):
    if isinstance(value, tl.tensor):
        return value
    if isinstance(value, tuple):
        items = [_assigned(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return SEMANTIC.to_tensor(value, check_type=False)


def _loop(start, end=None, step=1, **_):
    """`range` and `tl.range`: an integer tensor per trip, of the bounds' common type."""
    if end is None:
        start, end = 0, start
    dtype = tl.int32
    for bound in (start, end, step):
        bound_type = bound.dtype if isinstance(bound, tl.tensor) else SEMANTIC.to_tensor_type(bound)
        dtype = SEMANTIC.integer_promote_impl(dtype, bound_type)
    data_type = numpy_dtype(dtype)
    # All at once, so that programs that differ in two of them are split once.
    bounds = np.stack(np.broadcast_arrays(*(_numbers(bound) for bound in (start, end, step))), axis=1)
    if not (bounds == bounds[0]).all():
        raise Parted(bounds)
    for i in range(*map(int, bounds[0])):
        yield tl.tensor(Handle(np.array([i], data_type), dtype), dtype)


def _numbers(value):
    """One number per program [P], or one for all [1]."""
    if not isinstance(value, tl.tensor):
        return np.array([_plain(value)])
    if value.handle.data.size != value.handle.data.shape[0]:
        raise ValueError(f"a block of shape {value.handle.data.shape[1:]} is not an integer")
    return value.handle.data.reshape(-1)


def _static_range(start, end=None, step=1):
    return range(start) if end is None else range(start, end, step)


@functools.cache
def _rewritten(function):
    """`function` with its body rewritten. It keeps its globals; names added by the rewriting are bound in a closure."""
    lines, first_line = inspect.getsourcelines(function)
    module = ast.parse(textwrap.dedent("".join(lines)))
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for parameter in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs):
        parameter.annotation = None
    definition = _Rewriter().visit(definition)
    ast.increment_lineno(module, first_line - 1)

    captured = {helper.__name__: helper for helper in (_assigned, _loop, _truth, _both, _either)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        captured[name] = cell.cell_contents
    factory = ast.parse(f"def _factory({', '.join(captured)}):\n    return {definition.name}")
    assert isinstance(factory.body[0], ast.FunctionDef)
    factory.body[0].body.insert(0, definition)
    ast.fix_missing_locations(factory)
    namespace = {}
    code = compile(factory, function.__code__.co_filename, "exec", dont_inherit=True)
    exec(code, function.__globals__, namespace)
    rewritten = namespace["_factory"](**captured)
    rewritten.__defaults__ = tuple(map(_plain, function.__defaults__ or ())) or None
    return rewritten


def _plain(value):
    return value.value if isinstance(value, tl.constexpr) else value


# --- The language, bound to the numpy builder


@contextlib.contextmanager
def _interpreted_language():
    """Replace the language's functions, and restore them however the body ends."""
    saved = []
    try:
        for owner, name, replacement in _replacements():
            saved.append((owner, name, owner.__dict__.get(name, _ABSENT)))
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(saved):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_ABSENT = object()


@functools.cache
def _replacements():
    """All (owner, attribute, replacement) triples, found once."""
    table = {}
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                table[owner, name] = _bound(member)
            elif owner is tl.tensor and isinstance(member, jit.JITFunction):
                table[owner, name] = _method(member)
    for owner in (tl, tl.core):
        table[owner, "reduce"] = _reduce
        table[owner, "associative_scan"] = _scan
        table[owner, "range"] = _loop
        table[owner, "static_range"] = _static_range
        table[owner, "static_assert"] = _static_assert
        table[owner, "static_print"] = print
        for name in ("multiple_of", "max_contiguous", "max_constancy"):
            table[owner, name] = _hint
    table[tl.tensor, "reduce"] = _reduce
    table[tl.tensor, "associative_scan"] = _scan
    table[tl.tensor, "__index__"] = _index
    table[tl.tensor, "__int__"] = _index
    table[tl.tensor, "__repr__"] = table[tl.tensor, "__str__"] = lambda self: repr(self.handle.data)
    table[tl.tensor, "T"] = property(lambda self: SEMANTIC.permute(self, (1, 0)))  # pyright: ignore[reportArgumentType]
    # The builder uses the language's own types, which distinguish signed from unsigned; the compiler's do not.
    table[tl.dtype, "to_ir"] = lambda self, builder: self
    table[tl.block_type, "__init__"] = _block_type_init
    table[tl.tensor, "__init__"] = _tensor_init
    table[jit.JITFunction, "__call__"] = _call_device_function
    if hasattr(jit, "ConstexprFunction"):
        table[jit.ConstexprFunction, "__call__"] = _call_constexpr_function
    # Inherited methods of Triton's builder look this up by name; bfloat16 is a real type here, not raw bits.
    table[triton_interpreter, "_get_np_dtype"] = numpy_dtype
    return tuple((owner, name, replacement) for (owner, name), replacement in table.items())


_BUILTIN_WRAPPER = tl.core.builtin(lambda: None).__code__


# Most of the time would be spent on building the same few types again and again, so their attributes are cached and copied.

_original_block_type_init = tl.block_type.__init__
_original_tensor_init = tl.tensor.__init__
_block_attributes: dict = {}
_scalar_attributes: dict = {}


def _block_type_init(self, element_ty, shape):
    extents = getattr(_plain(shape), "values", shape)  # Triton's own tuple, or a Python sequence
    key = str(element_ty), tuple(map(_plain, extents))
    attributes = _block_attributes.get(key)
    if attributes is None:
        _original_block_type_init(self, element_ty, shape)
        attributes = _block_attributes[key] = {**self.__dict__, "_tensor_attributes": {}}
    self.__dict__.update(attributes)


def _tensor_init(self, handle, type):
    if type.is_block():
        known = type.__dict__.get("_tensor_attributes")
    else:
        known = _scalar_attributes.setdefault(str(type), {})
    if known:
        self.__dict__.update(known)
        self.handle = handle
    else:
        _original_tensor_init(self, handle, type)
        if known is not None:
            known.update(self.__dict__, handle=None)


def _bound(member):
    # Triton's wrapper only checks that `_semantic` is there, so it can be skipped.
    is_wrapper = getattr(member, "__code__", None) is _BUILTIN_WRAPPER
    function = member.__wrapped__ if is_wrapper else member

    def call(*args, **kwargs):
        kwargs["_semantic"] = SEMANTIC
        return function(*args, **kwargs)

    return call


def _method(member):
    def call(self, *args, **kwargs):
        return _rewritten(member.fn)(self, *args, **kwargs)

    return call


def _call_device_function(self, *args, **kwargs):
    return _rewritten(self.fn)(*args, **kwargs)


def _call_constexpr_function(self, *args, _semantic=None, **kwargs):
    return self.fn(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _static_assert(condition, message=""):
    assert condition, message


def _hint(value, *_, **__):
    return value


def _index(self):
    return int(_one(self.handle.data, "is not an integer"))


# --- Reductions and scans


def _reduce(input, axis, combine_fn, keep_dims=False, **_):
    if isinstance(input, tl.tensor):
        return _reduce((input,), axis, combine_fn, keep_dims)[0]
    axis, keep_dims = _plain(axis), _plain(keep_dims)
    arrays = [x.handle.data for x in input]
    shape = arrays[0].shape[1:]
    if axis is None:
        arrays, axis = [array.reshape(array.shape[0], -1) for array in arrays], 1
        kept = (1,) * len(shape)
    else:
        axis %= len(shape)
        kept = (*shape[:axis], 1, *shape[axis + 1 :])
        axis += 1
    known = _known_reduction(combine_fn)
    if known is not None:
        results = known(arrays, axis)
    else:
        results = _tree(combine_fn, [np.moveaxis(array, axis, 1) for array in arrays], input)
    results = [result.astype(numpy_dtype(x.dtype), copy=False) for result, x in zip(results, input)]
    if keep_dims:
        results = [result.reshape(result.shape[0], *kept) for result in results]
    return tuple(_tensor(result, x.dtype) for result, x in zip(results, input))


def _known_reduction(combine_fn):
    standard = tl.standard
    if combine_fn is standard._sum_combine:
        return lambda arrays, axis: [np.sum(_widened(arrays[0]), axis=axis)]
    # `fmax` and `fmin` drop NaN as the hardware instructions do.
    if combine_fn is standard._elementwise_max:
        return lambda arrays, axis: [np.fmax.reduce(arrays[0], axis=axis)]
    if combine_fn is standard._elementwise_min:
        return lambda arrays, axis: [np.fmin.reduce(arrays[0], axis=axis)]
    if combine_fn in (standard._argmax_combine_tie_break_left, standard._argmax_combine_tie_break_fast):
        return functools.partial(_with_indices, np.argmax)
    if combine_fn in (standard._argmin_combine_tie_break_left, standard._argmin_combine_tie_break_fast):
        return functools.partial(_with_indices, np.argmin)
    return None


def _with_indices(find, arrays, axis):
    arrays = alike(*arrays)
    place = np.expand_dims(find(arrays[0], axis=axis), axis)
    return [np.take_along_axis(array, place, axis).squeeze(axis) for array in arrays]


def _widened(array):
    """Half precision summed in float32: numpy would round after every addition."""
    return array.astype(np.float32) if array.dtype.itemsize <= 2 and array.dtype.kind in "fV" else array


def _combined(combine_fn, left, right, input):
    arguments = [_tensor(array, x.dtype) for side in (left, right) for array, x in zip(side, input)]
    result = combine_fn(*arguments)
    result = result if isinstance(result, tuple) else (result,)
    results = [SEMANTIC.to_tensor(value).handle.data for value in result]
    shape = np.broadcast_shapes(left[0].shape, *(data.shape for data in results))
    return [np.broadcast_to(data, shape) for data in results]


def _tree(combine_fn, arrays, input):
    """Combine along the block's first axis, neighbours first, so that the combine function need not commute."""
    while arrays[0].shape[1] > 1:
        left, right = [array[:, 0::2] for array in arrays], [array[:, 1::2] for array in arrays]
        arrays = _combined(combine_fn, left, right, input)
    return [array[:, 0] for array in arrays]


def _scan(input, axis, combine_fn, reverse=False, **_):
    if isinstance(input, tl.tensor):
        return _scan((input,), axis, combine_fn, reverse)[0]
    axis, reverse = _plain(axis) % len(input[0].shape) + 1, _plain(reverse)
    arrays = [np.moveaxis(x.handle.data, axis, 1) for x in input]
    if reverse:
        arrays = [array[:, ::-1] for array in arrays]
    if combine_fn is tl.standard._sum_combine:
        arrays = [np.cumsum(_widened(arrays[0]), axis=1)]
    elif combine_fn is tl.standard._prod_combine:
        arrays = [np.cumprod(_widened(arrays[0]), axis=1)]
    else:
        distance = 1
        while distance < arrays[0].shape[1]:
            # Whole blocks, as their extents must be powers of two; the first `distance` results are not used.
            earlier = [np.roll(array, distance, axis=1) for array in arrays]
            later = _combined(combine_fn, earlier, arrays, input)
            pairs = [alike(array, part) for array, part in zip(arrays, later)]
            arrays = [
                np.concatenate([array[:, :distance], part[:, distance:]], axis=1) for array, part in pairs
            ]
            distance *= 2
    if reverse:
        arrays = [array[:, ::-1] for array in arrays]
    return tuple(
        _tensor(np.moveaxis(array.astype(numpy_dtype(x.dtype), copy=False), 1, axis), x.dtype)
        for array, x in zip(arrays, input)
    )
