"""Hopper's forward kernel as plain Python: its groups of warps are threads, and numbers are replaced by what they are made of. So its barriers are
tested without a GPU: that nobody waits for ever, and that every product reads the tile it should."""

import itertools
import threading
import types
from typing import Any

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


class Anything:
    """A tensor, a layout, a type: what happens to it is of no interest."""

    def __getattr__(self, name: str) -> "Anything":
        return self

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self

    __getitem__ = __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = (
        __rtruediv__
    ) = __call__
    __lt__ = __gt__ = __le__ = __ge__ = __and__ = __or__ = __mod__ = __call__

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]


class Pointer:
    def __init__(self, numbers: Any, at: int = 0):
        self.numbers, self.at = numbers, at

    def __add__(self, more: Any) -> Any:
        return Pointer(self.numbers, self.at + more) if isinstance(more, int) else Anything()


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


class Buffer:
    """Shared memory of one tile: where its content comes from."""

    def __init__(self) -> None:
        self.content: Any = None

    def reshape(self, *_: Any) -> "Buffer":
        return self

    def permute(self, *_: Any) -> "Buffer":
        return self

    def store(self, value: Any) -> None:
        self.content = "result"

    dtype = Anything()


class Several(list):
    def index(self, at: int) -> Any:  # type: ignore[override]
        return self[at]


