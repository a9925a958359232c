"""Hopper's kernels as plain Python on NumPy arrays: groups of warps are threads. So numbers and barriers are tested without a GPU.

Products, and copies to device memory, take place when they are awaited, as late as they may, and copies from there when they begin: whoever frees or
fills a buffer too early changes results.
Shared memory is NaN before it is written. Layouts, and what orders memory between threads, are not emulated. What is written in PTX is replaced by
what it computes."""

import threading
import time
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.inner import run

triton = pytest.importorskip("triton")
constexpr = pytest.importorskip("triton.language").constexpr

LIMIT = 5.0
"""Seconds that a thread may wait."""


def finish(threads: list[threading.Thread], errors: list[BaseException]) -> None:
    """Runs the threads to their end. Raises the first error that one of them has noted."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


class Barrier:
    """Phases end when all arrivals and all bytes are there; a wait sees only whether their number is odd."""

    def __init__(self, count: int):
        self.changed = threading.Condition()
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, arrivals: int = 1, more_bytes: int = 0) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += more_bytes
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: (self.phase - 1) % 2 == parity, LIMIT)
        assert done, "a wait without end"


class Tensor(np.ndarray):
    """Numbers in registers."""

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


class Number(int):
    def to(self, dtype: Any) -> "Number":
        return self


def tensor(x: Any) -> Any:
    return np.asarray(x).view(Tensor)


class Pointer:
    def __init__(self, array: np.ndarray, at: Any = 0):
        self.array, self.at = array, at
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.array, self.at + more)


class Shared:
    def __init__(self, array: np.ndarray):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def index(self, at: Any) -> Any:
        return Shared(self.array[at])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def reshape(self, shape: Any) -> "Shared":
        view = self.array.reshape(tuple(shape))
        assert np.shares_memory(view, self.array)
        return Shared(view)

    def permute(self, order: Any) -> "Shared":
        return Shared(self.array.transpose(order))

    def load(self, layout: Any) -> Tensor:
        return tensor(self.array.copy())

    def store(self, value: Any) -> None:
        assert value.shape == self.array.shape and value.dtype == self.array.dtype
        self.array[...] = value


class Barriers(list):
    def index(self, at: Any) -> Any:  # type: ignore[override]
        return self[int(at)]


_BARRIERS = types.SimpleNamespace(
    MBarrierLayout=lambda: Barriers, init=lambda b, count: b.__init__(count),
    wait=lambda b, parity, pred=True: b.wait(parity) if pred else None,
    arrive=lambda b, count, pred=True: b.arrive(count) if pred else None, expect=lambda b, size: b.arrive(1, size),
)  # fmt: skip


class Descriptor:
    """A tensor in device memory, and the boxes that are copied from and to it."""

    def __init__(self, pointer: Pointer, shape: Any, strides: Any, block: Any, layout: Any):
        assert strides[-1] == 1 and all(s * pointer.array.itemsize % 16 == 0 for s in strides[:-1])
        self.flat, self.shape, self.strides, self.block = (
            pointer.array.reshape(-1)[pointer.at :],
            shape,
            strides,
            block,
        )

    def places(self, at: Any) -> tuple[np.ndarray, np.ndarray]:
        """Where the elements of a box are, and which exist."""
        where, inside = np.zeros(self.block, np.int64), np.ones(self.block, bool)
        for axis, (first, size, stride, length) in enumerate(
            zip(at, self.shape, self.strides, self.block, strict=True)
        ):
            index = (first + np.arange(length)).reshape(
                [-1 if a == axis else 1 for a in range(len(self.block))]
            )
            where, inside = where + index * stride, inside & (index >= 0) & (index < size)
        return where, inside

    def load(self, at: Any, barrier: Barrier, buffer: Shared) -> None:
        where, inside = self.places(at)
        assert buffer.array.shape == tuple(self.block)
        buffer.array[...] = np.where(
            inside, self.flat[np.where(inside, where, 0)], np.zeros((), self.flat.dtype)
        )
        barrier.arrive(0, -buffer.array.nbytes)

    def store(self, at: Any, buffer: Shared, add: bool = False) -> None:
        where, inside = self.places(at)
        assert buffer.array.shape == tuple(self.block) and buffer.dtype == self.flat.dtype
        before = self.flat[where[inside]] if add else 0
        self.flat[where[inside]] = before + buffer.array[inside]


class Product:
    """`a b + acc`, once it is awaited."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool):
        self.operands, self.use_acc, self.value = (a, b, acc), use_acc, None

    def run(self) -> None:
        a, b, acc = self.operands
        a, b = (np.asarray(x.array if isinstance(x, Shared) else x, np.float32) for x in (a, b))
        acc = acc.value if isinstance(acc, Product) else acc
        self.value = tensor(a @ b + (acc if self.use_acc else 0.0))
        assert self.value.shape == acc.shape, (a.shape, b.shape, acc.shape)


