"""Launches the kernels of one call: what all phases of all members share on the host."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...launch import Launch
from ..spec import CONSTANT, KEY, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR
from . import decay_phase, out_phase, single_pass, states_phase
from .tables import tables_of
from .tile_sizes import Tile, TritonConfig

Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]
DECAYS = {NONE: 0, CONSTANT: 1, SCALAR: 2, KEY: 3}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, its arrays with one leading axis and no more query heads than state heads (`repeated`).

    Every launch takes what its kernel's parameters name from a pool: operands, scalars, constants. What a call does not have is
    never read: the queries stand in for it.
    """

    arrays: RecurrenceArrays
    spec: RecurrenceSpec
    config: TritonConfig
    execute: Execute
    pool: dict[str, Array]
    constants: dict[str, Any]

    @property
    def chunks(self) -> int:
        """How many chunks there are, or entries for them."""
        table = self.pool.get("chunks_ptr")
        batch, length = self.arrays.q.shape[:2]
        return batch * _count(length, self.config.chunk_size) if table is None else table.shape[0]

    @property
    def sequences(self) -> int:
        batch, offsets = self.arrays.q.shape[0], self.arrays.offsets
        return batch if offsets is None else batch * (offsets.shape[1] - 1)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """State heads, key channels, value channels."""
        return tuple(self.constants[name] for name in ("HS", "D", "V"))

    def rows(self, *sizes: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """An output over tokens, by default in the operands' dtype."""
        batch, length = self.arrays.q.shape[:2]
        return jax.ShapeDtypeStruct((batch, length, *sizes), dtype or self.arrays.q.dtype)

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        outputs: dict[str, jax.ShapeDtypeStruct],
        programs: int,
        inputs: dict[str, Array] | None = None,
        **constants: Any,
    ) -> dict[str, Array]:
        names = kernel.arg_names
        batch, length = self.arrays.q.shape[:2]
        given = self.pool | (inputs or {})
        arrays = {
            name: given.get(name, self.arrays.q)
            for name in names
            if name.endswith("_ptr") and name not in outputs
        }
        known = self.constants | {"BLOCK_K": tile.block_k, "BLOCK_V": tile.block_v} | constants
        launch = Launch(
            kernel=kernel,
            inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()},
            outputs={name: outputs[name] for name in names if name in outputs},
            scalars={
                name: value
                for name, value in {"T": length, "TOKENS": batch * length}.items()
                if name in names
            },
            constants={name: known[name] for name in names if name in known},
            grid=(programs,),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            name=f"ejkernel_eqx.recurrence.{kernel.fn.__name__}",
        )
        return self.execute(launch, arrays)

    def with_decays(self) -> "Call":
        """The same call with the summed decays of its tokens, for kinds of one number a token."""
        if self.spec.decay != SCALAR:
            return self
        batch, length = self.arrays.q.shape[:2]
        heads = self.constants["HG"]
        tile = Tile(16, min(padded(heads), 64), 4, 1)
        planes = 3 if self.constants["EXACT"] else 2
        logs = jax.ShapeDtypeStruct((heads, planes, batch * length), jnp.float32)
        results = self.launch(
            decay_phase.decays_kernel, tile, {"logs_ptr": logs}, self.chunks * _count(heads, tile.block_v)
        )
        return dataclasses.replace(self, pool=self.pool | results)

    def states(self) -> tuple[Array, Array]:
        """The state at the start of every chunk `[chunks, HS, D, V]` in the operands' dtype, and the final state in the spec's."""
        tile = self.config.states
        results = self.launch(
            states_phase.states_kernel,
            tile,
            {"states_ptr": self.stored_states, "final_ptr": self.edge_states(self.spec.state_dtype)},
            self._state_programs(tile),
        )
        return results["states_ptr"], results["final_ptr"]

    def dstates(self, dout: Array, dfinal: Array) -> tuple[Array, Array]:
        """Gradients in the state at the end of every chunk and, float32, in the initial state."""
        tile = self.config.dstates
        results = self.launch(
            states_phase.dstates_kernel,
            tile,
            {"dstates_ptr": self.stored_states, "dinitial_ptr": self.edge_states("float32")},
            self._state_programs(tile),
            {"do_ptr": dout, "dfinal_ptr": dfinal},
        )
        return results["dstates_ptr"], results["dinitial_ptr"]

    def out(
        self,
        states: Array,
        *,
        scores: Array | None = None,
        new: Array | None = None,
        heads_each: int = 1,
    ) -> Array:
        """The outputs. `scores [B, T, HS, chunk]`: what is given instead of being made in the kernel; `new`: values of a delta member;
        `heads_each`: heads of one program, which share their query and key heads."""
        heads, _, values = self.sizes
        tile = self.config.out
        results = self.launch(
            out_phase.out_kernel,
            tile,
            {"out_ptr": self.rows(heads, values)},
            self.chunks * (heads // heads_each) * _count(values, tile.block_v),
            {"states_ptr": states} | _given(scores_ptr=scores, v_ptr=new),
            SCORES=scores is not None,
            BETA=self.arrays.beta is not None and scores is None,
            HEADS=heads_each,
            **({"HV": heads} if new is not None else {}),
        )
        return results["out_ptr"]

    def single(self) -> tuple[Array, Array]:
        """Outputs and final state by the one kernel that has all key channels."""
        heads, dim, values = self.sizes
        tile = dataclasses.replace(self.config.out, block_k=padded(dim))
        results = self.launch(
            single_pass.single_kernel,
            tile,
            {"out_ptr": self.rows(heads, values), "final_ptr": self.edge_states(self.spec.state_dtype)},
            self.sequences * heads * _count(values, tile.block_v),
        )
        return results["out_ptr"], results["final_ptr"]

    @property
    def stored_states(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.chunks, *self.sizes), self.arrays.q.dtype)

    def edge_states(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape of initial and final states."""
        batch, offsets = self.arrays.q.shape[0], self.arrays.offsets
        count = () if offsets is None else (offsets.shape[1] - 1,)
        return jax.ShapeDtypeStruct((batch, *count, *self.sizes), jnp.dtype(dtype))

    def _state_programs(self, tile: Tile) -> int:
        heads, dim, values = self.sizes
        return self.sequences * heads * _count(dim, tile.block_k) * _count(values, tile.block_v)


def make_call(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, execute: Execute) -> Call:
    """A call of arrays with one leading axis, their heads as the kernels want them.

    Float16 operands become float32: states, scores and what goes into products may pass the largest float16. One pass of products rounds
    to as many digits as float16 has; only the inverses of the delta rules are still made in several.
    """
    precision = precision_of(arrays, config)
    arrays = arrays._replace(**{name: (x := getattr(arrays, name)).astype(wide(x.dtype)) for name in "qkv"})
    length, dim, values = arrays.q.shape[1], arrays.q.shape[-1], arrays.v.shape[-1]
    chunk = config.chunk_size
    exact = arrays.q.dtype == jnp.float32
    counts = {"HQ": arrays.q.shape[2], "HK": arrays.k.shape[2], "HV": arrays.v.shape[2], "HG": 1, "HB": 1}
    if arrays.g is not None:
        counts["HG"] = arrays.g.shape[-1] if spec.decay in (CONSTANT, SCALAR) else arrays.g.shape[-2]
    if arrays.beta is not None:
        counts["HB"] = arrays.beta.shape[-1]
    heads = max(counts.values())
    constants = counts | {
        "HS": heads,
        "D": dim,
        "V": values,
        "CHUNK": chunk,
        "SCALE": spec.scale,
        "DECAY": DECAYS[spec.decay],
        "BETA": arrays.beta is not None,
        "SKIP": arrays.skip is not None,
        "INITIAL": arrays.initial_state is not None,
        "SEGMENTS": arrays.starts is not None,
        "TABLE": arrays.offsets is not None,
        "EVEN": arrays.offsets is None and length % chunk == 0,
        "EXACT": exact,
        "PRECISION": precision,
    }
    pool = {"q_ptr": arrays.q, "k_ptr": arrays.k, "v_ptr": arrays.v}
    pool |= _given(beta_ptr=arrays.beta, initial_ptr=arrays.initial_state, starts_ptr=arrays.starts)
    each = 1
    if arrays.offsets is not None:
        each = arrays.offsets.shape[1] - 1
        pool["chunks_ptr"], pool["bounds_ptr"] = tables_of(arrays.offsets, length, chunk)
    if arrays.g is not None:
        pool["g_ptr"] = jnp.repeat(arrays.g, each, axis=0) if spec.decay == CONSTANT else arrays.g
    if arrays.skip is not None:
        pool["skip_ptr"] = jnp.repeat(arrays.skip, each, axis=0)
    return Call(arrays, spec, config, execute, pool, constants)


def wide(dtype: Any) -> Any:
    """The dtype of operands on their way."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def precision_of(arrays: RecurrenceArrays, config: TritonConfig) -> str:
    """How operands are multiplied."""
    if arrays.q.dtype == jnp.bfloat16:
        return "ieee"
    single = arrays.q.dtype == jnp.float16
    return config.float32_dot.replace("tf32x3", "tf32") if single else config.float32_dot


def repeated(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> RecurrenceArrays:
    """The same call with a state head for every query head, where there are more of those."""
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


def padded(size: int) -> int:
    """The power of two from 16 that holds a number of channels."""
    return max(16, 1 << (size - 1).bit_length())


def _given(**arrays: Array | None) -> dict[str, Array]:
    return {name: x for name, x in arrays.items() if x is not None}


def _count(length: int, block: int) -> int:
    return math.ceil(length / block)


def sum_heads(x: Array, heads: int, *, axis: int = 2) -> Array:
    """The sums over the heads that share one."""
    count = x.shape[axis]
    if count == heads:
        return x
    return x.reshape((*x.shape[:axis], heads, count // heads, *x.shape[axis + 1 :])).sum(axis + 1)


def first_copies(states: Array, copies: int) -> Array:
    """Of states `[.., heads, D, V]` of which so many neighbours are equal, one each."""
    return states if copies == 1 else states[..., ::copies, :, :]


def in_first_copies(states: Array, copies: int) -> Array:
    """The transpose of `first_copies`: zero for the other copies."""
    if copies == 1:
        return states
    wide = jnp.pad(
        states[..., :, None, :, :], [(0, 0)] * (states.ndim - 2) + [(0, copies - 1), (0, 0), (0, 0)]
    )
    return wide.reshape((*states.shape[:-3], -1, *states.shape[-2:]))
