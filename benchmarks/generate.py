"""Steps of whole models beside the floor of their bytes: `generate`, and a loop of one's own over a `DecoderCache`.

    python -m benchmarks generate --json out.json        # every model; needs a GPU
    python -m benchmarks generate --only qwen3-0.6b-b1   # one of them, or several, with spaces between
    python -m benchmarks generate --quick                # a tiny model, anywhere
    python -m benchmarks generate --peers                # beside transformers with a static cache, compiled

Weights are random, in bfloat16. A step's time is the difference of two calls that write different numbers of tokens. The device's time, launches
and copies are those of the same difference in a trace. The floor reads the weights once, the keys and values of all tokens before once, and the
head as it is published; an embedding that is not the head is not read. Of experts it reads those that random tokens reach. Names such as
`llama-8b-int4-b1` are of quantised weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from benchmarks import problems, report
from benchmarks.measure import host_ms, kernel_times, torch_with_cuda

BYTES_PER_SECOND = 4.2e12
"""What an H200's memory gives to a kernel that only reads."""


@dataclasses.dataclass(frozen=True)
class Problem(problems.Problem):
    """`B` texts of `S` tokens. The time of a step is that of `many` new tokens without that of `few`."""

    B: int
    model: str
    S: int = 128
    few: int = 8
    many: int = 56
    bound_ms: float | None = None
    weights: str = ""
    """The kind of `ejx.quantise`, of experts alone where there are any."""

    @property
    def name(self) -> str:
        kind = f"-{self.weights}" if self.weights else ""
        return f"{self.model}{kind}-b{self.B}" + (f"-s{self.S}" if self.S != 128 else "")


PROBLEMS = problems.load("generate", Problem)


@dataclasses.dataclass
class Row:
    problem: str
    floor_ms: float
    bound_ms: float | None
    step_ms: float | None = None
    own_loop_ms: float | None = None
    """Of a loop over `eqx.filter_jit`, which waits in every call, and over `jax.jit`."""
    own_jit_ms: float | None = None
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


def make_model(name: str, weights: str = "") -> ejx.models.Decoder:
    config = ejx.models.decoder_config(problems.model_config(name))
    make = lambda key: ejx.models.Decoder(config, dtype=jnp.bfloat16, key=key)
    model = eqx.filter_jit(make)(jax.random.key(0))
    if not weights:
        return model
    experts = any(isinstance(layer.mlp, ejx.nn.MixtureOfExperts) for stack in model.stacks for layer in stack)
    return ejx.quantise(model, weights, where=(lambda path: ".experts" in path) if experts else None)


