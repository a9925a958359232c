"""The one bridge to Pallas on TPU: a launch as a value, which `run` compiles for the device or interprets on any host.

Importing this module imports all of Pallas, so only the platforms of the families do, each when it is first used.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..parallel import match_varying
from .by_name import executing
from .sizes import tile_bytes

_DEFAULT_LIMIT = (
    12 * 2**20
)  # what every compiler grants without being asked, with room for its own temporaries
_MIB = 2**20
_ELSEWHERE = (pltpu.SMEM, pltpu.HBM, pl.ANY)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TpuLaunch:
    """The description of one launch of a Pallas kernel on a TPU.

    **Arguments:**

    - `kernel`: a function of references, in this order: prefetched scalars, inputs, outputs, scratch.
    - `name`: the label in HLO and profilers, such as `"attention.forward"`.
    - `grid`: the programs; an axis may be a scalar array, if how many there are is data.
        Axes are sequential, the last one the fastest, so a block that several consecutive steps share stays in VMEM.
    - `scalars`: how many of the arrays are prefetched to scalar memory. The index maps of all specs receive them after the grid's indices.
    - `in_specs`, `out_specs`: one `pl.BlockSpec` for each other array and for each output. The last two axes of a block are multiples of
        `(8, 128)` or the array's own.
    - `outputs`: shapes and dtypes.
    - `scratch`: `pltpu.VMEM((8, 128), jnp.float32)`, semaphores and the like.
    - `parallel`: which axes of the grid may run in any order and on any core; the others are sequential.
    - `aliases`: arrays, counted with the scalars, whose buffers outputs reuse.
    - `temporaries`: bytes of the values of a step, which the compiler keeps in VMEM beside blocks and scratch; an estimate.
    - `flops`, `transcendentals`, `bytes_accessed`: for XLA's scheduler.
    """

    kernel: Callable[..., None]
    name: str
    grid: tuple[Any, ...]
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]
    outputs: Sequence[jax.ShapeDtypeStruct]
    scratch: Sequence[Any] = ()
    scalars: int = 0
    parallel: tuple[int, ...] = ()
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)
    temporaries: int = 0
    flops: int = 0
    transcendentals: int = 0
    bytes_accessed: int = 0

    @property
    def semantics(self) -> tuple[Any, ...]:
        return tuple("parallel" if axis in self.parallel else "arbitrary" for axis in range(len(self.grid)))

    def vmem(self, dtypes: Sequence[Any]) -> int:
        """The bytes of VMEM that a launch takes: every block twice, as the next one is fetched meanwhile, and scratch and temporaries once.
        `dtypes` are those of the inputs."""
        blocks = zip(
            (*self.in_specs, *self.out_specs), (*dtypes, *(x.dtype for x in self.outputs)), strict=True
        )
        total = self.temporaries
        for spec, dtype in blocks:
            if spec.memory_space not in _ELSEWHERE and spec.block_shape is not None:
                total += _buffers(spec) * tile_bytes(_sizes(spec.block_shape), dtype)
        for x in self.scratch:
            if getattr(x, "memory_space", None) == pltpu.VMEM:
                total += tile_bytes(x.shape, x.dtype)
        return total


def run(launch: TpuLaunch, arrays: Sequence[Array], *, interpret: bool = False) -> tuple[Array, ...]:
    """Performs a launch and returns its outputs.

    **Arguments:**

    - `arrays`: the prefetched scalars, then the inputs.
    - `interpret`: simulates a TPU on the host, slowly. Memory that was not written reads as NaN, and two accesses of one place without an order
        between them raise an error.

    **Returns:** the outputs in order; zeros if the grid is empty. Inside `jax.shard_map` they vary over all mesh axes that any array varies over.
    """
    if executing.value is not None and not interpret:
        return executing.value(launch, arrays)
    known = [size for size in launch.grid if isinstance(size, int)]
    if 0 in known or all(math.prod(x.shape) == 0 for x in launch.outputs):
        zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)
        return match_varying(zeros, list(arrays))
    arrays = match_varying(list(arrays), list(arrays))
    manual = jax.typeof(arrays[0]).manual_axis_type
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=manual) for x in launch.outputs]
    call = pl.pallas_call(
        _fresh(launch.kernel),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=launch.scalars,
            grid=launch.grid,
            in_specs=list(launch.in_specs),
            out_specs=list(launch.out_specs),
            scratch_shapes=list(launch.scratch),
        ),
        input_output_aliases=dict(launch.aliases),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=launch.semantics,
            vmem_limit_bytes=_limit(launch.vmem([x.dtype for x in arrays[launch.scalars :]])),
        ),
        cost_estimate=pl.CostEstimate(
            flops=launch.flops, transcendentals=launch.transcendentals, bytes_accessed=launch.bytes_accessed
        )
        if launch.flops
        else None,
        interpret=_checked() if interpret else False,
        name=f"ejkernel_eqx.{launch.name}",
    )
    return tuple(call(*arrays))


def _fresh(kernel: Callable[..., None]) -> Callable[..., None]:
    """A function object of its own for each launch: JAX caches the traced kernel by it, and `pl.num_programs` with it (jax-ml/jax#40847)."""

    @functools.wraps(kernel)
    def body(*refs: Any) -> None:
        kernel(*refs)

    return body


@functools.cache
def _checked() -> Any:
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def _limit(needed: int) -> int | None:
    """The VMEM to ask for, with a quarter more for what the compiler adds; `None` for what it grants anyway."""
    return None if needed <= _DEFAULT_LIMIT else -(-needed * 5 // 4 // _MIB) * _MIB


def _buffers(spec: Any) -> int:
    return getattr(spec.pipeline_mode, "buffer_count", 2)


def _sizes(block: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a block as numbers; axes that the kernel does not see count as one."""
    return tuple(int(getattr(size, "block_size", size) or 1) if size is not None else 1 for size in block)
