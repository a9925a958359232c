"""Train a small byte-level language model on text, or fine-tune a published one, and sample from the checkpoint.

    python examples/train_lm.py                       # the source text of Python's own standard library
    python examples/train_lm.py --data my_texts/      # a file or a folder
    python examples/train_lm.py --steps 600 --resume  # continue where the last run ended or was interrupted
    python examples/train_lm.py --mixer kda           # Kimi delta attention instead of attention
    python examples/train_lm.py --mixer mamba2,mamba2,attention  # a hybrid: this pattern, repeated
    python examples/train_lm.py --mlp moe             # a mixture of 8 experts in every layer, 2 for each token
    python examples/train_lm.py --tune                # first find the fastest kernel configurations here
    python examples/train_lm.py --remat kernels       # less memory: recompute what is cheap
    python examples/train_lm.py --mesh data=2,sequence=2,tensor=2  # rows, tokens and heads over 8 devices, weights over all
    python examples/train_lm.py --model Qwen3-0.6B --lora 16  # fine-tune the published model in this folder
    python examples/train_lm.py --model Qwen3-0.6B --lora 16 --quantise int4  # the same beside weights of 4 bits (QLoRA)

The model is an `ejx.models.Decoder`, a pre-norm decoder: RMSNorm, a sequence mixer (attention with RoPE and grouped heads, one of the
recurrent layers, or several in turn), RMSNorm, a SwiGLU or a mixture of them. Its layers are stacked, traced once, and unrolled in the
program, which is faster than a loop over them (`--scan-layers`). All output goes to `--out-dir`: `checkpoint.ejx`, `metrics.csv`,
`loss.png`, `sample.txt`.
"""

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# A closed standard error would be the number of the next file that is opened.
if __name__ == "__main__" and sys.stderr is None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mesh as meshes
from lora import add_lora, merge_lora, trained
from vocabulary import Bytes, Vocabulary, vocabulary_of

VOCABULARY = 256  # bytes
VALIDATION_BATCHES = 4
QUANTISED = ("int8", "fp8", "fp8-block", "int4", "mxfp4", "nvfp4")
NUM_EXPERTS = 8


class UsageError(Exception):
    """Invalid arguments; the message gives the remedy."""


