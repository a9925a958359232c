"""The configurations of this family's Triton kernels, and the arguments shared by all their launches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...launch import given, Launcher, result
from ...launch.fields import Block, Checked, Count, Float32Dot, Registers, Warps
from ...launch.sizes import padded
from ..flat import FlatCall
from ..spec import PagedArrays, PagedSpec

_SCALES = {None: 0, "token": 1, "head": 2}


@dataclasses.dataclass(frozen=True)
class PagedTile(Checked):
    """A tile of scores, at most `block_m` rows (queries times the heads that read one key head) by `block_k` keys, both powers of two of at
    least 16, and compiler options."""

    block_m: Block
    block_k: Block
    num_warps: Warps
    num_stages: Count
    max_registers: Registers = 0


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
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


class Call(FlatCall):
    """One call, with what all its launches share."""

    @property
    def result_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of `out` and `lse`, as the last kernel writes them."""
        shape = self.arrays.q.shape[:2]
        return {"out": result(*shape, self.values, dtype=self.arrays.q.dtype), "lse": result(*shape)}

    @property
    def launch(self) -> Launcher:
        """Launches an attention kernel with the shared arguments and the tile `BM`, `BK`."""
        arrays, spec = self.arrays, self.spec
        pages, page, kv_heads, dim = arrays.k.shape
        rope = 0 if arrays.rope is None else arrays.rope.shape[-1]
        is_float32 = arrays.kernel_operand == jnp.float32
        kind = lambda name: _SCALES[spec.scales if f"{name}_scale" in arrays.given else None]
        numbers: dict[str, Any] = {"P": pages, "M": arrays.page_table.shape[-1], "N": self.sequences}
        numbers |= {"ROW": self.row_sequences, "T": arrays.q.shape[0], "LONGEST": spec.max_query_len}
        numbers |= {"Q": 0 if arrays.qq_bias is None else arrays.qq_bias.shape[-1]}
        numbers |= {"H": self.heads, "K": kv_heads, "D": dim, "V": self.values, "R": rope, "PAGE": page}
        numbers |= {f"BLOCK_{letter}": padded(numbers[letter]) for letter in "DVR"}
        # More slots in total, or numbers in a page, than 32 bits can count.
        numbers["FAR"] = max(pages, kv_heads * max(dim, self.values, rope)) * page >= 2**31
        numbers |= {"LATENT": arrays.v is None, "K_SCALES": kind("k"), "R_SCALES": kind("rope")}
        numbers |= {"V_SCALES": kind("k" if arrays.v is None else "v"), "FAST_BYTES": self.config.fast_bytes}
        numbers |= {"SCALE": spec.scale, "CAP": spec.logits_soft_cap or 0.0, "WIDE": is_float32}
        numbers |= {"FAST_TANH": self.config.fast_tanh and not is_float32}
        numbers |= {"PRECISION": self.config.float32_dot if is_float32 else "ieee"}
        numbers |= {"LEFT": -1 if spec.left is None else min(spec.left, 2**30)}
        numbers |= {"GATES": 0 if arrays.gates is None else 2 * self.heads}
        numbers |= given(RANGED=arrays.kv_start, SINKS=arrays.sinks, ALIBI=arrays.slopes, QQ=arrays.qq_bias)
        named = arrays._asdict() | {"table": arrays.page_table}
        return Launcher("paged", named, numbers, arrays.q)


def folded(arrays: PagedArrays, spec: PagedSpec, config: TritonConfig) -> Call:
    """The call of arrays with one leading axis."""
    return Call.of(arrays, spec, config, in_parts=arrays.kv_start is not None)
