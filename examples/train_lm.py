"""Train a small language model on text, byte by byte; then load the checkpoint from disk and let it write.

    python examples/train_lm.py                       # the source text of Python's own standard library
    python examples/train_lm.py --data my_texts/      # a file or a folder
    python examples/train_lm.py --steps 600 --resume  # go on where the last run, or Ctrl-C, stopped
    python examples/train_lm.py --mixer kda           # Kimi delta attention instead of attention
    python examples/train_lm.py --mixer mamba2,mamba2,attention  # a hybrid: this pattern, repeated
    python examples/train_lm.py --tune                # first find the fastest kernel configurations here
    python examples/train_lm.py --remat kernels       # less memory: make again what is cheap to make

The model is a pre-norm decoder: RMSNorm, a sequence mixer (attention with RoPE and grouped heads, or one of the
recurrent layers, or several in turn), RMSNorm, a SwiGLU. Its layers are stacked: traced once, and written out one
after the other in the program, which is faster than a loop over them (`--scan-layers`). Everything it writes is in
`--out-dir`: `checkpoint.ejx`, `metrics.csv`, `loss.png`, `sample.txt`.
"""

import argparse
import contextlib
import csv
import dataclasses
import pathlib
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

import ejkernel_eqx as ejx

VOCABULARY = 256  # bytes
VALIDATION_BATCHES = 4


class UsageError(Exception):
    """Something is wrong with what was asked for; the message says what to do."""


