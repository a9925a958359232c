"""Steps of whole models beside the floor of their bytes: `generate`, and a loop of one's own over a `DecoderCache`.

    python -m benchmarks generate --json out.json        # every model; needs a GPU
    python -m benchmarks generate --only qwen3-0.6b-b1   # one of them
    python -m benchmarks generate --quick                # a tiny model, anywhere
    python -m benchmarks generate --peers                # beside transformers with a static cache, compiled

Weights are random, in bfloat16. A step's time is the difference of two calls that write different numbers of tokens. The device's time, launches
and copies are those of the same difference in a trace. The floor reads the weights once, the keys and values of all tokens before once, and the
head as it is published; an embedding that is not the head is not read. Of experts it reads those that random tokens reach.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from benchmarks import report
from benchmarks.measure import kernel_times, torch_with_cuda

BYTES_PER_SECOND = 4.2e12
"""What an H200's memory gives to a kernel that only reads."""

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "tie_word_embeddings": True},
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "tie_word_embeddings": True},
    "llama-8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e5}
    | {"rms_norm_eps": 1e-5, "vocab_size": 128_256, "tie_word_embeddings": False},
    "qwen3-moe": _QWEN3
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    | {"tie_word_embeddings": False},
    "mamba2": {"model_type": "mamba2", "hidden_size": 2048, "num_hidden_layers": 24, "state_size": 128, "expand": 2}
    | {"head_dim": 64, "num_heads": 64, "n_groups": 1, "conv_kernel": 4, "vocab_size": 50_288}
    | {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Problem:
    model: str
    batch: int
    prompt: int = 128
    steps: tuple[int, int] = (8, 56)
    bound_ms: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-b{self.batch}" + (f"-s{self.prompt}" if self.prompt != 128 else "")


PROBLEMS = (
    Problem("qwen3-0.6b", 1, bound_ms=0.52),
    Problem("qwen3-0.6b", 8, bound_ms=0.58),
    Problem("qwen3-0.6b", 64, bound_ms=1.0),
    Problem("qwen3-0.6b", 1, 32_512, bound_ms=1.6),
    Problem("llama-8b", 1, bound_ms=4.4),
    Problem("qwen3-moe", 1),
    Problem("qwen3-moe", 32),
    Problem("mamba2", 1),
    Problem("mamba2", 64),
)
QUICK = (Problem("tiny", 2, 16, (2, 6)),)


@dataclasses.dataclass
class Row:
    problem: str
    floor_ms: float
    bound_ms: float | None
    step_ms: float | None = None
    own_loop_ms: float | None = None
    stream_ms: float | None = None
    device_ms: float | None = None
    launches: int | None = None
    copies: int | None = None
    prefill_ms: float | None = None
    first_call_s: float | None = None
    peer_ms: float | None = None
    by_kernel: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Microseconds and launches a step, longest first."""
    reason: str | None = None


def make_model(name: str) -> ejx.models.Decoder:
    config = ejx.models.decoder_config(CONFIGS[name])
    make = lambda key: ejx.models.Decoder(config, dtype=jnp.bfloat16, key=key)
    return eqx.filter_jit(make)(jax.random.key(0))


def floor_ms(model: ejx.models.Decoder, problem: Problem) -> float:
    """The milliseconds that reading takes, once, in the middle of the steps."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if eqx.is_array(x))
    weights = size((model.stacks, model.norm, model.embedding if model.head is None else model.head))
    for layer in (layer for stack in model.stacks for layer in stack):
        if isinstance(layer.mlp, ejx.nn.MixtureOfExperts):
            count, each = layer.mlp.num_experts, layer.mlp.top_k
            hit = count * (1 - (1 - each / count) ** problem.batch)
            weights -= size(layer.mlp.experts) * (1 - hit / count)
    tokens = problem.prompt + sum(problem.steps) // 2
    per_token = model.init_cache(1, 128).nbytes - model.init_cache(1, 64).nbytes
    state = 2 * model.init_cache(1, 64).nbytes - model.init_cache(1, 128).nbytes
    return 1e3 * (weights + problem.batch * (tokens * per_token / 64 + 2 * state)) / BYTES_PER_SECOND


def timed(call: Callable[[], Any], repeats: int) -> float:
    """The least seconds of a call."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return best


def own_loop(model: ejx.models.Decoder, tokens: jax.Array, steps: int) -> float:
    """Seconds a step of a user's loop: a compiled step with a donated cache."""

    @functools.partial(eqx.filter_jit, donate="all-except-first")
    def step(model: Any, given: Any) -> Any:
        token, cache = given
        logits, cache = model(token[:, None], cache)
        return jnp.argmax(logits[:, 0], -1).astype(jnp.int32), cache

    state = tokens[:, -1], model.init_cache(tokens.shape[0], 64 * (-(-steps * 4 // 64)))
    for _ in range(3):
        state = step(model, state)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(steps):
        state = step(model, state)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / steps


def measure(model: ejx.models.Decoder, problem: Problem, repeats: int, traces: bool) -> Row:
    rng = np.random.default_rng(0)
    vocabulary = CONFIGS[problem.model]["vocab_size"]
    prompts = jnp.asarray(rng.integers(0, vocabulary, (problem.batch, problem.prompt)), jnp.int32)
    few, many = problem.steps
    call = lambda n: ejx.models.generate(model, prompts, max_new_tokens=n, stop_tokens=()).tokens
    row = Row(problem.name, floor_ms(model, problem), problem.bound_ms)
    row.first_call_s = timed(lambda: call(many), 1)
    times = {n: timed(lambda n=n: call(n), repeats) for n in (1, few, many)}
    row.step_ms = 1e3 * (times[many] - times[few]) / (many - few)
    row.prefill_ms = 1e3 * times[1]
    row.own_loop_ms = 1e3 * own_loop(model, prompts, many)
    tokens = lambda n: list(ejx.models.stream(model, prompts, max_new_tokens=n, stop_tokens=()))
    tokens(few)
    streamed = {n: timed(lambda n=n: tokens(n), repeats) for n in (few, many)}
    row.stream_ms = 1e3 * (streamed[many] - streamed[few]) / (many - few)
    if traces:
        found = {n: kernel_times(lambda n=n: call(n), 1) for n in (few, many)}
        none = (0.0, 0)
        kernels = {
            name: (ms - found[few].get(name, none)[0], count - found[few].get(name, none)[1])
            for name, (ms, count) in found[many].items()
        }
        steps = many - few
        row.device_ms = sum(ms for ms, _ in kernels.values()) / steps
        row.launches = round(sum(count for _, count in kernels.values()) / steps)
        row.copies = round(sum(count for name, (_, count) in kernels.items() if "emcpy" in name) / steps)
        longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:24]
        row.by_kernel = {name: (round(1e3 * ms / steps, 2), round(n / steps, 2)) for name, (ms, n) in longest}
    return row


def peer_ms(problem: Problem, repeats: int) -> float | None:
    """Milliseconds a step of transformers with a static cache and a compiled forward pass."""
    import torch
    import transformers

    values = CONFIGS[problem.model]
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, values["vocab_size"], (problem.batch, problem.prompt), device="cuda")

    def call(count: int) -> None:
        more = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count, **more
        )
        torch.cuda.synchronize()

    times = {}
    for count in problem.steps:
        call(count)
        call(count)
        times[count] = min(_seconds(functools.partial(call, count)) for _ in range(repeats))
    few, many = problem.steps
    return 1e3 * (times[many] - times[few]) / (many - few)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__, prog="python -m benchmarks generate")
    parser.add_argument("--only", nargs="*", default=None, help="names of problems")
    parser.add_argument("--peers", action="store_true", help="also transformers")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    problems = QUICK if options.quick else PROBLEMS
    rows: list[Row] = []
    models: dict[str, Any] = {}
    for problem in problems:
        if options.only and problem.name not in options.only:
            continue
        if problem.model not in models:
            models = {problem.model: make_model(problem.model)}  # one at a time
        on_gpu = jax.default_backend() == "gpu"
        try:
            row = measure(models[problem.model], problem, options.repeats, on_gpu)
        except Exception as error:  # one model's failure is not the others'
            row = Row(problem.name, 0.0, problem.bound_ms, reason=repr(error)[:500])
        if options.peers and torch_with_cuda():
            row.peer_ms = peer_ms(problem, options.repeats)
        rows.append(row)
        shown = {name: x for name, x in dataclasses.asdict(row).items() if x not in (None, {})}
        print({name: round(x, 3) if isinstance(x, float) else x for name, x in shown.items()}, flush=True)
        report.save(options, rows=[dataclasses.asdict(row) for row in rows])
    return 0
