"""How the groups of warps of Hopper's forward kernel learn which tile of queries is next where only the device knows how long tiles take: the loader takes
the next one when it has loaded one, and sends its number and its bounds to the consumers through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

MAIL_PLACES = gl.constexpr(2)
"""Letters that may be on their way: the one that consumers work on, and the next."""
MAIL_WORDS = gl.constexpr(6)


# fmt: off
@gluon.jit
def _take(counter_ptr):
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
def _taken(number):
    """A number that `_take` has taken, in all lanes."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _number(i, T, rows, BLOCK_Q: gl.constexpr):
    """Tile number `i` of those that programs take, -1 behind the last one: the last queries of all rows of batch times heads first."""
    tiles = (T + BLOCK_Q - 1) // BLOCK_Q
    return gl.where(i < tiles * rows, i % rows * tiles + (tiles - 1 - i // rows), -1)


@gluon.jit
def _send(mail, r, t, bounds):
    """From the loader to all consumers: tile `r` of the program is number `t`, its bounds, and of which kind its keys are."""
    letters, mail_full, mail_empty = mail
    place = r % MAIL_PLACES
    mbarrier.wait(mail_empty.index(place), ((r // MAIL_PLACES) & 1) ^ 1)
    _write(letters, place * MAIL_WORDS, t)
    for n in gl.static_range(5):
        _write(letters, place * MAIL_WORDS + n + 1, bounds[n])
    mbarrier.arrive(mail_full.index(place), count=1)


@gluon.jit
def _receive(mail, r):
    """What `_send` has sent."""
    letters, mail_full, mail_empty = mail
    place = r % MAIL_PLACES
    mbarrier.wait(mail_full.index(place), (r // MAIL_PLACES) & 1)
    t, lo, full_lo = _read(letters, place * MAIL_WORDS), _read(letters, place * MAIL_WORDS + 1), _read(letters, place * MAIL_WORDS + 2)
    full_hi, hi, kind = _read(letters, place * MAIL_WORDS + 3), _read(letters, place * MAIL_WORDS + 4), _read(letters, place * MAIL_WORDS + 5)
    mbarrier.arrive(mail_empty.index(place), count=1)
    return t, lo, full_lo, full_hi, hi, kind


@gluon.jit
def _write(letters, at, number):
    letters.index(at).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)


@gluon.jit
def _read(letters, at):
    return _least(gl.max(letters.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0))


@gluon.jit
def _least(number):
    """Of the lanes of a warp. They may all have one number: then this tells the assembler, which else takes branches for divergent and addresses for
    different ones."""
    return gl.inline_asm_elementwise("redux.sync.min.s32 $0, $1, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
