"""Small untrained models, engines of them, and texts served by them."""

import collections
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.models import (
    BranchConfig,
    Decoder,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    SharedBlockConfig,
)
from ejkernel_eqx.serving import Engine
from ejkernel_eqx.serving.pages import Pages

HEADS = {"num_heads": 4, "num_kv_heads": 2}
ROPE = ejx.nn.RotaryEmbedding(8)
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {**HEADS, "rope": ROPE}),
    "windowed": ("attention", {**HEADS, "rope": ROPE, "sliding_window": 6}),
    "forgetting": ("attention", {**HEADS, "forget_gate": True}),
    "mla": (
        "latent_attention",
        {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    ),
    "nsa": ("native_sparse_attention", {**HEADS, "rope": ROPE}),
    "mamba1": ("mamba1", {}),
    "mamba2": ("mamba2", {"head_dim": 8, "state_size": 16}),
    "mamba3": ("mamba3", {"head_dim": 8, "state_size": 16, "mimo_rank": 2}),
    "gla": ("gated_linear_attention", HEADS),
    "delta": ("gated_delta_net", {"num_k_heads": 2, "head_dim": 8}),
    "kda": ("kimi_delta_attention", {"num_heads": 4, "head_dim": 8}),
    "short": ("gated_short_convolution", {}),
    "beside": ("attention", {**HEADS, "rope": ROPE}),  # Mamba-2
    "shared": ("mamba2", {"head_dim": 8, "state_size": 16}),  # behind a block that layers share
}
BESIDE = BranchConfig("mamba2", {"head_dim": 8, "state_size": 16}, (0.8, 0.6))
BLOCK = SharedBlockConfig(1, {**HEADS, "head_dim": 8, "rope": ROPE}, MLPConfig(48), 4, True)
HYBRID = "mamba2,attention"


@functools.cache
def model_of(mixer: str, layers: int | None = None, platform: str | None = None) -> Decoder:
    """A model of bytes. `mixer` may end in " moe": with experts."""
    names, _, mlp = mixer.partition(" ")
    experts = {"hidden_dim": 48, "num_experts": 8, "top_k": 2}
    dense = MLPConfig(96) if not mlp else MoEConfig(experts)
    beside = lambda name: BESIDE if name == "beside" else None
    shared = {"shared": LayerConfig(*MIXERS["shared"], shared_block=0)}
    plain = lambda name: LayerConfig(*MIXERS[name], dense, beside=beside(name))
    pattern = [shared.get(name) or plain(name) for name in names.split(",")]
    repeats = 2 if layers is None else layers // len(pattern)
    blocks = BLOCK if "shared" in names else None
    config = DecoderConfig(256, 32, (*pattern,) * repeats, norm_eps=1e-5, shared_blocks=blocks)
    return Decoder(config, platform=platform, key=jax.random.key(0))


def make_engine(mixer: str, layers: int | None = None, platform: str | None = None, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"num_pages": 14, "page_size": 4, "max_batch": 4, "step_tokens": 8}
    return Engine(model_of(mixer, layers, platform), **(sizes | options))


def check_pages(pages: Pages, held: Iterable[Sequence[int]]) -> None:
    """Compares the counts of users with the pages that each request holds."""
    users = collections.Counter(page for own in held for page in own if page >= 0)
    assert pages._users == [users[page] for page in range(pages.num_pages)]
    unused = [page for page, count in enumerate(pages._users) if not count]
    assert sorted([*pages._empty, *pages._idle]) == unused
    assert all(pages._digests[page] is None for page in pages._empty)
    assert {digest: page for page, digest in enumerate(pages._digests) if digest} == pages._known


def check(engine: Engine) -> None:
    if engine.pages is not None:
        check_pages(engine.pages, [request.pages for request in engine.scheduler.running])


def check_empty(engine: Engine) -> None:
    check(engine)
    assert engine.num_running == engine.num_waiting == engine.pages_used == 0
    assert sorted(engine.scheduler.slots) == list(range(engine.scheduler.sampling.seed.size))
    assert engine.prefixes is None or not engine.prefixes.computing
    assert set(engine.compiled.values()) <= {1}
    assert set(engine.compiled) <= set(engine.programs)


def requests_of(seed: int, count: int, longest: int = 30, most: int = 20) -> list[tuple[bytes, int]]:
    rng = random.Random(seed)
    prompt = lambda: bytes(rng.randrange(256) for _ in range(rng.randint(1, longest)))
    return [(prompt(), rng.randint(1, most)) for _ in range(count)]


def serve(engine: Engine, requests: Any, seed: int = 0, cancel: Any = (), **options: Any) -> list[list[int]]:
    """The tokens of each when they come at random moments; those in `cancel` end after some tokens."""
    rng, waiting, texts, index_of = random.Random(seed), list(range(len(requests))), {}, {}
    while waiting or engine.num_running or engine.num_waiting:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if waiting:
                index = waiting.pop(0)
                number = engine.submit(*requests[index], **options)
                index_of[number], texts[index] = index, []
        for event in engine.step():
            index = index_of[event.request]
            texts[index].append(event.token)
            assert (event.finish is not None) == (len(texts[index]) == requests[index][1])
        for number, index in index_of.items():
            if index in cancel and len(texts[index]) >= cancel[index]:
                engine.cancel(number)
        check(engine)
    return [texts[index] for index in range(len(requests))]


def alone(engine: Engine, requests: Any, **options: Any) -> list[list[int]]:
    return [serve(engine, [request], **options)[0] for request in requests]


def check_whole(mixer: str, requests: Any, layers: int | None = None) -> None:
    """Compares greedy tokens with those of the whole sequence at once, without any cache."""
    model = model_of(mixer, layers, None)
    call = jax.jit(lambda tokens: jnp.argmax(model(tokens), axis=-1))
    for (prompt, _), text in requests:
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + len(text)] = [*prompt, *text]
        best = np.asarray(call(tokens))[0]
        assert best[len(prompt) - 1 :][: len(text)].tolist() == text
