"""What the pieces of a split add to what passes it, on Hopper, as `split_phase.local_kernel`: one warp loads, four weigh and multiply, each chunk
under the product before it. Memory moves by tensor descriptors (TMA); every chunk is whole."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import closed, CONSTANT, NONE, SCALAR
from .single_kernel import _described, _tiles_of

CHUNK = gl.constexpr(64)
WIDTH = gl.constexpr(64)
"""Value channels of a program."""


# fmt: off
@gluon.jit
def _weights(g, logs_ptr, beta_ptr, row, beyond, TOKENS, HB: gl.constexpr, SCALE: gl.constexpr, DECAY: gl.constexpr, BETA: gl.constexpr,
             TO_END: gl.constexpr):
    """What each token of the chunk at `row` counts at the edge that lies `beyond`, and the log2 decay of the chunk."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))  # [C]
    if DECAY == SCALAR:
        whole = gl.load(logs_ptr + row + (CHUNK - 1))  # []
        if TO_END:
            exponent = gl.load(logs_ptr + TOKENS + row + i)  # [C]
        else:
            exponent = gl.load(logs_ptr + row + i)  # [C]
    else:
        whole = CHUNK * g  # []
        if TO_END:
            exponent = (CHUNK - 1 - i).to(gl.float32) * g  # [C]
        else:
            exponent = (i + 1).to(gl.float32) * g  # [C]
    weight = gl.exp2(exponent + beyond)  # [C]
    if not TO_END:
        weight = weight * SCALE
    if TO_END and BETA:
        weight = weight * gl.load(beta_ptr + (row + i) * HB).to(gl.float32)
    return weight, whole


