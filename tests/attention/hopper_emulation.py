"""Hopper's kernels as plain Python on NumPy arrays: groups of warps are threads. So numbers and barriers are tested without a GPU.

Products, and copies to device memory, take place when they are awaited, as late as they may, and copies from there when they begin: whoever frees or
fills a buffer too early changes results.
Shared memory is NaN before it is written. Layouts, and what orders memory between threads, are not emulated."""

import threading
import time
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.hopper_protocol import Barrier, finish, LIMIT

constexpr = pytest.importorskip("triton.language").constexpr

_FUNCTIONS = """
_consumer _query_gradients _give _nothing _scores _part _products _half _described _barriers_of _tiles_of _writer _loader _load _hidden _place _bounds
_tell _told _hand_over _announce _return_keys _weights _score_gradients query_tiles _decays _pairs _stored _gentle_chunk _chunk
closed""".split()


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

    def __init__(self, pointer: Pointer, shape: Any, strides: Any, block: Any):
        assert strides[-1] == 1 and all(s * pointer.array.itemsize % 16 == 0 for s in strides[:-1])
        self.flat, self.shape, self.strides, self.block = pointer.array.reshape(-1), shape, strides, block

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
    """Runs a launch's programs, `at_once` of them at a time: the first ones do everything, if they do what they should. `parts`: what the kernels
    have in common."""

    def __init__(self, kernels: Any, parts: Any, at_once: int = 1):
        self.kernels, self.parts, self.at_once, self.own = kernels, parts, at_once, threading.local()
        self.errors: list[BaseException] = []
        self.claiming = threading.Lock()

    def run(self, launch: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        arrays = {name: np.array(x) for name, x in inputs.items()}
        for name, x in launch.outputs.items():
            arrays[name] = np.full(x.shape, np.nan if x.dtype != np.int32 else -7, x.dtype)
        for before, after in launch.aliases.items():
            arrays[after] = arrays[before].copy()
        named = {name: Pointer(x) for name, x in arrays.items()} | launch.scalars | launch.constants
        kernel = self._plain(self.kernels, launch.function.fn.__name__)
        for first in range(0, launch.grid[0], self.at_once):
            together = range(first, min(first + self.at_once, launch.grid[0]))
            finish(
                [
                    threading.Thread(target=self._program, args=(i, kernel, named), daemon=True)
                    for i in together
                ],
                self.errors,
            )
        return {name: jnp.asarray(arrays[name]) for name in launch.outputs}

    def _program(self, number: int, kernel: Any, named: dict[str, Any]) -> None:
        self.own.program = number
        kernel(**named)

    def _plain(self, module: Any, name: str) -> Any:
        plain = getattr(module, name).fn
        return types.FunctionType(
            plain.__code__, plain.__globals__ | self._world(), name, plain.__defaults__, plain.__closure__
        )

    def _world(self) -> dict[str, Any]:
        if not hasattr(self, "world"):
            language = types.SimpleNamespace(
                minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), load=_load, constexpr=Any,
                static_range=range, int32=np.dtype(np.int32), float32=np.dtype(np.float32), int64=np.dtype(np.int64),
                arange=lambda a, b, layout: tensor(np.arange(a, b)), zeros=lambda shape, dtype, layout: tensor(np.zeros(shape, dtype)),
                full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, dtype)), max=lambda x, axis: int(x.max(axis)),
                to_tensor=Number, where=_where, exp2=np.exp2, log2=np.log2, expand_dims=np.expand_dims, store=_store,
                program_id=lambda axis: self.own.program, multiple_of=lambda x, n: x, barrier=lambda: None,
                convert_layout=lambda x, layout: x, allocate_shared_memory=_allocated, warp_specialize=self._specialised, NVMMASharedLayout=_NoLayout,
                **dict.fromkeys("NVMMADistributedLayout DotOperandLayout SliceLayout BlockedLayout SwizzledSharedLayout".split(), lambda *_: None),
            )  # fmt: skip
            self.world = dict(
                gl=language, tl=language, mbarrier=_BARRIERS, tma=self._copies(), fence_async_shared=lambda: None,
                _meet=lambda: self.own.met.wait(LIMIT), _claimed=self._claimed,
                warpgroup_mma=self._product, warpgroup_mma_wait=self._await,
                _add=lambda desc, at, buffer: self.own.stores.append((desc, at, buffer, True)), _await_turn=_await_turn, _end_turn=_end_turn,
                _capped=lambda x, scale, cap, fast, factor, *_: np.tanh(x * (scale / cap)) * factor if cap > 0 else x, _log2=np.log2, LEAST=0.0,
            )  # fmt: skip
            for module in (self.parts, self.kernels):
                constants = {name: x.value for name, x in vars(module).items() if isinstance(x, constexpr)}
                self.world |= constants
            found = []
            for name in _FUNCTIONS:
                modules = [module for module in (self.kernels, self.parts) if hasattr(module, name)]
                if modules:
                    self.world[name] = self._plain(modules[0], name)
                    found.append(name)
            for name in found:  # which know one another now
                function: Any = self.world[name]
                function.__globals__.update(self.world)
        return self.world

    def _copies(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            make_tensor_descriptor=lambda ptr, shape, strides, block, layout: Descriptor(ptr, shape, strides, block),
            async_copy_global_to_shared=lambda desc, at, barrier, buffer: desc.load(at, barrier, buffer),
            async_copy_shared_to_global=lambda desc, at, buffer: self.own.stores.append((desc, at, buffer, False)), store_wait=self._stored,
        )  # fmt: skip

    def _specialised(self, parts: Any, warps: Any, registers: Any) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        shared = self._shared(len(parts))
        finish(
            [threading.Thread(target=self._guarded, args=(*part, shared), daemon=True) for part in parts],
            self.errors,
        )

    def _shared(self, parts: int) -> dict[str, Any]:
        """What the groups of warps of a program know of one another."""
        return {"met": threading.Barrier(2)}

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

    def _claimed(self, pointer: Pointer) -> int:
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
        values: Any = tuple(dep.value for dep in deps)
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


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    flat, at = pointer.array.reshape(-1), np.asarray(pointer.at)
    if mask is None:
        return tensor(flat[at]) if at.ndim or flat.dtype != np.int32 else int(flat[at])
    return tensor(np.where(mask, flat[np.where(mask, at, 0)], other))


def _store(pointer: Pointer, value: Any) -> None:
    flat = pointer.array.reshape(-1)
    assert value.dtype == flat.dtype
    flat[pointer.at] = value


def _where(seen: Any, x: Any, y: Any) -> Tensor:
    dtype = next(value.dtype for value in (x, y) if hasattr(value, "dtype"))
    return tensor(np.where(seen, x, y).astype(dtype))


def _await_turn(pointer: Pointer, turn: int) -> None:
    """The program's other writer, or another program, may have to give it."""
    flat, end = pointer.array.reshape(-1), time.monotonic() + LIMIT
    while flat[pointer.at] != turn:
        assert time.monotonic() < end, "a turn that nobody before gives"
        time.sleep(1e-4)


def _end_turn(pointer: Pointer, turn: int) -> None:
    pointer.array.reshape(-1)[pointer.at] = turn + 1
