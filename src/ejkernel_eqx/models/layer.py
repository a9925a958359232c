"""One layer of a decoder or an encoder: a mixer and an MLP between norms."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._jitted import compiled_call
from .._signatures import Module
from ..attention.ring.arguments import Split
from ..matmul import Matmul
from ..nn import ExpertParallel, MixtureOfExperts, MultiHeadAttention, RecurrentLayer, RouterStatistics
from ..nn.activations import gated
from ..nn.few_rows import laid_out_as, Norm, normed
from ..nn.initial import keys_of
from ..nn.parts import Parts
from ..nn.projection import are_few, is_shared, multiplied_by, project
from ..nn.token_order import in_temporal_order, is_zigzag
from ..nn.tokens import clear
from ..normalization import ResidualRMSNorm
from .caches import FirstKeys
from .config import BranchConfig, LayerConfig, MLPConfig, NormType, SharedBlockConfig
from .cross_layer_attention import CrossLayerAttention
from .layer_inputs import LayerInputs
from .mixers import MIXERS
from .mlp import MLP, norm_of
from .shared_block import BlockAdapters, SharedBlock
from .split import options_over


class DecoderLayer(Module):
    r"""A mixer and an MLP, each added to its residual. With norms before both, as in Llama:

    $$h = x + \mathrm{mixer}(\mathrm{norm}(x)), \qquad y = h + \mathrm{MLP}(\mathrm{norm}(h))$$

    A [`LayerConfig`][ejkernel_eqx.models.LayerConfig] describes the layer and the other places of norms.
    """

    mixer_norm: Norm | None
    mixer: Any
    beside: Any  # a second mixer, or None
    mixer_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLP | MixtureOfExperts | None
    mlp_out_norm: Norm | None
    layer_scalar: Array | None  # [1]
    experts: MixtureOfExperts | None  # beside the MLP
    post_feedforward_layernorm_1: Norm | None  # of the MLP beside them
    post_feedforward_layernorm_2: Norm | None  # of the experts
    per_layer_input_gate: eqx.nn.Linear | None  # [P, E]
    per_layer_projection: eqx.nn.Linear | None  # [E, P]
    post_per_layer_input_norm: Norm | None
    block_adapters: BlockAdapters | None  # of a shared block
    residual_norm: ResidualRMSNorm
    matmul: Matmul  # of few tokens
    config: LayerConfig = eqx.field(static=True)
    split: Split | None = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        config: LayerConfig,
        *,
        layer_index: Any,
        num_layers: int,
        norm_eps: float,
        norm_type: NormType = "rms",
        expert_parallel: ExpertParallel | None = None,
        split: Split | None = None,
        layer_embedding: int | None = None,
        shared_blocks: SharedBlockConfig | None = None,
        dtype: Any = None,
        key: Array,
        **options: Any,
    ):
        mixer_key, mlp_key = keys_of(key)
        norm = lambda there: norm_of(norm_type, embed_dim, norm_eps, dtype) if there else None
        before, behind = config.norms not in ("post", "pre_mlp"), config.norms in ("post", "around")
        place = {"layer_index": layer_index, "num_layers": num_layers}

        def mixer(config: LayerConfig | BranchConfig, key: Array) -> Any:
            own = dict(config.options) | options_over(config.mixer, split)
            return MIXERS[config.mixer](embed_dim, **place, **own, **options, dtype=dtype, key=key)

        self.mixer = mixer(config, mixer_key)
        beside_key = jax.random.fold_in(mixer_key, 1)
        self.beside = None if config.beside is None else mixer(config.beside, beside_key)
        self.mixer_norm, self.mixer_out_norm = norm(before), norm(behind)
        has_mlp = config.mlp is not None
        apart = config.norms not in ("post", "parallel")
        self.mlp_norm, self.mlp_out_norm = norm(apart and has_mlp), norm(behind and has_mlp)
        more: Any = {} if expert_parallel is None else {"parallel": expert_parallel}
        experts = lambda moe, key: MixtureOfExperts(
            embed_dim, **(options | dict(moe.options) | more), dtype=dtype, key=key
        )
        self.mlp = None
        if isinstance(config.mlp, MLPConfig):
            self.mlp = MLP(embed_dim, config.mlp, platform=options.get("platform"), dtype=dtype, key=mlp_key)
        elif config.mlp is not None:
            self.mlp = experts(config.mlp, mlp_key)
        self.experts = None
        if config.experts is not None:
            self.experts = experts(config.experts, jax.random.fold_in(mlp_key, 1))
        beside = config.experts is not None
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(beside), norm(beside)
        parts, has_embedding = Parts(jax.random.fold_in(key, 1), 2, dtype, None), layer_embedding is not None
        linear = lambda *sizes: parts.linear(*sizes) if has_embedding else None
        self.per_layer_input_gate = linear(embed_dim, layer_embedding)
        self.per_layer_projection = linear(layer_embedding, embed_dim)
        self.post_per_layer_input_norm = norm(has_embedding)
        self.block_adapters = None
        if config.shared_block is not None:
            assert shared_blocks is not None
            self.block_adapters = BlockAdapters(embed_dim, shared_blocks, dtype, jax.random.fold_in(key, 2))
        self.layer_scalar = jnp.ones(1, dtype) if config.output_scale else None
        platform = None if options.get("platform") == "cuda" else options.get("platform")
        self.residual_norm = ResidualRMSNorm(norm_eps, platform=platform)
        self.matmul = Matmul(platform=platform)
        self.config, self.split = config, split

    def mixers(self, shared_blocks: tuple[SharedBlock, ...]) -> tuple[Any, ...]:
        """The mixer, or both. Each has a cache of its own. The second may be the attention of a shared block."""
        if (number := self.config.shared_block) is not None:
            return self.mixer, shared_blocks[number].self_attn
        return (self.mixer,) if self.beside is None else (self.mixer, self.beside)

    @compiled_call()
    def __call__(
        self, x: Array, cache: Any = None, inputs: LayerInputs | None = None, **rows: Any
    ) -> tuple[Array, Any]:
        """**Arguments:**

        - `x`: features `[..., T, E]`; with `batch`, `[T, E]`.
        - `cache`: the cache of the mixer; of two mixers, a tuple.
        - `inputs`: the embedding of the tokens for this layer, and the keys of earlier layers, if the layer reads them.
        - `rows`: further arguments of the mixer, such as `padding_mask`, `segment_ids`, `batch`.

        **Returns:** the tuple `(features, cache)`: an array like `x`, and the new cache.
        """
        inputs = LayerInputs() if inputs is None else inputs
        if "batch" not in rows or not are_few(x):
            with multiplied_by(None if are_few(x) else self.matmul):
                return self.through(x, cache, rows, inputs)[:2]
        with multiplied_by(self.matmul):
            # The kernels of attention's projections compute the norm before it and add the residual after it.
            is_alone = self.beside is None and self.experts is None and self.block_adapters is None
            is_alone = is_alone and self.config.norms not in ("residual", "parallel", "parallel_apart")
            if is_alone and type(self.mixer) is MultiHeadAttention:
                return self._of_few(x, cache, rows, inputs)
            return self.through(x, cache, rows, inputs)[:2]

    @compiled_call()
    def with_statistics(self, x: Array, **rows: Any) -> tuple[Array, RouterStatistics | None]:
        """The features after the layer, and the statistics of the router of its experts, or `None`."""
        x, _, statistics = self.through(x, None, rows, LayerInputs(), True)
        return x, statistics

    def through(
        self,
        x: Array,
        cache: Any,
        rows: dict[str, Any],
        inputs: LayerInputs,
        return_statistics: bool = False,
    ) -> tuple[Array, Any, RouterStatistics | None]:
        """The results of a call, and on request the statistics of its experts. Without a cache, a layer whose keys others read returns the keys
        instead of a cache."""
        if self.block_adapters is not None:
            return *self._with_block(x, cache, rows, inputs), None
        gives = cache is None and self.config.gives_keys
        # Devices that share the input each have a part of its gradient. The parts of all projections are added before they are sent.
        alone = cache is None and not is_shared(x)
        apart = alone and self.beside is None and type(self.mixer) is MultiHeadAttention and not gives
        (h, *copies), x = self._into_branch(self.mixer_norm, x, readers=3 if apart else 1)
        residual = h if self.config.norms == "residual" else x
        if copies:
            out = self.mixer.apart(h, *copies, **rows)
        elif gives:
            out, cache = self.mixer.with_keys(h, **rows)
        elif isinstance(self.mixer, CrossLayerAttention):
            out = self.mixer(h, inputs.keys, **rows)
        else:
            out, cache = self._mixed(h, cache, rows)
        out = normed(self.mixer_out_norm, out.astype(x.dtype))
        if self.mlp is None:
            return _added(residual, out, self.config.mixer_scales), cache, None
        is_plain = type(self.mlp) is MLP and self.mlp.config.gated and self.experts is None
        readers = 2 if alone and is_plain else 1
        if self.config.norms.startswith("parallel"):
            h = h if self.mlp_norm is None else normed(self.mlp_norm, x)
            x, copies = _added(residual, out, self.config.mixer_scales), ()
        else:
            (h, *copies), x = self._into_branch(self.mlp_norm, residual, out, readers)
        residual = h if self.config.norms == "residual" else x
        statistics, real = None, real_of(rows)
        if not isinstance(self.mlp, MixtureOfExperts):
            y = self.mlp(h, *copies)
        elif return_statistics:
            y, statistics = self.mlp(h, padding_mask=real, return_statistics=True)
        else:
            y = self.mlp(h, padding_mask=real)
        if self.experts is not None:
            other, statistics = self.experts(x, padding_mask=real, return_statistics=True)
            y = normed(self.post_feedforward_layernorm_1, y.astype(x.dtype))
            y = y + laid_out_as(y, normed(self.post_feedforward_layernorm_2, other.astype(x.dtype)))
        x = _added(residual, normed(self.mlp_out_norm, y.astype(x.dtype)), self.config.mlp_scales)
        return self._finished(x, inputs), cache, statistics if return_statistics else None

    def _mixed(self, h: Array, cache: Any, rows: dict[str, Any]) -> tuple[Array, Any]:
        """The output of the mixer or of both, and the new cache."""

        def run(mixer: Any, cache: Any) -> tuple[Array, Any]:
            if cache is None and is_zigzag(self.split) and isinstance(mixer, RecurrentLayer):
                return in_temporal_order(self.split, mixer, h, rows), None
            if isinstance(cache, FirstKeys):
                # Real tokens do not see padding, which is behind them, but 0 * NaN is NaN.
                return mixer.with_keys(clear(h, rows.get("padding_mask")))
            return (mixer(h, **rows), None) if cache is None else mixer(h, cache, **rows)

        if self.config.beside is None:
            return run(self.mixer, cache)
        (out, cache), (other, state) = map(
            run, (self.mixer, self.beside), (None, None) if cache is None else cache
        )
        out, other = (x * scale for x, scale in zip((out, other), self.config.beside.scales))
        return out + other.astype(out.dtype), None if cache is None else (cache, state)

    def _with_block(
        self, x: Array, cache: Any, rows: dict[str, Any], inputs: LayerInputs
    ) -> tuple[Array, Any]:
        """The results of a layer whose mixer takes the tokens and the output of a shared block, added."""
        assert self.block_adapters is not None and self.config.shared_block is not None
        assert inputs.start is not None
        cache, state = (None, None) if cache is None else cache
        block = inputs.shared_blocks[self.config.shared_block]
        other, state = self.block_adapters(block, x, inputs.start, state, rows)
        h = normed(self.mixer_norm, x + laid_out_as(x, other))
        out, cache = self._mixed(h, cache, rows)
        x = _added(x, out.astype(x.dtype), self.config.mixer_scales)
        return x, None if cache is None else (cache, state)

    def _finished(self, x: Array, inputs: LayerInputs) -> Array:
        """The features after the MLP, with the part of the layer's embedding added, times the learned number of the layer."""
        gate, projection = self.per_layer_input_gate, self.per_layer_projection
        if gate is not None and projection is not None:
            assert isinstance(self.config.mlp, MLPConfig) and inputs.embedding is not None
            y = project("per_layer_input_gate", gate, x, inputs.embedding.shape[-1])
            y = gated(self.config.mlp.activation, y, inputs.embedding)
            y = project("per_layer_projection", projection, y, x.shape[-1])
            x = x + laid_out_as(x, normed(self.post_per_layer_input_norm, y.astype(x.dtype)))
        return x if self.layer_scalar is None else x * self.layer_scalar[0].astype(x.dtype)

    def _of_few(self, x: Array, cache: Any, rows: dict[str, Any], inputs: LayerInputs) -> tuple[Array, Any]:
        """A step of few tokens. The kernels of the projections also compute the norms before them and add the residuals after them."""

        def in_block(branch: Callable[..., Any], out_norm: Any, scales: tuple[float, float]) -> Any:
            """The sum of `x` and a branch, and the further results of the branch."""
            if out_norm is None and scales == (1, 1):
                return branch(residual=x)
            out, *more = branch()
            return _added(x, normed(out_norm, out.astype(x.dtype)), scales), *more

        mixer = functools.partial(self.mixer, x, cache, **rows, norm=self.mixer_norm)
        x, cache = in_block(mixer, self.mixer_out_norm, self.config.mixer_scales)
        if self.mlp is None:
            return x, cache
        if isinstance(mlp := self.mlp, MLP):
            branch = lambda **more: (mlp(x, norm=self.mlp_norm, **more),)
            return self._finished(
                in_block(branch, self.mlp_out_norm, self.config.mlp_scales)[0], inputs
            ), cache
        (h,), x = self._into_branch(self.mlp_norm, x)
        y = self.mlp(h, padding_mask=real_of(rows))
        x = _added(x, normed(self.mlp_out_norm, y.astype(x.dtype)), self.config.mlp_scales)
        return self._finished(x, inputs), cache

    def _into_branch(
        self, norm: Norm | None, residual: Array, out: Array | None = None, readers: int = 1
    ) -> tuple[tuple[Array, ...], Array]:
        """The input of a branch, and the residual beside it after `out` was added. The input is there once for each projection that reads it, so that
        one pass adds the gradients of all."""
        scales, give = self.config.mixer_scales, self.residual_norm.for_readers
        if norm is not None and _is_plain(norm, self.residual_norm) and self.config.norms != "residual":
            if out is None:
                return give(readers, residual, None, norm.weight)
            if scales == (1, 1):
                return give(readers, residual, laid_out_as(residual, out), norm.weight)
        x = residual if out is None else _added(residual, out, scales)
        return (normed(norm, x),), x


def _is_plain(norm: Norm, operation: ResidualRMSNorm) -> bool:
    """Returns whether the operation computes this norm. A user may have replaced the norm by another one."""
    own = type(norm) is eqx.nn.RMSNorm and norm.weight is not None and norm.bias is None
    return own and norm.eps == operation.spec.eps


def real_of(rows: dict[str, Any]) -> Array | None:
    """The tokens that are not padding: bool `[..., T]`, or `None` for all."""
    if "batch" in rows:
        return rows["batch"].is_real
    real, ids = rows.get("padding_mask"), rows.get("segment_ids")
    if ids is None:
        return None if real is None else jnp.asarray(real)
    return jnp.asarray(ids) >= 0 if real is None else jnp.asarray(real) & (jnp.asarray(ids) >= 0)


def _added(residual: Array, branch: Array, scales: tuple[float, float]) -> Array:
    scaled = [
        x if scale == 1 else x * jnp.asarray(scale, x.dtype) for x, scale in zip((residual, branch), scales)
    ]
    return scaled[0] + laid_out_as(residual, scaled[1])
