"""The command `serve`: an HTTP server of a published model."""

import argparse

from .._errors import require
from .generate import add_model_arguments, load_text_model
from .output import Outcome, progress, UsageError, user_input

HELP = """The folder holds config.json, safetensors, tokenizer.json and, for chats, a chat template. The server has OpenAI's form:
/v1/models, /v1/completions and /v1/chat/completions. It has no authentication: let others reach it through a proxy that has.
"""
_SIZES = {
    "num_pages": (4096, "pages of keys and values, for all requests together"),
    "page_size": (16, "tokens in a page"),
    "max_batch": (64, "the most requests that run at once"),
    "step_tokens": (512, "the most tokens in a step"),
    "max_length": (None, "the most tokens of a request with its prompt; by default what all pages hold"),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add_model_arguments(command)
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    add("--port", type=int, default=8000, help="port (default: %(default)s)")
    add("--name", help="name of the model in requests (default: that of the folder)")
    for name, (default, what) in _SIZES.items():
        text = what if default is None else f"{what} (default: {default})"
        add(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=text)
    drafts = "tokens proposed from the text itself, which a step verifies (default: %(default)s)"
    add("--num-draft-tokens", type=int, default=0, metavar="N", help=drafts)
    add("--kv-dtype", metavar="DTYPE", help="of the pages (default: that of the model)")


def run(options: argparse.Namespace) -> Outcome:
    try:  # other commands start without all this
        require("uvicorn", "serve", "server")  # first, as this extra has the others
        from .. import models
        from ..serving import Engine, server
    except ImportError as error:
        raise UsageError(str(error)) from error
    with user_input():
        loaded = load_text_model(options)
        drafts = options.num_draft_tokens
        speculate = models.Speculation(num_draft_tokens=drafts) if drafts else None
        sizes = {name: getattr(options, name) for name in _SIZES}
        engine = Engine(loaded.model, kv_dtype=options.kv_dtype, speculate=speculate, **sizes)
    engine.warm_up()
    name = options.name or options.folder.resolve().name
    progress(f"{name} at http://{options.host}:{options.port}/v1; Ctrl-C ends")
    server.run(
        server.make_app(engine, loaded.tokenizer, loaded.template, name=name), options.host, options.port
    )
    numbers = {"tokens": engine.tokens_written, "steps": engine.steps}
    summary = f"{engine.tokens_written:,} tokens in {engine.steps:,} steps"
    if speculate is not None:
        numbers |= {"drafts_offered": engine.drafts_offered, "drafts_accepted": engine.drafts_accepted}
        summary += f"; {engine.drafts_accepted:,} of {engine.drafts_offered:,} drafts accepted"
    return Outcome(numbers, lambda: summary)
