"""One decoder for all the published ones: described by data, its layers in stacks."""

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
from .._signatures import Module
from .._values import stops_programs
from ..dispatch import Backend, place_of_calls
from ..losses import LinearCrossEntropy
from ..nn import CacheState, ExpertParallel, RouterStatistics
from ..nn.arguments import check_flags
from ..nn.few_rows import Norm, normed
from ..nn.initial import keys_of, normal
from ..nn.parts import Parts
from ..nn.projection import are_few
from ..paged import RaggedBatch
from ..quantised import dequantise
from .caches import DecoderCache, ServingCache
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
from .split import split_options
from .vocabulary import check_rows, embed, in_vocabulary, logits_of

_KERNELS = (
    "attention_out attention_lse native_sparse_out native_sparse_saved recurrence_out recurrence_state "
    "recurrence_saved selective_scan_out selective_scan_state selective_scan_saved"
).split()
_PRODUCTS = ("grouped_matmul_out", "grouped_matmul_saved")


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

    A [`DecoderConfig`][ejkernel_eqx.models.DecoderConfig] describes the layers: Llama, Qwen, Mistral, Gemma, GPT-OSS, OLMo-2,
    Mamba, Qwen3-Next and others differ in their configuration only. [`from_pretrained`][ejkernel_eqx.models.from_pretrained] reads a published
    model, [`generate`][ejkernel_eqx.models.generate] continues texts.

    Layers of the same kind are stacked: each array has a leading axis, and the layers are traced once. A pattern of layers (a local and
    a global one, say) is a stack of that pattern.
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
        - `scan_layers`: whether training runs a loop over stacked layers. By default the layers are written out, which is faster and
            takes longer to compile; decoding always loops.
        - `remat`: what the forward pass keeps for the gradient: `"none"`: everything; `"matmuls"`: products of matrices and the outputs
            of kernels; `"kernels"`: the latter only.
        - `platform`: of every kernel, as in [`ejkernel_eqx.FlashAttention`][].
        - `expert_parallel`: over which axes of an automatic mesh mixtures of experts are split; on explicit meshes the types of the arrays
            say it.
        - `sequence_axis`: a mesh axis that the tokens are split over, for the mixers of all layers, as in
            [`ejkernel_eqx.nn.MultiHeadAttention`][] and [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer]. Latent and native sparse attention
            have none.
        - `token_order`: the order of the tokens then, `"zigzag"` for models of attention alone: rows in the order of
            [`ejkernel_eqx.sequences.reorder_sequence`][].
        - `dtype`: of the parameters; default float32. Norms, and what sets the decay of recurrent layers, are at least float32.
        - `compute_dtype`: what is computed in; default: that of the parameters. Logits are float32.
        - `key`: a PRNG key for the initial weights.
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
        self.embedding = normal(parts.key(), (config.vocab_size, width), dtype)
        keys, places = keys_of(parts.key(), count), np.arange(count, dtype=np.int32)
        options: dict[str, Any] = {"norm_type": config.norm_type, "norm_eps": config.norm_eps}
        options |= {"platform": platform, "compute_dtype": self.compute_dtype}
        self.positions = None
        if config.max_positions is not None:
            self.positions = normal(jax.random.fold_in(key, 2), (config.max_positions, width), dtype)
        blocks = config.shared_blocks
        block_keys = jax.random.split(jax.random.fold_in(key, 3), 0 if blocks is None else blocks.count)
        of_block: Any = {"platform": platform, "compute_dtype": self.compute_dtype, "dtype": dtype}
        self.shared_blocks = tuple(SharedBlock(config, **of_block, key=key) for key in block_keys)
        options |= {"layer_embedding": config.layer_embedding, "shared_blocks": blocks}
        self.layer_embedding = None
        if (features := config.layer_embedding) is not None:
            at_layers = Parts(jax.random.fold_in(key, 1), 2, dtype, compute_dtype)
            table = normal(at_layers.key(), (config.vocab_size, count * features), dtype)
            norm: Any = norm_of("rms", features, config.norm_eps, dtype)
            self.layer_embedding = LayerEmbedding(config, table, norm, at_layers)
        options |= {"expert_parallel": expert_parallel}
        options |= {"split": split_options(config, sequence_axis, token_order)}

        def stack(first: int, period: int, repeats: int, place: int) -> DecoderLayer:
            def make(key: Array, index: Array) -> DecoderLayer:
                layer = config.layers[first + place]
                return DecoderLayer(
                    width, layer, layer_index=index, num_layers=count, dtype=dtype, key=key, **options
                )

            mine = slice(first + place, first + period * repeats, period)
            return eqx.filter_vmap(make)(keys[mine], jnp.asarray(places[mine]))

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
        """The layer at a place in the model, out of its stack."""
        for (first, period, repeats), stack in zip(self.config.stacks(), self.stacks):
            if first <= index < first + period * repeats:
                at, place = divmod(index - first, period)
                return jax.tree.map(lambda x, at=at: x[at] if eqx.is_array(x) else x, stack[place])
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
        """An empty cache for decoding: keys and values of up to `max_length` tokens for each row of its attention layers, by default in
        the dtype the layers compute in, and the states of the recurrent ones. With `rolling`, layers with a sliding window keep no more
        tokens than the window has ([`ejkernel_eqx.nn.RollingKVCache`][]). On a GPU, decoding is fastest if 64 divides `max_length` and without
        `rolling`: calls of up to 8 tokens a row then run over the cache by the kernels of serving, which write into it in place."""
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
        """Empty pages and slots for serving many sequences, for calls with `batch=`. The arguments are those of
        [`ejkernel_eqx.nn.CacheState`][]`.init`; every layer has as many pages, or slots."""
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

        - `tokens`: integers `[..., T]`, with `batch` `[T]`, from 0 to the size of the vocabulary less one; padding may be any. Others raise if they
            are known, are undefined inside `jit`, and are found there by [`ejkernel_eqx.check_values`][].
        - `cache`: a `DecoderCache` from `init_cache`: what was before `tokens`. A prompt in one call and then token by token returns
            the same logits as the whole sequence in one call. With `batch`, a `ServingCache`.
        - `return_statistics`: whether to return what the routers of mixtures of experts did, for their losses. Without a cache.
        - `padding_mask`, `segment_ids`: `[..., T]`, as in the layers: bool, True for real tokens; and integers, tokens of one row that do not see
            those of other segments.
        - `batch`: for serving, an `ejkernel_eqx.RaggedBatch` of packed tokens.

        **Returns:** float32 logits `[..., T, vocabulary]`; with a cache, the tuple `(logits, cache)`; with `return_statistics`, the tuple
        `(logits, statistics)`, [`RouterStatistics`][ejkernel_eqx.nn.RouterStatistics] with a leading axis of the layers that have experts.
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
        """The input of the head, `[..., T, E]`. The arguments are those of a call; where few tokens need logits, as in serving, give `logits`
        those only."""
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
        """The input of the head, from embedded tokens `[..., T, E]`, and if requested what routers did, stack by stack. `rows` is checked."""
        found, keys, shared = [], {}, (x, self.shared_blocks)
        for shape, stack in zip(self.config.stacks(), self.stacks):
            inputs = LayerInputs(_of_stack(shape, of_layers), keys, *shared)
            x, statistics, new = self._train(stack, shape, x, rows, return_statistics, inputs)
            found, keys = found + statistics, keys | new
        return normed(self.norm, x), found

    def _over_pages(
        self, x: Array, cache: DecoderCache, rows: dict[str, Any], of_layers: Array | None
    ) -> tuple[Array, DecoderCache]:
        """A call with few tokens a row."""
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
        """Float32 logits `[..., vocabulary]` of features `[..., E]`."""
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
        """The mean cross entropy, in nats, of the logits of features `[..., E]`, which are never held whole
        ([`ejkernel_eqx.LinearCrossEntropy`][]).

        ```python
        loss = model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])
        ```

        **Arguments:**

        - `x`: `[..., E]`, from `features`.
        - `labels`: integers `[...]`, the token that comes next; negative where none is to be learned.
        - `token_weights`: `[...]`, default ones.
        """
        weight = dequantise(self.embedding if self.head is None else self.head.weight)
        if (scale := self.config.logits_scale) != 1:
            x = x * jnp.asarray(scale, x.dtype)
        return self.cross_entropy(x, labels, weight, self._head_bias, token_weights=token_weights)

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
        """The tokens after the stack; if requested the statistics of its layers with experts in one, if there are any; and the keys and values that
        its layers give away."""
        layers, static = eqx.partition(stack, eqx.is_array)
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

        # A loop keeps what the gradient needs in stacks, which every layer copies into and out of; written out, each layer's stays
        # where it is. Written out, the compiler would merge what is computed again with what was, but for a barrier.
        if self.remat != "none":
            period = jax.checkpoint(period, policy=_policy(self.remat), prevent_cse=not self.scan_layers)
        if not self.scan_layers and jax.sharding.get_abstract_mesh().explicit_axes:
            # What the kernels keep for the gradient is laid out by the compiler, which a scan in the context of such a mesh refuses.
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
        layers, static = eqx.partition(stack, eqx.is_array)
        arrays = layers, inputs.embedding

        def period(x: Array, own: Any) -> tuple[Array, Any]:
            (arrays, embedding), caches = own
            mine = inputs._replace(embedding=embedding)
            return _with_caches(eqx.combine(arrays, static), x, caches, rows, mine)

        if meshes_of((x, arrays, caches)):
            # A call may lay out its cache in another way, which what a loop carries keeps.
            return jax.lax.scan(period, x, (arrays, caches))

        def carried(carry: Any, own: Any) -> tuple[Any, None]:
            (x, caches), (index, arrays) = carry, own
            one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, False), caches)
            x, new = period(x, (arrays, one))
            put = lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0)
            return (x, jax.tree.map(put, caches, new)), None

        return jax.lax.scan(carried, (x, caches), (jnp.arange(repeats, dtype=jnp.int32), arrays))[0]

    def _serve(
        self, stack: Any, repeats: int, x: Array, state: Any, rows: dict[str, Any], inputs: LayerInputs
    ) -> tuple[Array, Any]:
        """The caches are part of the carry and written in place; as part of what is scanned over they would be copied."""
        arrays, static = eqx.partition(stack, eqx.is_array)
        batch: RaggedBatch = rows["batch"]

        def period(carry: Any, own: Any) -> tuple[Any, None]:
            (x, state), (index, numbers, arrays, embedding) = carry, own
            rows, mine = (
                {"batch": dataclasses.replace(batch, **numbers)},
                inputs._replace(embedding=embedding),
            )
            x, new = _with_caches(eqx.combine(arrays, static), x, state.pools(index), rows, mine)
            return (x, state.with_layers(new)), None

        # Made once, before the first layer. Behind the barrier a layer's part is a place in these arrays; without it, it would be a launch.
        numbers = jax.lax.optimization_barrier(state.numbers(batch))
        each = jnp.arange(repeats, dtype=jnp.int32), numbers, arrays, inputs.embedding
        # A loop is launched turn by turn by the host. Written out, few tokens are one CUDA graph. A prompt has more operations, which would take
        # long to compile.
        is_step = are_few(x) and batch.max_query_len <= MOST_TOKENS
        unroll = repeats if is_step and place_of_calls()[0] is Backend.GPU else 1
        return jax.lax.scan(period, (x, state), each, unroll=unroll)[0]

    # Published weights

    _published = filled_decoder
