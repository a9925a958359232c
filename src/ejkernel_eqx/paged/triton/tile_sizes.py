"""The tiles that the Triton kernels prefer, the number of programs per sequence, and the shared memory of a program."""

from ...dispatch import DeviceFacts, Problem
from ...launch import limits_registers, register_limits_measured
from ...launch.sizes import cdiv, fitting, padded
from ..cache.quantise import LARGEST
from ..spec import page_dtypes
from .call import PagedTile

_BYTES = {**dict.fromkeys(LARGEST, 1), "bfloat16": 2, "float16": 2, "float32": 4}
# block_m, block_k, num_warps, num_stages, and where the compiler is limited max_registers
Sizes = tuple[int, ...]
CHUNK, _MEDIUM, _LONG = 256, 1024, 4096  # minimum keys per program with few, more and many programs
_SHORTEST = 32  # keys of a program where there are hardly any
_SHORT = 512  # keys, up to which a sequence is short
_PARTIAL_BYTES = 2**27
SMALLEST = PagedTile(16, 16, 4, 1)
MOST_PAIR_ROWS = 32
"""The most rows that go in pairs. With more, matrices are multiplied from shared memory, to which bytes are converted anyway."""

# By the bytes of a key and its value, best first; the last ones are for devices with little shared memory. Two or three programs share a
# multiprocessor, with at least 32 KiB of loads in flight for each.
_DECODE: tuple[tuple[int, tuple[Sizes, ...]], ...] = (
    (128, ((64, 128, 4, 4), (64, 256, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2))),
    (256, ((64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4), (64, 64, 4, 3), (64, 128, 8, 3), (64, 32, 4, 2))),
    (512, ((64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 8, 3), (64, 32, 4, 4), (64, 128, 4, 3), (64, 32, 4, 2))),
    (1024, ((64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2), (64, 16, 4, 2))),
    (2048, ((64, 16, 4, 3), (64, 32, 4, 2), (64, 32, 8, 3), (64, 16, 4, 4), (64, 16, 4, 2), (16, 16, 4, 1))),
)  # fmt: skip
# For 8-bit pages and few rows: 168 registers leave room for three programs.
_PAIRS: tuple[tuple[int, tuple[Sizes, ...]], ...] = (
    (256, ((32, 128, 4, 3, 168), (32, 128, 4, 3), (32, 64, 4, 4), (32, 128, 4, 2, 168), (32, 64, 2, 3, 168), (32, 64, 4, 4, 128))),
    (512, ((32, 64, 4, 3, 168), (32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2))),
)  # fmt: skip
_LATENT: tuple[Sizes, ...] = (
    (64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (32, 64, 4, 2), (32, 32, 8, 2), (16, 64, 8, 2), (64, 32, 8, 2),
    (32, 32, 4, 3), (16, 32, 4, 3), (16, 16, 4, 2))  # fmt: skip
_LATENT_FEW: tuple[Sizes, ...] = (  # rows: up to 32
    (32, 64, 8, 3), (32, 64, 4, 2), (32, 32, 4, 3), (32, 32, 8, 3), (16, 64, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2))  # fmt: skip
# For 8-bit latents, of which twice as many are in flight in the same memory. Up to `MOST_PAIR_ROWS` rows go in pairs. With more, a stage is spent
# on what has been converted.
_LATENT_BYTES: tuple[Sizes, ...] = (
    (64, 64, 8, 3), (64, 64, 8, 2), (32, 64, 8, 3), (32, 64, 4, 2), (64, 32, 8, 3), (32, 32, 4, 3), (16, 64, 8, 3), (64, 32, 8, 2), (16, 32, 4, 3),
    (16, 16, 4, 2))  # fmt: skip
_LATENT_BYTES_FEW: tuple[Sizes, ...] = (
    (32, 64, 8, 4), (32, 64, 8, 3), (32, 64, 8, 3, 128), (32, 32, 4, 4), (32, 32, 4, 3), (16, 64, 8, 3), (32, 32, 4, 2), (16, 32, 4, 2),
    (16, 16, 4, 2))  # fmt: skip
_PREFILL: dict[int, tuple[Sizes, ...]] = {
    64: ((128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    128: (
        (128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 4), (128, 32, 8, 3, 128), (128, 128, 8, 2), (128, 64, 8, 2),
        (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1),
    ),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 4, 1), (32, 16, 4, 1)),
}  # fmt: skip
_SIDE_BY_SIDE = (128, 64, 8, 2, 128)  # two programs a multiprocessor, which takes a limit on registers
_PREFILL_FLOAT32: tuple[Sizes, ...] = (
    (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1))  # fmt: skip
_PREFILL_LATENT: tuple[Sizes, ...] = (
    (64, 32, 8, 3), (64, 32, 8, 2), (64, 64, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1))  # fmt: skip


def decode_tiles(problem: Problem, device: DeviceFacts, queries: int) -> list[PagedTile]:
    """The tiles that fit, best first, with no more rows than `queries` of a sequence need."""
    rows = padded(queries * (problem.dim("H") // problem.dim("K")))
    if problem.flag("latent"):
        few, many = (_LATENT_BYTES_FEW, _LATENT_BYTES) if _is_bytes(problem) else (_LATENT_FEW, _LATENT)
        return _fitting(many if rows > MOST_PAIR_ROWS else few, problem, device, rows)
    keys, values = (_BYTES[name] for name in page_dtypes(problem))
    row = problem.dim("D") * keys + problem.dim("V") * values
    table = _PAIRS if _pairs(problem, rows) else _DECODE
    sizes = next((tiles for most, tiles in table if row <= most), table[-1][1])
    # With few tiles, what counts is how soon the first has been loaded.
    if rows <= 16 and 0 < problem.dim("M") * problem.dim("p") <= _SHORT and not _pairs(problem, rows):
        sizes = tuple(sorted(sizes, key=lambda tile: tile[1:4] != (32, 4, 4)))
    if rows > 16:  # shared memory does not suffice for a third program
        sizes = tuple(tile for tile in sizes if len(tile) == 4)
    return _fitting(sizes, problem, device, rows)


def prefill_tiles(problem: Problem, device: DeviceFacts) -> list[PagedTile]:
    """The tiles that fit, best first."""
    if problem.flag("latent"):
        return _fitting(_PREFILL_LATENT, problem, device)
    if dot_bytes(problem) == 4:
        return _fitting(_PREFILL_FLOAT32, problem, device)
    width = padded(max(problem.dim("D"), problem.dim("V")), 64)
    sizes = _PREFILL[width]
    if width == 128 and limits_registers(device):
        sizes = (_SIDE_BY_SIDE, *sizes)
    return _fitting(sizes, problem, device)


def splits(problem: Problem, device: DeviceFacts, queries: int, block_m: int) -> tuple[int, int]:
    """The maximum number of programs that share the keys of a sequence, and the minimum number of keys per program.

    Few sequences are split until the device is full: two programs per multiprocessor, or one for latent pages, whose partial results are
    large. With more sequences, four times as many programs, since those that end early make room for others. If sequences may be long,
    enough for a long one among short ones; with many sequences, short ones are not split.
    `queries` of each sequence are computed in blocks of at most `block_m` rows.
    """
    heads, kv_heads = problem.dim("H"), problem.dim("K")
    blocks = cdiv(queries * (heads // kv_heads), block_m)
    programs = max(1, problem.dim("N") * kv_heads * blocks)
    full = (1 if problem.flag("latent") else 2) * (device.num_multiprocessors or 108)
    keys = problem.dim("M") * problem.dim("p")
    # The memory for partial results, a vector of values for each query head and split, limits the number of splits.
    vectors = max(1, problem.dim("N") * queries * heads * problem.dim("V"))
    room = max(1, _PARTIAL_BYTES // (4 * vectors))
    if programs <= full:
        count, chunk, long = _in_waves(programs, full), CHUNK, 2 * _LONG
        # With so few programs most of the device would wait.
        while not problem.flag("latent") and chunk > _SHORTEST and 4 * programs * cdiv(keys, chunk) < full:
            chunk //= 2
    else:
        count, long = cdiv(4 * full, programs), _LONG
        chunk = _MEDIUM if count > 1 else _LONG
    count = min(count, cdiv(keys, chunk))
    return max(1, count, min(cdiv(keys, long), room)), chunk


def _in_waves(programs: int, full: int) -> int:
    """The number of splits that best fills the device, in one wave or, if that leaves much of it idle, in two or three."""
    counts = [wave * full // programs for wave in (1, 2, 3)]
    filled = [programs * count / (wave * full) for wave, count in enumerate(counts, 1)]
    enough = (n for n, share in enumerate(filled) if share >= 0.85)
    return counts[next(enough, filled.index(max(filled)))]


def shared_memory(problem: Problem, tile: PagedTile, device: DeviceFacts) -> int:
    """An upper estimate of the shared memory of one program, in bytes: its queries, and the streamed tiles once per stage."""
    latent, dot = problem.flag("latent"), dot_bytes(problem)
    values = padded(problem.dim("V"))
    width = padded(problem.dim("D") - problem.dim("V")) if latent else padded(problem.dim("D"))
    queries = tile.block_m * (width + values * bool(latent)) * dot
    first, second = (_BYTES[name] for name in page_dtypes(problem))
    parts = ((values, first), (width, second)) if latent else ((width, first), (values, second))
    # Narrow tiles are multiplied from registers, wide ones from shared memory, to which other dtypes are converted first.
    stages = max(1, tile.num_stages - (tile.block_m < 64))
    in_flight = lambda size: max(1, tile.num_stages - (tile.block_m < 64 or (bool(latent) and size < dot)))
    streamed = sum(tile.block_k * channels * size * in_flight(size) for channels, size in parts)
    scores = tile.block_m * tile.block_k * dot
    if dot == 4:  # in two halves, for the passes of a product
        queries, scores = 2 * queries, 2 * scores
    if tile.block_m >= 64 and (dot == 4 or problem.flag("scales")):
        converted = (channels for channels, size in parts if size < dot or dot == 4 or not latent)
        scores += tile.block_k * sum(converted) * dot
    if latent and tile.block_m >= 64 and device.capability >= (10, 0):  # results pass through it
        scores += tile.block_m * values * dot
    over_scores = 4 * bool(problem.flag("qq_bias")) + 8 * bool(problem.flag("log_forget"))
    more = tile.block_k * stages * (tile.block_m * over_scores + 12)
    results = tile.block_m * values * 4 + (queries if tile.block_m < 64 else 0)
    return max(queries + scores + streamed + more, results)


def pairs_fit(dim: int, values: int) -> bool:
    """Reports whether `pairs` can process these numbers of channels."""
    return min(dim, values) > 16 and dim % 2 == 0 and values % 2 == 0


def _pairs(problem: Problem, rows: int) -> bool:
    return _is_bytes(problem) and rows <= MOST_PAIR_ROWS and pairs_fit(problem.dim("D"), problem.dim("V"))


def _is_bytes(problem: Problem) -> bool:
    """Reports whether keys and values, or latents, are 8-bit numbers that are multiplied in 16 bits."""
    keys, values = page_dtypes(problem)
    return keys in LARGEST and dot_bytes(problem) == 2 and bool(problem.flag("latent") or keys == values)


def bound_by_products(problem: Problem) -> bool:
    """Reports whether reading 8-bit latents is not expected to take less time than reading 16-bit ones: with many rows, which share what is read,
    multiplying is the bound."""
    rows = problem.dim("Q") * (problem.dim("H") // problem.dim("K"))
    return bool(problem.flag("latent")) and _is_bytes(problem) and rows > MOST_PAIR_ROWS


def dot_bytes(problem: Problem) -> int:
    """The bytes of a number in matrix products."""
    q = problem.dtype("q")
    return 2 if q != "float32" and all(name == q or name in LARGEST for name in page_dtypes(problem)) else 4


def _fitting(
    sizes: tuple[Sizes, ...], problem: Problem, device: DeviceFacts, rows: int = 2**30
) -> list[PagedTile]:
    # Other vendors' compilers keep loads in flight in registers, without a limit.
    is_nvidia = device.vendor == "nvidia"
    keys, most = (256, 4) if is_nvidia else (64, 2)
    tiles = [
        PagedTile(min(m, rows), min(k, keys), w, min(stages, most), *(limit if is_nvidia else ()))
        for m, k, w, stages, *limit in sizes
    ]
    fit = fitting(tiles, lambda tile: shared_memory(problem, tile, device), device)
    if not register_limits_measured(device):  # the tuner measures their effect on this device
        fit = [tile for tile in fit if not tile.max_registers][:1] + fit
    return list(dict.fromkeys(fit)) or [SMALLEST]
