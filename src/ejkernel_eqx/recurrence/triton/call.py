"""Launches the kernels of one call: host code shared by all phases of all members."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core import Named
from ...launch import given, Launcher, result
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, heads_of, KEY, letters_of, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR
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

    def knowing(self, arrays: Named, **numbers: Any) -> "Call":
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

    def states(
        self, edges: Named, dout: Array | None = None, dfinal: Array | None = None
    ) -> tuple[Array, Array]:
        """The state at the start of every chunk `[chunks, HS, D, V]` in the operands' dtype, and the final state in the spec's. With the gradients
        of outputs and final state, the gradients with respect to the state at the end of every chunk and, in float32, to the initial state.
        `edges`: the states before splits, or the gradients after them."""
        tile, arrays, dtype = self.config.states, edges, self.spec.state_dtype
        numbers: dict[str, Any] = {"REVERSE": dout is not None}
        if dout is not None:
            tile, arrays, dtype = self.config.dstates, {"do": dout, "initial": dfinal, **edges}, "float32"
            numbers |= {"INITIAL": True, "name": "dstates_kernel"}
        outputs = {"states": self.stored_states, "final": self.edge_states(dtype)}
        kernel, programs = states_phase.states_kernel, self.state_programs(tile)
        results = self.launch(kernel, tile, outputs, programs, arrays, **numbers)
        return results["states"], results["final"]

    def out(self, states: Array, heads_each: int = 1) -> Array:
        """The outputs, from scores `[B, T, HS, chunk]` if the call has them. `heads_each`: heads per program, which share their query and key
        heads."""
        heads, _, values = self.sizes
        tile, outputs = self.config.out, {"out": self.rows(heads, values)}
        programs = self.chunks * (heads // heads_each) * cdiv(values, tile.block_v)
        scored = self.launch.arrays["scores"] is not None
        numbers = {"HEADS": heads_each, "SCORES": scored, "BETA": self.arrays.beta is not None and not scored}
        kernel, inputs = out_phase.out_kernel, {"states": states}
        return self.launch(kernel, tile, outputs, programs, inputs, **numbers)["out"]

    def single(self, edges: Named) -> tuple[Array, Array]:
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
        tiles = cdiv(dim, tile.block_k) * cdiv(values, tile.block_v)
        return self.sequences * (splits or self.splits) * heads * tiles


def make_call(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig) -> Call:
    """A call from arrays with one leading axis, with heads in the form that the kernels expect.

    Float16 operands become float32, since states, scores and operands of products may exceed the largest float16. Single-pass products
    round to as many digits as float16 has; only the inverses of the delta rules still take several passes.
    """
    precision = precision_of(arrays, config)
    operands = {name: x for name in "qkvab" if (x := getattr(arrays, name)) is not None}
    arrays = arrays._replace(**{name: x.astype(wide(x.dtype)) for name, x in operands.items()})
    size, length, chunk = letters_of(arrays, spec).sizes(arrays), arrays.q.shape[1], config.chunk_size
    counts = {name.upper(): size.get(name, 1) for name in ("Hq", "Hk", "Hv", "Hg", "Hb", "Ha", "Hw")}
    per_sequence = lambda x: None if x is None else jnp.repeat(x, size.get("N", 1), axis=0)
    tables = (None, None) if arrays.offsets is None else tables_of(arrays.offsets, length, chunk)
    named = arrays._asdict() | {
        "g": per_sequence(arrays.g) if spec.decay == CONSTANT else arrays.g,
        "skip": per_sequence(arrays.skip),
        "initial": arrays.initial_state,
        **dict(zip(("chunks", "bounds"), tables)),
        # Arguments of some members only.
        **dict.fromkeys(("logs", "spans", "carry", "scores", "k_end", "edges", "kept", "beyond", "do")),
    }
    tokens = {"T": length, "TOKENS": arrays.q.shape[0] * length, "CHUNK": chunk}
    sizes = {"HS": max(counts.values()), "D": size["D"], "V": size["V"]}
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
    # The option concerns float32 operands; bfloat16 ones are multiplied as they are.
    if arrays.q.dtype == jnp.bfloat16:
        return "ieee"
    # Operands that were float16 have no more digits than one tf32 product keeps.
    single = arrays.q.dtype == jnp.float16
    return config.float32_dot.replace("tf32x3", "tf32") if single else config.float32_dot


def repeated(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> RecurrenceArrays:
    """This call with a state head for every query head, if there are more query heads."""
    heads, state = heads_of(arrays, spec)
    if heads == state:
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
    padding = [(0, 0, 0)] * states.ndim
    # Interior padding puts the zeros between heads; as many follow the last one.
    padding[-3] = (0, copies - 1, copies - 1)
    return lax.pad(states, jnp.zeros((), states.dtype), padding)