# The model


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a checkpoint must agree on. Goes into its header."""

    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mixer: str = "attention"

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def pattern(self) -> list[str]:
        """The mixers of the first layers; those of the next ones are the same, and so on."""
        return self.mixer.split(",")


# A mixer is made from the architecture, the layer's place in the model, and `platform` and `key`. It is called
# `mixer(x) -> y` in training, `mixer(x, state) -> (y, state)` in decoding, and in serving `mixer(x, cache, batch=batch)`.


def attention(arch: Architecture, index: Array, **options) -> ejx.nn.MultiHeadAttention:
    rope = ejx.nn.RotaryEmbedding(arch.head_dim)
    heads = {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads}
    return ejx.nn.MultiHeadAttention(arch.embed_dim, **heads, rope=rope, **options)


def mamba1(arch: Architecture, index: Array, **options) -> ejx.nn.Mamba1Mixer:
    return ejx.nn.Mamba1Mixer(arch.embed_dim, **options)


def mamba2(arch: Architecture, index: Array, **options) -> ejx.nn.Mamba2Mixer:
    return ejx.nn.Mamba2Mixer(arch.embed_dim, head_dim=arch.head_dim, state_size=2 * arch.head_dim, **options)


def gla(arch: Architecture, index: Array, **options) -> ejx.nn.GatedLinearAttention:
    heads = {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads}
    return ejx.nn.GatedLinearAttention(arch.embed_dim, **heads, **options)


def lightning(arch: Architecture, index: Array, **options) -> ejx.nn.LightningAttention:
    place = {"layer_index": index, "num_layers": arch.num_layers}
    return ejx.nn.LightningAttention(arch.embed_dim, num_heads=arch.num_heads, **place, **options)


def kda(arch: Architecture, index: Array, **options) -> ejx.nn.KimiDeltaAttention:
    heads = {"num_heads": arch.num_heads, "head_dim": arch.head_dim}
    return ejx.nn.KimiDeltaAttention(arch.embed_dim, **heads, **options)


def gated_deltanet(arch: Architecture, index: Array, **options) -> ejx.nn.GatedDeltaNet:
    heads = {"num_k_heads": arch.num_kv_heads, "num_v_heads": arch.num_heads, "head_dim": arch.head_dim}
    return ejx.nn.GatedDeltaNet(arch.embed_dim, **heads, **options)


MIXERS: dict[str, Callable[..., Any]] = {
    mixer.__name__: mixer for mixer in (attention, mamba1, mamba2, gla, lightning, kda, gated_deltanet)
}


def tokenwise(layer, x: Array) -> Array:
    """An Equinox layer, which takes one vector, over `[B, T, E]` or `[T, E]`."""
    for _ in range(x.ndim - 1):
        layer = jax.vmap(layer)
    return layer(x)


class SwiGLU(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, embed_dim: int, *, key: Array):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        hidden = -(-8 * embed_dim // 3 // 32) * 32
        self.gate = eqx.nn.Linear(embed_dim, hidden, use_bias=False, key=gate_key)
        self.up = eqx.nn.Linear(embed_dim, hidden, use_bias=False, key=up_key)
        self.down = eqx.nn.Linear(hidden, embed_dim, use_bias=False, key=down_key)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(eqx.Module):
    mixer_norm: eqx.nn.RMSNorm
    mixer: Any
    mlp_norm: eqx.nn.RMSNorm
    mlp: SwiGLU

    def __init__(self, arch: Architecture, mixer: str, index: Array, platform: str | None, *, key: Array):
        mixer_key, mlp_key = jax.random.split(key)
        self.mixer_norm = eqx.nn.RMSNorm(arch.embed_dim, use_bias=False)
        self.mixer = MIXERS[mixer](arch, index, platform=platform, key=mixer_key)
        self.mlp_norm = eqx.nn.RMSNorm(arch.embed_dim, use_bias=False)
        self.mlp = SwiGLU(arch.embed_dim, key=mlp_key)

    def __call__(self, x: Array, state=None, batch: ejx.RaggedBatch | None = None) -> tuple[Array, Any]:
        """`x` is `[B, T, E]`; with a batch of sequences packed side by side, as `serve_lm.py` makes them, `[T, E]`."""
        h = tokenwise(self.mixer_norm, x)
        packed = {} if batch is None else {"batch": batch}
        h, state = (self.mixer(h), None) if state is None else self.mixer(h, state, **packed)
        x = x + h
        return x + tokenwise(self.mlp, tokenwise(self.mlp_norm, x)), state


KERNELS = jax.checkpoint_policies.save_only_these_names(
    *("attention_out", "attention_lse", "recurrence_out", "recurrence_state", "recurrence_saved"),
    *("selective_scan_out", "selective_scan_state", "selective_scan_saved"),
)
MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

REMAT = {
    "matmuls": jax.checkpoint_policies.save_from_both_policies(MATMULS, KERNELS),
    "kernels": KERNELS,
}
"""What the forward pass keeps for the gradient instead of everything; the rest is computed again, layer by layer."""


class Decoder(eqx.Module):
    embedding: Array  # [vocabulary, E]
    layers: tuple[
        DecoderLayer, ...
    ]  # one for each place in the pattern, its arrays with a leading axis of periods
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    num_periods: int = eqx.field(static=True)
    scan_layers: bool = eqx.field(static=True)
    remat: str = eqx.field(static=True)

    def __init__(
        self,
        arch: Architecture,
        platform: str | None = None,
        *,
        scan_layers: bool = False,
        remat: str = "none",
        key: Array,
    ):
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.embedding = jax.random.normal(embed_key, (VOCABULARY, arch.embed_dim))
        places = len(arch.pattern)
        self.num_periods = arch.num_layers // places
        self.scan_layers, self.remat = scan_layers, remat
        keys = jax.random.split(layers_key, (self.num_periods, places))
        indices = jnp.arange(arch.num_layers).reshape(self.num_periods, places)

        def stack(place: int, mixer: str) -> DecoderLayer:
            make = lambda key, index: DecoderLayer(arch, mixer, index, platform, key=key)
            return eqx.filter_vmap(make)(keys[:, place], indices[:, place])

        self.layers = tuple(stack(place, mixer) for place, mixer in enumerate(arch.pattern))
        self.norm = eqx.nn.RMSNorm(arch.embed_dim, use_bias=False)
        self.head = eqx.nn.Linear(arch.embed_dim, VOCABULARY, use_bias=False, key=head_key)

    def init_state(self, batch: int, max_length: int):
        """The empty state of all mixers, for decoding."""
        return tuple(layer.mixer.init_cache((self.num_periods, batch), max_length) for layer in self.layers)

    def __call__(self, tokens: Array, state=None) -> tuple[Array, Any]:
        """`tokens` is `[B, T]`; gives float32 logits `[B, T, vocabulary]` and the new state."""
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def period(x, layers_and_states):
            arrays, states = layers_and_states
            new = []
            for layer, state in zip(eqx.combine(arrays, static), states):
                x, state = layer(x, state)
                new.append(state)
            return x, tuple(new)

        # A loop keeps what the gradient needs in stacks, which every layer copies into and out of; written out, each
        # layer's stays where it is. Decoding has no gradient, and its states are stacks in any case.
        written_out = state is None and not self.scan_layers
        if state is None and self.remat != "none":
            # In a loop the compiler cannot merge what is computed again with what was; written out, it needs a barrier.
            period = jax.checkpoint(period, policy=REMAT[self.remat], prevent_cse=written_out)
        states = (None,) * len(self.layers) if state is None else state
        unroll = self.num_periods if written_out else 1
        x, state = jax.lax.scan(period, self.embedding[tokens], (arrays, states), unroll=unroll)
        return tokenwise(self.head, tokenwise(self.norm, x)).astype(jnp.float32), state


def cast(model: Decoder, dtype) -> Decoder:
    """The model with its floating-point arrays in `dtype`, but for the rates of recurrent layers; the optimiser keeps the float32 ones."""

    def one(path, x):
        stays = getattr(path[-1], "name", None) in ("A_log", "D", "dt_bias")
        return x.astype(dtype) if eqx.is_inexact_array(x) and not stays else x

    return jax.tree_util.tree_map_with_path(one, model)


# The data


def find_texts(path: pathlib.Path | None) -> list[pathlib.Path]:
    """The files to learn from, in an order that is the same everywhere."""
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        foreign = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = [f for f in root.rglob("*.py") if not foreign & set(f.relative_to(root).parts)]
    elif path.is_dir():
        root = path
        files = [f for f in path.rglob("*") if f.is_file()]
    elif path.is_file():
        root, files = path.parent, [path]
    else:
        raise UsageError(
            f"--data: expected a file or a folder, but {str(path)!r} does not exist; check the path."
        )
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def load_data(path: pathlib.Path | None, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes to validate on: every 20th file, or the last 5% where there are fewer
    files."""
    texts = [f.read_bytes() for f in find_texts(path)]
    if len(texts) >= 20:
        held_out = texts[10::20]
        del texts[10::20]
    else:
        everything = b"\n".join(texts)
        cut = len(everything) - len(everything) // 20
        texts, held_out = [everything[:cut]], [everything[cut:]]
    train, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in (texts, held_out))
    if min(len(train), len(validation)) < seq_len + 1:
        raise UsageError(
            f"--data: expected more than {20 * (seq_len + 1)} bytes for sequences of {seq_len}, found "
            f"{len(train) + len(validation)} in {str(path or 'the standard library')!r}; give more text or a smaller "
            "--seq-len."
        )
    return train, validation


