"""The loss of `examples/train_lm.py` trained in bfloat16 and in float8: the same weights at first, the same batches, in turn.

    python -m benchmarks float8-loss --json float8_loss.json   # 354M parameters, 500 steps of B4 T2048; needs a GPU
    python -m benchmarks float8-loss --quick                   # a small model, anywhere

A run ends with its loss on held-out text, without float8, and with the mean of the training loss over the last steps.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from examples import train_lm

SIZES = {
    "full": "--embed-dim 1024 --num-layers 28 --num-heads 16 --num-kv-heads 16 --seq-len 2048 --batch-size 4",
    "quick": "--embed-dim 128 --num-layers 2 --num-heads 4 --num-kv-heads 2 --seq-len 128 --batch-size 4",
}
LAST, HELD_OUT = 50, 32
"""Steps whose training loss is averaged; batches of the loss on held-out text."""


def train(options: argparse.Namespace, way: str, data: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    """A whole run, and its losses."""
    words = f"{SIZES['quick' if options.quick else 'full']} --steps {options.steps} --learning-rate 3e-4"
    args = train_lm.parse([*words.split(), *(["--float8"] if way == "float8" else [])])
    model, state, _ = train_lm.make_state(args, train_lm.architecture_of(args))
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    step, validate = train_lm.make_steps(args)
    losses, start, first = [], time.perf_counter(), 0.0
    for i in range(args.steps):
        model, state, loss, _ = step(None, model, state, train_lm.batch_at(data, i, args))
        losses.append(loss)
        if i == 0:
            jax.block_until_ready(loss)
            first, start = time.perf_counter() - start, time.perf_counter()
    losses = [float(loss) for loss in losses]
    ms = 1e3 * (time.perf_counter() - start) / max(args.steps - 1, 1)
    batches = jnp.stack([train_lm.batch_at(held_out, i, args) for i in range(HELD_OUT)])
    row = {"way": way, "parameters": count, "ms": ms, "first_step_seconds": first}
    row |= {"training_loss": float(np.mean(losses[-LAST:])), "held_out_loss": float(validate(model, batches))}
    return row | {"losses": losses}


def main(arguments: Sequence[str] | None = None) -> int:
    options = report.parser("float8-loss", __doc__).parse_args(arguments)
    options.steps = 20 if options.quick else options.steps
    seq_len = 128 if options.quick else 2048
    data, held_out = train_lm.load_data(None, seq_len, train_lm.tokenizer_of(report.ROOT / "none"))
    rows: list[dict[str, Any]] = []
    for way in ("bfloat16", "float8"):
        rows.append(train(options, way, data, held_out))
        for name in ("training_loss", "held_out_loss"):
            rows[-1][f"{name}_over_bfloat16"] = rows[-1][name] / rows[0][name]
        print(report.table_of("float8-loss", rows), flush=True)
        report.save(
            options, sizes=SIZES["quick" if options.quick else "full"], steps=options.steps, rows=rows
        )
    return 0
