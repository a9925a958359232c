"""Platform `triton`: configurations and support. The kernels are those of attention, with keys that have a second part."""

import functools

from ...attention.triton import compiled as attention
from ...attention.triton.compiled import TileConfig, TritonConfig
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import fitting, rows_of, too_large
from ..over_attention import halves
from ..over_attention import PARTS as PARTS
from . import tile_sizes

OPAQUE = True
MAX_DIM = 128
config_type = TritonConfig
_SMALLEST = TileConfig(16, 16, 4, 1)

unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    nope, rope, values = tile_sizes.dims(problem)
    if max(nope, rope, values) > MAX_DIM:
        return f"takes parts of keys and values up to {MAX_DIM}, not Dn {nope}, Dr {rope} and V {values}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The first preferred tile of each kernel that fits the device's shared memory."""
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first. Each takes the next tile of every kernel."""
    columns = []
    for kernel in tile_sizes.KERNELS:
        tiles = [TileConfig(*tile) for tile in tile_sizes.choices(kernel, problem, device)]
        needed = functools.partial(tile_sizes.shared_memory, kernel, problem, device)
        # The estimate is an upper one, so the smallest tile stays even if it seems too large.
        columns.append(fitting(tiles, needed, device) or [_SMALLEST])
    how = {} if device.vendor == "nvidia" else {"fast_tanh": False, "float32_dot": "ieee"}
    return [TritonConfig(*tiles, **how) for tiles in rows_of(columns)]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler."""
    for kernel in tile_sizes.KERNELS:
        tile = getattr(config, kernel)
        needed = tile_sizes.shared_memory(kernel, problem, device, tile)
        sizes = f"{tile.block_q}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, needed, device)
        if reason is not None and tile != _SMALLEST:
            return reason
    return None


forward, backward = halves(attention)


_SMALL = attention.interpreted.config
interpreted = Interpreted(__name__, _SMALL, fast_tanh=False, float32_dot="ieee")
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