class Program:
    """One program; `read` are the products of each consumer: the queries or `None`, and the keys or values; `cleared` are the values that a consumer
    clears, if it finds keys that nobody sees (`unseen`) in every tile."""

    def __init__(
        self, kernels: Any, consumers: int, stages: int, query_places: int = 1, unseen: bool = False
    ):
        self.kernels, self.consumers, self.unseen = kernels, consumers, unseen
        places = query_places * consumers
        self.buffers = tuple(Several(Buffer() for _ in range(n)) for n in (places, stages, stages))
        counts = (
            (places, 1),
            (places, 1),
            (stages, 1),
            (stages, consumers),
            (stages, 1),
            (stages, consumers),
        )
        self.barriers = tuple(Several(Barrier(count) for _ in range(n)) for n, count in counts)
        places = 2
        self.mail = (
            [None] * (6 * places),
            Several(Barrier(1) for _ in range(places)),
            Several(Barrier(consumers) for _ in range(places)),
        )
        self.taken = itertools.count()
        self.turns = [threading.Semaphore(0) for _ in range(consumers)]
        self.read: list[list[Any]] = [[] for _ in range(consumers)]
        self.cleared: list[list[Any]] = [[] for _ in range(consumers)]
        self.stored: list[list[Any]] = [[] for _ in range(consumers)]
        self.errors: list[BaseException] = []

    def run(self, loader: dict[str, Any], consumer: dict[str, Any]) -> None:
        threads = [threading.Thread(target=self._guarded, args=("_loader", -1, loader), daemon=True)]
        for w in range(self.consumers):
            threads.append(
                threading.Thread(
                    target=self._guarded, args=("_consumer", w, consumer | {"W": w}), daemon=True
                )
            )
        finish(threads, self.errors)

    def _guarded(self, name: str, w: int, arguments: dict[str, Any]) -> None:
        try:
            self._as_python(name, w)(**arguments)
        except BaseException as error:  # the thread of the test raises it
            self.errors.append(error)

    def _as_python(self, name: str, w: int) -> Any:
        """A function of the kernel, and those it calls, on this program's memory."""
        anything = Anything()
        fake = types.SimpleNamespace(
            minimum=min, maximum=max, load=_load, program_id=lambda axis: 0, num_programs=lambda axis: 1, static_range=range,
            constexpr=Any, where=_where,
            **dict.fromkeys(("arange full zeros to_tensor exp2 log2 sum max expand_dims convert_layout store float32 int32 int64 "
            "NVMMADistributedLayout DotOperandLayout SliceLayout").split(), anything),
        )  # fmt: skip
        barrier = types.SimpleNamespace(
            wait=lambda b, parity: b.wait(parity),
            arrive=lambda b, count, pred=True: b.arrive(count) if pred else None,
            expect=lambda b, size: b.arrive(1, size),
        )
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=_copied, store_wait=lambda n: None,
            async_copy_shared_to_global=lambda desc, at, buffer: self.stored[w].append((tuple(at), buffer.content)),
        )  # fmt: skip
        world = dict(
            gl=fake, mbarrier=barrier, tma=copies, fence_async_shared=lambda: None, warpgroup_mma=lambda *a, **_: self._product(w, *a),
            warpgroup_mma_wait=lambda n, deps: anything, ROWS_EACH=64, QUERY_PLACES=2, LN2=1.0, LOG2E=1.0,
            _give_turn=lambda consumer: self.turns[consumer].release(),
            _await_turn=lambda consumer: self._await_turn(consumer),
            MAIL_PLACES=2, MAIL_WORDS=6, _take=lambda pointer: next(self.taken), _taken=lambda number: number,
            _write=lambda letters, at, number: letters.__setitem__(at, number),
            _read=lambda letters, at: letters[at], _clear=lambda *arguments: self._clear(w, *arguments),
            _scored=lambda qk, partly, *_: (anything, partly and self.unseen), _begun=lambda *_: (anything,) * 2,
            _weights=lambda *_: (anything,) * 4, _softmax=lambda *_: (anything,) * 4, _capped=anything, _own_sum=anything, _row_sum=anything,
            _rescaled=anything, _described=lambda pointer, *_: pointer,
        )  # fmt: skip
        world["key_tiles"] = key_tiles()
        for helper in (
            "_scores",
            "_weighted",
            "_load",
            "_key_tiles",
            "_listed_bounds",
            "_number",
            "_send",
            "_receive",
            "_record",
            "_entry",
            "_place",
            "_finish",
        ):
            if hasattr(self.kernels, helper):
                world[helper] = _plain(getattr(self.kernels, helper), world)
        return _plain(getattr(self.kernels, name), world)

    def _clear(
        self, w: int, vs: Any, full: Any, at: int, marks: Any, block_k: int, v: int, stages: int
    ) -> None:
        full.index(at % stages).wait((at // stages) & 1)
        self.cleared[w].append(vs.index(at % stages).content)

    def _await_turn(self, consumer: int) -> None:
        assert self.turns[consumer].acquire(timeout=LIMIT), "a turn that nobody gives"

    def _product(self, w: int, a: Any, b: Any, *_: Any) -> Any:
        self.read[w].append((a.content if isinstance(a, Buffer) else None, b.content))
        return Anything()


class Number(int):
    def to(self, _: Any) -> "Number":
        return self


def _load(pointer: Any, **_: Any) -> Any:
    return Number(pointer.numbers.flat[pointer.at]) if isinstance(pointer, Pointer) else Anything()


def _where(which: Any, one: Any, other: Any) -> Any:
    """Of numbers the chosen one."""
    return (one if which else other) if isinstance(which, bool) else Anything()


TL = types.SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), load=_load, constexpr=Any)
"""What `key_tiles` needs of Triton's language."""


def key_tiles() -> Any:
    """The function of the kernels that says which tiles of keys there are."""
    from ejkernel_eqx.attention.triton.tile import key_tiles as function

    return _plain(function, {"tl": TL})


def _copied(desc: tuple[str, int], at: Any, barrier: Barrier, buffer: Buffer) -> None:
    name, size = desc
    buffer.content = (name, *at)
    barrier.arrive(0, -size)


def _plain(function: Any, world: dict[str, Any]) -> Any:
    """A kernel's function as Python calls it."""
    plain = function.fn
    return types.FunctionType(
        plain.__code__, plain.__globals__ | world, plain.__name__, plain.__defaults__, plain.__closure__
    )
