"""The host side: from the arrays of a call to chunks of all heads and back, and the launches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...core import Named
from ...launch.pallas import run, TpuLaunch
from ..spec import CONSTANT, KEY, NONE, RecurrenceArrays, RecurrenceSpec
from ..xla_chunks import Chunks
from ..xla_decay import closed
from .chunk import Form
from .kernels import backward_kernel, ENDS, forward_kernel, FRESH, Launched, OPERANDS
from .tile_sizes import values


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, whose arrays have one leading axis."""

    arrays: RecurrenceArrays
    spec: RecurrenceSpec
    chunks: Chunks

    @property
    def queries(self) -> int:
        """Query heads of a state head."""
        return max(1, self.arrays.q.shape[2] // self.chunks.heads)

    @property
    def sequences(self) -> int:
        return self.chunks.sequences or 1

    @property
    def is_empty(self) -> bool:
        return self.chunks.count == 0 or self.chunks.sequences == 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.chunks.heads, self.arrays.q.shape[-1], self.arrays.v.shape[-1]

    def operands(self, inputs: Named) -> Named:
        """Operands as the kernels take them, from those of the call: `q [B, R, P, D]`, `k`, `v` and decays by key `[B, HS, P, ...]`, numbers of
        tokens `[B, HS, NC, 1, C]`. Linear, but for decays that are as good as closed."""
        chunks, length = self.chunks, self.arrays.q.shape[1]
        result = {name: chunks.take(inputs[name]) for name in "qkv"}
        for name in ("g", "beta"):
            if name in inputs:
                x = inputs[name].astype(jnp.float32)
                if name == "g" and self.spec.decay == CONSTANT:
                    # One number per token, so that places without a token do not decay.
                    x = jnp.broadcast_to(x[:, None], (x.shape[0], length, x.shape[-1]))
                x = chunks.take(closed(x) if name == "g" else x)
                result[name] = x if x.ndim == 4 else x.reshape(*x.shape[:2], chunks.count, 1, chunks.size)
        if self.spec.decay == NONE:
            # As decays of 1: without them libtpu 0.0.50 fails for v6e and tpu7x, on queries that are multiplied both by keys and by the state.
            result["g"] = jnp.zeros((chunks.batch, chunks.heads, chunks.count, 1, chunks.size), jnp.float32)
        return result

    def learned(self) -> Named:
        return {name: x for name in OPERANDS if (x := getattr(self.arrays, name)) is not None}

    def tables(self) -> tuple[Array, Array]:
        """The sequence of each chunk and its flags, int32 `[B NC]`; `[NC]` if all rows are alike."""
        chunks = self.chunks
        place = jnp.arange(chunks.count, dtype=jnp.int32)
        if not chunks.packed:
            first, last = place == 0, place == chunks.count - 1
            flags = FRESH * first.astype(jnp.int32) + ENDS * last.astype(jnp.int32)
            return jnp.zeros_like(flags), flags
        # The last chunk of an empty sequence belongs to another one and must not end it.
        ends = ((chunks.last[..., None] == place[None, None]) & ~chunks.empty[..., None]).any(1)
        flags = FRESH * chunks.fresh.astype(jnp.int32) + ENDS * ends.astype(jnp.int32)
        return chunks.sequence.reshape(-1).astype(jnp.int32), flags.reshape(-1)

    def starts(self) -> Array:
        """`[B, NC, 1, C]`: where the segment of each token begins, in tokens of the chunk, -1 if before it."""
        chunks = self.chunks
        begins = jnp.asarray(chunks.positions // chunks.size * chunks.size)[None]
        relative = jnp.maximum(chunks.starts - begins, -1).astype(jnp.float32)
        return relative.reshape(-1, chunks.count, 1, chunks.size)

    def edges(self, states: Array) -> Array:
        """Initial or final states as `[B, N, HS, D, V]`."""
        return states if self.chunks.packed else states[:, None]

    def of_sequences(self, states: Array, otherwise: Array | None) -> Array:
        """The states of sequences `[B, N, HS, D, V]`, or of rows `[B, HS, D, V]`; of empty sequences others, by default zeros."""
        if not self.chunks.packed:
            return states[:, 0]
        return jnp.where(
            self.chunks.empty[..., None, None, None], 0 if otherwise is None else otherwise, states
        )


def make_call(arrays: RecurrenceArrays, spec: RecurrenceSpec, chunk_size: int) -> Call:
    return Call(arrays, spec, Chunks(arrays, spec, chunk_size))


def run_forward(call: Call, heads: int, save: bool) -> Named:
    """`out [B, R, P, V]`, `final [B, N, HS, D, V]` and, with `save`, `states [B, NC, HS, D, V]`."""
    inputs = call.operands(call.learned())
    if call.arrays.initial_state is not None:
        inputs["initial"] = call.edges(call.arrays.initial_state)
    blocks = _Blocks(call, heads, reverse=False)
    batch, out_heads = inputs["q"].shape[:2]
    state_heads, dim, width = call.sizes
    # With a skip, what is added to the outputs is added before they are rounded.
    dtype = call.arrays.v.dtype if call.arrays.skip is None else jnp.float32
    outputs = {
        "out": ((batch, out_heads, call.chunks.places, width), dtype),
        "final": ((batch, call.sequences, state_heads, dim, width), call.spec.state_dtype),
    }
    if save:
        outputs["states"] = ((batch, call.chunks.count, state_heads, dim, width), call.arrays.q.dtype)
    return blocks.launch(forward_kernel, "forward", inputs, outputs, "state")


def run_backward(call: Call, heads: int, states: Array, dout: Array, dfinal: Array) -> Named:
    """The gradients of `call.operands`, and `dinitial [B, N, HS, D, V]` in float32; their names begin with `d`."""
    inputs = call.operands(call.learned())
    shapes = {f"d{name}": (x.shape, x.dtype) for name, x in inputs.items()}
    inputs |= {"states": states, "dout": call.chunks.take(dout), "dfinal": call.edges(dfinal)}
    if call.arrays.initial_state is not None:
        shapes["dinitial"] = (inputs["dfinal"].shape, jnp.float32)
    return _Blocks(call, heads, reverse=True).launch(backward_kernel, "backward", inputs, shapes, "dstate")


class _Blocks:
    """The blocks of a launch: of a row, `heads` state heads and a chunk, which come in this order, or the chunks in the other."""

    def __init__(self, call: Call, heads: int, reverse: bool):
        self.call, self.heads, self.reverse = call, heads, reverse
        self.count = call.chunks.count

    def _chunk(self, c: Any) -> Any:
        # The backward carries the state's gradient from the last chunk to the first.
        return self.count - 1 - c if self.reverse else c

    def spec(self, name: str, shape: tuple[int, ...], launched: Launched) -> Any:
        heads, size = self.heads, self.call.chunks.size
        kind, chunk = name.removeprefix("d"), self._chunk
        if kind == "starts":
            return pl.BlockSpec((None, None, 1, size), lambda b, h, c, *_: (b, chunk(c), 0, 0))
        if kind == "states":
            return pl.BlockSpec((None, None, heads, *shape[3:]), lambda b, h, c, *_: (b, chunk(c), h, 0, 0))
        if kind in ("initial", "final"):
            place = lambda b, h, c, sequence, _: (b, sequence[launched.entry(b, chunk(c))], h, 0, 0)
            return pl.BlockSpec((None, None, heads, *shape[3:]), place)
        if len(shape) == 5:
            return pl.BlockSpec((None, heads, None, 1, size), lambda b, h, c, *_: (b, h, chunk(c), 0, 0))
        many = heads * self.call.queries if kind in ("q", "out") else heads
        return pl.BlockSpec((None, many, size, shape[3]), lambda b, h, c, *_: (b, h, chunk(c), 0))

    def launch(self, kernel: Any, label: str, inputs: Named, outputs: dict[str, Any], scratch: str) -> Named:
        call = self.call
        if call.chunks.starts is not None:
            inputs = inputs | {"starts": call.starts()}
        state_heads, dim, width = call.sizes
        form = Form(call.spec.scale, call.spec.delta, call.arrays.q.dtype.name, self.reverse)
        names = (*inputs, *outputs, scratch)
        launched = Launched(names, form, self.heads, call.queries, self.count, call.chunks.packed)
        results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in outputs.values()]
        batch, size = call.arrays.q.shape[0], call.chunks.size
        products = 2 * dim * width + size * (dim + width)  # of a token and head
        flops = 2 * batch * state_heads * call.chunks.places * (1 + call.queries) * products
        launch = TpuLaunch(
            kernel=functools.partial(kernel, launched),
            name=f"recurrence.{label}",
            grid=(batch, state_heads // self.heads, self.count),
            scalars=2,
            in_specs=[self.spec(name, x.shape, launched) for name, x in inputs.items()],
            out_specs=[self.spec(name, shape, launched) for name, (shape, _) in outputs.items()],
            outputs=results,
            scratch=[pltpu.VMEM((self.heads, dim, width), jnp.float32)],
            parallel=(0, 1),
            temporaries=values(label, self.heads, size, call.queries, dim, width, call.spec.decay == KEY),
            flops=flops * (3 if self.reverse else 1),
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs.values(), *results)),
        )
        return dict(zip(outputs, run(launch, [*call.tables(), *inputs.values()]), strict=True))
