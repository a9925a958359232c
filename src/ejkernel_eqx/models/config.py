"""The configurations of decoders and encoders: the mixer, the norms and the MLP of each layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .._signatures import nearest
from ..nn.activations import ACTIVATIONS, UNGATED
from ..nn.arguments import check_fields, check_flags, check_numbers
from ..sequences.packing import read_count

Norms = Literal["pre", "pre_mlp", "post", "around", "residual", "parallel", "parallel_apart"]
NormType = Literal["rms", "layer", "layer_without_bias"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu", "relu2", "xielu"]

NORMS = ("pre", "pre_mlp", "post", "around", "residual", "parallel", "parallel_apart")
_NORM_TYPES = ("rms", "layer", "layer_without_bias")


def _check_one_of(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise ValueError(
            f"{name}: expected one of {', '.join(sorted(known))}, received {value!r}{nearest(value, known)}"
        )


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    r"""The feed-forward part of a layer: $W_{down}(f(W_{gate} x) \odot W_{up} x)$.

    **Arguments:**

    - `hidden_dim`: features between the projections.
    - `activation`: $f$: `"silu"` (SwiGLU), `"gelu"`, `"gelu_tanh"` (GeGLU, Gemma), `"relu"`; or `"clamped_swiglu"`, GPT-OSS's
        $(\mathrm{up} + 1) \odot \mathrm{gate} \odot \sigma(1.702\,\mathrm{gate})$, with both clamped at 7.
    - `use_bias`: whether the projections have biases.
    - `gate_scale`: what the gate is multiplied by before $f$ (Falcon-H1).
    - `gated`: whether there is a gate. Without one the MLP is $W_{down}\,f(W_{up} x)$. Then $f$ may also be `"relu2"`, the square of `"relu"`
        (Arcee), or `"xielu"`, which has parameters (Apertus).

    **Raises:** `ValueError` for an activation that is not known.
    """

    hidden_dim: int
    activation: Activation = "silu"
    use_bias: bool = False
    gated: bool = True
    gate_scale: float = 1.0

    def __post_init__(self):
        check_fields(self)
        _check_one_of("activation", self.activation, ACTIVATIONS if self.gated else (*UNGATED, "xielu"))


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts instead of an MLP.

    **Arguments:**

    - `options`: a mapping with the arguments of [`ejkernel_eqx.nn.MixtureOfExperts`][], except the width, dtypes, platform and key. `hidden_dim`,
        `num_experts` and `top_k` are required.
    """

    options: Any

    def __post_init__(self):
        object.__setattr__(self, "options", _sorted(self.options))
        _check_entries(self.options, ("hidden_dim", "num_experts", "top_k"), "MixtureOfExperts")

    @property
    def num_experts(self) -> int:
        return dict(self.options)["num_experts"]


def _sorted(options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items() if isinstance(options, Mapping) else options))


@dataclasses.dataclass(frozen=True)
class BranchConfig:
    """A second mixer of a layer, which takes the same input as the first (Falcon-H1).

    **Arguments:**

    - `mixer`, `options`: as in `LayerConfig`.
    - `scales`: two factors, of the output of the first mixer and of this one. The products are added.
    """

    mixer: str
    options: Any = ()
    scales: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self):
        from .mixers import MIXERS

        _check_one_of("mixer", self.mixer, MIXERS)
        object.__setattr__(self, "options", _sorted(self.options))
        _check_scales("scales", self.scales, "the first mixer and this one")


