"""Division of work between warps of Hopper's persistent kernels: a counter in device memory from which programs claim tiles, a work queue in shared memory through
which the producer warp tells the others what it claimed, named barriers between groups of warps, and semaphores between programs.

A program claims a tile when it has loaded one: only the device knows how long tiles take."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Words in shared memory, and the barriers of each item's slot: written by the producer, read by all consumers.
WorkQueue = namedtuple("WorkQueue", "slots full empty")
FIRST_BARRIER = gl.constexpr(8)
"""The first named barrier of these kernels. Triton uses those from 0 on, one for each group of warps and a few more."""


# fmt: off
@gluon.jit
def _claim(counter_ptr):
    """The next number of a counter that all programs share, in the first lane; not awaited."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.global.relaxed.gpu.add.u32 $0, [$1], 1;
        }""",
        "=&r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _claimed(number):
    """A number from `_claim`, in all lanes."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _queue_of(SLOTS: gl.constexpr, WORDS: gl.constexpr, READERS: gl.constexpr):
    """A queue of items of so many words; a slot is free when all readers have said so."""
    # Full: the producer arrives alone. Empty: each reader arrives.
    full, empty = _barriers_of(SLOTS, READERS)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return WorkQueue(slots, full, empty)


@gluon.jit
def _push(queue, r, words, WORDS: gl.constexpr):
    """The producer writes item `r` when its slot is free."""
    SLOTS: gl.constexpr = queue.slots.shape[0] // WORDS
    # All consumers have read what was in the slot.
    slot = r % SLOTS
    mbarrier.wait(queue.empty.index(slot), ((r // SLOTS) & 1) ^ 1)
    for n in gl.static_range(WORDS):
        word = gl.full([1], words[n], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))  # [1]
        queue.slots.index(slot * WORDS + n).store(word)
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def _await_item(queue, r, WORDS: gl.constexpr):
    """Waits for item `r`. Returns its slot."""
    SLOTS: gl.constexpr = queue.slots.shape[0] // WORDS
    mbarrier.wait(queue.full.index(r % SLOTS), (r // SLOTS) & 1)
    return r % SLOTS


@gluon.jit
def _word(queue, at, WARPS: gl.constexpr):
    # One word, which every lane of so many warps reads.
    return gl.max(queue.slots.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _uniform(number):
    """The least number of a warp's lanes. Where all lanes hold the same one, this tells the assembler so: branches and addresses become uniform."""
    return gl.inline_asm_elementwise("redux.sync.min.s32 $0, $1, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _zero(count):
    """0, of a number that is not negative, which the compiler is not told. Places in shared memory that it adds to are no constants, of whose products it
    would keep all addresses in registers, or spill them."""
    return gl.minimum(count, 0)


@gluon.jit
def _barriers_of(COUNT: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """A barrier for every buffer that all its writers have filled, mostly one load, and one for every buffer that all its readers have read."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def _await_named(consumer: gl.constexpr):
    """Waits on a consumer's named barrier, which the other consumer arrives at when this one may start its products."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(FIRST_BARRIER + consumer)], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def _arrive_named(consumer: gl.constexpr):
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(FIRST_BARRIER + consumer)], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def _sync_consumers():
    """Both consumers wait for one another, and for what they have stored, at one named barrier."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [gl.to_tensor(FIRST_BARRIER)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await_semaphore(semaphore_ptr, count):
    """Waits until the semaphore is `count`."""
    # Acquire: what was added before the release is seen.
    seen = _semaphore(semaphore_ptr)
    while seen != count:
        seen = _semaphore(semaphore_ptr)
    # The tile is added by an asynchronous copy, after what this warp has read.
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, $1;", "=r,r,~{memory}", [seen], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _semaphore(semaphore_ptr):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", [semaphore_ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release_semaphore(semaphore_ptr, count):
    """Waits until what this warp has added is in device memory, and moves the semaphore on from `count`. All lanes store the same."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.proxy.async; st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r,~{memory}", [semaphore_ptr, count + 1], dtype=gl.int32, is_pure=False, pack=1)
