"""`NativeSparseAttention`: each query attends compressed keys, a few chosen blocks of keys, and a window."""

from typing import ClassVar, Literal, overload, TYPE_CHECKING, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from .arguments import resolve
from .core import ATTEND
from .operation import results_of, SparseOperation


class NativeInputs(TypedDict, total=False):
    """The arguments by name of [`ejkernel_eqx.NativeSparseAttention`][] but for `return_indices`, which decides what comes back."""

    compressed_k: Float[AnyArray, "*B C K D"] | None
    compressed_v: Float[AnyArray, "*B C K V"] | None
    block_indices: Int[Numbers, "*B T K n"] | None
    cu_seqlens: Int[Numbers, " N+1"] | None
    segment_ids: Int[Numbers, "*S T"] | None
    max_segments: int | None
    q_offset: int | Int[Numbers, "*B"] | None


class NativeSparseAttention(SparseOperation):
    r"""Causal attention in time linear in the sequence length, apart from a small share: the sum of three branches under gates,

    $$o_t = g^{\mathrm{cmp}}_t\, \mathrm{Attn}(q_t, \tilde K_{\le t}, \tilde V_{\le t})
      + g^{\mathrm{slc}}_t\, \mathrm{Attn}(q_t, K_{\mathcal I_t}, V_{\mathcal I_t})
      + g^{\mathrm{win}}_t\, \mathrm{Attn}(q_t, K_{t-w < j \le t}, V_{t-w < j \le t})$$

    - compressed: key $c$ stands for the tokens $c\,d \le i < c\,d + l$ (`compression_stride` $d$, `compression_size` $l$). A query sees it if all
      of them are at or before it. By default compressed keys and values are means.
    - selected: the keys of the blocks $\mathcal I_t$ of `block_size` tokens, up to the query. These are its own block,
        the first block, and those for which $\sum_h \sum_c p_{hc}\, |c \cap m|$ is largest. Here $p$ are the weights of
        the compressed branch, and $h$ the query heads that share a key head. $|c \cap m|$ counts the strides that
        compressed key $c$ and block $m$ share. No gradient flows through this choice.
    - sliding: the last `sliding_window` keys, the query's own included.

    A branch in which a query sees nothing adds 0. Differentiable in reverse mode in `q, k, v, gates, compressed_k, compressed_v`. Platforms:
    Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`); the same results in every run on Triton.

    Source: Yuan et al., *Native Sparse Attention* (2025, arXiv:2502.11089), section 3; equation 9 with the overlaps that its text describes.
    """

    operation: ClassVar[str] = "native_sparse_attention"
    __init__ = SparseOperation.__init__

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            k: Float[AnyArray, "*B S K D"],
            v: Float[AnyArray, "*B S K V"],
            gates: Float[AnyArray, "*B T H 3"],
            *,
            return_indices: Literal[False] = False,
            **others: Unpack[NativeInputs],
        ) -> Float[Array, "*B T H V"]: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            k: Float[AnyArray, "*B S K D"],
            v: Float[AnyArray, "*B S K V"],
            gates: Float[AnyArray, "*B T H 3"],
            *,
            return_indices: Literal[True],
            **others: Unpack[NativeInputs],
        ) -> tuple[Float[Array, "*B T H V"], Int[Array, "*B T K n"]]: ...

    @jax.named_scope("ejkernel_eqx.NativeSparseAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B S K D"],
        v: Float[AnyArray, "*B S K V"],
        gates: Float[AnyArray, "*B T H 3"],
        *,
        compressed_k: Float[AnyArray, "*B C K D"] | None = None,
        compressed_v: Float[AnyArray, "*B C K V"] | None = None,
        block_indices: Int[Numbers, "*B T K n"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*S T"] | None = None,
        max_segments: int | None = None,
        q_offset: int | Int[Numbers, "*B"] | None = None,
        return_indices: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Int[Array, "*B T K n"]]:
        """**Arguments:**

        - `q`: `[..., T, H, D]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `k`, `v`: `[..., S, K, D]` and `[..., S, K, V]`, with the leading axes and dtype of `q`; `K` divides `H`.
        - `gates`: `[..., T, H, 3]`, any float dtype: the weights of the compressed, the selected and the sliding branch.
        - `compressed_k`, `compressed_v`: learned compressed keys and values instead of means, `C = (S - l) // d + 1` of them. In a cache there
            may be more; those that stand for later tokens are not read. In packed sequences, `C = T // d`: those of the first sequence, then of the
            second, and so on, without gaps.
        - `block_indices`: ints `[..., T, K, n]`, the blocks of each query and key head instead of a choice. They count from the start of the
            sequence; -1, and a block named before, select nothing.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (without leading axes, `S = T`), each with its own blocks. Tokens outside of them are
            padding and may hold NaN.
        - `segment_ids`: instead of offsets, ints that broadcast to `[..., T]` (`S = T`). A run of equal ids is a
            sequence. Negative ids are padding. Here too, blocks and compressed keys start with their sequence.
        - `max_segments`: a static upper bound of the sequences of a row of `segment_ids`, by default `T`; further ones are padding. The
            memory of a gradient grows with it, by a block of keys and values for each.
        - `q_offset`: position of the first query among the keys, an int or one per row. Default `S - T`. For decoding, `T = 1` and the number of
            keys in the cache before it.
        - `return_indices`: also return the blocks that were chosen.

        **Returns:** `[..., T, H, V]` in the dtype of `q`; with `return_indices` also int32 `[..., T, K, num_blocks]`, -1 where there are no
        more blocks. Raises `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        compressed, packing = (compressed_k, compressed_v), (cu_seqlens, segment_ids, max_segments)
        arrays, spec = resolve(self.options, (q, k, v, gates), compressed, block_indices, packing, q_offset)
        results = results_of(self, ATTEND, arrays, spec, spec.count)
        out, indices, base = results["out"], results["indices"], arrays.base
        if not return_indices:
            return out
        # Users number blocks from 0 in each sequence.
        return out, indices if base is None else jnp.where(indices < 0, -1, indices - base[..., None, None])