@dataclasses.dataclass(frozen=True)
class SharedBlockConfig:
    """Blocks of attention and an MLP that layers share (Zamba2). A block takes the tokens and their embeddings side by side. Each layer has low-rank
    products beside the block's projections, and a projection behind it; the result is added to what the mixer of the layer takes.

    **Arguments:**

    - `count`: blocks.
    - `options`: what [`ejkernel_eqx.nn.MultiHeadAttention`][] is built with, besides widths, dtypes, platform and key: at least `num_heads`,
        `num_kv_heads` and `head_dim`.
    - `mlp`: an `MLPConfig` with a gate.
    - `adapter_rank`: features between the two matrices of each low-rank product.
    - `attention_adapters`: whether those are also beside the projections of queries, keys and values.
    """

    count: int
    options: Any
    mlp: MLPConfig
    adapter_rank: int
    attention_adapters: bool = False

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "options", _sorted(self.options))
        _check_entries(self.options, ("num_heads", "num_kv_heads", "head_dim"), "MultiHeadAttention")
        if not isinstance(self.mlp, MLPConfig) or not self.mlp.gated:
            raise ValueError(f"mlp: expected an MLPConfig with a gate, received {self.mlp!r}.")


def _check_entries(options: Any, names: tuple[str, ...], layer: str) -> None:
    for name in names:
        if name not in dict(options):
            raise ValueError(
                f"options: expected an entry {name!r}, received {', '.join(dict(options)) or 'none'}; it is an argument of {layer} that has to "
                "be there."
            )


