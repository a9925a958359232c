"""Launches the kernels of one call: host code shared by all phases of all members."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...launch import given, Launcher, result
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, KEY, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR
from . import decay_phase, out_phase, single_pass, states_phase
from .hopper import call as hopper_call
from .tables import tables_of
from .tile_sizes import Tile, TritonConfig

DECAYS = {NONE: 0, CONSTANT: 1, SCALAR: 2, KEY: 3}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, whose arrays have one leading axis and no more query heads than state heads (`repeated`).

    `launch` fills a kernel's parameters by name from a pool of operands, scalars and constants.
    """

    arrays: RecurrenceArrays
    spec: RecurrenceSpec
    config: TritonConfig
    launch: Launcher

    @property
    def chunks(self) -> int:
        """The number of chunks, or of table entries for them."""
        table = self.launch.arrays["chunks"]
        batch, length = self.arrays.q.shape[:2]
        return batch * cdiv(length, self.config.chunk_size) if table is None else table.shape[0]

    @property
    def sequences(self) -> int:
        batch, offsets = self.arrays.q.shape[0], self.arrays.offsets
        return batch if offsets is None else batch * (offsets.shape[1] - 1)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of state heads, key channels and value channels."""
        numbers = self.launch.numbers
        return numbers["HS"], numbers["D"], numbers["V"]

    def rows(self, *sizes: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """The shape of an output over tokens, by default in the operands' dtype."""
        batch, length = self.arrays.q.shape[:2]
        return result(batch, length, *sizes, dtype=dtype or self.arrays.q.dtype)

    def wide_rows(self, *sizes: int) -> jax.ShapeDtypeStruct:
        """`rows` in float32."""
        return self.rows(*sizes, dtype=jnp.float32)

    def gradient(self, x: Array) -> jax.ShapeDtypeStruct:
        """The shape of a gradient over the heads of the call; in float32 if the operand has fewer heads, since it is then summed."""
        heads = self.sizes[0]
        return self.rows(heads, x.shape[3], dtype=x.dtype if x.shape[2] == heads else jnp.float32)

    def parts(self, x: Array, summed: int = 1) -> jax.ShapeDtypeStruct:
        """The shape of a gradient in parts, one for every `summed` state heads that share a head of the operand."""
        count = self.sizes[0] // x.shape[2] // summed
        return result(count, *x.shape, dtype=x.dtype if count == 1 else jnp.float32)

    def knowing(self, arrays: dict[str, Array], **numbers: Any) -> "Call":
        """This call with more arguments for its kernels."""
        return dataclasses.replace(self, launch=self.launch.knowing(arrays, **numbers))

    def with_decays(self) -> "Call":
        """This call with the cumulative decays of its tokens, for kinds with one number per token."""
        if self.spec.decay != SCALAR:
            return self
        batch, length = self.arrays.q.shape[:2]
        heads = self.launch.numbers["HG"]
        tile = Tile(16, min(padded(heads), 64), 4, 1)
        logs = result(heads, 3 if self.launch.numbers["EXACT"] else 2, batch * length)
        shapes = {"logs": logs, "spans": result(heads, self.chunks)}
        programs = self.chunks * cdiv(heads, tile.block_v)
        sums = self.launch(decay_phase.decays_kernel, tile, shapes, programs, CHUNKS=self.chunks)
        return self.knowing(sums)

    def states(self, edges: dict[str, Array]) -> tuple[Array, Array]:
        """The state at the start of every chunk `[chunks, HS, D, V]` in the operands' dtype, and the final state in the spec's; `edges` are
        the states before splits."""
        tile = self.config.states
        outputs = {"states": self.stored_states, "final": self.edge_states(self.spec.state_dtype)}
        results = self.launch(states_phase.states_kernel, tile, outputs, self.state_programs(tile), edges)
        return results["states"], results["final"]

    def dstates(self, dout: Array, dfinal: Array, edges: dict[str, Array]) -> tuple[Array, Array]:
        """Gradients with respect to the state at the end of every chunk and, in float32, to the initial state; `edges` are
        those after splits."""
        tile, arrays = self.config.dstates, {"do": dout, "dfinal": dfinal, **edges}
        outputs = {"dstates": self.stored_states, "dinitial": self.edge_states("float32")}
        results = self.launch(states_phase.dstates_kernel, tile, outputs, self.state_programs(tile), arrays)
        return results["dstates"], results["dinitial"]

    def out(self, states: Array, *, scores: Array | None = None, heads_each: int = 1) -> Array:
        """The outputs. `scores [B, T, HS, chunk]`: passed in instead of being computed in the kernel; `heads_each`: heads per program, which
        share their query and key heads."""
        heads, _, values = self.sizes
        tile, outputs = self.config.out, {"out": self.rows(heads, values)}
        programs = self.chunks * (heads // heads_each) * cdiv(values, tile.block_v)
        has = {"SCORES": scores is not None, "BETA": self.arrays.beta is not None and scores is None}
        arrays = {"states": states, "scores": scores}
        return self.launch(out_phase.out_kernel, tile, outputs, programs, arrays, HEADS=heads_each, **has)[
            "out"
        ]

    def single(self, edges: dict[str, Array]) -> tuple[Array, Array]:
        """Outputs and final state from the single kernel that holds all key channels; `edges` are the states before splits."""
        if self.config.out.hopper:
            return hopper_call.single(self, edges)
        heads, dim, values = self.sizes
        tile = dataclasses.replace(self.config.out, block_k=padded(dim))
        outputs = {"out": self.rows(heads, values), "final": self.edge_states(self.spec.state_dtype)}
        results = self.launch(single_pass.single_kernel, tile, outputs, self.state_programs(tile), edges)
        return results["out"], results["final"]

    @property
    def stored_states(self) -> jax.ShapeDtypeStruct:
        return result(self.chunks, *self.sizes, dtype=self.arrays.q.dtype)

    def edge_states(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape of initial and final states."""
        batch, offsets = self.arrays.q.shape[0], self.arrays.offsets
        count = () if offsets is None else (offsets.shape[1] - 1,)
        return result(batch, *count, *self.sizes, dtype=jnp.dtype(dtype))

    @property
    def splits(self) -> int:
        """The number of parts of each sequence that have their own programs."""
        return self.launch.numbers["SPLITS"]

    def state_programs(self, tile: Any, splits: int | None = None) -> int:
        """The number of programs that have a tile of a state over a split each, by default over all splits."""
        heads, dim, values = self.sizes
        return (
            self.sequences
            * (splits or self.splits)
            * heads
            * cdiv(dim, tile.block_k)
            * cdiv(values, tile.block_v)
        )


def make_call(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig) -> Call:
    """A call from arrays with one leading axis, with heads in the form that the kernels expect.

    Float16 operands become float32, since states, scores and operands of products may exceed the largest float16. Single-pass products
    round to as many digits as float16 has; only the inverses of the delta rules still take several passes.
    """
    precision = precision_of(arrays, config)
    arrays = arrays._replace(**{name: (x := getattr(arrays, name)).astype(wide(x.dtype)) for name in "qkv"})
    length, dim, values = arrays.q.shape[1], arrays.q.shape[-1], arrays.v.shape[-1]
    chunk = config.chunk_size
    counts = {"HQ": arrays.q.shape[2], "HK": arrays.k.shape[2], "HV": arrays.v.shape[2], "HG": 1, "HB": 1}
    if arrays.g is not None:
        counts["HG"] = arrays.g.shape[-1] if spec.decay in (CONSTANT, SCALAR) else arrays.g.shape[-2]
    if arrays.beta is not None:
        counts["HB"] = arrays.beta.shape[-1]
    each = 1 if arrays.offsets is None else arrays.offsets.shape[1] - 1
    per_sequence = lambda x: None if x is None else jnp.repeat(x, each, axis=0)
    tables = (None, None) if arrays.offsets is None else tables_of(arrays.offsets, length, chunk)
    named = arrays._asdict() | {
        "g": per_sequence(arrays.g) if spec.decay == CONSTANT else arrays.g,
        "skip": per_sequence(arrays.skip),
        "initial": arrays.initial_state,
        **dict(zip(("chunks", "bounds"), tables)),
        # Arguments of some members only.
        **dict.fromkeys(("logs", "spans", "carry", "scores", "k_end", "edges", "kept", "beyond")),
    }
    tokens = {"T": length, "TOKENS": arrays.q.shape[0] * length, "CHUNK": chunk}
    sizes = {"HS": max(counts.values()), "D": dim, "V": values}
    kind = {"SCALE": spec.scale, "DECAY": DECAYS[spec.decay], "PRECISION": precision}
    numbers = {
        **(counts | tokens | sizes | kind),
        "SPLITS": max(1, min(config.splits, cdiv(length, chunk))),
        "EVEN": arrays.offsets is None and length % chunk == 0,
        "EXACT": arrays.q.dtype == jnp.float32,
        **given(BETA=arrays.beta, SKIP=arrays.skip, INITIAL=arrays.initial_state),
        **given(SEGMENTS=arrays.starts, TABLE=arrays.offsets),
    }
    return Call(arrays, spec, config, Launcher("recurrence", named, numbers, arrays.q))


def wide(dtype: Any) -> Any:
    """The dtype that operands are computed in."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def precision_of(arrays: RecurrenceArrays, config: TritonConfig) -> str:
    """The precision in which operands are multiplied."""
    if arrays.q.dtype == jnp.bfloat16:
        return "ieee"
    single = arrays.q.dtype == jnp.float16
    return config.float32_dot.replace("tf32x3", "tf32") if single else config.float32_dot


def repeated(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> RecurrenceArrays:
    """This call with a state head for every query head, if there are more query heads."""
    heads = arrays.q.shape[2]
    counts = [arrays.k.shape[2], arrays.v.shape[2]]
    if arrays.g is not None:
        counts.append(arrays.g.shape[-1 if spec.decay in (CONSTANT, SCALAR) else -2])
    if arrays.beta is not None:
        counts.append(arrays.beta.shape[-1])
    state = max(counts)
    if heads <= state:
        return arrays
    assert arrays.skip is None
    initial = arrays.initial_state
    return arrays._replace(
        v=jnp.repeat(arrays.v, heads // arrays.v.shape[2], axis=2),
        initial_state=None if initial is None else jnp.repeat(initial, heads // state, axis=-3),
    )


def sum_heads(x: Array, heads: int, *, axis: int = 2) -> Array:
    """Sums over the heads that share one head."""
    count = x.shape[axis]
    if count == heads:
        return x
    return x.reshape((*x.shape[:axis], heads, count // heads, *x.shape[axis + 1 :])).sum(axis + 1)


def first_copies(states: Array, copies: int) -> Array:
    """The first of every `copies` equal neighbours among states `[.., heads, D, V]`."""
    return states if copies == 1 else states[..., ::copies, :, :]


def sum_copies(states: Array, copies: int) -> Array:
    """Sums of states `[.., heads, D, V]` over `copies` neighbours each."""
    return sum_heads(states, states.shape[-3] // copies, axis=states.ndim - 3)


def in_first_copies(states: Array, copies: int) -> Array:
    """The transpose of `first_copies`: the other copies are zero."""
    if copies == 1:
        return states
    wide = jnp.pad(
        states[..., :, None, :, :], [(0, 0)] * (states.ndim - 2) + [(0, copies - 1), (0, 0), (0, 0)]
    )
    return wide.reshape((*states.shape[:-3], -1, *states.shape[-2:]))
