"""What the Triton kernels of this family are configured by, and what every launch of them is given."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...launch import Launch
from ..spec import PagedArrays, PagedSpec, PAGES, SCALES

Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]
_SCALES = {None: 0, "token": 1, "head": 2}
_ROWS = ("sinks", "slopes", "qq_bias")
_LARGEST_PART = 256


@dataclasses.dataclass(frozen=True)
class PagedTile:
    """A tile of scores: at most `block_m` rows (queries times the heads that read one key head) by `block_k` keys, powers of two
    from 16, and compiler options. `max_registers` of a thread: 0 for the compiler's choice; without effect on jax-triton before 0.4."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __post_init__(self):
        for name in ("block_m", "block_k"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 16 or size & (size - 1):
                raise ValueError(f"PagedTile.{name}: expected a power of two from 16, received {size!r}.")
        if (
            self.num_warps not in (1, 2, 4, 8, 16)
            or not isinstance(self.num_stages, int)
            or self.num_stages < 1
        ):
            raise ValueError(
                f"PagedTile: expected num_warps 1, 2, 4, 8 or 16 and num_stages >= 1, received {self.num_warps!r} and {self.num_stages!r}."
            )
        if not isinstance(self.max_registers, int) or not 0 <= self.max_registers <= 255:
            raise ValueError(
                f"PagedTile.max_registers: expected an int from 0 to 255, received {self.max_registers!r}."
            )


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """`decode`: of sequences with few queries, whose keys are split over up to `split_k` programs, none with fewer than `chunk_size`
    keys where there are more; `prefill`: of those with more queries."""

    decode: PagedTile
    prefill: PagedTile
    split_k: int = 1
    chunk_size: int = 256
    fast_tanh: bool = True
    """The soft cap of 16-bit inputs by NVIDIA's `tanh.approx` (error 5e-4 of the cap)."""
    fast_bytes: bool = True
    """8-bit pages become numbers by NVIDIA's instructions, four at once."""
    float32_dot: str = "tf32x3"
    """How float32 matrices are multiplied: `"tf32x3"` (three passes, float32's accuracy), `"ieee"`, or on request `"tf32"`."""

    def __post_init__(self):
        for name in ("split_k", "chunk_size"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"TritonConfig.{name}: expected a positive int, received {number!r}.")
        if self.float32_dot not in ("tf32x3", "ieee", "tf32"):
            raise ValueError(
                f"TritonConfig.float32_dot: expected 'tf32x3', 'ieee' or 'tf32', received {self.float32_dot!r}."
            )


@dataclasses.dataclass(frozen=True)
class Call:
    """One call whose leading axis has been merged into tokens, sequences and pages.

    `arrays` are those of `PagedArrays` without leading axes, but for the small ones (`sinks`, `slopes`, `qq_bias`, scales of a head),
    which have one, of rows: sequence `n` reads row `n // row_sequences`.
    """

    arrays: PagedArrays
    spec: PagedSpec
    config: TritonConfig
    execute: Execute
    row_sequences: int

    @property
    def num_sequences(self) -> int:
        return self.arrays.q_len.shape[0]

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key heads."""
        return self.arrays.q.shape[-2], self.arrays.k.shape[-2]

    @property
    def group(self) -> int:
        heads, kv_heads = self.heads
        return heads // kv_heads

    @property
    def values(self) -> int:
        return (self.arrays.k if self.arrays.v is None else self.arrays.v).shape[-1]

    @property
    def result_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of `out_ptr` and `lse_ptr`, as the last kernel has them."""
        tokens, heads = self.arrays.q.shape[:2]
        return {
            "out_ptr": jax.ShapeDtypeStruct((tokens, heads, self.values), self.arrays.q.dtype),
            "lse_ptr": jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        }

    @property
    def dot_dtype(self) -> jnp.dtype:
        """What matrices are multiplied in: quantised pages in the dtype of the queries, others in the wider one."""
        q, k = self.arrays.q.dtype, self.arrays.k.dtype
        return q if self.spec.scales is not None or q == k else jnp.dtype(jnp.float32)

    def launch(
        self,
        kernel: Any,
        tile: PagedTile,
        grid: tuple[int, ...],
        outputs: dict[str, jax.ShapeDtypeStruct],
        *,
        before: dict[str, Array] | None = None,
        scalars: dict[str, int] | None = None,
        **constants: Any,
    ) -> dict[str, Array]:
        """Launches an attention kernel. Its parameters: `q_ptr, k_ptr, v_ptr, rope_ptr, table_ptr, q_start_ptr, q_len_ptr,
        kv_len_ptr, kv_start_ptr, k_scale_ptr, v_scale_ptr, rope_scale_ptr, sinks_ptr, slopes_ptr, qq_bias_ptr, P, M, N, Q, ROW, T`, the
        arrays of `before` and the numbers of `scalars` anywhere among them, then the outputs `out_ptr, lse_ptr`, then the constants below
        and `constants`.

        With `before`, `out` and `lse` as they are so far (`out_before_ptr, lse_before_ptr`), the outputs start as these (and are in place).
        """
        inputs = {f"{name}_ptr": self._given(field) for name, field in _INPUTS.items()}
        inputs |= {f"{name}_before_ptr": x for name, x in (before or {}).items()}
        qq_bias = self.arrays.qq_bias
        launch = Launch(
            kernel=kernel,
            inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
            outputs=outputs,
            scalars={
                "P": self.arrays.k.shape[0],
                "M": self.arrays.page_table.shape[-1],
                "N": self.num_sequences,
                "Q": 0 if qq_bias is None else qq_bias.shape[-1],
                "ROW": self.row_sequences,
                "T": self.arrays.q.shape[0],
                **(scalars or {}),
            },
            constants=self.constants(tile) | constants,
            grid=grid,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
            name=f"ejkernel_eqx.paged.{kernel.fn.__name__}",
            aliases={f"{name}_before_ptr": f"{name}_ptr" for name in before or {}},
        )
        return self.execute(launch, inputs)

    def constants(self, tile: PagedTile) -> dict[str, Any]:
        """The constants of every attention kernel."""
        arrays, spec = self.arrays, self.spec
        dim, rope = arrays.k.shape[-1], 0 if arrays.rope is None else arrays.rope.shape[-1]
        is_float32 = self.dot_dtype == jnp.float32
        return {
            "H": self.heads[0],
            "K": self.heads[1],
            "D": dim,
            "V": self.values,
            "R": rope,
            "PAGE": arrays.k.shape[1],
            # More slots in all, or numbers in a page, than 32 bits can count.
            "FAR": max(arrays.k.shape[0], self.heads[1] * max(dim, self.values, rope)) * arrays.k.shape[1]
            >= 2**31,
            "BLOCK_D": padded(dim),
            "BLOCK_V": padded(self.values),
            "BLOCK_R": padded(rope),
            "BM": tile.block_m,
            "BK": tile.block_k,
            "LATENT": arrays.v is None,
            "SCALES": _SCALES[spec.scales],
            "SCALE": spec.scale,
            "CAP": spec.logits_soft_cap or 0.0,
            "FAST_TANH": self.config.fast_tanh and not is_float32,
            "LEFT": -1 if spec.left is None else min(spec.left, 2**30),
            "RANGED": arrays.kv_start is not None,
            "SINKS": arrays.sinks is not None,
            "ALIBI": arrays.slopes is not None,
            "QQ": arrays.qq_bias is not None,
            "PRECISION": self.config.float32_dot if is_float32 else "ieee",
            "WIDE": is_float32,
        }

    def _given(self, field: str) -> Array:
        """What a call does not have is never read: the queries stand in for it."""
        x = getattr(self.arrays, field)
        return self.arrays.q if x is None else x


_INPUTS = {
    **{name: name for name in ("q", "k", "v", "rope", "q_start", "q_len", "kv_len", "kv_start")},
    **{name: name for name in (*SCALES, *_ROWS)},
    "table": "page_table",
}


def folded(arrays: PagedArrays, spec: PagedSpec, config: TritonConfig, execute: Execute) -> Call:
    """The call with its leading axis merged: tokens, sequences and, where they are mapped, pages one after another."""
    batch, tokens = arrays.q.shape[:2]
    per_row = arrays.q_len.shape[1]
    given = arrays.given
    table = given["page_table"]

    paged = [*PAGES, *(SCALES if spec.scales == "token" else ())]
    own = {"k": 4, "v": 4, "rope": 4, **dict.fromkeys(SCALES, 3 if spec.scales == "token" else 1)}
    pages = {name: given[name] for name in paged if name in given}
    if any(x.ndim > own[name] for name, x in pages.items()):
        count = given["k"].shape[-4]
        first = (jnp.arange(batch, dtype=jnp.int32) * count)[:, None, None]
        table = jnp.where((table >= 0) & (table < count), table + first, -1)
        for name, x in pages.items():
            every = x if x.ndim > own[name] else jnp.broadcast_to(x, (batch, *x.shape))
            given[name] = every.reshape((-1, *every.shape[2:]))
    given["page_table"] = table.reshape((-1, table.shape[-1]))
    if table.shape[-1] == 1 and "kv_start" in given:
        given |= _in_parts({name: given[name] for name in ("page_table", *pages)})

    small = {**dict.fromkeys(("sinks", "slopes"), 1), "qq_bias": 2}
    if spec.scales == "head":
        small |= dict.fromkeys(SCALES, 1)
    small = {name: ndim for name, ndim in small.items() if name in given}
    mapped = any(given[name].ndim > ndim for name, ndim in small.items())
    for name, ndim in small.items():
        x = given[name]
        given[name] = x if x.ndim > ndim else jnp.broadcast_to(x, (batch if mapped else 1, *x.shape))

    given["q"] = given["q"].reshape((-1, *given["q"].shape[2:]))
    first = (jnp.arange(batch, dtype=jnp.int32) * tokens)[:, None]
    given["q_start"] = (given["q_start"] + first if batch > 1 else given["q_start"]).reshape(-1)
    for name in ("q_len", "kv_len", "kv_start"):
        if name in given:
            given[name] = given[name].reshape(-1)
    return Call(
        PagedArrays.of(given),
        spec,
        config,
        execute,
        per_row if mapped else max(batch * per_row, 1),
    )


def _in_parts(given: dict[str, Array]) -> dict[str, Array]:
    """The page table and pages of dense keys, one page a sequence, with parts of them as pages: kernels are compiled for a size of pages, and so
    most numbers of keys share one. Their table is a constant, so nothing is computed on the device for it."""
    count, size = given["k"].shape[:2]
    part = math.gcd(size, _LARGEST_PART)
    if part < 16 or part == size:
        return given
    table, parts = given.pop("page_table"), size // part
    cut = {name: x.reshape((count * parts, part, *x.shape[2:])) for name, x in given.items()}
    numbers = table * parts + jnp.arange(parts, dtype=jnp.int32)[None]
    return cut | {"page_table": jnp.where((table >= 0) & (table < count), numbers, -1)}


def padded(size: int) -> int:
    """The channels of a tile: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


def count(length: int, block: int) -> int:
    return math.ceil(length / block)
