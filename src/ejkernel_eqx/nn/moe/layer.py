"""`MixtureOfExperts`: a router, experts, and an expert for all tokens."""

from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..._jitted import compiled_call
from ..._shapes import AnyArray, Bool, Float
from ...core.arguments import wide
from ...dispatch import PlatformLike
from ...weights.expert_configs import mixture_of_experts_options
from ...weights.experts import mixture_of_experts
from ..activations import check_activation
from ..arguments import check_flags, check_tokens, checked, read_array
from ..parts import Parts
from ..projection import project, promoted
from ..published import Published
from ..tokens import clear
from .experts import Experts
from .parallel import ExpertParallel, over_devices
from .router import Router
from .routing import Choice, GroupScore, Routing, Scoring
from .shared import SharedExpert
from .statistics import RouterStatistics

_Tokens = Float[AnyArray, "*B E"]
_Output = Float[Array, "*B E"]
_Real = Bool[AnyArray, "*B"] | None


class MixtureOfExperts(Published):
    r"""A mixture of experts: a router sends each token to a few of many MLPs, whose outputs are added with the router's weights.

    $$y = \sum_{i \in \mathcal{T}(x)} w_i(x)\, E_i(x) + g(x)\, S(x), \qquad
      E_i(x) = W^{(i)}_{down}\big(f(W^{(i)}_{gate} x) \odot W^{(i)}_{up} x\big)$$

    with the experts $\mathcal{T}(x)$ of the token and their weights $w_i$:

    | model | `scoring` | `normalize` | besides |
    |---|---|---|---|
    | Mixtral, MiniMax | `"softmax"` | yes | |
    | OLMoE, Qwen2-MoE, Qwen3-MoE | `"softmax"` | `norm_topk_prob` | Qwen2: `shared_dim`, `shared_gate=True` |
    | Qwen3-Next | `"softmax"` | yes | `shared_dim`, `shared_gate=True` |
    | GPT-OSS | `"top_k_softmax"` | | `activation="clamped_swiglu"`, `use_bias=True`, `use_router_bias=True` |
    | DeepSeek-V2 | `"softmax"` | no | `num_groups`, `top_k_groups`, `group_score="max"`, `scaling_factor`, `shared_dim` |
    | Gemma 4 | `"softmax"` | yes | `activation="gelu_tanh"`, `norm_eps` |
    | Llama 4 | `"sigmoid"` | no | `top_k=1`, `scale_inputs=True`, `shared_dim` |
    | Jamba | `"softmax"` | no | |
    | LFM2 | `"sigmoid"` | `norm_topk_prob` | `use_correction_bias=True`, `scaling_factor` |
    | Nemotron 3 | as DeepSeek-V3 | | `gated=False`, `activation="relu2"`, `latent_dim` |
    | DeepSeek-V3 | `"sigmoid"` | yes | `num_groups`, `top_k_groups`, `use_correction_bias=True`, `scaling_factor`, `shared_dim` |

    No expert has a capacity, and no token is dropped. Tokens are sorted by expert, and each projection of all experts is one
    [`ejkernel_eqx.GroupedMatmul`][]. The order of every sum is fixed: equal inputs give equal bits. The router computes in float32.

    The parameters are those of published models, the experts' stacked: `gate.weight` `[N, E]`, `experts.gate_proj` and `experts.up_proj`
    `[N, F, E]`, `experts.down_proj` `[N, E, F]`, `shared_expert.*`. [`ejkernel_eqx.load_published`][] reads all published forms: one module for each
    expert, `gate_up_proj` of all, GPT-OSS's transposed and interleaved one.

    Sources: Shazeer et al., *Outrageously Large Neural Networks* (2017); Fedus et al., *Switch Transformers* (2021); Jiang et al., *Mixtral of
    Experts* (2024); DeepSeek-AI, *DeepSeek-V3 Technical Report* (2024); the published model code.
    """

    gate: Router
    experts: Experts
    shared_expert: SharedExpert | None
    shared_expert_gate: eqx.nn.Linear | None  # [1, E]
    embed_dim: int = eqx.field(static=True)
    hidden_dim: int = eqx.field(static=True)
    parallel: ExpertParallel | None = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    @checked
    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        num_experts: int,
        top_k: int,
        scoring: Scoring = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 1,
        top_k_groups: int = 1,
        group_score: GroupScore = "top2",
        scale_inputs: bool = False,
        use_router_bias: bool = False,
        use_correction_bias: bool = False,
        norm_eps: float | None = None,
        activation: str = "silu",
        gated: bool = True,
        latent_dim: int | None = None,
        use_bias: bool = False,
        shared_dim: int | None = None,
        shared_gate: bool = False,
        parallel: ExpertParallel | None = None,
        platform: PlatformLike | None = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `embed_dim`: features of the input and the output, `E`.
        - `hidden_dim`: features inside an expert, `F`.
        - `num_experts`, `top_k`: how many experts there are, `N`, and how many each token goes to.
        - `scoring`: what experts are ranked by, and what their weights are. `"softmax"` is over all logits, and
            `"sigmoid"` of each. `"top_k_softmax"` is the softmax of the chosen logits alone.
        - `normalize`: whether the weights of the chosen experts are divided by their sum. Without meaning for `"top_k_softmax"`.
        - `scaling_factor`: what the weights are multiplied by at last (DeepSeek's `routed_scaling_factor`).
        - `num_groups`, `top_k_groups`: experts are in so many groups of equal size, and a token goes to experts of the best `top_k_groups` alone.
        - `group_score`: what groups are ranked by: `"top2"`, the sum of their two best experts, or `"max"`, the best one.
        - `scale_inputs`: whether the input of an expert is multiplied by the weight of the token, not its output. With `top_k=1`.
        - `use_router_bias`: whether the logits have a bias.
        - `use_correction_bias`: whether experts are ranked with a bias, `gate.e_score_correction_bias`, added to their
            scores. It does not enter their weights, and no gradient reaches it.
            [`update_correction_bias`][ejkernel_eqx.nn.update_correction_bias] balances experts by it.
        - `norm_eps`: with it, tokens are divided by their root mean square, to whose square it is added, twice: for the router, times a learned
            `gate.scale` $/ \sqrt{E}$, and for the experts, times `gate.norm.weight`. The weight of each expert is multiplied by a learned
            `gate.expert_scale` (Gemma 4). Default: none of these.
        - `activation`: $f$, as in [`ejkernel_eqx.models.MLPConfig`][], also of the shared expert.
        - `gated`: whether experts have a gate; without, $E_i(x) = W^{(i)}_{down} f(W^{(i)}_{up} x)$, where $f$ may also be `"relu2"`.
        - `latent_dim`: the width in which the experts compute, but for the shared one: tokens are projected there for all experts, and the weighted
            sum back (Nemotron 3); default that of the tokens.
        - `use_bias`: whether the projections of experts have biases.
        - `shared_dim`: features inside an expert that all tokens go to, $S$; `None` for none. Published models with several shared experts have one
            that is as many times as wide.
        - `shared_gate`: whether its output is multiplied by $g(x) = \sigma(w \cdot x)$; otherwise $g = 1$.
        - `parallel`: on automatic meshes, which mesh axes split experts and tokens; see
            [`ExpertParallel`][ejkernel_eqx.nn.ExpertParallel]. On explicit meshes the types of the arrays say it.
        - `platform`: of the grouped matmuls, as in [`ejkernel_eqx.FlashAttention`][].
        - `dtype`: of the parameters; default float32. The correction bias is at least float32.
        - `compute_dtype`: dtype of the computation, but for the router, and of the output; inputs and weights are cast to it. Default: the promoted
            dtype of the two.
        - `key`: a PRNG key for the initial weights.
        """
        check_activation(activation, gated)
        if shared_dim is None and shared_gate:
            raise ValueError(
                "shared_gate: expected False without shared_dim, received True; shared_dim makes the expert that it is the gate of."
            )
        if parallel is not None and not isinstance(parallel, ExpertParallel):
            raise ValueError(
                f"parallel: expected an ExpertParallel or None, received {type(parallel).__name__}; ejx.nn.ExpertParallel() is one."
            )
        groups: Any = {"num_groups": num_groups, "top_k_groups": top_k_groups, "group_score": group_score}
        groups |= {"scale_inputs": scale_inputs}
        choice = Choice(num_experts, top_k, scoring, normalize, scaling_factor, **groups)
        parts = Parts(key, 4, dtype, compute_dtype)
        biases: Any = {"use_bias": use_router_bias, "use_correction_bias": use_correction_bias}
        biases |= {"norm_eps": norm_eps}
        self.gate = Router(embed_dim, choice, **biases, dtype=parts.dtype, key=parts.key())
        shared: Any = {"activation": activation, "dtype": parts.dtype}
        options: Any = {"use_bias": use_bias, "platform": platform, "gated": gated, **shared}
        options |= {"latent_dim": latent_dim}
        self.experts = Experts(embed_dim, hidden_dim, num_experts, **options, key=parts.key())
        shared_key = parts.key()
        self.shared_expert = None
        if shared_dim is not None:
            self.shared_expert = SharedExpert(embed_dim, shared_dim, has_gate=gated, **shared, key=shared_key)
        self.shared_expert_gate = parts.linear(embed_dim, 1) if shared_gate else None
        self.embed_dim, self.hidden_dim, self.parallel = embed_dim, hidden_dim, parallel
        self.compute_dtype = parts.compute_dtype

    _options_of = staticmethod(mixture_of_experts_options)

    @property
    def num_experts(self) -> int:
        return self.gate.choice.num_experts

    @property
    def top_k(self) -> int:
        return self.gate.choice.top_k

    def route(self, x: Float[AnyArray, "*B E"]) -> Routing:
        """The experts of tokens `[..., E]` and their weights: a [`Routing`][ejkernel_eqx.nn.Routing] of `logits` `[...,
        N]`, `weights` `[..., top_k]` and `indices` `[..., top_k]`. The expert with the highest rank comes first, and of
        equal ones that with the lower number."""
        return self.gate(self._read(x))

    @overload
    def __call__(
        self, x: _Tokens, *, padding_mask: _Real = None, return_statistics: Literal[False] = False
    ) -> _Output: ...

    @overload
    def __call__(
        self, x: _Tokens, *, padding_mask: _Real = None, return_statistics: Literal[True]
    ) -> tuple[_Output, RouterStatistics]: ...

    @compiled_call("ejx.nn.MixtureOfExperts")
    def __call__(
        self,
        x: Float[AnyArray, "*B E"],
        *,
        padding_mask: Bool[AnyArray, "*B"] | None = None,
        return_statistics: bool = False,
    ) -> Float[Array, "*B E"] | tuple[Float[Array, "*B E"], RouterStatistics]:
        """**Arguments:**

        - `x`: tokens `[..., E]`, with any number of leading axes.
        - `padding_mask`: bool `[...]`, True for real tokens. Padding goes to no expert, does not count in the statistics, and gives 0.
        - `return_statistics`: whether to return what the losses and the balance of the router are computed from.

        **Returns:** an array of the shape of `x`, laid out like it on a mesh; with `return_statistics`, the tuple of it and
        [`RouterStatistics`][ejkernel_eqx.nn.RouterStatistics].

        **Raises:** `ValueError` for invalid arguments.
        """
        check_flags(return_statistics=return_statistics)
        x = self._read(x)
        check_tokens("padding_mask", padding_mask, "booleans", "x", x, "[...]")
        real = None if padding_mask is None else jnp.asarray(padding_mask)
        x = clear(x, real)
        y, statistics = over_devices(self.gate, self.experts, x, real, self.parallel)
        y = y.astype(x.dtype)
        if self.shared_expert is not None:
            y = y + self._shared(x)
        y = clear(y, real)
        return (y, statistics) if return_statistics else y

    def _read(self, x: Any) -> Array:
        x = read_array("x", x, "floats", "[..., E]")
        if x.ndim < 1 or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"x: expected [..., E] with E = {self.embed_dim}, received shape {x.shape}; features are the last axis."
            )
        return x.astype(self.compute_dtype or promoted(x, self.experts.up_proj))

    def _shared(self, x: Array) -> Array:
        assert self.shared_expert is not None
        y = self.shared_expert(x)
        if self.shared_expert_gate is None:
            return y
        gate = jax.nn.sigmoid(project("shared_expert_gate", self.shared_expert_gate, x, 1))
        # The gradient of the gate, a sum over features, is taken in float32.
        return (wide(y) * wide(gate)).astype(y.dtype)

    _published = mixture_of_experts
