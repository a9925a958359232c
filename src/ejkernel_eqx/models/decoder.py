"""`Decoder`: one class for all published decoders. A configuration describes its layers, which are stored in stacks."""

import dataclasses
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._broadcast import like
from .._jitted import compiled_call
from .._kernel import replaced
from .._signatures import Module
from .._values import stops_programs
from ..dispatch import Backend, place_of_calls
from ..losses import LinearCrossEntropy, LinearDivergence, Teacher, TokenStatistics
from ..nn import CacheState, ExpertParallel, RouterStatistics
from ..nn.arguments import check_flags
from ..nn.few_rows import Norm, normed
from ..nn.initial import keys_of, normal
from ..nn.parts import Parts
from ..nn.projection import are_few
from ..nn.split_attention import split_of
from ..paged import RaggedBatch
from ..quantised import dequantise
from .caches import DecoderCache, FirstKeys, ServingCache
from .config import DecoderConfig, MoEConfig
from .filling import filled_decoder
from .layer import DecoderLayer
from .layer_embedding import LayerEmbedding
from .layer_inputs import LayerInputs
from .mlp import norm_of
from .pooler import Pooler
from .positions import embed_positions
from .rows_as_pages import as_differentiated, have_pages, meshes_of, MOST_TOKENS, PagedRows
from .shared_block import SharedBlock
from .split import check_splittable
from .vocabulary import check_rows, embed, in_vocabulary, logits_of

_KERNELS = (
    "attention_out attention_lse native_sparse_out native_sparse_saved recurrence_out recurrence_state "
    "recurrence_saved selective_scan_out selective_scan_state selective_scan_saved"
).split()
_PRODUCTS = ("grouped_matmul_out", "grouped_matmul_saved", "scaled_matmul_out")

TIED_STD = 0.02
"""The initial standard deviation of embeddings where the head is the embedding, as in GPT-2. With 1, the logits of a token would be as large as
the square root of the width, and its own logit as large as the width."""


def _of_layers(leaf: Any) -> bool:
    """Whether a leaf of a stack has a row for each layer. Flags such as `inference` have none, also where `jax.jit` or `jax.device_put` makes
    arrays of them."""
    return eqx.is_array(leaf) and leaf.ndim > 0


def _policy(remat: str) -> Any:
    if remat == "kernels":
        return jax.checkpoint_policies.save_only_these_names(*_KERNELS)
    named = jax.checkpoint_policies.save_only_these_names(*_KERNELS, *_PRODUCTS)
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint_policies.save_from_both_policies(products, named)


