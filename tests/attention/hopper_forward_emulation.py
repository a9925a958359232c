"""Hopper's forward kernels as plain Python on NumPy arrays, as `hopper_emulation` has the backward ones. What is written in PTX is
replaced by what it computes."""

import threading
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.launch import run
from tests.attention import hopper_emulation
from tests.attention.hopper_emulation import Pointer, Tensor, tensor
from tests.attention.hopper_protocol import LIMIT
from tests.tolerances import assert_close

triton = pytest.importorskip("triton")


class Device(hopper_emulation.Device):
    """Runs the launches of a call; those of Triton's kernels are interpreted."""

    def __init__(self, at_once: int = 1):
        super().__init__(None, None, at_once)
        self.functions: dict[int, Any] = {}

    def run(self, launch: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if not launch.is_gluon:
            return run(launch, inputs, interpret=True)
        self.kernels = types.SimpleNamespace(**{launch.function.fn.__name__: launch.function})
        self.programs = launch.grid[0]
        return super().run(launch, inputs)

    def _shared(self, parts: int) -> dict[str, Any]:
        consumers = parts - 1
        return {
            "program": self.own.program,
            "turns": [threading.Semaphore(0) for _ in range(consumers)],
        }

    def _plain(self, module: Any, name: str) -> Any:
        return self._as_python(getattr(module, name))

    def _as_python(self, function: Any) -> Any:
        """A kernel's function, and those it calls, each with the names of its own module."""
        if id(function) not in self.functions:
            plain, world = function.fn, self._world()
            names = dict(plain.__globals__)
            self.functions[id(function)] = types.FunctionType(
                plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
            )
            for name, value in list(names.items()):
                if name in world:
                    names[name] = world[name]
                elif isinstance(value, triton.language.constexpr):
                    names[name] = value.value
                elif isinstance(value, triton.JITFunction):
                    names[name] = self._as_python(value)
        return self.functions[id(function)]

    def _world(self) -> dict[str, Any]:
        if not hasattr(self, "world"):
            language = types.SimpleNamespace(
                minimum=_least, maximum=_most, cdiv=lambda a, b: -(-a // b), load=_load, store=_store, static_range=range, constexpr=Any,
                int32=np.dtype(np.int32), float32=np.dtype(np.float32), int64=np.dtype(np.int64), bfloat16=np.dtype(jnp.bfloat16),
                arange=lambda a, b, layout: tensor(np.arange(a, b)), zeros=lambda shape, dtype, layout: tensor(np.zeros(shape, dtype)),
                full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, dtype)), sum=np.sum, max=_reduced(np.max),
                min=_reduced(np.min), to_tensor=hopper_emulation.Number, where=_where, exp2=np.exp2, log2=np.log2, expand_dims=np.expand_dims,
                convert_layout=lambda x, *_, **__: x, multiple_of=lambda x, _: x, allocate_shared_memory=hopper_emulation._allocated,
                warp_specialize=self._specialised, NVMMASharedLayout=hopper_emulation._NoLayout,
                program_id=lambda axis: self.own.program, num_programs=lambda axis: self.programs,
                NVMMADistributedLayout=lambda version, warps, shape: types.SimpleNamespace(instr_shape=shape),
                SliceLayout=lambda axis, parent: types.SimpleNamespace(parent=parent),
                **dict.fromkeys("DotOperandLayout BlockedLayout SwizzledSharedLayout".split(), lambda *_: None),
            )  # fmt: skip
            self.world = dict(
                gl=language, tl=language, mbarrier=hopper_emulation._BARRIERS, tma=self._copies(), fence_async_shared=lambda: None,
                warpgroup_mma=self._product, warpgroup_mma_wait=self._await,
                _await_turn=self._await_own, _give_turn=lambda consumer: self.own.turns[consumer].release(),
                _take=self._claimed, _taken=lambda number: number, _least=lambda number: number,
                _within=_within, _capped=_capped, _rescaled=_rescaled,
                _write=_written,
            )  # fmt: skip
        return self.world

    def _await_own(self, consumer: int) -> None:
        assert self.own.turns[consumer].acquire(timeout=LIMIT), "a turn that nobody gives"


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
    return hopper_emulation._where(which, x, y)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    flat, at = pointer.array.reshape(-1), np.asarray(pointer.at)
    if mask is None:
        if at.ndim:
            return tensor(flat[at])
        return hopper_emulation.Number(flat[at]) if flat.dtype.kind in "iu" else flat[at].item()
    return tensor(np.where(mask, flat[np.where(mask, at, 0)], other))


def _store(pointer: Pointer, value: Tensor, mask: Any) -> None:
    pointer.array.reshape(-1)[np.asarray(pointer.at)[mask]] = value[mask]


def _written(letters: Any, at: int, number: int) -> None:
    """In one word."""
    letters.index(at).store(tensor(np.asarray([number], np.int32)))


def _rescaled(acc: Tensor, alpha: Tensor, patience: int) -> Any:
    return acc * alpha[:, None]


def _within(s: Tensor, low: Any, high: Any, bounded_below: bool, hidden: float) -> Tensor:
    column = np.arange(s.shape[1])
    seen = column < high[:, None]
    if bounded_below:
        seen &= column >= low[:, None]
    return hopper_emulation._where(seen, s, hidden)


def _capped(
    qk: Tensor, scale: float, cap: float, fast: bool, multiplier: float, bounded: bool, pack: int
) -> Any:
    if cap == 0:
        return qk
    s = np.tanh(qk * np.float32(scale / cap)) * np.float32(multiplier)
    return np.exp2(s) if bounded else s


def assert_agrees(found: Any, expected: Any, dtype: Any) -> None:
    """Output and log-sums."""
    for name, x in zip(("out", "lse"), found, strict=True):
        assert_close(x, getattr(expected, name), dtype, name=name)
