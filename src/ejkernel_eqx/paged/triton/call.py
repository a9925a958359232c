"""The configurations of this family's Triton kernels, and the arguments shared by all their launches."""

import dataclasses

import jax
import jax.numpy as jnp

from ...launch import Execute, given, Launcher, result
from ...launch.fields import Block, check_fields, Count, Float32Dot, Registers, Warps
from ...launch.sizes import padded
from ..flat import merged_rows
from ..spec import PagedArrays, PagedSpec, PAGES

_SCALES = {None: 0, "token": 1, "head": 2}


@dataclasses.dataclass(frozen=True)
class PagedTile:
    """A tile of scores, at most `block_m` rows (queries times the heads that read one key head) by `block_k` keys, both powers of two of at
    least 16, and compiler options."""

    block_m: Block
    block_k: Block
    num_warps: Warps
    num_stages: Count
    max_registers: Registers = 0

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """`decode`: tiles for sequences with few queries, whose keys are split over up to `split_k` programs, each with at least `chunk_size`
    keys if there are that many; `prefill`: tiles for sequences with more queries."""

    decode: PagedTile
    prefill: PagedTile
    split_k: Count = 1
    chunk_size: Count = 256
    fast_tanh: bool = True
    """Computes the soft cap of 16-bit inputs with NVIDIA's `tanh.approx` (error 5e-4 of the cap)."""
    fast_bytes: bool = True
    """Converts 8-bit pages with NVIDIA's instructions, four numbers at once."""
    float32_dot: Float32Dot = "tf32x3"
    together: bool = False
    """The last program of a sequence to end merges its splits, in one launch; else another launch does."""

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class Call:
    """One call whose leading axis has been merged into tokens, sequences and pages.

    `arrays` are those of `PagedArrays` without leading axes, except the small ones (`sinks`, `slopes`, `qq_bias`, scales per head), which
    have an axis of rows: sequence `n` reads row `n // row_sequences`.
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
        """The numbers of query heads and key heads."""
        return self.arrays.q.shape[-2], self.arrays.k.shape[-2]

    @property
    def group(self) -> int:
        heads, kv_heads = self.heads
        return heads // kv_heads

    @property
    def values(self) -> int:
        return self.arrays.value_channels

    @property
    def result_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of `out` and `lse`, as the last kernel writes them."""
        tokens, heads = self.arrays.q.shape[:2]
        return {
            "out": result(tokens, heads, self.values, dtype=self.arrays.q.dtype),
            "lse": result(tokens, heads),
        }

    @property
    def launch(self) -> Launcher:
        """Launches an attention kernel with the shared arguments and the tile `BM`, `BK`."""
        arrays, spec = self.arrays, self.spec
        (pages, page, _, dim), (heads, kv_heads) = arrays.k.shape, self.heads
        rope = 0 if arrays.rope is None else arrays.rope.shape[-1]
        is_float32 = self.arrays.kernel_operand == jnp.float32
        scales = {name: _SCALES[spec.scales if f"{name}_scale" in arrays.given else None] for name in PAGES}
        numbers = {
            "P": pages,
            "M": arrays.page_table.shape[-1],
            "N": self.num_sequences,
            "Q": 0 if arrays.qq_bias is None else arrays.qq_bias.shape[-1],
            "ROW": self.row_sequences,
            "T": arrays.q.shape[0],
            "LONGEST": spec.max_query_len,
            "H": heads,
            "K": kv_heads,
            "D": dim,
            "V": self.values,
            "R": rope,
            "PAGE": page,
            # More slots in total, or numbers in a page, than 32 bits can count.
            "FAR": max(pages, kv_heads * max(dim, self.values, rope)) * page >= 2**31,
            "BLOCK_D": padded(dim),
            "BLOCK_V": padded(self.values),
            "BLOCK_R": padded(rope),
            "LATENT": arrays.v is None,
            "K_SCALES": scales["k"],
            "V_SCALES": scales["k" if arrays.v is None else "v"],
            "R_SCALES": scales["rope"],
            "SCALE": spec.scale,
            "CAP": spec.logits_soft_cap or 0.0,
            "FAST_TANH": self.config.fast_tanh and not is_float32,
            "FAST_BYTES": self.config.fast_bytes,
            "LEFT": -1 if spec.left is None else min(spec.left, 2**30),
            **given(RANGED=arrays.kv_start, SINKS=arrays.sinks, ALIBI=arrays.slopes, QQ=arrays.qq_bias),
            "PRECISION": self.config.float32_dot if is_float32 else "ieee",
            "WIDE": is_float32,
        }
        named = arrays._asdict() | {"table": arrays.page_table}
        return Launcher("paged", named, numbers, arrays.q, self.execute)


def folded(arrays: PagedArrays, spec: PagedSpec, config: TritonConfig, execute: Execute) -> Call:
    """The call with its leading axis merged into tokens, sequences and, if they are mapped, pages."""
    merged, row_sequences = merged_rows(arrays, spec, in_parts=arrays.kv_start is not None)
    return Call(merged, spec, config, execute, row_sequences)
