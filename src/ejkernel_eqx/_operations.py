"""The package's operations as data: the room that implements each, and on which platforms.

The registry reads this table, which imports no room: the module of a platform is imported when it is first used."""

from typing import NamedTuple


class Written(NamedTuple):
    """Says how a room implements a platform: for which devices, with which priority, and in which module, or as which object of one.

    The highest priority that supports a request comes first; below zero only if requested by name."""

    backend: str
    priority: int
    module: str


PLATFORMS = {
    "cuda": Written("gpu", 40, "cudnn"),
    "triton": Written("gpu", 30, "triton.compiled"),
    "xla": Written("any", 10, "xla"),
    # Behind XLA until someone has run it on a TPU, and because the compiler cannot split it on automatic meshes: used where it is requested, or
    # where a table of the device has it as the faster one.
    "pallas": Written("tpu", 5, "pallas.compiled"),
    "triton-interpret": Written("any", -10, "triton.compiled:interpreted"),
    "pallas-interpret": Written("any", -20, "pallas.compiled:interpreted"),
}
_USUAL = ("triton", "xla", "triton-interpret")
_ON_TPU = (*_USUAL, "pallas", "pallas-interpret")


class Family(NamedTuple):
    """Operations of one core: its name in tables, the room of its modules, and its platforms."""

    core: str
    room: str
    platforms: tuple[str, ...] = _USUAL
    is_tunable: bool = True


RECURRENCE = Family("recurrence", "recurrence", _ON_TPU)
# Pallas does not have these transitions.
_RANK_ONE = RECURRENCE._replace(platforms=_USUAL)
_PAGED = Family("paged", "paged", _ON_TPU)
_ATTENTION = Family("attention", "attention", (*_ON_TPU, "cuda"))

OPERATIONS: dict[str, Family] = {
    "flash_attention": _ATTENTION,
    "block_sparse_attention": _ATTENTION,
    "scaled_dot_product_attention": _ATTENTION,
    "ring_attention": _ATTENTION._replace(platforms=_USUAL),
    "attention": _ATTENTION._replace(platforms=("xla",), is_tunable=False),
    "native_sparse_attention": Family("native_sparse", "native_sparse"),
    "multi_head_latent_attention": Family("latent", "latent", _ON_TPU),
    "absorbed_latent_attention": _PAGED,
    "paged_attention": _PAGED,
    "prefill_paged_attention": _PAGED,
    "ragged_decode_attention": _PAGED,
    "ragged_paged_attention": _PAGED,
    "unified_attention": _PAGED,
    "paged_native_sparse_attention": Family("native_pages", "native_sparse.native_pages"),
    "delta_product": RECURRENCE,
    "delta_rule": RECURRENCE,
    "dplr_delta_rule": _RANK_ONE,
    "gated_delta_rule": RECURRENCE,
    "gated_linear_attention": RECURRENCE,
    "kernel_delta_attention": RECURRENCE,
    "lightning_attention": RECURRENCE,
    "linear_attention": RECURRENCE,
    "rwkv7": _RANK_ONE,
    "state_space_v2": RECURRENCE,
    "state_space_v3": RECURRENCE,
    "state_space_v1": Family("selective_scan", "selective_scan"),
    "causal_conv1d": Family("convolution", "convolution"),
    "gated_rms_norm": Family("normalization", "normalization"),
    "residual_rms_norm": Family("residual", "normalization"),
    "grouped_matmul": Family("matmul", "matmul", _ON_TPU),
    "matmul": Family("dense_matmul", "matmul.dense"),
    "scaled_matmul": Family("scaled_matmul", "matmul.float8"),
    "linear_cross_entropy": Family("losses", "losses"),
    "linear_divergence": Family("losses", "losses"),
    "mean_pooling": Family("pooling", "pooling"),
    "recurrent": Family("cells", "cells"),
    "rotary_heads": Family("rotary_heads", "rotary.heads"),
}

CLASSES: dict[str, str] = {
    "attention": "attention:Attention",
    "block_sparse_attention": "attention:BlockSparseAttention",
    "flash_attention": "attention:FlashAttention",
    "native_sparse_attention": "native_sparse:NativeSparseAttention",
    "ring_attention": "attention:RingAttention",
    "scaled_dot_product_attention": "attention:ScaledDotProductAttention",
    "causal_conv1d": "convolution:CausalConv1d",
    "gated_rms_norm": "normalization:GatedRMSNorm",
    "grouped_matmul": "matmul:GroupedMatmul",
    "linear_cross_entropy": "losses:LinearCrossEntropy",
    "linear_divergence": "losses:LinearDivergence",
    "matmul": "matmul:Matmul",
    "mean_pooling": "pooling:MeanPooling",
    "recurrent": "cells:Recurrent",
    "residual_rms_norm": "normalization:ResidualRMSNorm",
    "rotary_heads": "rotary.heads:RotaryHeads",
    "scaled_matmul": "matmul:ScaledMatmul",
    "paged_attention": "paged:PagedAttention",
    "paged_native_sparse_attention": "native_sparse:PagedNativeSparseAttention",
    "prefill_paged_attention": "paged:PrefillPagedAttention",
    "ragged_decode_attention": "paged:RaggedDecodeAttention",
    "ragged_paged_attention": "paged:RaggedPagedAttention",
    "unified_attention": "paged:UnifiedAttention",
    "absorbed_latent_attention": "latent:AbsorbedLatentAttention",
    "multi_head_latent_attention": "latent:MultiHeadLatentAttention",
    "delta_product": "recurrence:DeltaProduct",
    "delta_rule": "recurrence:DeltaRule",
    "dplr_delta_rule": "recurrence:DPLRDeltaRule",
    "gated_delta_rule": "recurrence:GatedDeltaRule",
    "gated_linear_attention": "recurrence:GatedLinearAttention",
    "kernel_delta_attention": "recurrence:KernelDeltaAttention",
    "lightning_attention": "recurrence:LightningAttention",
    "linear_attention": "recurrence:LinearAttention",
    "rwkv7": "recurrence:RWKV7",
    "state_space_v1": "selective_scan:StateSpaceV1",
    "state_space_v2": "recurrence:StateSpaceV2",
    "state_space_v3": "recurrence:StateSpaceV3",
}
"""The class of each operation, as `"room:name"`."""
