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

ENCODERS: dict[str, dict[str, Any]] = json.loads(PATH.with_name("encoders.json").read_text())
"""The same for encoders, with some `features` of real tokens in the place of logits; `encoder_inputs` makes them."""


def model_type(kind: str) -> str:
    return kind.partition(" ")[0]


def drawn(shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float32 weights of these names and shapes, each from its own name."""

    def one(name: str, shape: Any) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(name.encode()))
        value = random.standard_normal(tuple(shape)).astype(np.float32)
        if "norm" in name.lower():
            return (0.2 * value + (0.0 if "bias" in name else 1.0)).astype(np.float32)
        if name.endswith("A_log"):
            return np.log(1 + np.abs(value)).astype(np.float32)
        return np.asarray(0.3 * value, np.float32)  # also of a single number

    return {name: one(name, shape) for name, shape in shapes.items()}


def tokens(rows: int = 2, length: int = 13) -> np.ndarray:
    return np.random.default_rng(7).integers(3, 61, (rows, length)).astype(np.int32)


def encoder_inputs(config: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, which of them are real, and their types."""
    ids, real = tokens(), np.arange(13) < np.array([[13], [8]])
    ids[~real] = config["pad_token_id"]
    return ids, real, np.broadcast_to(np.arange(13, dtype=np.int32) // 5 % 2, ids.shape)
