"""Chunks and heads of a step, and the vector memory that they take."""

import dataclasses
from typing import Annotated

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Checked, Count, power_of_two
from ...launch.sizes import padded, tile_bytes, too_large_for_vmem
from ..spec import KEY

Chunk = Annotated[int, power_of_two(16, 256)]


@dataclasses.dataclass(frozen=True)
class PallasConfig(Checked):
    """Tokens of a chunk, and the state heads that a step of each direction computes side by side, so that their products need not wait for each
    other; of these, as many as divide the state heads."""

    chunk_size: Chunk
    forward_heads: Count
    backward_heads: Count


def heads_of_step(wanted: int, heads: int) -> int:
    """The most heads up to those that are wanted by which the state heads can be divided."""
    return max(n for n in range(1, min(wanted, heads) + 1) if heads % n == 0)


def chunk_of(config: PallasConfig, length: int) -> int:
    """The tokens of a chunk, no more than there are."""
    return min(config.chunk_size, padded(length))


def values(label: str, heads: int, chunk: int, queries: int, dim: int, width: int, by_key: bool) -> int:
    """An estimate of the bytes of the values of a step."""
    rows = chunk * (queries + 1)
    squares = tile_bytes((rows, chunk), "float32") * (6 + (chunk.bit_length() if by_key else 2))
    sides = tile_bytes((rows, max(dim, width)), "float32") * (8 + (2 * chunk.bit_length() if by_key else 0))
    states = 3 * tile_bytes((dim, width), "float32")
    return heads * (squares + sides + states) * (2 if label == "backward" else 1)


def vmem(label: str, config: PallasConfig, problem: Problem) -> int:
    """An estimate of the vector memory of a launch: every block twice, and the values of a step."""
    dim, width, state_heads = problem.dim("D"), problem.dim("V"), problem.dim("HS")
    queries = max(1, problem.dim("R") // state_heads)
    chunk = chunk_of(config, problem.dim("T"))
    heads = heads_of_step(getattr(config, f"{label}_heads"), state_heads)
    dtype, decay = problem.dtype("qkv"), problem.flag("decay")
    queried = queries * (tile_bytes((chunk, dim), dtype) + tile_bytes((chunk, width), dtype))
    stored = tile_bytes((chunk, dim), dtype) + tile_bytes((chunk, width), dtype)
    gates = tile_bytes((chunk, dim), "float32") if decay == KEY else tile_bytes((1, chunk), "float32")
    state = tile_bytes((dim, width), "float32")
    moved = queried + stored + 2 * gates + 3 * state
    if label == "backward":
        moved += queried + stored + 2 * gates
    return heads * (2 * moved + state) + values(label, heads, chunk, queries, dim, width, decay == KEY)


MAX_CHUNKS = 65_536
"""Chunks of packed sequences, over all leading axes: their table is in scalar memory, a megabyte."""
_CHUNKS = {False: (128, 64, 256, 32, 16), True: (64, 32, 128, 16)}
_HEADS = ((4, 2), (8, 4), (2, 1), (1, 1))


def candidates(problem: Problem, device: DeviceFacts) -> list[PallasConfig]:
    """Configurations worth timing, the heuristic first: those that fit."""
    chunks = _CHUNKS[bool(problem.flag("delta")) or problem.flag("decay") == KEY]
    configs: dict[PallasConfig, None] = {}
    for heads in _HEADS:
        for chunk in chunks:
            forward, backward = (heads_of_step(n, problem.dim("HS")) for n in heads)
            config = PallasConfig(min(chunk, padded(problem.dim("T"))), forward, backward)
            if config_unsupported(config, problem, device) is None:
                configs.setdefault(config)
    return list(configs)[:12] or [PallasConfig(16, 1, 1)]


def config_unsupported(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why a step cannot fit the device's vector memory, by an estimate, or the table of chunks its scalar memory."""
    if problem.flag("packed") == "offsets":
        chunks = problem.dim("B") * (problem.dim("T") // config.chunk_size + problem.dim("N"))
        if chunks > MAX_CHUNKS:
            return f"takes up to {MAX_CHUNKS} chunks of packed sequences over all leading axes, not {chunks}"
    for label in ("forward", "backward"):
        needed = vmem(label, config, problem) * 5 // 4
        sizes = f"chunks of {config.chunk_size} and {getattr(config, f'{label}_heads')} heads"
        reason = too_large_for_vmem(label, sizes, needed, device)
        if reason is not None:
            return reason
    return None