def _in_order(*places: Array) -> Array:
    """Arrays of each place of a pattern, stacked over its repetitions, as one over the layers in their order."""
    stacked = jnp.stack(places, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def _with_caches(
    layers: Any, x: Array, caches: Any, rows: dict[str, Any], inputs: LayerInputs
) -> tuple[Array, tuple[Any, ...]]:
    """The tokens after some layers, and their new caches."""
    new, given = [], iter(caches)
    for place, layer in enumerate(layers):
        own: list[Any] = [next(given) for _ in layer.mixers(inputs.shared_blocks)]
        x, cache = layer(
            x, tuple(own) if len(own) > 1 else own[0], inputs.of(place, layer.config.keys_of), **rows
        )
        new += cache if len(own) > 1 else (cache,)
    return x, tuple(new)


def _of_stack(shape: tuple[int, int, int], of_layers: Array | None) -> Array | None:
    """The part `[repetitions, layers of the pattern, ...]` of what all layers have, `[L, ...]`."""
    if of_layers is None:
        return None
    first, period, repeats = shape
    mine = of_layers[first : first + period * repeats]
    return mine.reshape(repeats, period, *mine.shape[1:])


def _keys_in(caches: Any, place: int, rows: dict[str, Any]) -> Any:
    """What a layer in a stack of one repetition keeps, as `CrossLayerAttention` reads it."""
    if not isinstance(caches, CacheState):
        return jax.tree.map(lambda a: a[0], caches[place])
    pools, batch = caches.of_layer(0, rows["batch"])
    return pools[place], batch


class Decoder(Module):
    r"""A decoder-only language model: an embedding, layers of a mixer and an MLP each, a norm, a head.

    $$x_0 = s\,E[\mathrm{tokens}], \qquad x_{l+1} = \mathrm{layer}_l(x_l), \qquad
      \mathrm{logits} = c \tanh(W \mathrm{norm}(x_L) / c)$$

    $E$ is the embedding `[vocabulary, E]` and $W$ the head, which may be the embedding itself. The scale $s$ and the cap $c$ are optional.

    A [`DecoderConfig`][ejkernel_eqx.models.DecoderConfig] describes the layers. Llama, Qwen, Mistral, Gemma, GPT-OSS, OLMo-2,
    Mamba, Qwen3-Next and others differ in their configuration only. [`from_pretrained`][ejkernel_eqx.models.from_pretrained] reads a published
    model. [`generate`][ejkernel_eqx.models.generate] continues texts.

    Layers of the same kind form a stack: each of their arrays has a leading axis for the layers, and JAX traces the layer once. If layers repeat
    in a pattern (a local one and a global one, say), a stack holds the repetitions of the pattern.
    """

    embedding: Array  # [vocabulary, E]
    positions: Array | None  # [positions, E]
    layer_embedding: LayerEmbedding | None
    shared_blocks: tuple[SharedBlock, ...]
    stacks: tuple[
        tuple[DecoderLayer, ...], ...
    ]  # for each a pattern of layers, with a leading axis of repetitions
    norm: Norm
    head: eqx.nn.Linear | None  # None where it is the embedding
    cross_entropy: LinearCrossEntropy
    pooler: Pooler | None  # of `embed`, where the published model has one
    config: DecoderConfig = eqx.field(static=True)
    scan_layers: bool = eqx.field(static=True)
    remat: str = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    def __init__(
        self,
        config: DecoderConfig,
        *,
        scan_layers: bool = False,
        remat: str = "none",
        platform: str | None = None,
        expert_parallel: ExpertParallel | None = None,
        sequence_axis: str | None = None,
        token_order: Literal["contiguous", "zigzag"] = "contiguous",
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: Array,
    ):
        """**Arguments:**

        - `config`: the architecture.
        - `scan_layers`: whether the compiled training program has a loop over the layers. By default the layers are unrolled. That is faster, and
            takes longer to compile. Decoding always loops.
        - `remat`: what the forward pass keeps for the backward pass. `"none"` keeps everything. `"matmuls"` keeps the results of matrix products and
            of kernels. `"kernels"` keeps the results of kernels only.
        - `platform`: the platform of every kernel, as in [`ejkernel_eqx.FlashAttention`][].
        - `expert_parallel`: the axes of an automatic mesh that experts are split over. On an explicit mesh the types of the arrays determine it.
        - `sequence_axis`: a mesh axis that the tokens are split over, for the mixers of all layers, as in
            [`ejkernel_eqx.nn.MultiHeadAttention`][] and [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer].
        - `token_order`: with `sequence_axis`, the order of the tokens in a row. `"zigzag"` is that of
            [`ejkernel_eqx.sequences.reorder_sequence`][]. Recurrent layers send each token to the device that has it in temporal order, and back.
        - `dtype`: the dtype of the parameters; default float32. Norms and the parameters of decays in recurrent layers are at least float32.
        - `compute_dtype`: the dtype of the computation; default that of the parameters. Logits are always float32.
        - `key`: a PRNG key for the initial weights.

        **Raises:** `ValueError` for an argument that does not fit, such as `sequence_axis` with learned positions.
        """
        if not isinstance(config, DecoderConfig):
            raise ValueError(
                f"config: expected a DecoderConfig, received {type(config).__name__}; ejx.models.decoder_config(dict) reads a published one."
            )
        check_flags(scan_layers=scan_layers)
        if remat not in ("none", "matmuls", "kernels"):
            raise ValueError(
                f"remat: expected none, matmuls or kernels, received {remat!r}; none keeps everything."
            )
        parts = Parts(key, 3, dtype, compute_dtype)
        dtype, self.compute_dtype = parts.dtype, parts.compute_dtype
        width, count = config.embed_dim, len(config.layers)
        std = TIED_STD if config.tie_embeddings else 1.0
        # The scale enlarges embeddings in the layers alone. Their output would be closer to the embedding of the input, whose logit would be large.
        scale = max(1.0, config.embedding_scale) if config.tie_embeddings else 1.0
        self.embedding = normal(parts.key(), (config.vocab_size, width), dtype, std / scale)
        keys, places = keys_of(parts.key(), count), np.arange(count, dtype=np.int32)
        options: dict[str, Any] = {"norm_type": config.norm_type, "norm_eps": config.norm_eps}
        options |= {"platform": platform, "compute_dtype": self.compute_dtype}
        self.positions = None
        if config.max_positions is not None:
            self.positions = normal(jax.random.fold_in(key, 2), (config.max_positions, width), dtype, std)
        blocks = config.shared_blocks
        block_keys = jax.random.split(jax.random.fold_in(key, 3), 0 if blocks is None else blocks.count)
        self.shared_blocks = tuple(
            SharedBlock(config, platform=platform, compute_dtype=self.compute_dtype, dtype=dtype, key=key)
            for key in block_keys
        )
        options |= {"layer_embedding": config.layer_embedding, "shared_blocks": blocks}
        self.layer_embedding = None
        if (features := config.layer_embedding) is not None:
            at_layers = Parts(jax.random.fold_in(key, 1), 2, dtype, compute_dtype)
            table = normal(at_layers.key(), (config.vocab_size, count * features), dtype)
            norm: Any = norm_of("rms", features, config.norm_eps, dtype)
            self.layer_embedding = LayerEmbedding(config, table, norm, at_layers)
        split = split_of(sequence_axis, token_order)
        check_splittable(config, split)
        options |= {"expert_parallel": expert_parallel, "split": split}

        def stack(first: int, period: int, repeats: int, place: int) -> DecoderLayer:
            rest: list[Any] = []

            def make(key: Array, index: Any) -> Any:
                layer, numbers = config.layers[first + place], {"layer_index": index, "num_layers": count}
                made = DecoderLayer(width, layer, **numbers, dtype=dtype, key=key, **options)
                arrays, static = eqx.partition(made, eqx.is_array)
                rest.append(static)
                return arrays

            # `eqx.filter_vmap` would compile a program for each shape, to move the first axis to its place.
            mine = slice(first + place, first + period * repeats, period)
            return eqx.combine(jax.vmap(make)(jnp.stack(keys[mine]), places[mine]), *rest)

        self.stacks = tuple(
            tuple(stack(*shape, place) for place in range(shape[1])) for shape in config.stacks()
        )
        self.norm = norm_of(config.norm_type, width, config.norm_eps, dtype)
        head = lambda: parts.linear(width, config.vocab_size, config.head_bias)
        self.head = None if config.tie_embeddings else head()
        self.cross_entropy = LinearCrossEntropy(logits_soft_cap=config.logits_soft_cap)
        self.pooler = None
        self.config, self.scan_layers, self.remat = config, scan_layers, remat

    @property
    def num_layers(self) -> int:
        return len(self.config.layers)

    def layer(self, index: int) -> DecoderLayer:
        """The layer with this index, taken out of its stack. **Raises:** `ValueError` for an index outside of `0` to `num_layers - 1`."""
        for (first, period, repeats), stack in zip(self.config.stacks(), self.stacks):
            if first <= index < first + period * repeats:
                at, place = divmod(index - first, period)
                return jax.tree.map(lambda x, at=at: x[at] if _of_layers(x) else x, stack[place])
        raise ValueError(
            f"index: expected 0 to {self.num_layers - 1}, a layer of the model, received {index}; count from 0."
        )

    # Caches

    def init_cache(
        self,
        batch_shape: tuple[int, ...] | int,
        max_length: int,
        dtype: DTypeLike | None = None,
        *,
        rolling: bool = False,
    ) -> DecoderCache:
        """Returns an empty cache for decoding: keys and values for attention layers, states for recurrent ones.

        On a GPU, calls with up to 8 tokens a row run on the kernels of serving, which write into the cache in place. They are fastest if 64 divides
        `max_length`. They do not run with `rolling`.

        **Arguments:**

        - `batch_shape`: the leading axes of the tokens of a call.
        - `max_length`: the capacity of each row, in tokens.
        - `dtype`: the dtype of keys and values; default that in which the layers compute.
        - `rolling`: whether layers with a sliding window keep only the tokens of the window ([`ejkernel_eqx.nn.RollingKVCache`][]).
        """
        check_flags(rolling=rolling)
        return DecoderCache.init(self, batch_shape, max_length, dtype, rolling)

    def init_serving_cache(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        dtype: Any = None,
        scales: str | None = None,
        num_draft_tokens: int = 0,
    ) -> ServingCache:
        """Returns empty pages and slots for calls with `batch=`. The arguments are those of [`ejkernel_eqx.nn.CacheState`][]`.init`. Each attention
        layer has `num_pages` pages, and each recurrent layer has `num_slots` slots."""
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": num_slots}
        kept = {"dtype": dtype, "scales": scales, "num_draft_tokens": num_draft_tokens}
        make = lambda mixers, shape: CacheState.init(mixers, **sizes, **kept, batch_shape=shape[2:])
        return ServingCache(tuple(map(make, self.mixers, self.config.stacks())))

    @property
    def mixers(self) -> list[list[Any]]:
        """Those of each stack, in the order of their caches."""
        of = lambda stack: [mixer for layer in stack for mixer in layer.mixers(self.shared_blocks)]
        return [of(stack) for stack in self.stacks]

    # Calls

    @overload
    def __call__(
        self, tokens: Array, cache: None = None, *, return_statistics: Literal[False] = False, **rows: Any
    ) -> Array: ...

    @overload
    def __call__(
        self, tokens: Array, cache: None = None, *, return_statistics: Literal[True], **rows: Any
    ) -> tuple[Array, RouterStatistics]: ...

    @overload
    def __call__(self, tokens: Array, cache: DecoderCache, **rows: Any) -> tuple[Array, DecoderCache]: ...

    @overload
    def __call__(
        self, tokens: Array, cache: ServingCache, *, batch: RaggedBatch
    ) -> tuple[Array, ServingCache]: ...

    @compiled_call("ejx.models.Decoder")
    def __call__(
        self, tokens: Array, cache: Any = None, *, return_statistics: bool = False, **rows: Any
    ) -> Any:
        """**Arguments:**

        - `tokens`: integers `[..., T]` from 0 to the size of the vocabulary less one; with `batch`, `[T]`. Padding may have any value. Inside `jit`
            the result of another token is undefined, unless [`ejkernel_eqx.check_values`][] is on.
        - `cache`: a `DecoderCache` with the tokens before these; with `batch`, a `ServingCache`. Reading a sequence in several calls gives the same
            logits as in one call.
        - `return_statistics`: whether to return what the routers of mixtures of experts did. Losses of experts need it. Not with a cache.
        - `padding_mask`: bool `[..., T]`, True for real tokens.
        - `segment_ids`: integers `[..., T]`. Tokens of one row see only those with the same id.
        - `batch`: for serving, an `ejkernel_eqx.RaggedBatch` that describes the packed tokens.

        **Returns:** float32 logits `[..., T, vocabulary]`. With a cache, the tuple `(logits, cache)`. With `return_statistics`, the tuple
        `(logits, statistics)` of [`RouterStatistics`][ejkernel_eqx.nn.RouterStatistics], whose arrays have a leading axis for the layers with
        experts.

        **Raises:** `ValueError` for arguments that do not fit, and for tokens outside of the vocabulary where their values are known.
        """
        x = self.features(tokens, cache, return_statistics=return_statistics, **rows)
        if cache is None and not return_statistics:
            return self.logits(x)
        x, other = x
        return self.logits(x), other

    @compiled_call()
    def features(
        self, tokens: Array, cache: Any = None, *, return_statistics: bool = False, **rows: Any
    ) -> Any:
        """Returns the input of the head, `[..., T, E]`. The arguments and errors are those of a call. If only some tokens need logits, as in serving,
        pass their features to `logits`."""
        self._check_statistics(return_statistics, cache)
        rows = self._check(tokens, cache, rows)
        dtype = self.embedding.dtype if self.compute_dtype is None else jnp.dtype(self.compute_dtype)
        tokens = in_vocabulary(tokens, self.embedding.shape[0], rows)
        x = embed(self.embedding, tokens).astype(dtype)
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, dtype)
        if self.positions is not None:
            x = x + embed_positions(self.positions, tokens, cache, rows).astype(dtype)
        of_layers = None if self.layer_embedding is None else self.layer_embedding(tokens, x)
        if cache is None:
            x, found = self.through_layers(x, rows, return_statistics, of_layers)
            return (
                (x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)) if return_statistics else x
            )
        if "batch" in rows:
            return self._through(self._serve, x, cache, rows, of_layers)
        is_paged = have_pages(self, x, cache, rows)
        if is_paged or not stops_programs():
            cache.check_room(x.shape[-2], rows.get("padding_mask"))
        over_rows = lambda model, *given: model._through(model._decode, *given)
        call = as_differentiated(Decoder._over_pages, over_rows) if is_paged else over_rows
        return call(self, x, cache, rows, of_layers)

    def through_layers(
        self, x: Array, rows: dict[str, Any], return_statistics: bool = False, of_layers: Array | None = None
    ) -> tuple[Array, list[RouterStatistics]]:
        """The input of the head from embedded tokens `[..., T, E]`. On request also the statistics of routers, one for each stack. `rows` was checked
        before."""
        found, keys, shared = [], {}, (x, self.shared_blocks)
        for shape, stack in zip(self.config.stacks(), self.stacks):
            inputs = LayerInputs(_of_stack(shape, of_layers), keys, *shared)
            x, statistics, new = self._train(stack, shape, x, rows, return_statistics, inputs)
            found, keys = found + statistics, keys | new
        return normed(self.norm, x), found

    def _over_pages(
        self, x: Array, cache: DecoderCache, rows: dict[str, Any], of_layers: Array | None
    ) -> tuple[Array, DecoderCache]:
        """A call with few tokens a row, by the kernels for pages."""
        paged = PagedRows.of(x.shape, cache, rows)
        batch, tokens = {"batch": paged.batch}, paged.tokens(x)
        of_layers = None if of_layers is None else jax.vmap(paged.tokens)(of_layers)
        return paged.results(*self._through(self._serve, tokens, paged.pages, batch, of_layers))

    def _through(
        self, run: Any, x: Array, cache: Any, rows: dict[str, Any], of_layers: Array | None
    ) -> tuple[Array, Any]:
        """The input of the head and the new cache, by `_decode` or `_serve`."""
        caches, keys, shared = [], {}, (x, self.shared_blocks)
        for shape, stack, own in zip(self.config.stacks(), self.stacks, cache.stacks):
            inputs = LayerInputs(_of_stack(shape, of_layers), keys, *shared)
            x, own = run(stack, shape[2], x, own, rows, inputs)
            caches.append(own)
            for place, layer in enumerate(stack):
                if layer.config.gives_keys:  # whose stack is repeated once
                    number = sum(len(before.mixers(self.shared_blocks)) for before in stack[:place])
                    keys = keys | {shape[0] + place: _keys_in(own, number, rows)}
        return normed(self.norm, x), type(cache)(tuple(caches))

    @compiled_call()
    def logits(self, x: Array) -> Array:
        """Returns the float32 logits `[..., vocabulary]` of features `[..., E]`."""
        weight = self.embedding if self.head is None else self.head.weight
        logits = logits_of(weight, x)
        if (bias := self._head_bias) is not None:
            logits = logits + like(bias.astype(logits.dtype), logits)
        if (scale := self.config.logits_scale) != 1:
            logits = scale * logits
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    @compiled_call()
    def loss(self, x: Array, labels: Array, token_weights: Array | None = None) -> Array:
        """Returns the mean cross entropy of the next tokens, in nats, a float32 scalar. The logits are computed in chunks, so that they are never in
        memory together ([`ejkernel_eqx.LinearCrossEntropy`][]).

        ```python
        loss = model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])
        ```

        **Arguments:**

        - `x`: features `[..., E]`, from `features`.
        - `labels`: integers `[...]`, the next token of each. Negative ones do not count.
        - `token_weights`: floats `[...]`, the weight of each token in the mean; default ones.
        """
        x, weight, bias = self._of_head(x)
        return self.cross_entropy(x, labels, weight, bias, token_weights)

    @compiled_call()
    def token_statistics(self, x: Array, labels: Array, temperature: float = 1.0) -> TokenStatistics:
        """Log-probabilities of given tokens, entropies and more, `[...]` and differentiable, from the features `[..., E]` before each
        ([`ejkernel_eqx.TokenStatistics`][]), for losses such as [`ejkernel_eqx.grpo_loss`][]. The logits, which are never held whole, are divided by
        the temperature.

        **Arguments:**

        - `x`: `[..., E]`, from `features`.
        - `labels`: integers `[...]`, the token that comes next; negative where there is none.
        - `temperature`: that of sampling.
        """
        x, weight, bias = self._of_head(x)
        own = self.cross_entropy.options
        options = dataclasses.replace(own, reduction="none", temperature=temperature)
        return replaced(self.cross_entropy, options=options)(x, labels, weight, bias, return_statistics=True)[
            1
        ]

    @compiled_call()
    def divergence(
        self,
        x: Array,
        teacher: Teacher,
        token_weights: Array | None = None,
        *,
        mask: Any = None,
        **options: Any,
    ) -> Array:
        """How far this model is from a teacher, such as the model `other` ([`ejkernel_eqx.LinearDivergence`][]): the loss of distillation.

        ```python
        teacher = other.as_teacher(other.features(tokens))
        loss = model.divergence(model.features(tokens), teacher, mask=tokens >= 0, temperature=2.0)
        ```

        **Arguments:**

        - `x`: `[..., E]`, from `features`.
        - `teacher`: an [`ejkernel_eqx.Teacher`][] with the same vocabulary.
        - `token_weights`, `mask`: `[...]`, default ones and all; bool, True for tokens to learn from.
        - `options`: of `LinearDivergence`: `divergence`, `beta`, `temperature`, `reduction`.
        """
        x, weight, bias = self._of_head(x)
        loss = LinearDivergence(**options, logits_soft_cap=self.config.logits_soft_cap)
        return loss(x, weight, teacher, bias, token_weights, mask=mask)

    def as_teacher(self, x: Array) -> Teacher:
        """The distributions after features `[..., E]`, for the `divergence` of another model."""
        x, weight, bias = self._of_head(x)
        return Teacher.from_features(x, weight, bias, logits_soft_cap=self.config.logits_soft_cap)

    def _of_head(self, x: Array) -> tuple[Array, Array, Array | None]:
        """What a loss takes: features, weight and bias, of which the first and the last are scaled."""
        weight = dequantise(self.embedding if self.head is None else self.head.weight)
        bias = self._head_bias
        if (scale := self.config.logits_scale) != 1:
            x = x * jnp.asarray(scale, x.dtype)
            bias = None if bias is None else bias * jnp.asarray(scale, bias.dtype)
        return x, weight, bias

    @property
    def _head_bias(self) -> Array | None:
        return None if self.head is None else self.head.bias

    def _check_statistics(self, wanted: Any, cache: Any) -> None:
        check_flags(return_statistics=wanted)
        if not wanted:
            return
        if cache is not None:
            raise ValueError(
                "return_statistics: expected False with a cache, received True; statistics are for training, which has none."
            )
        mixtures = [moe for layer in self.config.layers for moe in (layer.mlp, layer.experts)]
        counts = {moe.num_experts for moe in mixtures if isinstance(moe, MoEConfig)}
        if len(counts) != 1:
            raise ValueError(
                "return_statistics: expected layers with mixtures of equally many experts, received a model with "
                f"{' and '.join(map(str, sorted(counts))) or 'no'} experts; call its layers one by one."
            )

    def _check(self, tokens: Array, cache: Any, rows: dict[str, Any]) -> dict[str, Any]:
        rows = {name: value for name, value in rows.items() if value is not None}
        if unknown := sorted(set(rows) - {"padding_mask", "segment_ids", "batch"}):
            raise ValueError(
                f"{unknown[0]}: expected padding_mask, segment_ids or batch, received this; check the spelling."
            )
        kind = ServingCache if "batch" in rows else DecoderCache
        if cache is not None and not isinstance(cache, kind):
            make = "init_serving_cache" if "batch" in rows else "init_cache"
            raise ValueError(
                f"cache: expected a {kind.__name__}, received {type(cache).__name__}; {make} makes one."
            )
        if "batch" in rows and cache is None:
            raise ValueError(
                "cache: expected a ServingCache with batch, received None; init_serving_cache makes one."
            )
        if not isinstance(rows.get("batch"), RaggedBatch | None):
            raise ValueError(
                f"batch: expected a RaggedBatch, received {type(rows['batch']).__name__}; build it with RaggedBatch.build."
            )
        check_rows(tokens, rows)
        return rows

    def _train(
        self,
        stack: Any,
        shape: tuple[int, int, int],
        x: Array,
        rows: dict[str, Any],
        return_statistics: bool,
        inputs: LayerInputs,
    ) -> tuple[Array, list[RouterStatistics], dict[int, Any]]:
        """The tokens after the stack; on request the statistics of its layers with experts, as one; and the keys and values that later layers
        read."""
        layers, static = eqx.partition(stack, _of_layers)
        (first, _, repeats), arrays = shape, (layers, inputs.embedding)

        def period(x: Array, own: Any) -> tuple[Array, tuple[list[RouterStatistics], dict[int, Any]]]:
            found, given = [], {}
            arrays, embedding = own
            for place, layer in enumerate(eqx.combine(arrays, static)):
                mine = inputs._replace(embedding=embedding).of(place, layer.config.keys_of)
                x, keys, statistics = layer.through(x, None, rows, mine, return_statistics)
                found += [] if statistics is None else [statistics]
                given |= {first + place: keys} if layer.config.gives_keys else {}
            return x, (found, given)

        # A loop stores what the gradient needs in arrays over all layers, which every layer copies into and out of. Unrolled layers copy nothing.
        # Without a loop, `prevent_cse` keeps the compiler from merging the recomputation with the first computation.
        if self.remat != "none":
            period = jax.checkpoint(period, policy=_policy(self.remat), prevent_cse=not self.scan_layers)
        if not self.scan_layers and jax.sharding.get_abstract_mesh().explicit_axes:
            # In the context of an explicit mesh, a scan refuses arrays whose sharding the compiler chooses. The kernels keep such arrays.
            each = []
            for index in range(repeats):
                x, found = period(
                    x, jax.tree.map(lambda a, at=index: jax.lax.index_in_dim(a, at, 0, False), arrays)
                )
                each.append(found)
            found = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
        else:
            x, found = jax.lax.scan(period, x, arrays, unroll=1 if self.scan_layers else repeats)
        found, given = found
        given = jax.tree.map(lambda a: a[0], given)
        return x, [jax.tree.map(_in_order, *found)] if found else [], given

    def _decode(
        self, stack: Any, repeats: int, x: Array, caches: Any, rows: dict[str, Any], inputs: LayerInputs
    ) -> tuple[Array, Any]:
        layers, static = eqx.partition(stack, _of_layers)
        arrays = layers, inputs.embedding

        def period(x: Array, own: Any) -> tuple[Array, Any]:
            (arrays, embedding), caches = own
            mine = inputs._replace(embedding=embedding)
            return _with_caches(eqx.combine(arrays, static), x, caches, rows, mine)

        if meshes_of((x, arrays, caches)):
            # A layer may return its cache with another sharding. What a loop carries must keep its sharding, so the caches are scanned over.
            return jax.lax.scan(period, x, (arrays, caches))

        def carried(carry: Any, own: Any) -> tuple[Any, None]:
            (x, caches), (index, arrays) = carry, own
            of_layer = lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, False)
            one = tuple(c if isinstance(c, FirstKeys) else jax.tree.map(of_layer, c) for c in caches)
            x, new = period(x, (arrays, one))
            write = lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0)
            put = lambda c, own: (
                c.put(index, own) if isinstance(c, FirstKeys) else jax.tree.map(write, c, own)
            )
            return (x, tuple(map(put, caches, new))), None

        return jax.lax.scan(carried, (x, caches), (jnp.arange(repeats, dtype=jnp.int32), arrays))[0]

    def _serve(
        self, stack: Any, repeats: int, x: Array, state: Any, rows: dict[str, Any], inputs: LayerInputs
    ) -> tuple[Array, Any]:
        """The loop carries the caches, so they are written in place. If the loop scanned over them, they would be copied."""
        arrays, static = eqx.partition(stack, _of_layers)
        batch: RaggedBatch = rows["batch"]

        def period(carry: Any, own: Any) -> tuple[Any, None]:
            (x, state), (index, numbers, arrays, embedding) = carry, own
            rows, mine = (
                {"batch": dataclasses.replace(batch, **numbers)},
                inputs._replace(embedding=embedding),
            )
            x, new = _with_caches(eqx.combine(arrays, static), x, state.pools(index), rows, mine)
            return (x, state.with_layers(new)), None

        # The numbers are computed once, before the first layer. The barrier keeps XLA from computing each layer's part by a launch of its own.
        numbers = {
            name: x if isinstance(x, np.ndarray) else jax.lax.optimization_barrier(x)
            for name, x in state.numbers(batch).items()
        }
        each = jnp.arange(repeats, dtype=jnp.int32), numbers, arrays, inputs.embedding
        # The host launches every turn of a loop. An unrolled step of few tokens is one CUDA graph. An unrolled prompt would take long to compile.
        is_step = are_few(x) and batch.max_query_len <= MOST_TOKENS
        unroll = repeats if is_step and place_of_calls()[0] is Backend.GPU else 1
        return jax.lax.scan(period, (x, state), each, unroll=unroll)[0]

    # Published weights

    _published = filled_decoder
