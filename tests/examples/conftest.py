"""The examples as modules, and what they read: a text, and the checkpoint of an untrained model."""

import importlib
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import pytest

MODULES = ("train_lm", "serve_lm", "serving", "grpo")
SHARED = ("architectures", "console", "serve_options", "train_options", "training_log", "training_text")
SMALL = "--batch-size 8 --seq-len 32 --embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2".split()
SMALL += "--validate-every 10 --checkpoint-every 10 --sample-length 20 --learning-rate 1e-2".split()


class Examples(NamedTuple):
    """The modules, as they import one another beside each other."""

    train_lm: Any
    serve_lm: Any
    serving: Any
    grpo: Any

    def train(self, *options: object) -> int:
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            return self.train_lm.main([*map(str, options)])


@pytest.fixture(scope="package")
def examples():
    folder = str(pathlib.Path(__file__).parents[2] / "examples")
    sys.path.insert(0, folder)
    before = {name: sys.modules.pop(name, None) for name in (*MODULES, *SHARED)}
    yield Examples(*(importlib.import_module(name) for name in MODULES))
    sys.path.remove(folder)
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return path


@pytest.fixture(scope="package")
def checkpoint(examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    args = examples.train_lm.parse([*SMALL, "--steps", "1", "--out-dir", str(folder)])
    state = examples.train_lm.make_state(args, examples.train_lm.architecture_of(args))
    examples.train_lm.save_checkpoint(folder / "checkpoint.ejx", state, args)
    return folder / "checkpoint.ejx"
