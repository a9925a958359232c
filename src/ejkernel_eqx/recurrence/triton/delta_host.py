"""Triton: delta rules, host side. Two kernels forward, three backward; with a decay per key channel three and five.

Of the forward pass are kept: the scores, the inverse of every chunk's own matrix, and three factors a token. States are made again.
"""

import jax
import jax.numpy as jnp
from jax import Array

from ...launch import run
from ..spec import CONSTANT, heads_of, KEY, RecurrenceArrays, RecurrenceSpec
from .call import Call, Execute, first_copies, in_first_copies, make_call, padded, repeated, sum_heads
from .delta_gradients import delta_gradients_kernel, delta_pairs_kernel
from .delta_key_gradients import delta_key_gradients_kernel
from .delta_states import delta_dstates_kernel, delta_states_kernel
from .key_scores import gates
from .tile_sizes import Tile, TritonConfig
from .wy import delta_scores_kernel
from .wy_key import delta_key_scores_kernel

Arrays = dict[str, Array]


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    heads = f"H{heads_of(arrays, spec).out}"
    matrix = ("T", heads, "chunk")
    return {"scores": matrix, "inverse": matrix, "factors": (heads, "factors", "T")}


def forward(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, *, execute: Execute = run
) -> Arrays:
    """`out`, `final_state`, and what the backward pass needs."""
    call = make_call(repeated(arrays, spec), spec, config, execute)
    heads, _, values = call.sizes
    if spec.decay == KEY:
        solved = _key_scores(call, _gates(call), solving=True)
    else:
        solved = _scores(call)
    nothing = _nothing()
    results = call.launch(
        delta_states_kernel,
        config.out,
        {
            "out_ptr": call.rows(heads, values),
            "final_ptr": call.edge_states(spec.state_dtype),
            "states_ptr": nothing,
            "written_ptr": nothing,
        },
        _programs(call, config.out),
        solved,
        **_serial(call),
        OUT=True,
    )
    return {
        "out": results["out_ptr"].astype(arrays.v.dtype),
        "final_state": first_copies(results["final_ptr"], _copies(call, arrays)),
        **{name: solved[f"{name}_ptr"] for name in ("scores", "inverse", "factors")},
    }