def batch_at(data: np.ndarray, step: int, args: argparse.Namespace) -> np.ndarray:
    """The batch of a step, `[B, T + 1]`: a function of seed and step alone, so a resumed run sees what it
    would have."""
    random = np.random.default_rng((args.seed, step))
    starts = random.integers(0, len(data) - args.seq_len, args.batch_size)
    return data[starts[:, None] + np.arange(args.seq_len + 1)].astype(np.int32)


# Training


class TrainState(NamedTuple):
    model: Decoder
    optimiser_state: Any
    step: int


def make_optimiser(args: argparse.Namespace) -> optax.GradientTransformation:
    warmup = max(1, min(100, args.steps // 10))
    peak = args.learning_rate
    steps = max(args.steps, warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end_value=0.05 * peak)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


def make_state(args: argparse.Namespace, architecture: dict[str, Any]) -> TrainState:
    layers = {"scan_layers": args.scan_layers, "remat": args.remat}
    model = Decoder(Architecture(**architecture), args.platform, **layers, key=jax.random.key(args.seed))
    return TrainState(model, make_optimiser(args).init(eqx.filter(model, eqx.is_inexact_array)), 0)


def mean_loss(model: Decoder, tokens: Array, dtype) -> Array:
    """Cross entropy of the next byte, in nats."""
    logits, _ = cast(model, dtype)(tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def make_steps(args: argparse.Namespace):
    optimiser = make_optimiser(args)

    @eqx.filter_jit(donate="all")
    def train_step(model, optimiser_state, tokens):
        loss, grads = eqx.filter_value_and_grad(mean_loss)(model, tokens, args.dtype)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, optimiser_state = optimiser.update(grads, optimiser_state, parameters)
        return eqx.apply_updates(model, updates), optimiser_state, loss

    @eqx.filter_jit
    def validation_loss(model, batches):
        return jnp.mean(jax.lax.map(lambda tokens: mean_loss(model, tokens, args.dtype), batches))

    return train_step, validation_loss


def architecture_of(args: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(Architecture)}


def tune(args: argparse.Namespace, state: TrainState) -> TrainState:
    """The same state on the fastest kernel configurations of this device; what is known already is not timed again."""
    tokens = jax.ShapeDtypeStruct((args.batch_size, args.seq_len), jnp.int32)
    forward = lambda model, tokens: cast(model, args.dtype)(tokens)
    # The optimiser's state has the model's structure, so it goes along.
    model, optimiser_state = ejx.tune(
        state.model, tokens, call=forward, others=state.optimiser_state, options=ejx.TuneOptions()
    )
    print(ejx.explain(model))
    return TrainState(model, optimiser_state, state.step)


def save_checkpoint(path: pathlib.Path, state: TrainState, args: argparse.Namespace) -> None:
    ejx.save(path, state, {"architecture": architecture_of(args)})


def load_checkpoint(path: pathlib.Path, args: argparse.Namespace) -> TrainState:
    """The state in a checkpoint, if it is one of the architecture that is asked for."""
    if not path.exists():
        raise UsageError(f"--resume: there is no checkpoint {str(path)!r}; run once without --resume.")

    def like(architecture):
        asked = architecture_of(args)
        different = [
            f"{k}={architecture.get(k)!r} (asked for: {v!r})"
            for k, v in asked.items()
            if architecture.get(k) != v
        ]
        if different:
            raise UsageError(
                f"--resume: {str(path)!r} holds another architecture, with {', '.join(different)}; "
                "pass the options it was made with, or another --out-dir."
            )
        return make_state(args, architecture)

    return ejx.load(path, like)


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collects the first Ctrl-C (or SIGTERM) for the loop to end in its own time; a second one ends at
    once."""
    received: list[int] = []

    def handle(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Metrics:
    """Rows of step, training loss and validation loss (or nothing), kept on disk."""

    def __init__(self, path: pathlib.Path, first_step: int):
        self.path = path
        self.rows: list[tuple[int, float, float | None]] = []
        if first_step and path.exists():
            with path.open(newline="") as file:
                rows = [(int(a), float(b), float(c) if c else None) for a, b, c in list(csv.reader(file))[1:]]
            self.rows = [row for row in rows if row[0] <= first_step]

    def write(self) -> None:
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([("step", "loss", "validation_loss"), *self.rows])

    def plot(self, path: pathlib.Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        steps, losses, _ = zip(*self.rows)
        held_out = [(step, value) for step, _, value in self.rows if value is not None]
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(steps, losses, linewidth=1, label="training")
        axes.plot(*zip(*held_out), marker="o", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level language model")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def train(
    args: argparse.Namespace, state: TrainState, train_data: np.ndarray, validation_data: np.ndarray
) -> bool:
    """Train to `args.steps` and write checkpoints; False if interrupted."""
    train_step, validation_loss = make_steps(args)
    held_out = np.stack([batch_at(validation_data, i, args) for i in range(VALIDATION_BATCHES)])
    metrics = Metrics(args.out_dir / "metrics.csv", state.step)
    model, optimiser_state, step = state
    waiting: list[tuple[int, Array]] = []  # losses not yet fetched: the device should not wait for the host
    bar = tqdm(total=args.steps, initial=step, unit="step", desc="training", dynamic_ncols=True)
    speed_from = (time.perf_counter(), step)
    with interruptible() as interrupts, bar:
        while step < args.steps and not interrupts:
            model, optimiser_state, loss = train_step(
                model, optimiser_state, batch_at(train_data, step, args)
            )
            step += 1
            waiting.append((step, loss))
            bar.update()
            if step % args.validate_every == 0 or step == args.steps or interrupts:
                value = float(validation_loss(model, held_out))
                metrics.rows += [(s, float(x), None) for s, x in waiting[:-1]] + [(step, float(loss), value)]
                waiting.clear()
                bar.write(
                    f"step {step}: training loss {metrics.rows[-1][1]:.3f}, validation loss {value:.3f}"
                )
            if len(waiting) >= 10:
                metrics.rows += [(s, float(x), None) for s, x in waiting]
                waiting.clear()
            if metrics.rows and not waiting:
                now = time.perf_counter()
                tokens = (step - speed_from[1]) * args.batch_size * args.seq_len
                bar.set_postfix(
                    loss=f"{metrics.rows[-1][1]:.3f}", tokens_per_s=f"{tokens / (now - speed_from[0]):,.0f}"
                )
                speed_from = (now, step)
            if step % args.checkpoint_every == 0 or step == args.steps or interrupts:
                save_checkpoint(
                    args.out_dir / "checkpoint.ejx", TrainState(model, optimiser_state, step), args
                )
                metrics.write()
    metrics.plot(args.out_dir / "loss.png")
    return step == args.steps


# Writing


@eqx.filter_jit
def generate(model: Decoder, prompt: Array, key: Array, length: int, temperature: float, top_k: int) -> Array:
    """`length` more bytes after `prompt [T]`: the prompt in one pass, then byte by byte on the state."""
    state = model.init_state(1, prompt.shape[0] + length)
    logits, state = model(prompt[None], state)

    def step(carry, key):
        logits, state = carry
        best, indices = jax.lax.top_k(logits[0], top_k)
        token = jnp.argmax(best) if temperature == 0 else jax.random.categorical(key, best / temperature)
        token = indices[token]
        logits, state = model(token[None, None], state)
        return (logits[:, -1], state), token

    _, tokens = jax.lax.scan(step, (logits[:, -1], state), jax.random.split(key, length))
    return tokens


def write_sample(args: argparse.Namespace) -> None:
    """Generate from the checkpoint as it is on disk."""
    state = load_checkpoint(args.out_dir / "checkpoint.ejx", args)
    model = cast(state.model, args.dtype)
    prompt = jnp.asarray(np.frombuffer(args.prompt.encode() or b"\n", np.uint8).astype(np.int32))
    start = time.perf_counter()
    tokens = generate(
        model,
        prompt,
        jax.random.key(args.seed),
        args.sample_length,
        args.temperature,
        min(args.top_k, VOCABULARY),
    )
    text = args.prompt + np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")
    seconds = time.perf_counter() - start
    (args.out_dir / "sample.txt").write_text(text, encoding="utf-8")
    print(
        f"--- {args.sample_length} bytes from the checkpoint of step {state.step} ({seconds:.1f} s) ---\n{text}\n---"
    )


# The command line


def mixer_pattern(text: str) -> str:
    """`--mixer`: names with commas between them."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MIXERS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(MIXERS)}, received {name!r}")
    return ",".join(names)


SIZES = {
    "cpu": {"steps": 200, "batch_size": 16, "seq_len": 128, "embed_dim": 128, "num_layers": 4}
    | {"num_heads": 4, "num_kv_heads": 2, "learning_rate": 3e-3, "dtype": "float32"},
    "accelerator": {"steps": 2000, "batch_size": 32, "seq_len": 1024, "embed_dim": 768, "num_layers": 12}
    | {"num_heads": 12, "num_kv_heads": 4, "learning_rate": 1e-3, "dtype": "bfloat16"},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=pathlib.Path, help="a file or folder of text (default: Python's standard library)")
    add("--out-dir", type=pathlib.Path, default=pathlib.Path("runs/train_lm"))
    add("--resume", action="store_true", help="go on from the checkpoint in --out-dir")
    for name in ("steps", "batch-size", "seq-len", "embed-dim", "num-layers", "num-heads", "num-kv-heads"):
        add(f"--{name}", type=int, help="default by device")
    add("--learning-rate", type=float, help="default by device")
    add("--mixer", type=mixer_pattern, default="attention", help=f"a pattern of {', '.join(MIXERS)}")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the computation")
    add("--platform", help="kernel platform, e.g. triton or xla (default: chosen by device)")
    loop = "run the layers in a loop instead of writing them out: a smaller program, a slower step"
    add("--scan-layers", action="store_true", help=loop)
    keep = "what the forward pass keeps for the gradient: all, or only products of matrices and kernels' results, or these alone"
    add("--remat", choices=["none", *REMAT], default="none", help=keep)
    add("--tune", action="store_true", help="find the fastest kernel configurations before training")
    add("--seed", type=int, default=0)
    add("--validate-every", type=int, default=50, help="steps")
    add("--checkpoint-every", type=int, default=100, help="steps")
    add("--prompt", default="def ")
    add("--sample-length", type=int, default=300, help="bytes")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest byte")
    add("--top-k", type=int, default=40)
    args = parser.parse_args(argv)
    args.dtype = None if args.dtype == "auto" else args.dtype
    sizes = dict(SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"])
    places = len(args.mixer.split(","))
    # By default as many whole periods as fit, or one.
    sizes["num_layers"] = max(sizes["num_layers"] // places, 1) * places
    vars(args).update({name: value for name, value in sizes.items() if getattr(args, name) is None})
    small = [
        n for n in (*sizes, "validate_every", "checkpoint_every", "sample_length", "top_k") if n != "dtype"
    ]
    for name in small:
        if getattr(args, name) <= 0:
            raise UsageError(
                f"--{name.replace('_', '-')}: expected a positive number, received {getattr(args, name)}."
            )
    if args.num_layers % places:
        raise UsageError(
            f"--num-layers: expected a multiple of the {places} layers of --mixer {args.mixer}, received "
            f"{args.num_layers}; the pattern is repeated whole."
        )
    return args


def run(args: argparse.Namespace) -> int:
    checkpoint = args.out_dir / "checkpoint.ejx"
    try:
        state = load_checkpoint(checkpoint, args) if args.resume else make_state(args, architecture_of(args))
    except ValueError as error:  # our own checks of heads and sizes, and of the file
        raise UsageError(str(error)) from error
    train_data, validation_data = load_data(args.data, args.seq_len)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array)))
    print(
        f"{count:,} parameters, {len(train_data):,} bytes to train on, {len(validation_data):,} held out, "
        f"{args.dtype} on {jax.devices()[0].device_kind}, step {state.step} of {args.steps}"
    )
    if args.tune:
        state = tune(args, state)
    if state.step < args.steps and not train(args, state, train_data, validation_data):
        print(f"Interrupted; {checkpoint} is saved. The same command with --resume goes on from there.")
        return 130
    write_sample(args)
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parse(argv))
    except (UsageError, ejx.EjkernelError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