def floor_ms(model: ejx.models.Decoder, problem: Problem) -> float:
    """The milliseconds that reading takes, once, in the middle of the steps."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if eqx.is_array(x))
    weights = size((model.stacks, model.norm, model.embedding if model.head is None else model.head))
    for layer in (layer for stack in model.stacks for layer in stack):
        if isinstance(layer.mlp, ejx.nn.MixtureOfExperts):
            count, each = layer.mlp.num_experts, layer.mlp.top_k
            hit = count * (1 - (1 - each / count) ** problem.B)
            weights -= size(layer.mlp.experts) * (1 - hit / count)
    tokens = problem.S + (problem.few + problem.many) // 2
    per_token = model.init_cache(1, 128).nbytes - model.init_cache(1, 64).nbytes
    state = 2 * model.init_cache(1, 64).nbytes - model.init_cache(1, 128).nbytes
    return 1e3 * (weights + problem.B * (tokens * per_token / 64 + 2 * state)) / BYTES_PER_SECOND


def least_ms(call: Callable[[], Any], repeats: int) -> float:
    """The least milliseconds of a call."""
    return min(host_ms(call, 1) for _ in range(repeats))


def step_ms(call: Callable[[int], Any], problem: Problem, repeats: int, warm: int = 1) -> float:
    """Milliseconds a step, from calls for few and for many tokens; `warm`: calls of either before."""
    times = []
    for count in (problem.few, problem.many):
        for _ in range(warm):
            call(count)
        times.append(least_ms(functools.partial(call, count), repeats))
    return (times[1] - times[0]) / (problem.many - problem.few)


def own_loops(model: ejx.models.Decoder, tokens: jax.Array, steps: int) -> list[float]:
    """Milliseconds a step of a user's loops: a compiled step with a donated cache, by `eqx.filter_jit` and by `jax.jit`."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(arrays: Any, given: Any) -> Any:
        token, cache = given
        logits, cache = eqx.combine(arrays, static)(token[:, None], cache)
        return jnp.argmax(logits[:, 0], -1).astype(jnp.int32), cache

    def milliseconds(call: Any, model_or_arrays: Any) -> float:
        state = tokens[:, -1], model.init_cache(tokens.shape[0], 64 * (-(-steps * 4 // 64)))

        def run() -> Any:
            nonlocal state
            state = call(model_or_arrays, state)
            return state

        host_ms(run, 3)
        return host_ms(run, steps)

    waiting = milliseconds(eqx.filter_jit(step, donate="all-except-first"), model)
    return [waiting, milliseconds(jax.jit(step, donate_argnums=1), arrays)]


def measure(model: ejx.models.Decoder, problem: Problem, repeats: int, traces: bool) -> Row:
    rng = np.random.default_rng(0)
    vocabulary = problems.model_config(problem.model)["vocab_size"]
    prompts = jnp.asarray(rng.integers(0, vocabulary, (problem.B, problem.S)), jnp.int32)
    few, many = problem.few, problem.many
    call = lambda n: ejx.models.generate(model, prompts, max_new_tokens=n, stop_tokens=()).tokens
    stream = lambda n: list(ejx.models.stream(model, prompts, max_new_tokens=n, stop_tokens=()))
    row = Row(problem.name, floor_ms(model, problem), problem.bound_ms)
    row.first_call_s = least_ms(lambda: call(many), 1) / 1e3
    row.prefill_ms = least_ms(lambda: call(1), repeats)
    row.step_ms = step_ms(call, problem, repeats)
    row.own_loop_ms, row.own_jit_ms = own_loops(model, prompts, many)
    row.stream_ms = step_ms(stream, problem, repeats)
    if traces:
        short, long = (kernel_times(functools.partial(call, n), 1) for n in (few, many))
        less = lambda name: short.get(name, (0.0, 0))
        kernels = {name: (ms - less(name)[0], n - less(name)[1]) for name, (ms, n) in long.items()}
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

    values = problems.model_config(problem.model)
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, values["vocab_size"], (problem.B, problem.S), device="cuda")

    def call(count: int) -> None:
        more = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
        more |= {"max_new_tokens": count, "min_new_tokens": count}
        model.generate(tokens, attention_mask=torch.ones_like(tokens), **more)
        torch.cuda.synchronize()

    return step_ms(call, problem, repeats, warm=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("generate", __doc__)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    models: dict[tuple[str, str], Any] = {}
    chosen = PROBLEMS["tiny" if options.quick else "anchors"]
    names = [problem.name for problem in chosen]
    if unknown := sorted(set(options.only or ()) - set(names)):
        parser.error(f"--only: expected some of {' '.join(names)}, received {' '.join(unknown)}")
    for problem in chosen:
        if options.only and problem.name not in options.only:
            continue
        key = problem.model, problem.weights
        if key not in models:
            models.clear()  # one at a time
            models[key] = make_model(*key)
        on_gpu = jax.default_backend() == "gpu"
        try:
            row = measure(models[key], problem, options.repeats, on_gpu)
        except Exception as error:  # one model's failure is not the others'
            row = Row(problem.name, 0.0, problem.bound_ms, reason=repr(error)[:500])
        if options.peers and torch_with_cuda():
            row.peer_ms = peer_ms(problem, options.repeats)
        rows.append(row)
        shown = {name: x for name, x in dataclasses.asdict(row).items() if x not in (None, {})}
        print({name: round(x, 3) if isinstance(x, float) else x for name, x in shown.items()}, flush=True)
        report.save(options, rows=[dataclasses.asdict(row) for row in rows])
    return 0