def _check_scales(name: str, scales: Any, of: str) -> None:
    if not isinstance(scales, tuple) or len(scales) != 2:
        raise ValueError(
            f"{name}: expected two numbers, for {of}, received {scales!r}; (1.0, 1.0) adds them."
        )
    check_numbers(**{name: scales[0]})
    check_numbers(**{name: scales[1]})


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One layer of a decoder: a mixer, in which tokens act on each other, and an MLP, which computes on each token.

    **Arguments:**

    - `mixer`: a key of `ejx.models.MIXERS`: `"attention"`, `"latent_attention"`, `"native_sparse_attention"`,
        `"mamba1"`, `"mamba2"`, `"mamba3"`, `"gated_linear_attention"`, `"lightning_attention"`, `"kimi_delta_attention"`,
        `"gated_delta_net"`, `"gated_short_convolution"`, `"cross_layer_attention"`.
    - `options`: a mapping with the arguments of the mixer's class in `ejx.nn`, except the width, dtypes, platform and key.
    - `mlp`: an `MLPConfig`, or a `MoEConfig` for a mixture of experts; `None` for no MLP, as in Mamba.
    - `norms`: the places of the norms:
        - `"pre"`: before the mixer and before the MLP (Llama);
        - `"post"`: after the mixer and after the MLP (OLMo-2);
        - `"around"`: before and after both (Gemma 2 and 3);
        - `"residual"`: before both, and the normalised input is also the residual (MiniMax);
        - `"parallel"`: one norm, whose output the mixer and the MLP both take; their outputs are added to the residual (Phi-2, Cohere);
        - `"parallel_apart"`: the same with a norm for each (Pythia);
        - `"pre_mlp"`: before the MLP alone (the first layer of ModernBERT).
    - `mixer_scales`, `mlp_scales`: two factors, of the residual and of the branch that is added to it (MiniMax's alpha and beta).
    - `output_scale`: whether the output of the layer is multiplied by a learned number (Gemma 4).
    - `beside`: a `BranchConfig` for a second mixer beside the first; default none.
    - `experts`: a `MoEConfig` for experts beside the MLP, with norms of their own (Gemma 4); default none.
    - `gives_keys`: whether later layers read the keys and values of this one. Its mixer is then `"attention"`.
    - `keys_of`: for `"cross_layer_attention"`, the index of the layer whose keys and values it reads.
    - `shared_block`: the index of a block of `DecoderConfig(shared_blocks=)`, whose output is added to the input of the mixer (Zamba2). Such a
        layer is a mixer alone.

    **Raises:** `ValueError` for values that do not fit together, with the remedy.
    """

    mixer: str
    options: Any = ()
    mlp: MLPConfig | MoEConfig | None = None
    norms: Norms = "pre"
    mixer_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    output_scale: bool = False
    beside: BranchConfig | None = None
    experts: MoEConfig | None = None
    gives_keys: bool = False
    keys_of: int | None = None
    shared_block: int | None = None

    def __post_init__(self):
        from .mixers import MIXERS

        _check_one_of("mixer", self.mixer, MIXERS)
        _check_one_of("norms", self.norms, NORMS)
        object.__setattr__(self, "options", _sorted(self.options))
        check_flags(output_scale=self.output_scale, gives_keys=self.gives_keys)
        if self.experts is not None and not (
            isinstance(self.experts, MoEConfig) and isinstance(self.mlp, MLPConfig)
        ):
            raise ValueError(
                f"experts: expected a MoEConfig beside an MLPConfig, or None, received {type(self.experts).__name__}; in the place of the MLP, "
                "experts are the mlp."
            )
        if self.mlp is not None and not isinstance(self.mlp, MLPConfig | MoEConfig):
            raise ValueError(
                f"mlp: expected an MLPConfig, a MoEConfig or None, received {type(self.mlp).__name__}; MLPConfig(hidden_dim) is one."
            )
        if not isinstance(self.beside, BranchConfig | None):
            raise ValueError(
                f"beside: expected a BranchConfig or None, received {type(self.beside).__name__}; BranchConfig(mixer, options) is one."
            )
        alone = LayerConfig(self.mixer, self.options) if self.shared_block is not None else None
        if alone is not None and dataclasses.replace(self, shared_block=None) != alone:
            raise ValueError(
                f"shared_block: expected None but in a layer of a mixer alone, received {self.shared_block!r}; leave the other arguments out."
            )
        for name in ("mixer_scales", "mlp_scales"):
            _check_scales(name, getattr(self, name), "the residual and the branch")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a [`Decoder`][ejkernel_eqx.models.Decoder].

    **Arguments:**

    - `vocab_size`, `embed_dim`: rows and columns of the embedding.
    - `layers`: a `LayerConfig` for each layer.
    - `norm_eps`: the number that norms add to the mean square.
    - `embedding_scale`: the factor $s$ of the embeddings ($\\sqrt{E}$ in Gemma).
    - `tie_embeddings`: whether the head is the embedding. The random embeddings of a new model then have the standard deviation 0.02, over
        `embedding_scale` if that is above 1. So the first loss is near the logarithm of `vocab_size`. Otherwise they have 1.
    - `logits_soft_cap`: $c$ of $c \\tanh(\\mathrm{logits} / c)$; default none.
    - `unit_offset_norms`: whether the published norms are stored as `weight - 1` (Gemma, Qwen3-Next). For loading only.
    - `stop_tokens`: the tokens with which a text ends; the default of `generate`.
    - `logits_scale`: a factor of the logits (Granite, Cohere).
    - `norm_type`: `"rms"`; `"layer"` for layer norms, which subtract the mean; `"layer_without_bias"` (Cohere).
    - `head_bias`: whether the head has a bias (Phi-2). A head that is the embedding has none.
    - `max_positions`: the number of learned embeddings of positions, which are added to those of the tokens (GPT-2, OPT); default none. A text of
        more tokens is an error. In a program for a GPU, the results of tokens at later positions are NaN.
    - `layer_embedding`: the features of a further embedding of the tokens for each layer, which is added after the MLP (Gemma 4); default none.
    - `shared_blocks`: a `SharedBlockConfig` for blocks that layers share (Zamba2); default none.
    - `published`: the text of the `config.json` that this was read from, if any. `save_pretrained` writes it. Comparisons leave it out.

    **Raises:** `ValueError` for values that do not fit together, with the remedy.
    """

    vocab_size: int
    embed_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    logits_soft_cap: float | None = None
    unit_offset_norms: bool = False
    stop_tokens: tuple[int, ...] = ()
    logits_scale: float = 1.0
    norm_type: NormType = "rms"
    head_bias: bool = False
    layer_embedding: int | None = None
    max_positions: int | None = None
    shared_blocks: SharedBlockConfig | None = None
    published: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or not all(isinstance(layer, LayerConfig) for layer in self.layers):
            raise ValueError(
                f"layers: expected a LayerConfig for each layer, at least one, received {self.layers!r}."
            )
        self._check_keys()
        has_mlps = all(isinstance(layer.mlp, MLPConfig) for layer in self.layers)
        if self.layer_embedding is not None and not has_mlps:
            raise ValueError("layer_embedding: expected an MLPConfig in every layer, received others.")
        _check_one_of("norm_type", self.norm_type, _NORM_TYPES)

    def _check_keys(self) -> None:
        blocks = 0 if self.shared_blocks is None else self.shared_blocks.count
        for index, layer in enumerate(self.layers):
            if layer.shared_block is not None and not 0 <= layer.shared_block < blocks:
                raise ValueError(
                    f"layers[{index}].shared_block: expected None or the number of one of the {blocks} blocks of shared_blocks, received "
                    f"{layer.shared_block!r}; they are counted from 0."
                )
            if (layer.mixer == "cross_layer_attention") != (layer.keys_of is not None):
                raise ValueError(
                    f"layers[{index}].keys_of: expected a number for 'cross_layer_attention' and None for others, received {layer.keys_of!r}."
                )
            source = layer.keys_of
            if source is not None and (not 0 <= source < index or not self.layers[source].gives_keys):
                raise ValueError(
                    f"layers[{index}].keys_of: expected the number of an earlier layer with gives_keys=True, received {source!r}; set it there."
                )
            if layer.gives_keys and layer.mixer != "attention":
                raise ValueError(
                    f"layers[{index}].gives_keys: expected False for {layer.mixer!r}, received True; only 'attention' has keys to give."
                )

    def stacks(self) -> tuple[tuple[int, int, int], ...]:
        """The stacks: for each the index of its first layer, the number of layers in its pattern, and the repetitions of the pattern. If the pattern
        does not divide the number of layers, a second stack holds the rest. Layers whose keys others read are not repeated."""
        # As numbers, which are compared faster than layers.
        kinds, count = [self.layers.index(layer) for layer in self.layers], len(self.layers)
        giving = [index for index, layer in enumerate(self.layers) if layer.gives_keys]
        if not giving:
            return _repeated(kinds, 0)
        first, last = giving[0], giving[-1] + 1
        middle = ((first, last - first, 1),)
        return _repeated(kinds[:first], 0) + middle + _repeated(kinds[last:count], last)


def _repeated(kinds: list[int], first: int) -> tuple[tuple[int, int, int], ...]:
    """The stacks of consecutive layers of these kinds."""
    if not (count := len(kinds)):
        return ()
    period = next(p for p in range(1, count + 1) if kinds[p:] == kinds[:-p])
    whole = count // period
    left = count - whole * period
    return ((first, period, whole), *([(first + whole * period, left, 1)] if left else []))


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The architecture of an [`Encoder`][ejkernel_eqx.models.Encoder].

    **Arguments:**

    - `body`: the embedding, the layers and the last norm, as a `DecoderConfig` without a head (`tie_embeddings`). The mixer of each layer is
        `"attention"` with the option `causal` false.
    - `num_positions`: the number of learned embeddings of positions, which are added to those of the tokens. 0 for none, as in models with rotations.
    - `first_position`: the position of the first token of a text (RoBERTa: 2).
    - `num_token_types`: the number of types of tokens, such as first and second sentence. Their embeddings are added. 0 for none.
    - `embedding_norm`: whether there is a norm between the embedding and the layers (ModernBERT). BERT's norm after the embedding is read as the norm
        before the first mixer.
    """

    body: DecoderConfig
    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    embedding_norm: bool = False

    def __post_init__(self):
        if not isinstance(self.body, DecoderConfig) or not self.body.tie_embeddings:
            raise ValueError(
                f"body: expected a DecoderConfig with tie_embeddings, as an encoder has no head, received {self.body!r}."
            )
        for name in ("num_positions", "first_position", "num_token_types"):
            read_count(name, getattr(self, name))
        check_flags(embedding_norm=self.embedding_norm)
        for index, layer in enumerate(self.body.layers):
            if layer.mixer != "attention" or dict(layer.options).get("causal", True):
                raise ValueError(
                    f"body: expected 'attention' with causal=False in each layer, received {layer.mixer!r} in layer {index}, whose tokens see no "
                    "later ones; set the option, or build a Decoder."
                )