@gluon.jit
def _adder(buffers, weighted, barriers, local_ptr, g, beyond, logs_ptr, beta_ptr, row, step, count, TOKENS, HB: gl.constexpr, D: gl.constexpr,
           V: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, DECAY: gl.constexpr, BETA: gl.constexpr, TO_END: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    plain: gl.constexpr = DECAY == NONE and TO_END and not BETA
    xs, ys = buffers
    full, empty = barriers
    state = gl.zeros([D, WIDTH], gl.float32, layout)  # [D, 64]
    if not plain:
        weight, whole = _weights(g, logs_ptr, beta_ptr, row, beyond, TOKENS, HB, SCALE, DECAY, BETA, TO_END)
    for n in range(0, count):
        s = n % NUM_STAGES
        mbarrier.wait(full.index(s), (n // NUM_STAGES) & 1)
        x, y = xs.index(s).reshape([CHUNK, D]), ys.index(s).reshape([CHUNK, WIDTH])
        if not plain:
            mine = weighted.index(n % 2)
            mine.store((y.load(layout).to(gl.float32) * gl.expand_dims(weight, 1)).to(y.dtype))
            fence_async_shared()
            # Those of the next chunk, under this one's product.
            row += gl.where(n + 1 < count, step, 0)
            beyond += whole
            weight, whole = _weights(g, logs_ptr, beta_ptr, row, beyond, TOKENS, HB, SCALE, DECAY, BETA, TO_END)
            y = mine
        state = warpgroup_mma(x.permute((1, 0)), y, state, is_async=True)
        # At most this product is under way, so the one before has left its operands.
        state = warpgroup_mma_wait(1, deps=[state])
        if n > 0:
            mbarrier.arrive(empty.index((n - 1) % NUM_STAGES), count=1)
    state = warpgroup_mma_wait(0, deps=[state])
    if count > 0:
        d = gl.arange(0, D, gl.SliceLayout(1, layout))  # [D]
        c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))  # [64]
        gl.store(local_ptr + (gl.expand_dims(d, 1) * V + gl.expand_dims(c, 0)), state)


@gluon.jit
def _loader(buffers, barriers, x_desc, y_desc, seq, x_head, y_head, v0, token, step, count, D: gl.constexpr, NUM_STAGES: gl.constexpr):
    xs, ys = buffers
    full, empty = barriers
    for n in range(0, count):
        s = n % NUM_STAGES
        mbarrier.wait(empty.index(s), ((n // NUM_STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), CHUNK * (D + WIDTH) * 2)
        tma.async_copy_global_to_shared(x_desc, [seq, x_head, token + n * step, 0], full.index(s), xs.index(s))
        tma.async_copy_global_to_shared(y_desc, [seq, y_head, token + n * step, v0], full.index(s), ys.index(s))


@gluon.jit
def hopper_local_kernel(
    x_ptr, y_ptr, g_ptr, logs_ptr, beta_ptr, kept_ptr, beyond_ptr, T, TOKENS,
    local_ptr,
    HS: gl.constexpr, HX: gl.constexpr, HY: gl.constexpr, HG: gl.constexpr, HB: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    SCALE: gl.constexpr, DECAY: gl.constexpr, BETA: gl.constexpr, SPLITS: gl.constexpr, PIECES: gl.constexpr, TO_END: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """As `split_phase.local_kernel`, for whole chunks of unpacked bfloat16 sequences and splits of whole chunks. `x` are keys or queries, `y`
    values or the outputs' gradients."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    tiles: gl.constexpr = V // WIDTH
    index = gl.program_id(0)
    v0, index = index % tiles * WIDTH, index // tiles
    h, index = index % HS, index // HS
    index, seq = index % (PIECES * (SPLITS - 1)), index // (PIECES * (SPLITS - 1))
    piece, at = index // (SPLITS - 1), index % (SPLITS - 1)
    own = (gl.to_tensor(seq).to(gl.int64) * (SPLITS - 1) + at) * HS + h
    chunks = T // (CHUNK * SPLITS)  # of a split
    size = (chunks + PIECES - 1) // PIECES
    near = piece * size
    count = gl.minimum(gl.load(kept_ptr + own) - near, size)
    beyond = gl.load(beyond_ptr + own * PIECES + piece)
    if TO_END:
        token = ((at + 1) * chunks - 1 - near) * CHUNK
        step = 0 * size - CHUNK
    else:
        token = ((at + 1) * chunks + near) * CHUNK
        step = 0 * size + CHUNK
    g = 0.0
    if DECAY == CONSTANT:
        g = closed(gl.load(g_ptr + gl.to_tensor(seq).to(gl.int64) * HG + h // (HS // HG)).to(gl.float32))  # []
    if DECAY == SCALAR:
        logs_ptr += gl.to_tensor(h // (HS // HG)).to(gl.int64) * (2 * TOKENS)
    if BETA:
        beta_ptr += h // (HS // HB)
    place = ((gl.to_tensor(seq).to(gl.int64) * (SPLITS - 1) + at) * PIECES + piece) * HS + h
    local_ptr += place * (D * V) + v0
    row = gl.to_tensor(seq).to(gl.int64) * T + token
    x_desc = _described(x_ptr, TOKENS // T, T, HX, D, CHUNK, D)
    y_desc = _described(y_ptr, TOKENS // T, T, HY, V, CHUNK, WIDTH)
    buffers = (_tiles_of(dtype, NUM_STAGES, D), _tiles_of(dtype, NUM_STAGES, WIDTH))
    weighted = gl.allocate_shared_memory(dtype, [2, CHUNK, WIDTH], gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype))
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    barriers = (full, empty)
    gl.warp_specialize([
        (_adder, (buffers, weighted, barriers, local_ptr, g, beyond, logs_ptr, beta_ptr, row, step, count, TOKENS, HB, D, V, NUM_STAGES, SCALE,
                  DECAY, BETA, TO_END)),
        (_loader, (buffers, barriers, x_desc, y_desc, seq, h // (HS // HX), h // (HS // HY), v0, token, step, count, D, NUM_STAGES)),
    ], [1], [24])
