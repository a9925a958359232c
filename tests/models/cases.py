"""Small random models of every published kind: configurations as in `config.json`, weights drawn by name, tokens; and what `transformers` gives."""

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

PATH = pathlib.Path(__file__).parent / "golden.json"
GOLDEN: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
"""For each kind its `config`, the `shapes` of its weights, the `logits` of the last token of each row, and the `norm` of all logits."""


def model_type(kind: str) -> str:
    return kind.partition(" ")[0]


def drawn(shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float32 weights of these names and shapes, each from its own name."""

    def one(name: str, shape: Any) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(name.encode()))
        value = random.standard_normal(tuple(shape)).astype(np.float32)
        if "norm" in name:
            return (0.2 * value + (0.0 if "bias" in name else 1.0)).astype(np.float32)
        if name.endswith("A_log"):
            return np.log(1 + np.abs(value)).astype(np.float32)
        return np.asarray(0.3 * value, np.float32)  # also of a single number

    return {name: one(name, shape) for name, shape in shapes.items()}


def tokens(rows: int = 2, length: int = 13) -> np.ndarray:
    return np.random.default_rng(7).integers(3, 61, (rows, length)).astype(np.int32)
