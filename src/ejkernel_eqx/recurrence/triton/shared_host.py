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
    groups, chunk, count = heads // shared, config.chunk_size, call.chunks * (heads // each)
    is_plain = decay == NONE and arrays.beta is None
    if_decays = lambda shape: NOTHING if decay == NONE else shape
    if_beta = lambda shape: NOTHING if arrays.beta is None else shape
    tokens = call.wide_rows(heads)
    # The products that heads share.
    outputs, programs = {"products": result(call.chunks * groups, chunk, chunk)}, call.chunks * groups
    numbers, kernel = {"GROUPS": groups, "MASKED": False}, kernels.shared_products_kernel
    results = call.launch(kernel, config.scores, outputs, programs, **numbers)
    # What pairs of tokens contribute, summed over `each` heads.
    inputs = results | {"dstates": dstates, "do": dout}
    outputs = {
        "dv": call.gradient(arrays.v),
        "dproducts": result(count, chunk, chunk),
        "pairs": if_decays(tokens),
        "weighed": if_beta(tokens),
        "dskip": NOTHING if arrays.skip is None else result(call.chunks, heads, values),
    }
    numbers = {"HEADS": each, "GROUPS": groups}
    results = call.launch(kernels.shared_pairs_kernel, config.wy, outputs, 2 * count, inputs, **numbers)
    # Queries and keys, of as many heads as leave enough programs.
    tiles, summed = cdiv(dim, config.gradients.block_k), each
    programs = lambda: tiles * call.chunks * (heads // summed)
    while summed < shared and shared % (2 * summed) == 0 and programs() > _PROGRAMS:
        summed *= 2
    by_tile = result(tiles, *tokens.shape)
    outputs = {
        "dq": call.parts(arrays.q, summed),
        "dk": call.parts(arrays.k, summed),
        "reads": if_decays(by_tile),
        "written": NOTHING if is_plain else by_tile,
        "through": if_decays(result(tiles, call.chunks, heads)),
    }
    inputs = {"dproducts": results["dproducts"], "states": states, "dstates": dstates, "do": dout}
    numbers, kernel = {"HEADS": summed, "SUMMED": each}, kernels.shared_channels_kernel
    results |= call.launch(kernel, config.gradients, outputs, programs(), inputs, **numbers)
    if is_plain:
        return results
    tile = Tile(16, min(padded(heads), 32), 4, 1)
    dg = if_decays(result(call.chunks, heads) if decay == CONSTANT else tokens)
    outputs, count = {"dg": dg, "dbeta": if_beta(tokens)}, call.chunks * cdiv(heads, tile.block_v)
    inputs = {name: results[name] for name in ("pairs", "weighed", "reads", "written", "through")}
    return results | call.launch(kernels.shared_decays_kernel, tile, outputs, count, inputs, TILES=tiles)
