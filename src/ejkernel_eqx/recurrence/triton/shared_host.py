"""The launches of gradients whose state heads share queries and keys."""

from jax import Array

from ...launch import NOTHING, result
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, NONE
from . import shared_gradients as kernels
from .call import Call
from .tile_sizes import Tile

_PROGRAMS = 1024  # of a kernel: enough for any device, so that fewer partial sums need not be written


def gradients(
    call: Call, states: Array, dstates: Array, dout: Array, shared: int, each: int
) -> dict[str, Array]:
    """Gradients of the call's operands over tokens, in parts `[parts, ..]` for queries and keys, those of decays and of the write strength over
    state heads, and of `skip` by chunk. `shared` heads have the same query and key heads; `each` of them sum into one gradient of products."""
    arrays, config, decay = call.arrays, call.config, call.spec.decay
    heads, dim, values = call.sizes
    groups, chunk = heads // shared, config.chunk_size
    is_plain = decay == NONE and arrays.beta is None
    for_decays = lambda *shape: NOTHING if decay == NONE else result(*shape)
    products = call.launch(
        kernels.shared_products_kernel,
        config.scores,
        {"products": result(call.chunks * groups, chunk, chunk)},
        call.chunks * groups,
        GROUPS=groups,
    )["products"]
    batch, length = arrays.q.shape[:2]
    found = call.launch(
        kernels.shared_pairs_kernel,
        config.wy,
        {
            "dv": call.gradient(arrays.v),
            "dproducts": result(call.chunks * (heads // each), chunk, chunk),
            "pairs": for_decays(batch, length, heads),
            "weighed": NOTHING if arrays.beta is None else result(batch, length, heads),
            "dskip": NOTHING if arrays.skip is None else result(call.chunks, heads, values),
        },
        2 * call.chunks * (heads // each),
        {"products": products, "dstates": dstates, "do": dout},
        HEADS=each,
        GROUPS=groups,
    )
    tiles = cdiv(dim, config.gradients.block_k)
    summed = each
    while (
        summed < shared and shared % (2 * summed) == 0 and call.chunks * tiles * (heads // summed) > _PROGRAMS
    ):
        summed *= 2
    found |= call.launch(
        kernels.shared_channels_kernel,
        config.gradients,
        {
            "dq": call.parts(arrays.q, summed),
            "dk": call.parts(arrays.k, summed),
            "reads": for_decays(tiles, batch, length, heads),
            "written": NOTHING if is_plain else result(tiles, batch, length, heads),
            "through": for_decays(tiles, call.chunks, heads),
        },
        tiles * call.chunks * (heads // summed),
        {"dproducts": found["dproducts"], "states": states, "dstates": dstates, "do": dout},
        HEADS=summed,
        SUMMED=each,
    )
    if not is_plain:
        tile = Tile(16, min(padded(heads), 32), 4, 1)
        found |= call.launch(
            kernels.shared_decays_kernel,
            tile,
            {
                "dg": for_decays(call.chunks, heads)
                if decay == CONSTANT
                else for_decays(batch, length, heads),
                "dbeta": NOTHING if arrays.beta is None else result(batch, length, heads),
            },
            call.chunks * cdiv(heads, tile.block_v),
            {name: found[name] for name in ("pairs", "weighed", "reads", "written", "through")},
            TILES=tiles,
        )
    return found
