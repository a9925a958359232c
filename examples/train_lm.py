"""Train a small byte-level language model on text, or fine-tune a published one, and sample from the checkpoint.

    python examples/train_lm.py                       # the source text of Python's own standard library
    python examples/train_lm.py --data my_texts/      # a file or a folder
    python examples/train_lm.py --steps 600 --resume  # continue where the last run ended or was interrupted
    python examples/train_lm.py --mixer kda           # Kimi delta attention instead of attention
    python examples/train_lm.py --mixer mamba2,mamba2,attention  # a hybrid: this pattern, repeated
    python examples/train_lm.py --mlp moe             # a mixture of 8 experts in every layer, 2 for each token
    python examples/train_lm.py --tune                # first find the fastest kernel configurations here
    python examples/train_lm.py --remat kernels       # less memory: recompute what is cheap
    python examples/train_lm.py --float8              # wide layers are multiplied in float8; weights stay as they are
    python examples/train_lm.py --mesh data=2,sequence=2,tensor=2  # rows, tokens and heads over 8 devices, weights over all
    python examples/train_lm.py --model Qwen3-0.6B --lora 16  # fine-tune the published model in this folder
    python examples/train_lm.py --distil Qwen3-0.6B   # a small model that learns from the published model in this folder
    python examples/train_lm.py --model Qwen3-0.6B --lora 16 --quantise int4  # the same beside weights of 4 bits (QLoRA)

The model is an `ejx.models.Decoder`, a pre-norm decoder: RMSNorm, a sequence mixer (attention with RoPE and grouped heads, one of the
recurrent layers, or several in turn), RMSNorm, a SwiGLU or a mixture of them. Its layers are stacked, traced once, and unrolled in the
program, which is faster than a loop over them (`--scan-layers`). All output goes to `--out-dir`: `checkpoint.ejx` (from several devices
`checkpoint.parts`), `metrics.csv`, `loss.png`, `sample.txt` and, with `--model`, the folder `tuned`: the model in its published form, which
`ejkernel-eqx serve` reads.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import sys
import time
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
from ejkernel_eqx.models import add_lora, Decoder, merge_lora
from ejkernel_eqx.models.lora import trained

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train_options
from architectures import Architecture, cast, make_model, published_config, VOCABULARY
from console import drop_output, interruptible, UsageError
from training_log import Log
from training_text import keep_tokenizer, load_data, tokenizer_of

VALIDATION_BATCHES = 4


class TrainState(NamedTuple):
    model: Decoder
    optimiser_state: Any
    step: int


def parse(argv: list[str] | None) -> argparse.Namespace:
    return train_options.parse(argv, __doc__)


def batch_at(data: np.ndarray, step: int, args: argparse.Namespace) -> np.ndarray:
    """The batch of a step, `[B, T + 1]`. It depends only on seed and step, so a resumed run sees the same batches."""
    random = np.random.default_rng((args.seed, step))
    starts = random.integers(0, len(data) - args.seq_len, args.batch_size)
    return data[starts[:, None] + np.arange(args.seq_len + 1)].astype(np.int32)


def make_schedule(args: argparse.Namespace) -> optax.Schedule:
    """The learning rate by step. It depends on `--steps`: a run that is resumed with the same number continues exactly."""
    warmup = max(1, min(100, args.steps // 10))
    steps, peak = max(args.steps, warmup + 1), args.learning_rate
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end_value=0.05 * peak)


def make_optimiser(args: argparse.Namespace) -> optax.GradientTransformation:
    adam = optax.adamw(make_schedule(args), b2=0.98, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def architecture_of(args: argparse.Namespace) -> dict[str, Any]:
    """What must match between a checkpoint and a run; stored in its header."""
    if args.model is not None:
        return {"published": published_config(args.model), "lora": args.lora, "quantise": args.quantise}
    size = VOCABULARY
    if args.distil is not None:
        size = ejx.models.decoder_config(published_config(args.distil)).vocab_size
    names = [field.name for field in dataclasses.fields(Architecture) if field.name != "vocab_size"]
    return {name: getattr(args, name) for name in names} | {"vocab_size": size}


def make_state(
    args: argparse.Namespace, architecture: dict[str, Any], folder: pathlib.Path | None = None
) -> TrainState:
    """A model of this architecture with random weights, or with those of a published folder, and the state of its optimiser."""
    key = jax.random.key(args.seed)
    options: Any = {"scan_layers": args.scan_layers, "remat": args.remat, "platform": args.platform}
    if args.mesh is not None and args.mesh.shape["sequence"] > 1:
        options["sequence_axis"] = "sequence"
    if folder is not None:  # in float32 for the optimiser
        model = ejx.models.from_pretrained(folder, dtype="float32", dequantise=True, **options)
    elif "published" in architecture:
        model = ejx.models.from_config(architecture["published"], **options, key=key)
    else:
        model = make_model(Architecture(**architecture), **options, key=key)
    if kind := architecture.get("quantise"):
        model = ejx.quantise(model, kind)
    if args.float8:
        ejx.with_float8_training(model)  # which says so if there is no wide layer
    if rank := architecture.get("lora"):
        model = add_lora(model, rank, key=jax.random.key(args.seed + 1))
    return TrainState(model, make_optimiser(args).init(eqx.filter(model, trained(model))), 0)


def teacher_of(args: argparse.Namespace, student: Decoder) -> Decoder | None:
    """The model to learn from."""
    if args.distil is None:
        return None
    teacher = ejx.models.from_pretrained(args.distil, dtype=args.dtype, platform=args.platform)
    if (size := teacher.config.vocab_size) != student.config.vocab_size:
        raise UsageError(
            f"--distil: expected a teacher with the {student.config.vocab_size} tokens of --model, received one with {size}; give one of "
            "the same family."
        )
    return teacher


def training_loss(
    model: Decoder,
    tokens: Any,
    dtype: Any,
    balance: float = 0.0,
    teacher: Decoder | None = None,
    share: float = 0.0,
    float8: bool = False,
) -> tuple[Array, Array]:
    """What is minimised, and the cross entropy in it, in nats: experts have to be balanced as well, or a few would do all the work. With a
    teacher, a share of it is the divergence from that. On a mesh, `tokens` are inputs and targets."""
    model = cast(model, dtype)
    model = ejx.with_float8_training(model) if float8 else model
    if isinstance(tokens, tuple):
        (inputs, targets), features = tokens, model
        loss_of = lambda logits: ejx.models.split_cross_entropy(logits, targets)
    else:
        inputs, features = tokens[:, :-1], model.features
        loss_of = lambda x: model.loss(x, tokens[:, 1:])
    has_experts = any(isinstance(layer.mlp, ejx.models.MoEConfig) for layer in model.config.layers)
    if has_experts and balance:
        x, statistics = features(inputs, return_statistics=True)
        added = balance * ejx.nn.load_balancing_loss(statistics)
    else:
        x, added = features(inputs), 0.0
    loss = total = loss_of(x)
    if teacher is not None:
        distance = model.divergence(x, teacher.as_teacher(teacher.features(inputs)))
        total = (1 - share) * loss + share * distance
    return total + added, loss


def mean_loss(model: Decoder, tokens: Any, dtype: Any) -> Array:
    """Cross entropy of the next token, in nats."""
    return training_loss(model, tokens, dtype)[1]


def make_steps(args: argparse.Namespace):
    optimiser = make_optimiser(args)
    compiled: dict[str, Any] = {"compiler_options": ejx.models.compiler_options(args.mesh)}

    @eqx.filter_jit(donate="all-except-first", **compiled)
    def train_step(teacher, model, optimiser_state, tokens):
        parameters, frozen = eqx.partition(model, trained(model))
        more = args.dtype, args.balance, teacher, args.distil_weight, args.float8
        loss_of = lambda parameters: training_loss(eqx.combine(parameters, frozen), tokens, *more)
        (_, loss), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(parameters)
        updates, optimiser_state = optimiser.update(grads, optimiser_state, parameters)
        model = eqx.combine(eqx.apply_updates(parameters, updates), frozen)
        return model, optimiser_state, loss, optax.tree.norm(grads)

    @eqx.filter_jit
    def validation_loss(model, batches):
        if args.mesh is not None:  # written out, because a loop would not know how the arrays in it are split
            pairs = zip(*batches, strict=True)
            return jnp.mean(jnp.stack([mean_loss(model, pair, args.dtype) for pair in pairs]))
        return jnp.mean(jax.lax.map(lambda tokens: mean_loss(model, tokens, args.dtype), batches))

    return train_step, validation_loss


def tune(args: argparse.Namespace, state: TrainState) -> TrainState:
    """The same state with the fastest kernel configurations on this device; known ones are not timed again."""
    sizes = {} if args.mesh is None else args.mesh.shape  # a kernel has the rows and tokens of one device
    shape = args.batch_size // sizes.get("data", 1), args.seq_len // sizes.get("sequence", 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    forward = lambda model, tokens: cast(model, args.dtype)(tokens)
    # The optimiser's state has the structure of the model, so it changes too.
    model, optimiser_state = ejx.tune(
        state.model, tokens, call=forward, others=state.optimiser_state, options=ejx.TuneOptions()
    )
    print(ejx.explain(model))
    return TrainState(model, optimiser_state, state.step)


CHECKPOINTS = ("checkpoint.ejx", "checkpoint.parts")  # of one device: a file; of several: a folder


def newest_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    paths = [folder / name for name in CHECKPOINTS]
    written = lambda path: (path / "index.ejx" if path.is_dir() else path).stat().st_mtime_ns
    return max((path for path in paths if path.exists()), key=written, default=paths[0])


def save_checkpoint(path: pathlib.Path, state: TrainState, args: argparse.Namespace) -> None:
    ejx.save(path, state, {"architecture": architecture_of(args)}, sharded=path.suffix == ".parts")


def load_checkpoint(path: pathlib.Path, args: argparse.Namespace) -> TrainState:
    """The state in a checkpoint, if its architecture is the requested one; placed on the mesh, whatever devices wrote it."""
    if not path.exists():
        raise UsageError(f"--resume: there is no checkpoint {str(path)!r}; run once without --resume.")

    def short(value: Any) -> str:  # a whole configuration would be too long
        return f"a configuration of {value.get('model_type')}" if isinstance(value, dict) else repr(value)

    def like(architecture: dict[str, Any]) -> TrainState:
        pairs = {k: (architecture.get(k), asked) for k, asked in architecture_of(args).items()}
        different = [f"{k}={short(a)} (requested: {short(b)})" for k, (a, b) in pairs.items() if a != b]
        if different:
            raise UsageError(
                f"--resume: {str(path)!r} holds another architecture, with {', '.join(different)}; "
                "pass the options that it was trained with, or another --out-dir."
            )
        return make_state(args, architecture)

    if args.mesh is None:
        return ejx.load(path, like)
    state = eqx.filter_eval_shape(lambda: like(**ejx.serialisation.info(path)["hyperparameters"]))
    return ejx.load(path, ejx.models.place(state, state.model, args.mesh))


def train(args: argparse.Namespace, state: TrainState, data: np.ndarray, held_out: np.ndarray) -> bool:
    """Trains until `args.steps` and writes checkpoints; returns False if interrupted."""
    train_step, validation_loss = make_steps(args)
    batches: Any = np.stack([batch_at(held_out, i, args) for i in range(VALIDATION_BATCHES)])
    model, optimiser_state, step = state
    checkpoint = args.out_dir / CHECKPOINTS[args.mesh is not None and args.mesh.size > 1]
    teacher = teacher_of(args, model)
    on_devices = lambda batch: batch
    if args.mesh is not None:
        on_devices = lambda batch: ejx.models.place_tokens(batch, args.mesh)
        # The state first: its arrays are split like those of the model, which says how.
        optimiser_state, model = (
            ejx.models.place(tree, model, args.mesh) for tree in (optimiser_state, model)
        )
        batches = on_devices(batches)
    # On a terminal only: in a file, every update of a bar would be one more line.
    bar = tqdm(total=args.steps, initial=step, unit="step", desc="training", dynamic_ncols=True, disable=None)
    log = Log(args.log or args.out_dir, step, args.batch_size * args.seq_len, make_schedule(args))
    is_last = False
    with interruptible() as interrupts, bar:
        while not is_last:
            batch = on_devices(batch_at(data, step, args))
            model, optimiser_state, loss, norm = train_step(teacher, model, optimiser_state, batch)
            step += 1
            log.add(step, loss, norm)
            bar.update()
            is_last = step == args.steps or bool(interrupts)
            if is_last or step % args.validate_every == 0 or len(log.waiting) >= 10:
                row = log.read()
                bar.set_postfix(loss=f"{row['loss']:.3f}", tokens_per_s=f"{row['tokens_per_second']:,.0f}")
            if is_last or step % args.validate_every == 0:
                log.validated(value := float(validation_loss(model, batches)))
                bar.write(f"step {step}: training loss {row['loss']:.3f}, validation loss {value:.3f}")
            if is_last or step % args.checkpoint_every == 0:
                log.write()  # before the checkpoint: a resumed run leaves out rows after its first step
                state = TrainState(model, optimiser_state, step)
                save_checkpoint(checkpoint, state, args)
                log.resume_clock()
    log.plot()
    return step == args.steps


def write_sample(args: argparse.Namespace, model: ejx.models.Decoder, step: int) -> None:
    """Generates text from the model of a checkpoint."""
    model, tokenizer = cast(model, args.dtype), tokenizer_of(args.out_dir)
    prompt = tokenizer.encode(args.prompt or "\n")
    sampling = ejx.models.Sampling(args.temperature, min(args.top_k, model.config.vocab_size), seed=args.seed)
    start = time.perf_counter()
    found = ejx.models.generate(model, [prompt], max_new_tokens=args.sample_length, sampling=sampling)
    tokens = found.texts()[0]
    text = tokenizer.decode([*prompt, *tokens])
    (args.out_dir / "sample.txt").write_text(text, encoding="utf-8")
    what = f"{len(tokens)} tokens from the checkpoint of step {step}"
    print(f"--- {what} ({time.perf_counter() - start:.1f} s) ---\n{text}\n---")


def write_tuned(args: argparse.Namespace, model: ejx.models.Decoder) -> None:
    """Writes a tuned model in its published form, with the tokenizer of the folder that it comes from."""
    folder = args.out_dir / "tuned"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    ejx.models.save_pretrained(ejx.dequantise(model), folder, like=args.model)
    print(f"The tuned model is in {folder}; ejkernel-eqx serve {folder} serves it.")


def run(args: argparse.Namespace) -> int:
    try:
        if args.resume:
            state = load_checkpoint(newest_checkpoint(args.out_dir), args)
        else:
            state = make_state(args, architecture_of(args), args.model)
    except ValueError as error:  # from our checks of heads, sizes and the file
        raise UsageError(str(error)) from error
    args.out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = keep_tokenizer(args.model or args.distil, args.out_dir)
    data, held_out = load_data(args.data, args.seq_len, tokenizer)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(state.model, trained(state.model))))
    print(
        f"{count:,} parameters, {len(data):,} tokens to train on, {len(held_out):,} held out, "
        f"{args.dtype} on {jax.devices()[0].device_kind}, step {state.step} of {args.steps}"
    )
    if args.tune:
        state = tune(args, state)
    if state.step < args.steps and not train(args, state, data, held_out):
        print(
            f"Interrupted; {newest_checkpoint(args.out_dir)} is saved. Run the same command with --resume to continue."
        )
        return 130
    args = argparse.Namespace(**{**vars(args), "mesh": None})  # on one device
    state = load_checkpoint(newest_checkpoint(args.out_dir), args)
    model = merge_lora(state.model)
    write_sample(args, model, state.step)
    if args.model is not None:
        write_tuned(args, model)
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


if __name__ == "__main__":
    sys.exit(main())
