"""Writes `golden/*.npz`: what `transformers` makes of the layers in `published.py`, for the tests where it is not installed.

Run from the root of the repository, in an environment with the extras `test` and `transformers`: `python -m tests.weights.make_golden [NAMES]`.
"""

import json
import pathlib
import sys

import numpy as np

from tests.weights.published import CASES, live, Published

FOLDER = pathlib.Path(__file__).parent / "golden"


def write(name: str) -> None:
    found = live(name)
    text = json.dumps({"config": found.config, "shapes": found.shapes})
    np.savez_compressed(
        FOLDER / f"{name}.npz", text=np.frombuffer(text.encode(), np.uint8), x=found.x, y=found.y
    )


def read(name: str) -> Published:
    with np.load(FOLDER / f"{name}.npz") as file:
        text = json.loads(file["text"].tobytes())
        shapes = {key: tuple(shape) for key, shape in text["shapes"].items()}
        return Published(text["config"], shapes, file["x"], file["y"])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        write(case)