# The model


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What must match between a checkpoint and a run; stored in its header."""

    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mixer: str = "attention"
    mlp: str = "dense"

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def pattern(self) -> list[str]:
        """The mixers of the first layers; the pattern repeats for the others."""
        return self.mixer.split(",")

    def layer(self, mixer: str, **options: Any) -> ejx.models.LayerConfig:
        """A mixer and a SwiGLU, or experts, each preceded by a norm."""
        hidden = -(-8 * self.embed_dim // 3 // 32) * 32
        if self.mlp == "dense":
            return ejx.models.LayerConfig(mixer, options, ejx.models.MLPConfig(hidden))
        # The two experts of a token have as many features together.
        experts = {"hidden_dim": hidden // 2, "num_experts": NUM_EXPERTS, "top_k": 2}
        return ejx.models.LayerConfig(mixer, options, ejx.models.MoEConfig(experts))

    def config(self) -> ejx.models.DecoderConfig:
        layers = [MIXERS[name](self) for name in self.pattern]
        repeats = self.num_layers // len(layers)
        return ejx.models.DecoderConfig(VOCABULARY, self.embed_dim, (*layers,) * repeats, norm_eps=1e-5)


# The arguments for the layers of `ejx.nn`, by the name of the mixer.


def attention(arch: Architecture) -> ejx.models.LayerConfig:
    rope = ejx.nn.RotaryEmbedding(arch.head_dim)
    return arch.layer("attention", num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads, rope=rope)


def mla(arch: Architecture) -> ejx.models.LayerConfig:
    """Multi-head latent attention, in DeepSeek's proportions."""
    dim = arch.head_dim
    sizes = {"kv_lora_rank": 4 * dim, "qk_nope_head_dim": dim, "qk_rope_head_dim": 2 * -(-dim // 4)}
    return arch.layer("latent_attention", num_heads=arch.num_heads, **sizes)


def nsa(arch: Architecture) -> ejx.models.LayerConfig:
    """Native sparse attention, with the paper's sizes of blocks."""
    sizes = {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads}
    rope = ejx.nn.RotaryEmbedding(arch.head_dim)
    return arch.layer("native_sparse_attention", **sizes, rope=rope)


def mamba1(arch: Architecture) -> ejx.models.LayerConfig:
    return arch.layer("mamba1")


def mamba2(arch: Architecture) -> ejx.models.LayerConfig:
    return arch.layer("mamba2", head_dim=arch.head_dim, state_size=2 * arch.head_dim)


def gla(arch: Architecture) -> ejx.models.LayerConfig:
    return arch.layer("gated_linear_attention", num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads)


def lightning(arch: Architecture) -> ejx.models.LayerConfig:
    return arch.layer("lightning_attention", num_heads=arch.num_heads)


def kda(arch: Architecture) -> ejx.models.LayerConfig:
    return arch.layer("kimi_delta_attention", num_heads=arch.num_heads, head_dim=arch.head_dim)


def gated_deltanet(arch: Architecture) -> ejx.models.LayerConfig:
    heads = {"num_k_heads": arch.num_kv_heads, "num_v_heads": arch.num_heads, "head_dim": arch.head_dim}
    return arch.layer("gated_delta_net", **heads)


MIXERS: dict[str, Callable[[Architecture], ejx.models.LayerConfig]] = {
    mixer.__name__: mixer
    for mixer in (attention, mla, nsa, mamba1, mamba2, gla, lightning, kda, gated_deltanet)
}


OLDER = {
    "mlp": "dense",
    "quantise": None,
}  # what checkpoints do not say that were written before there were other kinds


def make_model(arch: Architecture, platform: str | None = None, *, key: Array, **options) -> Decoder:
    """The decoder, with random weights; `options` are `scan_layers` and `remat`."""
    return Decoder(arch.config(), platform=platform, key=key, **options)


def cast(model: Decoder, dtype) -> Decoder:
    """The model with floating-point arrays in `dtype`, except the rates of recurrent layers and the routers of experts; the optimiser keeps the
    float32 ones."""

    def one(path, x):
        names = [getattr(part, "name", None) for part in path]
        stays = names[-1] in ("A_log", "D", "dt_bias") or "gate" in names
        return x.astype(dtype) if eqx.is_inexact_array(x) and not stays else x

    return jax.tree_util.tree_map_with_path(one, model)


# The data


def find_texts(path: pathlib.Path | None) -> list[pathlib.Path]:
    """The training files, in an order that is the same on every machine."""
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


def load_data(
    path: pathlib.Path | None, seq_len: int, vocabulary: Vocabulary | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens for training and tokens for validation: every 20th file, or the last 5% if there are fewer files. By default, a token is a
    byte."""
    texts = [f.read_bytes() for f in find_texts(path)]
    if len(texts) >= 20:
        held_out = texts[10::20]
        del texts[10::20]
    else:
        everything = b"\n".join(texts)
        cut = len(everything) - len(everything) // 20
        texts, held_out = [everything[:cut]], [everything[cut:]]
    train, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in (texts, held_out))
    kind = "bytes"
    if vocabulary is not None and not isinstance(vocabulary, Bytes):
        kind = "tokens"
        train, validation = (
            np.array(vocabulary.encode(part.tobytes()), np.int32) for part in (train, validation)
        )
    if min(len(train), len(validation)) < seq_len + 1:
        raise UsageError(
            f"--data: expected more than {20 * (seq_len + 1)} {kind} for sequences of {seq_len}, found "
            f"{len(train) + len(validation)} in {str(path or 'the standard library')!r}; pass more text or a smaller "
            "--seq-len."
        )
    return train, validation


def batch_at(data: np.ndarray, step: int, args: argparse.Namespace) -> np.ndarray:
    """The batch of a step, `[B, T + 1]`. It depends only on seed and step, so a resumed run sees the same batches."""
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


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a model that a checkpoint does not fix."""
    options = {"scan_layers": args.scan_layers, "remat": args.remat, "platform": args.platform}
    split = args.mesh is not None and args.mesh[meshes.SEQUENCE] > 1
    return options | ({"sequence_axis": meshes.SEQUENCE} if split else {})


def make_state(args: argparse.Namespace, architecture: dict[str, Any]) -> TrainState:
    """A model of this architecture with random weights, and the state of its optimiser."""
    key = jax.random.key(args.seed)
    options = model_options(args)
    if "published" in architecture:
        model = ejx.models.from_config(architecture["published"], **options, key=key)
    else:
        model = make_model(Architecture(**architecture), **options, key=key)
    return with_optimiser(args, model, architecture)


def published_state(args: argparse.Namespace, architecture: dict[str, Any]) -> TrainState:
    """The published model in `--model`, in float32 for the optimiser."""
    options = model_options(args)
    model = ejx.models.from_pretrained(args.model, dtype="float32", dequantise=True, **options)
    return with_optimiser(args, model, architecture)


def with_optimiser(args: argparse.Namespace, model: Decoder, architecture: dict[str, Any]) -> TrainState:
    if kind := architecture.get("quantise"):
        model = ejx.quantise(model, kind)
    if rank := architecture.get("lora"):
        model = add_lora(model, rank, key=jax.random.key(args.seed + 1))
    return TrainState(model, make_optimiser(args).init(eqx.filter(model, trained(model))), 0)


def mean_loss(model: Decoder, tokens: Array, dtype) -> Array:
    """Cross entropy of the next token, in nats."""
    model = cast(model, dtype)
    return model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])


def has_experts(model: Decoder) -> bool:
    return any(isinstance(layer.mlp, ejx.models.MoEConfig) for layer in model.config.layers)


def training_loss(model: Decoder, tokens: Array, args: argparse.Namespace) -> tuple[Array, Array]:
    """What is minimised, and the cross entropy in it: experts have to be balanced as well, or a few would do all the work."""
    if not has_experts(model) or not args.balance:
        loss = mean_loss(model, tokens, args.dtype)
        return loss, loss
    model = cast(model, args.dtype)
    x, statistics = model.features(tokens[:, :-1], return_statistics=True)
    loss = model.loss(x, tokens[:, 1:])
    return loss + args.balance * ejx.nn.load_balancing_loss(statistics), loss


def split_mean_loss(model: Decoder, tokens: tuple[Array, Array], dtype) -> Array:
    """`mean_loss` of inputs and targets on a mesh."""
    return meshes.cross_entropy(cast(model, dtype)(tokens[0]), tokens[1])


def split_training_loss(
    model: Decoder, tokens: tuple[Array, Array], args: argparse.Namespace
) -> tuple[Array, Array]:
    """`training_loss` of inputs and targets on a mesh."""
    if not has_experts(model) or not args.balance:
        loss = split_mean_loss(model, tokens, args.dtype)
        return loss, loss
    logits, statistics = cast(model, args.dtype)(tokens[0], return_statistics=True)
    loss = meshes.cross_entropy(logits, tokens[1])
    return loss + args.balance * ejx.nn.load_balancing_loss(statistics), loss


def compiler_options() -> dict[str, Any]:
    """For the compiler of a training step: on a GPU, queries and keys are not computed by one product, as the gradient of their weights
    would then be one of arrays that first have to be written next to each other."""
    return {"xla_gpu_dot_merger_threshold_mb": 0} if jax.default_backend() == "gpu" else {}


def make_steps(args: argparse.Namespace):
    optimiser = make_optimiser(args)
    loss_with_parts = training_loss if args.mesh is None else split_training_loss

    compiled: dict[str, Any] = {"compiler_options": compiler_options()}

    @eqx.filter_jit(donate="all", **compiled)
    def train_step(model, optimiser_state, tokens):
        parameters, frozen = eqx.partition(model, trained(model))
        loss_of = lambda parameters: loss_with_parts(eqx.combine(parameters, frozen), tokens, args)
        (_, loss), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(parameters)
        updates, optimiser_state = optimiser.update(grads, optimiser_state, parameters)
        model = eqx.combine(eqx.apply_updates(parameters, updates), frozen)
        return model, optimiser_state, (loss, optax.tree.norm(grads))

    @eqx.filter_jit
    def validation_loss(model, batches):
        if args.mesh is not None:  # written out, because a loop would not know how the arrays in it are split
            pairs = ((batches[0][i], batches[1][i]) for i in range(VALIDATION_BATCHES))
            return jnp.mean(jnp.stack([split_mean_loss(model, pair, args.dtype) for pair in pairs]))
        return jnp.mean(jax.lax.map(lambda tokens: mean_loss(model, tokens, args.dtype), batches))

    return train_step, validation_loss


def architecture_of(args: argparse.Namespace) -> dict[str, Any]:
    """What must match between a checkpoint and a run; stored in its header."""
    if args.model is not None:
        return {"published": read_config(args.model), "lora": args.lora, "quantise": args.quantise}
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(Architecture)}


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    try:
        config = read_object(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.is_file():  # which says what ends a text, as in from_pretrained
            stop = read_object(generation).get("eos_token_id")
            own = config["text_config"] if isinstance(config.get("text_config"), dict) else config
            own["eos_token_id"] = own.get("eos_token_id") if stop is None else stop
        return config
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--model: expected the folder of a published model with a config.json, received {str(folder)!r} ({error}); "
            "huggingface_hub.snapshot_download(name) downloads one."
        ) from error


