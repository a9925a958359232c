"""`python -m benchmarks NAME ...`: runs a benchmark, or says which there are."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

FAMILIES = {
    "attention": ("attention", "FAMILY"),
    "linear": ("linear", "FAMILY"),
    "cells": ("cells", "FAMILY"),
    "decode": ("decode", "FAMILY"),
    "sparse": ("sparse", "FAMILY"),
    "pooling": ("pooling", "FAMILY"),
    "moe": ("moe", "FAMILY"),
    "moe-layer": ("moe", "LAYER"),
    "latent": ("latent", "FAMILY"),
    "native-sparse": ("native_sparse", "FAMILY"),
}
"""The benchmarks of `runner.py`: where their data is."""
_OWN = ("decode-gaps", "everything", "generate", "ring", "serving-steps", "tpu-static", "train-step")
SCRIPTS = {
    **{name: name.replace("-", "_") for name in _OWN},
    **dict.fromkeys(("host-cost", "mask-construction"), "host"),
    **dict.fromkeys(("platform-times", "tune"), "tune"),
}
"""The modules of the other commands, each with a `main`."""


def family(name: str) -> Any:
    """The `runner.Family` of a benchmark."""
    module, attribute = FAMILIES[name]
    return getattr(importlib.import_module(f"benchmarks.{module}"), attribute)


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in FAMILIES:
        # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6" if name != "decode" else "0.8")
        return importlib.import_module("benchmarks.runner").main(family(name), rest)
    if name in SCRIPTS:
        module = importlib.import_module(f"benchmarks.{SCRIPTS[name]}")
        return module.main(rest, name) if SCRIPTS[name] in ("host", "tune") else module.main(rest)
    print(
        f"usage: python -m benchmarks NAME ..., NAME one of {', '.join((*FAMILIES, *SCRIPTS))}",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