def backward(
    arrays: RecurrenceArrays,
    spec: RecurrenceSpec,
    config: TritonConfig,
    saved: Arrays,
    dout: Array,
    dfinal_state: Array,
    *,
    execute: Execute = run,
) -> Arrays:
    """The gradients of every float array that is given."""
    call = make_call(repeated(arrays, spec), spec, config, execute)
    heads, _, values = call.sizes
    copies = _copies(call, arrays)
    given = {f"{name}_ptr": x for name, x in saved.items()} | {"do_ptr": dout.astype(call.arrays.q.dtype)}
    key_gates = _gates(call) if spec.decay == KEY else {}
    folded = _key_scores(call, key_gates, solving=False) if spec.decay == KEY else {}
    nothing = _nothing()
    results = call.launch(
        delta_states_kernel,
        config.states,
        {
            "out_ptr": nothing,
            "final_ptr": nothing,
            "states_ptr": _states(call),
            "written_ptr": call.rows(heads, values),
        },
        _programs(call, config.states),
        given | folded,
        **_serial(call),
        OUT=False,
    )
    given |= {name: results[name] for name in ("states_ptr", "written_ptr")}
    results = call.launch(
        delta_dstates_kernel,
        config.dstates,
        {
            "dstates_ptr": _states(call),
            "derrors_ptr": call.rows(heads, values),
            "dinitial_ptr": call.edge_states("float32"),
        },
        _programs(call, config.dstates),
        given | folded | {"dfinal_ptr": in_first_copies(dfinal_state, copies)},
        **_serial(call),
    )
    given |= {name: results[name] for name in ("dstates_ptr", "derrors_ptr")}
    dinitial = results["dinitial_ptr"]
    grads = _key_gradients(call, given | key_gates) if spec.decay == KEY else _gradients(call, given)
    if spec.decay == CONSTANT:
        grads["dg_ptr"] = _sum_tokens(grads["dg_ptr"], arrays.offsets)
    # Which axis of an array are its heads.
    axes = {"q": 2, "k": 2, "v": 2, "g": 1 if spec.decay == CONSTANT else 2, "beta": 2}
    found = {
        name: sum_heads(grads[f"d{name}_ptr"], x.shape[axis], axis=axis)
        for name, axis in axes.items()
        if (x := getattr(arrays, name)) is not None
    }
    if arrays.initial_state is not None:
        found["initial_state"] = sum_heads(dinitial, dinitial.shape[-3] // copies, axis=dinitial.ndim - 3)
    return found


def _copies(call: Call, arrays: RecurrenceArrays) -> int:
    """How often a state head of the call's own is repeated."""
    return call.sizes[0] // heads_of(arrays, call.spec).state


def _scores(call: Call) -> Arrays:
    heads, each = call.sizes[0], _heads_each(call)
    return call.launch(
        delta_scores_kernel,
        call.config.scores,
        _solutions(call),
        call.chunks * (heads // each),
        BLOCK_K=padded(call.sizes[1]),
        HEADS=each,
        SOLVE=_solving(call),
    )


def _gates(call: Call) -> Arrays:
    high, low = gates(call)
    return {"gates_ptr": high, "low_ptr": high if low is None else low}


def _key_scores(call: Call, key_gates: Arrays, *, solving: bool) -> Arrays:
    """The scores and inverses if `solving`; queries and keys with their decays inside in place of the plain ones."""
    heads, dim, _ = call.sizes
    wide = call.rows(heads, dim)
    solutions = _solutions(call) if solving else dict.fromkeys(_solutions(call), _nothing())
    results = call.launch(
        delta_key_scores_kernel,
        call.config.scores,
        solutions
        | {
            "q_in_ptr": wide,
            "k_in_ptr": wide,
            "k_end_ptr": wide,
            "carry_ptr": jax.ShapeDtypeStruct((call.chunks, heads, dim), jnp.float32),
        },
        call.chunks * heads,
        key_gates,
        SOLVE=_solving(call),
        SOLVING=solving,
    )
    kept = ("scores_ptr", "inverse_ptr", "factors_ptr") if solving else ()
    return {name: results[name] for name in (*kept, "k_end_ptr", "carry_ptr")} | {
        "q_ptr": results["q_in_ptr"],
        "k_ptr": results["k_in_ptr"],
    }


def _solutions(call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    heads, chunk = call.sizes[0], call.config.chunk_size
    batch, length = call.arrays.q.shape[:2]
    return {
        "scores_ptr": call.rows(heads, chunk),
        "inverse_ptr": call.rows(heads, chunk),
        "factors_ptr": jax.ShapeDtypeStruct((batch, heads, 3, length), jnp.float32),
        "scratch_ptr": jax.ShapeDtypeStruct((call.chunks, heads, chunk, 32), jnp.float32),
    }


def _pairs(call: Call, given: Arrays) -> Arrays:
    """What the gradients have from pairs of tokens, `dv`, and of `dbeta` a part."""
    heads, chunk, values = call.sizes[0], call.config.chunk_size, call.sizes[2]
    a_head = call.rows(heads, dtype=jnp.float32)
    return call.launch(
        delta_pairs_kernel,
        call.config.wy,
        {
            "dscores_ptr": call.rows(heads, chunk),
            "dreads_ptr": call.rows(heads, chunk),
            "diagonal_ptr": a_head,
            "dv_ptr": _shared(call, heads, values, "HV"),
            "dbeta_ptr": a_head,
        },
        call.chunks * heads,
        given,
    )


def _gradients(call: Call, given: Arrays) -> Arrays:
    """Over state heads; those of queries and keys summed over the heads that share them."""
    heads, dim, _ = call.sizes
    each = _heads_each(call)
    pairs = _pairs(call, given)
    tiles = -(-dim // call.config.gradients.block_k)
    parts = call.rows(tiles, heads, dtype=jnp.float32)
    results = call.launch(
        delta_gradients_kernel,
        call.config.gradients,
        {
            "dq_ptr": _shared(call, heads // each, dim, "HQ"),
            "dk_ptr": _shared(call, heads // each, dim, "HK"),
            "dg_ptr": parts if call.arrays.g is not None else _nothing(),
            "dbeta_ptr": parts,
        },
        call.chunks * (heads // each) * tiles,
        given | {name: pairs[name] for name in ("dscores_ptr", "dreads_ptr", "diagonal_ptr")},
        HEADS=each,
    )
    results["dbeta_ptr"] = pairs["dbeta_ptr"] + results["dbeta_ptr"].sum(2)
    if call.arrays.g is not None:
        results["dg_ptr"] = results["dg_ptr"].sum(2)
    return results | {"dv_ptr": pairs["dv_ptr"]}


def _key_gradients(call: Call, given: Arrays) -> Arrays:
    heads, dim, _ = call.sizes
    pairs = _pairs(call, given)
    tiles = -(-dim // call.config.gradients.block_k)
    results = call.launch(
        delta_key_gradients_kernel,
        call.config.gradients,
        {
            "dq_ptr": _shared(call, heads, dim, "HQ"),
            "dk_ptr": _shared(call, heads, dim, "HK"),
            "dg_ptr": call.rows(heads, dim, dtype=jnp.float32),
            "dbeta_ptr": call.rows(tiles, heads, dtype=jnp.float32),
        },
        call.chunks * heads * tiles,
        given | {name: pairs[name] for name in ("dscores_ptr", "dreads_ptr", "diagonal_ptr")},
    )
    results["dbeta_ptr"] = pairs["dbeta_ptr"] + results["dbeta_ptr"].sum(2)
    return results | {"dv_ptr": pairs["dv_ptr"]}


def _shared(call: Call, count: int, width: int, owner: str) -> jax.ShapeDtypeStruct:
    """Gradients of `count` heads: float32 where they are still to be summed."""
    return call.rows(count, width, dtype=None if count == call.constants[owner] else jnp.float32)


def _heads_each(call: Call) -> int:
    """State heads that share a query head and a key head."""
    queries, keys = call.constants["HQ"], call.constants["HK"]
    return call.sizes[0] // keys if queries == keys else 1


def _solving(call: Call) -> str:
    """How blocks of the inverses are multiplied: as float32, for bfloat16 operands in one pass where that is faster. One pass cuts numbers
    off at 11 bits, no more than float16 has, and an inverse passes the error on."""
    if call.arrays.q.dtype == jnp.bfloat16 and call.config.float32_dot == "tf32x3":
        return "tf32"
    return call.config.float32_dot


def _serial(call: Call) -> dict[str, int | bool]:
    """Constants of the serial passes."""
    decayed = call.spec.decay == KEY
    heads, dim, _ = call.sizes
    return {"BLOCK_K": padded(dim), "DECAYED": decayed} | ({"HQ": heads, "HK": heads} if decayed else {})


def _programs(call: Call, tile: Tile) -> int:
    heads, _, values = call.sizes
    return call.sequences * heads * -(-values // tile.block_v)


def _states(call: Call) -> jax.ShapeDtypeStruct:
    heads, dim, values = call.sizes
    return jax.ShapeDtypeStruct((call.chunks, heads, values, dim), call.arrays.q.dtype)


def _nothing() -> jax.ShapeDtypeStruct:
    """An output that a kernel does not write."""
    return jax.ShapeDtypeStruct((1,), jnp.float32)


def _sum_tokens(x: Array, offsets: Array | None) -> Array:
    """`[B, T, HS]` summed over tokens, of packed sequences over theirs."""
    if offsets is not None:
        token = jnp.arange(x.shape[1])[None]
        inside = (token >= offsets[:, :1]) & (token < offsets[:, -1:])
        x = jnp.where(inside[..., None], x, 0.0)
    return x.sum(1)
