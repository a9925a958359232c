"""`python -m benchmarks NAME ...`: runs a benchmark, or says which there are."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

FAMILIES = (
    "attention linear cells decode sparse pooling losses moe moe-layer quantised latent native-sparse".split()
)
"""The benchmarks of `runner.py`."""
SCRIPTS = "decode-gaps devices everything float8-loss generate host-cost mask-construction platform-times ring".split()
SCRIPTS += "serving-steps tpu-static train-step tune".split()
"""The other commands."""
_SHARED = {"moe-layer": "moe", "host-cost": "host", "mask-construction": "host", "platform-times": "tune"}
"""The modules that are not of the name."""


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{_SHARED.get(name, name).replace('-', '_')}")


def family(name: str) -> Any:
    """The `runner.Family` of a benchmark."""
    return module(name).LAYER if name == "moe-layer" else module(name).FAMILY


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in FAMILIES:
        # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6" if name != "decode" else "0.8")
        return importlib.import_module("benchmarks.runner").main(family(name), rest)
    if name in SCRIPTS:
        several = module(name).__name__ in ("benchmarks.host", "benchmarks.tune")
        return module(name).main(rest, name) if several else module(name).main(rest)
    print(
        f"usage: python -m benchmarks NAME ..., NAME one of {', '.join((*FAMILIES, *SCRIPTS))}",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
