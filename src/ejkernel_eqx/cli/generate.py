"""The commands `generate` and `chat`: a published model in a terminal."""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from .output import Outcome, progress, UsageError, user_input

HELP = """The folder holds config.json, safetensors and tokenizer.json.

example:
  python -m ejkernel_eqx generate path/to/Qwen3-0.6B "Once upon a time" --temperature 0.7
"""
CHAT_HELP = """The folder holds config.json, safetensors, tokenizer.json and a chat template. Each line is a message. The answer
appears as it is written.

  /new     forgets what was said
  /quit    ends, as the end of the input does
  Ctrl-C   stops the answer; without one, ends

example:
  python -m ejkernel_eqx chat path/to/Qwen3-0.6B --temperature 0.7
"""


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that load a published model."""
    add = command.add_argument
    add("folder", type=pathlib.Path, help="of a published model")
    add("--dtype", help="of the computation (default: that of the file)")
    add("--quantise", metavar="KIND", help="round weights to int8, fp8, fp8-block, int4, mxfp4 or nvfp4")
    add("--dequantise", action="store_true", help="quantised weights of the folder become floats")
    add("--platform", help="kernel platform (default: chosen by device)")


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_model_arguments(command)
    command.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of standard input")
    _add_sampling(command, 256)


def add_chat_arguments(command: argparse.ArgumentParser) -> None:
    add_model_arguments(command)
    command.add_argument("--system", metavar="TEXT", help="the message of the system")
    _add_sampling(command, 1024)


def _add_sampling(command: argparse.ArgumentParser, tokens: int) -> None:
    add = command.add_argument
    add("--max-new-tokens", type=int, default=tokens, metavar="N", help="default %(default)s")
    add("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    add("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens; 0, the default, of all")
    add("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest with probability P together")
    add("--min-p", type=float, default=0.0, metavar="P", help="of those with P times the largest probability")
    add("--seed", type=int, default=0)


def load_text_model(options: argparse.Namespace) -> Any:
    """The `TextModel` of `add_model_arguments`."""
    try:  # other commands start without all this
        from .. import quantise
        from ..serving import text
    except ImportError as error:
        raise UsageError(str(error)) from error
    given = {name: getattr(options, name) for name in ("dtype", "platform", "dequantise")}
    loaded = text.TextModel.from_folder(options.folder, **given)
    if options.quantise is not None:
        loaded.model = quantise(loaded.model, options.quantise)
    return loaded


def _sampling(options: argparse.Namespace) -> Any:
    from ..models import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.seed, options.min_p)


def run(options: argparse.Namespace) -> Outcome:
    with user_input():
        sampling = _sampling(options)
        model = load_text_model(options)
        prompts = options.prompts or [line.rstrip("\n") for line in sys.stdin]
        if not prompts:
            raise UsageError("PROMPT: expected at least one, received none; give some text.")
        texts = model.generate(prompts, max_new_tokens=options.max_new_tokens, sampling=sampling)
    return Outcome({"texts": texts}, lambda: "\n".join(texts))


def run_chat(options: argparse.Namespace) -> Outcome:
    with user_input():
        sampling = _sampling(options)
        model = load_text_model(options)
        if model.template is None:
            raise UsageError(f"folder: {options.folder} has no chat template; use the command generate.")
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages, turns = list(start), 0
    if sys.stdin.isatty():
        progress("/quit ends, /new begins again, Ctrl-C stops an answer")
    for line in _lines():
        if line == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        # Another seed for each answer, so that the same words may be answered otherwise.
        own = dataclasses.replace(sampling, seed=(sampling.seed + turns) % 2**32)
        pieces: list[str] = []
        with user_input(), contextlib.suppress(KeyboardInterrupt):
            for piece in model.chat(messages, max_new_tokens=options.max_new_tokens, sampling=own):
                pieces.append(piece)
                print(piece, end="", flush=True, file=options.stdout)
        print(flush=True, file=options.stdout)
        messages.append({"role": "assistant", "content": "".join(pieces)})
        turns += 1
    return Outcome({"messages": messages}, lambda: "bye")


def _lines() -> Iterator[str]:
    """The messages, up to the end or `/quit`."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if sys.stdin.isatty():
                print("> ", end="", flush=True, file=sys.stderr)
            line = sys.stdin.readline()
            if not line or line.strip() == "/quit":
                return
            if line.strip():
                yield line.strip()