class Device:
    """Runs a launch's programs, `at_once` of them at a time: the first ones do everything, if they do what they should. Triton's kernels are
    interpreted."""

    def __init__(self, *modules: Any, at_once: int = 1):
        self.at_once, self.own = at_once, threading.local()
        self.errors: list[BaseException] = []
        self.claiming = threading.Lock()
        self.functions: dict[int, Any] = {}
        self.world = self._world()

    def run(self, launch: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if not launch.is_gluon:
            return run(launch, inputs, interpret=True)
        arrays = {name: np.array(x) for name, x in inputs.items()}
        for name, x in launch.outputs.items():
            arrays[name] = np.full(x.shape, np.nan if x.dtype != np.int32 else -7, x.dtype)
        for before, after in launch.aliases.items():
            arrays[after] = arrays[before].copy()
        named = {name: Pointer(x) for name, x in arrays.items()} | launch.scalars | launch.constants
        kernel, self.programs = self._as_python(launch.function), launch.grid[0]
        for first in range(0, self.programs, self.at_once):
            together = range(first, min(first + self.at_once, self.programs))
            finish([self._thread(self._program, i, kernel, named) for i in together], self.errors)
        return {name: jnp.asarray(arrays[name]) for name in launch.outputs}

    @staticmethod
    def _thread(function: Any, *args: Any) -> threading.Thread:
        return threading.Thread(target=function, args=args, daemon=True)

    def _program(self, number: int, kernel: Any, named: dict[str, Any]) -> None:
        self.own.program = number
        kernel(**named)

    def _as_python(self, function: Any) -> Any:
        """A kernel's function, and those it calls, each with the names of its own module."""
        if id(function) not in self.functions:
            plain = function.fn
            names = dict(plain.__globals__)
            self.functions[id(function)] = types.FunctionType(
                plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
            )
            for name, value in list(names.items()):
                if name in self.world:
                    names[name] = self.world[name]
                elif isinstance(value, constexpr):
                    names[name] = value.value
                elif isinstance(value, triton.JITFunction):
                    names[name] = self._as_python(value)
        return self.functions[id(function)]

    def _world(self) -> dict[str, Any]:
        language = types.SimpleNamespace(
            minimum=_least, maximum=_most, cdiv=lambda a, b: -(-a // b), load=_load, store=_store, static_range=range, constexpr=Any,
            int32=np.dtype(np.int32), float32=np.dtype(np.float32), int64=np.dtype(np.int64), bfloat16=np.dtype(jnp.bfloat16),
            arange=lambda a, b, layout: tensor(np.arange(a, b)), zeros=lambda shape, dtype, layout: tensor(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, dtype)), sum=np.sum, max=_reduced(np.max),
            min=_reduced(np.min), to_tensor=Number, where=_where, exp2=np.exp2, log2=np.log2, expand_dims=np.expand_dims, barrier=lambda: None,
            convert_layout=lambda x, *_, **__: x, multiple_of=lambda x, _: x, allocate_shared_memory=_allocated,
            warp_specialize=self._specialised, NVMMASharedLayout=_NoLayout,
            program_id=lambda axis: self.own.program, num_programs=lambda axis: self.programs,
            NVMMADistributedLayout=lambda version, warps, shape: types.SimpleNamespace(instr_shape=shape),
            SliceLayout=lambda axis, parent: types.SimpleNamespace(parent=parent),
            **dict.fromkeys("DotOperandLayout BlockedLayout SwizzledSharedLayout".split(), lambda *_: None),
        )  # fmt: skip
        copies = types.SimpleNamespace(
            make_tensor_descriptor=Descriptor, async_copy_global_to_shared=lambda desc, at, barrier, buffer: desc.load(at, barrier, buffer),
            async_copy_shared_to_global=lambda desc, at, buffer: self.own.stores.append((desc, at, buffer, False)), store_wait=self._stored,
        )  # fmt: skip
        return dict(
            gl=language, tl=language, mbarrier=_BARRIERS, tma=copies, fence_async_shared=lambda: None,
            warpgroup_mma=self._product, warpgroup_mma_wait=self._await, _claim=self._claim, _claimed=lambda number: number,
            _sync_consumers=lambda: self.own.consumers.wait(LIMIT), _add=lambda desc, at, buffer: self.own.stores.append((desc, at, buffer, True)),
            _await_named=self._await_named, _arrive_named=lambda consumer: self.own.named[consumer].release(),
            _await_semaphore=_await_semaphore, _release_semaphore=_release_semaphore, _within=_within, _capped=_capped,
            _rescaled=lambda acc, alpha, threshold: acc * alpha[:, None], _log2=np.log2, _uniform=lambda number: number, LEAST=0.0,
        )  # fmt: skip

    def _specialised(self, parts: Any, warps: Any, registers: Any) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        # What the groups of warps of a program know of one another.
        shared = {
            "consumers": threading.Barrier(2),
            "program": self.own.program,
            "named": [threading.Semaphore(0) for _ in range(len(parts) - 1)],
        }
        finish([self._thread(self._guarded, *part, shared) for part in parts], self.errors)

    def _await_named(self, consumer: int) -> None:
        assert self.own.named[consumer].acquire(timeout=LIMIT), "a named barrier that nobody arrives at"

    def _guarded(self, function: Any, arguments: Any, shared: dict[str, Any]) -> None:
        self.own.queue, self.own.stores = [], []
        vars(self.own).update(shared)
        try:
            with np.errstate(all="ignore"):  # as on a device
                function(*arguments)
            assert not self.own.queue, "products that nobody awaits"
            assert not self.own.stores, "copies that nobody awaits"
        except BaseException as error:  # the thread of the test raises it
            self.errors.append(error)

    def _stored(self, outstanding: int) -> None:
        while len(self.own.stores) > outstanding:
            desc, at, buffer, add = self.own.stores.pop(0)
            desc.store(at, buffer, add)

    def _claim(self, pointer: Pointer) -> int:
        flat = pointer.array.reshape(-1)
        with self.claiming:
            flat[pointer.at] += 1
            return int(flat[pointer.at]) - 1

    def _product(self, a: Any, b: Any, acc: Any, use_acc: Any = True, is_async: bool = False) -> Product:
        assert is_async
        self.own.queue.append(Product(a, b, acc, use_acc))
        return self.own.queue[-1]

    def _await(self, outstanding: int, deps: Any) -> Any:
        while len(self.own.queue) > outstanding:
            self.own.queue.pop(0).run()
        values: Any = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
        assert all(value is not None for value in values), "a product that is not awaited"
        return values if len(values) > 1 else values[0]


class _NoLayout:
    def __init__(self, **_: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*_: Any) -> None:
        return None


def _allocated(dtype: Any, shape: Any, layout: Any) -> Any:
    if layout is Barriers:
        return Barriers(Barrier(1) for _ in range(shape[0]))
    return Shared(np.full(shape, -7 if dtype == np.int32 else np.nan, dtype))


def _reduced(function: Any) -> Any:
    def reduced(x: Any, axis: int) -> Any:
        result = function(x, axis)
        return result if result.ndim else result.item()

    return reduced


def _scalars(*values: Any) -> bool:
    return all(np.ndim(value) == 0 for value in values)


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if _scalars(a, b) else tensor(np.minimum(a, b))


def _most(a: Any, b: Any) -> Any:
    return max(a, b) if _scalars(a, b) else tensor(np.maximum(a, b))


def _where(which: Any, x: Any, y: Any) -> Any:
    if _scalars(which, x, y):
        return x if which else y
    dtype = next(value.dtype for value in (x, y) if hasattr(value, "dtype"))
    return tensor(np.where(which, x, y).astype(dtype))


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
    flat, at = pointer.array.reshape(-1), np.asarray(pointer.at)
    if mask is None:
        if at.ndim:
            return tensor(flat[at])
        return Number(flat[at]) if flat.dtype.kind in "iu" else tensor(flat[at])
    return tensor(np.where(mask, flat[np.where(mask, at, 0)], other))


def _store(pointer: Pointer, value: Tensor, mask: Any = ...) -> None:
    assert value.dtype == pointer.array.dtype
    pointer.array.reshape(-1)[np.asarray(pointer.at)[mask]] = value[mask]


def _within(s: Tensor, low: Any, high: Any, bounded_below: bool, hidden: float) -> Tensor:
    column = np.arange(s.shape[1])
    seen = column < high[:, None]
    if bounded_below:
        seen &= column >= low[:, None]
    return _where(seen, s, hidden)


def _capped(qk: Tensor, scoring: Any, pack: int) -> Any:
    if scoring.CAP == 0:
        return qk
    s = np.tanh(qk * np.float32(scoring.SCALE / scoring.CAP)) * np.float32(scoring.MULTIPLIER)
    return np.exp2(s) if scoring.BOUNDED else s


def _await_semaphore(pointer: Pointer, count: int) -> None:
    """The program's other writer, or another program, may have to release it."""
    flat, end = pointer.array.reshape(-1), time.monotonic() + LIMIT
    while flat[pointer.at] != count:
        assert time.monotonic() < end, "a semaphore that nobody before releases"
        time.sleep(1e-4)


def _release_semaphore(pointer: Pointer, count: int) -> None:
    pointer.array.reshape(-1)[pointer.at] = count + 1
