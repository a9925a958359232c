"""The options of `serve_lm.py`."""

import argparse
import codecs
import pathlib
import sys

import jax
from console import check_numbers, UsageError
from train_options import QUANTISED, SIZES

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Sampling

ENGINE_SIZES = ("num_pages", "page_size", "max_batch", "step_tokens", "max_length")
KV_DTYPES = ["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]


def unescaped(text: str) -> str:
    """Parses `--stop`, in which \\n is a line break."""
    try:
        return codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a text or escapes such as \\n, received {text}"
        ) from error


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", type=pathlib.Path, default=pathlib.Path("runs/train_lm/checkpoint.ejx"))
    add("--model", type=pathlib.Path, metavar="FOLDER", help="a published model, instead of a checkpoint")
    add("--prompts", default="-", help="a file with one prompt per line; - is standard input (the default)")
    add("--out", type=pathlib.Path, help="also write a line of JSON to this file when a request ends")
    add("--max-new-tokens", type=int, default=100, help="tokens to generate for each prompt")
    add(
        "--stop",
        type=unescaped,
        help="end a text before this string, e.g. '\\n'; model's stop tokens also end it",
    )
    add("--temperature", type=float, default=0.0, help="0 (the default) takes the most likely token")
    add("--top-k", type=int, default=0, help="draw from this many most likely tokens; 0 for all")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the most likely tokens with this probability together",
    )
    add("--seed", type=int, default=0)
    add("--max-batch", type=int, default=8, help="maximum number of concurrent sequences")
    add("--step-tokens", type=int, default=128, help="tokens per step, of decodes and prompts together")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--num-pages", type=int, default=512)
    add(
        "--max-length",
        type=int,
        help="maximum tokens of a request with its prompt (default: what all pages hold)",
    )
    drafts = "tokens looked up in each text and verified in a step; 0 (the default) for none"
    add("--num-draft-tokens", type=int, default=0, help=drafts)
    add(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values; 8-bit dtypes are quantised"
    )
    add(
        "--quantise",
        choices=QUANTISED,
        help="round the weights of linear layers and of experts to 8 or 4 bits",
    )
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the computation")
    add("--platform", help="kernel platform, e.g. triton or xla (default: chosen by device)")
    args = parser.parse_args(argv)
    platforms = [platform.value for platform in ejx.Platform]
    if args.platform not in (None, *platforms):
        raise UsageError(f"--platform: expected one of {', '.join(platforms)}, received {args.platform!r}.")
    if args.dtype == "auto":
        args.dtype = SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"]["dtype"]
    check_numbers(args, 1, "max_new_tokens", *ENGINE_SIZES)
    check_numbers(args, 0, "seed", "num_draft_tokens")
    try:
        Sampling(args.temperature, args.top_k, args.top_p)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return args


def check_files(args: argparse.Namespace) -> None:
    """Raises an error if the model or standard output is not there."""
    if sys.stdout is None:
        raise UsageError("standard output is closed; redirect it to a file, or to /dev/null with --out.")
    if args.model is not None and not (args.model / "tokenizer.json").is_file():
        raise UsageError(
            f"--model: expected the folder of a published model, but {str(args.model)!r} has no tokenizer.json; download all files of the model."
        )
    if args.model is None and not args.checkpoint.is_file():
        raise UsageError(
            f"--checkpoint: there is no file {str(args.checkpoint)!r}; make one with examples/train_lm.py, or pass the path of an existing one."
        )
    inputs = [path for path in (args.checkpoint, pathlib.Path(args.prompts)) if path.exists()]
    if args.out is not None and args.out.exists() and any(map(args.out.samefile, inputs)):
        raise UsageError(
            f"--out: expected a file other than the inputs, received {str(args.out)!r}; pass another."
        )