def read_object(path: pathlib.Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no JSON object, but {type(found).__name__}")
    return found


def tune(args: argparse.Namespace, state: TrainState) -> TrainState:
    """The same state with the fastest kernel configurations on this device; known ones are not timed again."""
    # A kernel has the rows and tokens of one device.
    rows, length = (
        size if args.mesh is None else size // args.mesh[axis]
        for size, axis in ((args.batch_size, meshes.DATA), (args.seq_len, meshes.SEQUENCE))
    )
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    forward = lambda model, tokens: cast(model, args.dtype)(tokens)
    # The optimiser's state has the structure of the model, so it changes too.
    model, optimiser_state = ejx.tune(
        state.model, tokens, call=forward, others=state.optimiser_state, options=ejx.TuneOptions()
    )
    print(ejx.explain(model))
    return TrainState(model, optimiser_state, state.step)


def save_checkpoint(path: pathlib.Path, state: TrainState, args: argparse.Namespace) -> None:
    ejx.save(path, state, {"architecture": architecture_of(args)})


def short(value: Any) -> str:
    """A value as text in a message; a whole configuration would be too long."""
    return f"a configuration of {value.get('model_type')}" if isinstance(value, dict) else repr(value)


def load_checkpoint(path: pathlib.Path, args: argparse.Namespace) -> TrainState:
    """The state in a checkpoint, if its architecture is the requested one."""
    if not path.exists():
        raise UsageError(f"--resume: there is no checkpoint {str(path)!r}; run once without --resume.")

    def like(architecture):
        asked = architecture_of(args)
        held = OLDER | architecture
        different = [
            f"{k}={short(held.get(k))} (requested: {short(v)})" for k, v in asked.items() if held.get(k) != v
        ]
        if different:
            raise UsageError(
                f"--resume: {str(path)!r} holds another architecture, with {', '.join(different)}; "
                "pass the options that it was trained with, or another --out-dir."
            )
        return make_state(args, architecture)

    return ejx.load(path, like)


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Catches the first Ctrl-C (or SIGTERM), so that the loop can end cleanly; a second one ends immediately."""
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
    """Rows of step, training loss, norm of the gradient and, if computed, validation loss, stored on disk."""

    COLUMNS = ("step", "loss", "gradient_norm", "validation_loss")

    def __init__(self, path: pathlib.Path, first_step: int):
        self.path = path
        self.rows: list[tuple[int, float, float | None, float | None]] = []
        if first_step and path.exists():
            number = lambda row, name: float(row[name]) if row.get(name) else None
            with path.open(newline="") as file:
                self.rows = [
                    (int(row["step"]), float(row["loss"]), *(number(row, name) for name in self.COLUMNS[2:]))
                    for row in csv.DictReader(file)
                    if int(row["step"]) <= first_step
                ]

    def add(self, steps: list[tuple[int, tuple[Array, Array]]], validation: float | None = None) -> None:
        """What steps returned; `validation` belongs to the last of them."""
        self.rows += [(step, float(loss), float(norm), None) for step, (loss, norm) in steps]
        self.rows[-1] = (*self.rows[-1][:3], validation)

    def write(self) -> None:
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([self.COLUMNS, *self.rows])

    def plot(self, path: pathlib.Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        steps, losses, norms, _ = zip(*self.rows)
        held_out = [(step, value) for step, *_, value in self.rows if value is not None]
        figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
        above.plot(steps, losses, linewidth=1, label="training")
        above.plot(*zip(*held_out), marker="o", label="validation")
        above.set(ylabel="loss (nats per token)", title="Language model")
        above.legend()
        below.plot(steps, [np.nan if norm is None else norm for norm in norms], linewidth=1)
        below.set(xlabel="step", ylabel="norm of the gradient")
        for axes in (above, below):
            axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def train(
    args: argparse.Namespace, state: TrainState, train_data: np.ndarray, validation_data: np.ndarray
) -> bool:
    """Trains until `args.steps` and writes checkpoints; returns False if interrupted."""
    train_step, validation_loss = make_steps(args)
    held_out = np.stack([batch_at(validation_data, i, args) for i in range(VALIDATION_BATCHES)])
    metrics = Metrics(args.log / "metrics.csv", state.step)
    model, optimiser_state, step = state
    on_devices = lambda batch: batch
    if args.mesh is not None:
        mesh = meshes.mesh_of(args.mesh)
        on_devices = lambda batch: meshes.put_tokens(batch, mesh)
        # The state first: its arrays are split like those of the model, which says how.
        optimiser_state, model = (meshes.place(tree, model, mesh) for tree in (optimiser_state, model))
        held_out = on_devices(held_out)
    waiting: list[
        tuple[int, tuple[Array, Array]]
    ] = []  # losses and norms not yet fetched, so that the device does not wait for the host
    # On a terminal only: in a file, every update of a bar would be one more line.
    bar = tqdm(total=args.steps, initial=step, unit="step", desc="training", dynamic_ncols=True, disable=None)
    speed_from = (time.perf_counter(), step)
    with interruptible() as interrupts, bar:
        while step < args.steps and not interrupts:
            model, optimiser_state, measured = train_step(
                model, optimiser_state, on_devices(batch_at(train_data, step, args))
            )
            step += 1
            waiting.append((step, measured))
            bar.update()
            if step % args.validate_every == 0 or step == args.steps or interrupts:
                value = float(validation_loss(model, held_out))
                metrics.add(waiting, value)
                waiting.clear()
                bar.write(
                    f"step {step}: training loss {metrics.rows[-1][1]:.3f}, validation loss {value:.3f}"
                )
            if len(waiting) >= 10:
                metrics.add(waiting)
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
    metrics.plot(args.log / "loss.png")
    return step == args.steps


# Writing


def write_sample(args: argparse.Namespace) -> None:
    """Generates text from the checkpoint on disk, on one device."""
    args = argparse.Namespace(**{**vars(args), "mesh": None})
    state = load_checkpoint(args.out_dir / "checkpoint.ejx", args)
    model, vocabulary = cast(merge_lora(state.model), args.dtype), vocabulary_of(args.out_dir)
    prompt = vocabulary.encode(args.prompt.encode() or b"\n")
    top_k = min(args.top_k, model.config.vocab_size)
    sampling = ejx.models.Sampling(args.temperature, top_k, seed=args.seed)
    start = time.perf_counter()
    found = ejx.models.generate(model, [prompt], max_new_tokens=args.sample_length, sampling=sampling)
    tokens = found.texts()[0]
    text = vocabulary.decode([*prompt, *tokens]).decode(errors="replace")
    seconds = time.perf_counter() - start
    (args.out_dir / "sample.txt").write_text(text, encoding="utf-8")
    kind = "bytes" if isinstance(vocabulary, Bytes) else "tokens"
    print(
        f"--- {len(tokens)} {kind} from the checkpoint of step {state.step} ({seconds:.1f} s) ---\n{text}\n---"
    )


# The command line


def mixer_pattern(text: str) -> str:
    """Parses `--mixer`: names separated by commas."""
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
    add(
        "--log",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of metrics.csv and loss.png (default: --out-dir)",
    )
    add("--resume", action="store_true", help="continue from the checkpoint in --out-dir")
    for name in ("steps", "batch-size", "seq-len", "embed-dim", "num-layers", "num-heads", "num-kv-heads"):
        add(f"--{name}", type=int, help="default by device")
    add("--learning-rate", type=float, help="default by device")
    add("--mixer", type=mixer_pattern, default="attention", help=f"a pattern of {', '.join(MIXERS)}")
    add("--mlp", choices=["dense", "moe"], default="dense", help="moe: a mixture of experts in every layer")
    add(
        "--balance", type=float, default=0.01, help="weight of the load-balancing loss of experts; 0 for none"
    )
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the computation")
    add("--platform", help="kernel platform, e.g. triton or xla (default: chosen by device)")
    loop = "run the layers in a loop instead of unrolling them: a smaller program, a slower step"
    add("--scan-layers", action="store_true", help=loop)
    keep = "what the forward pass keeps for the gradient: all, only matrix products and kernel results, or only kernel results"
    add("--remat", choices=["none", "matmuls", "kernels"], default="none", help=keep)
    add(
        "--model",
        type=pathlib.Path,
        metavar="FOLDER",
        help="folder of a published model to fine-tune (config.json, safetensors)",
    )
    add(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="with --model: train only low-rank updates of this rank; 0 trains all weights",
    )
    add(
        "--quantise",
        choices=QUANTISED,
        help="with --lora: keep the weights that are not trained in 8 or 4 bits",
    )
    axes = "axes of a mesh and their devices: data=N splits rows, sequence=N tokens, tensor=N heads and features; all split the weights"
    add("--mesh", type=meshes.read_axes, metavar="AXES", help=axes)
    add("--tune", action="store_true", help="find the fastest kernel configurations before training")
    add("--seed", type=int, default=0)
    add("--validate-every", type=int, default=50, help="steps")
    add("--checkpoint-every", type=int, default=100, help="steps")
    add("--prompt", default="def ")
    add("--sample-length", type=int, default=300, help="bytes")
    add("--temperature", type=float, default=0.7, help="0 takes the most likely byte")
    add("--top-k", type=int, default=40)
    args = parser.parse_args(argv)
    args.log = args.out_dir if args.log is None else args.log
    args.dtype = None if args.dtype == "auto" else args.dtype
    if args.lora < 0 or (args.lora and args.model is None):
        raise UsageError(
            f"--lora: expected a rank of at least 1 with --model, received {args.lora}; 0 trains all weights."
        )
    if args.quantise and not args.lora:
        raise UsageError(
            "--quantise: expected --lora with it, as codes are not trained, received none; give a rank, or leave it out."
        )
    if args.balance < 0:
        raise UsageError(f"--balance: expected a number from 0 on, received {args.balance}; 0 is none.")
    _check_no_sizes(args)
    sizes = dict(SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"])
    places = len(args.mixer.split(","))
    # By default, as many whole periods as fit, but at least one.
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
    _check_mesh(args)
    if args.num_layers % places:
        raise UsageError(
            f"--num-layers: expected a multiple of the {places} layers of --mixer {args.mixer}, received "
            f"{args.num_layers}; only whole patterns are repeated."
        )
    return args


def _check_no_sizes(args: argparse.Namespace) -> None:
    """A published model has sizes of its own."""
    given = [name for name in ("embed_dim", "num_layers", "num_heads", "num_kv_heads") if getattr(args, name)]
    given += ["mixer"] if args.mixer != "attention" else []
    given += ["mlp"] if args.mlp != "dense" else []
    if args.model is not None and given:
        raise UsageError(
            f"--{given[0].replace('_', '-')}: expected none beside --model, whose config.json says it, received {getattr(args, given[0])}; leave "
            "it out."
        )


def _check_mesh(args: argparse.Namespace) -> None:
    if args.mesh is None:
        return
    try:
        meshes.mesh_of(args.mesh)
    except ValueError as error:
        raise UsageError(f"--mesh: {error}.") from error
    for name, axis in (("batch_size", meshes.DATA), ("seq_len", meshes.SEQUENCE)):
        if getattr(args, name) % args.mesh[axis]:
            raise UsageError(
                f"--{name.replace('_', '-')}: expected a multiple of the {args.mesh[axis]} devices of axis {axis!r}, received {getattr(args, name)}."
            )
    if args.lora:
        raise UsageError(
            "--lora: expected none with --mesh, whose recipe splits whole matrices; leave one out."
        )


def keep_vocabulary(args: argparse.Namespace) -> Vocabulary:
    """The tokenizer of the published model, copied beside the checkpoint; without a model, bytes."""
    kept = args.out_dir / "tokenizer.json"
    if (args.out_dir / "config.json").exists():
        raise UsageError(
            f"--out-dir: expected a folder for what is written, received {str(args.out_dir)!r}, which holds a published model; give another."
        )
    if args.model is None:
        kept.unlink(missing_ok=True)
        return Bytes()
    if not (args.model / "tokenizer.json").is_file():
        raise UsageError(
            f"--model: {str(args.model)!r} has no tokenizer.json; download all files of the model."
        )
    shutil.copyfile(args.model / "tokenizer.json", kept)
    return vocabulary_of(args.out_dir)


def run(args: argparse.Namespace) -> int:
    checkpoint = args.out_dir / "checkpoint.ejx"
    try:
        new_state = make_state if args.model is None else published_state
        state = load_checkpoint(checkpoint, args) if args.resume else new_state(args, architecture_of(args))
    except ValueError as error:  # from our checks of heads, sizes and the file
        raise UsageError(str(error)) from error
    for folder in (args.out_dir, args.log):
        folder.mkdir(parents=True, exist_ok=True)
    vocabulary = keep_vocabulary(args)
    train_data, validation_data = load_data(args.data, args.seq_len, vocabulary)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(state.model, trained(state.model))))
    kind = "bytes" if isinstance(vocabulary, Bytes) else "tokens"
    print(
        f"{count:,} parameters, {len(train_data):,} {kind} to train on, {len(validation_data):,} held out, "
        f"{args.dtype} on {jax.devices()[0].device_kind}, step {state.step} of {args.steps}"
    )
    if args.tune:
        state = tune(args, state)
    if state.step < args.steps and not train(args, state, train_data, validation_data):
        print(f"Interrupted; {checkpoint} is saved. Run the same command with --resume to continue.")
        return 130
    write_sample(args)
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parse(argv))
    except (UsageError, ejx.EjkernelError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder without permissions, a reader that has gone
        print(f"train_lm: {error}; mend that and continue with --resume.", file=sys.stderr)
        drop_output()
        return 1


def drop_output() -> None:
    """What standard output still holds is not written when the process ends, which would fail again."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # no stream, or one without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
