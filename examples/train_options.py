"""The options of `train_lm.py`: what they are, their defaults by device, and what does not fit together."""

import argparse
import importlib.util
import math
import pathlib

import jax
from architectures import MIXERS
from console import check_numbers, UsageError
from jax.sharding import AxisType, Mesh

from ejkernel_eqx.models import MESH_AXES

QUANTISED = ("int8", "fp8", "fp8-block", "int4", "mxfp4", "nvfp4")
SIZES = {
    "cpu": {"steps": 200, "batch_size": 16, "seq_len": 128, "embed_dim": 128, "num_layers": 4}
    | {"num_heads": 4, "num_kv_heads": 2, "learning_rate": 3e-3, "dtype": "float32"},
    "accelerator": {"steps": 2000, "batch_size": 32, "seq_len": 1024, "embed_dim": 768, "num_layers": 12}
    | {"num_heads": 12, "num_kv_heads": 4, "learning_rate": 1e-3, "dtype": "bfloat16"},
}


def mixer_pattern(text: str) -> str:
    """Parses `--mixer`: names separated by commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MIXERS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(MIXERS)}, received {name!r}")
    return ",".join(names)


def mesh_of(text: str) -> Mesh:
    """Parses `--mesh`, such as `data=2,sequence=4`, to a mesh with explicit axes. Those that are not named have one device."""
    sizes = dict.fromkeys(MESH_AXES, 1)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in MESH_AXES or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"expected some of {'=N,'.join(MESH_AXES)}=N, received {part.strip()!r}"
            )
        sizes[name] = int(size)
    if (count := math.prod(sizes.values())) > jax.device_count():
        raise UsageError(
            f"--mesh: expected at most the {jax.device_count()} devices that JAX sees, received {count}; "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of a CPU."
        )
    axis_types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=jax.devices()[:count]
    )


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=pathlib.Path, help="a file or folder of text (default: Python's standard library)")
    add("--out-dir", type=pathlib.Path, default=pathlib.Path("runs/train_lm"))
    add("--log", type=pathlib.Path, metavar="DIR", help="for metrics.csv and loss.png; default: --out-dir")
    add("--resume", action="store_true", help="continue from the checkpoint in --out-dir")
    for name in ("steps", "batch-size", "seq-len", "embed-dim", "num-layers", "num-heads", "num-kv-heads"):
        add(f"--{name}", type=int, help="default by device")
    add("--learning-rate", type=float, help="default by device")
    add("--mixer", type=mixer_pattern, default="attention", help=f"a pattern of {', '.join(MIXERS)}")
    add("--mlp", choices=["dense", "moe"], default="dense", help="moe: a mixture of experts in every layer")
    balance = "weight of the load-balancing loss of experts; 0 for none"
    add("--balance", type=float, default=0.01, help=balance)
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the computation")
    rounded = "multiply by layers with 128 features and more in float8, in the gradient too"
    add("--float8", action="store_true", help=rounded)
    add("--platform", help="kernel platform, e.g. triton or xla (default: chosen by device)")
    loop = "run the layers in a loop instead of unrolling them: a smaller program, a slower step"
    add("--scan-layers", action="store_true", help=loop)
    keep = "what the forward pass keeps for the gradient: all, only matrix products and kernel results, or only kernel results"
    add("--remat", choices=["none", "matmuls", "kernels"], default="none", help=keep)
    folder = "folder of a published model to fine-tune (config.json, safetensors)"
    add("--model", type=pathlib.Path, metavar="FOLDER", help=folder)
    rank = "with --model: train only low-rank updates of this rank; 0 trains all weights"
    add("--lora", type=int, default=0, metavar="RANK", help=rank)
    frozen = "with --lora: keep the weights that are not trained in 8 or 4 bits"
    add("--quantise", choices=QUANTISED, help=frozen)
    teacher = "folder of a published model to learn from: a smaller one takes its vocabulary and comes near its probabilities"
    add("--distil", type=pathlib.Path, metavar="FOLDER", help=teacher)
    share = "with --distil: the share of the divergence from the teacher in what is minimised; the rest is the cross entropy"
    add("--distil-weight", type=float, default=0.5, help=share)
    axes = "axes of a mesh and their devices: data=N splits rows, sequence=N tokens, tensor=N heads and features; all split the weights"
    add("--mesh", type=mesh_of, metavar="AXES", help=axes)
    add("--tune", action="store_true", help="find the fastest kernel configurations before training")
    add("--seed", type=int, default=0)
    add("--validate-every", type=int, default=50, help="steps")
    add("--checkpoint-every", type=int, default=100, help="steps")
    add("--prompt", default="def ")
    add("--sample-length", type=int, default=300, help="bytes")
    add("--temperature", type=float, default=0.7, help="0 takes the most likely byte")
    add("--top-k", type=int, default=40)
    args = parser.parse_args(argv)
    args.dtype = None if args.dtype == "auto" else args.dtype
    _check_model(args)
    if not 0 <= args.distil_weight <= 1:
        raise UsageError(
            f"--distil-weight: expected a share from 0 to 1, received {args.distil_weight}; 1 leaves out the cross entropy."
        )
    if args.balance < 0:
        raise UsageError(f"--balance: expected a number from 0 on, received {args.balance}; 0 is none.")
    sizes = dict(SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"])
    places = len(args.mixer.split(","))
    # By default, as many whole periods as fit, but at least one.
    sizes["num_layers"] = max(sizes["num_layers"] // places, 1) * places
    vars(args).update({name: value for name, value in sizes.items() if getattr(args, name) is None})
    numbers = [name for name in sizes if name not in ("dtype", "learning_rate")]
    check_numbers(args, 1, *numbers, "validate_every", "checkpoint_every", "sample_length", "top_k")
    if args.learning_rate <= 0:
        raise UsageError(f"--learning-rate: expected a positive number, received {args.learning_rate}.")
    _check_mesh(args)
    if args.num_layers % places:
        raise UsageError(
            f"--num-layers: expected a multiple of the {places} layers of --mixer {args.mixer}, received "
            f"{args.num_layers}; only whole patterns are repeated."
        )
    return args


def _check_model(args: argparse.Namespace) -> None:
    """A published model has sizes of its own, and is needed for updates of it."""
    if args.lora < 0:
        raise UsageError(f"--lora: expected a rank from 0 on, received {args.lora}; 0 trains all weights.")
    if args.lora and args.float8:
        raise UsageError(
            "--float8: expected none with --lora, whose weights have no gradient; leave one out."
        )
    if args.lora and args.model is None:
        raise UsageError(
            "--model: expected the folder of a published model beside --lora, received none; give one."
        )
    if args.quantise and not args.lora:
        raise UsageError(
            "--quantise: expected --lora with it, as codes are not trained, received none; give a rank, or leave it out."
        )
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
    for name, size, axis in (("batch-size", args.batch_size, "data"), ("seq-len", args.seq_len, "sequence")):
        if size % (count := args.mesh.shape[axis]):
            raise UsageError(
                f"--{name}: expected a multiple of the {count} devices of axis {axis!r}, received {size}."
            )
    if args.distil is not None:
        raise UsageError(
            "--distil: expected none with --mesh, over which no teacher is placed; leave one out."
        )
    if args.float8 and args.mesh.shape["tensor"] > 1:
        raise UsageError("--float8: expected a --mesh without tensor, which splits features; leave one out.")
    if args.float8 and args.mesh.size > 1 and args.mlp == "moe":
        raise UsageError(
            "--float8: expected none with --mlp moe on a --mesh, whose experts are not multiplied in float8; leave one out."
        )
    if args.mesh.size > 1 and importlib.util.find_spec("orbax") is None:
        raise UsageError(
            "--mesh: several devices write checkpoints by orbax-checkpoint, which is not installed; run: pip install 'ejkernel-eqx[checkpoints]'"
        )
