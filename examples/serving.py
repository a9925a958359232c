"""Many requests at once with `ejkernel_eqx.serving`: shared first tokens are computed once, and a request may be cancelled at any time.

    python examples/serving.py                                   # an untrained model of bytes
    python examples/serving.py --model Qwen3-0.6B                # the published model in this folder

`serve_lm.py` serves prompts from a file; `python -m ejkernel_eqx serve FOLDER` is an HTTP server.
"""

import argparse
import pathlib

import jax
from architectures import Architecture, make_model
from training_text import tokenizer_of

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Sampling
from ejkernel_eqx.serving import Engine

PREFIX = "The following is a list of words. Each of them begins with the letter that comes before it. "


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="folder of a published model")
    args = parser.parse_args(argv)
    if args.model is None:
        model = make_model(Architecture(64, 2, 4, 2), key=jax.random.key(0))
    else:
        model = ejx.models.from_pretrained(args.model)
    tokenizer = tokenizer_of(args.model or pathlib.Path())
    engine = Engine(model, num_pages=128, max_batch=4, step_tokens=64)

    prompts = [tokenizer.encode(f"{PREFIX}{letter}: ") for letter in "ABCDE"]
    tokens = {}
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.7, top_p=0.9, seed=seed)
        number = engine.submit(prompt, max_new_tokens=16, sampling=sampling)
        tokens[number] = []
    last = number
    for event in engine.run():
        tokens[event.request].append(event.token)
        if event.finish is not None:
            print(f"request {event.request} ({event.finish}): {tokenizer.decode(tokens[event.request])!r}")
        if event.request == 0 and len(tokens[0]) == 8:
            engine.cancel(last)
            print(f"request {last}: cancelled")
    print(
        f"{engine.tokens_written} tokens in {engine.steps} steps, which computed {engine.tokens_computed}; "
        f"the prompts have {sum(map(len, prompts))}"
    )


if __name__ == "__main__":
    main()
