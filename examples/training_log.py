"""What a training run writes down: `metrics.csv`, with a row for each step, and `loss.png`, a picture of loss and gradient norm."""

import csv
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

COLUMNS: tuple[str, ...] = (
    "step",
    "loss",
    "gradient_norm",
    "learning_rate",
    "tokens_per_second",
    "validation_loss",
)


class Log:
    """The rows of a run in a folder. A resumed run continues those up to its first step."""

    def __init__(self, folder: pathlib.Path, first_step: int, tokens: int, schedule: Callable[[Any], Any]):
        self.folder, self.tokens, self.schedule = folder, tokens, schedule
        self.rows: list[dict[str, Any]] = []
        # Not yet read from the device, so that it does not wait for the host.
        self.waiting: list[tuple[int, Any, Any]] = []
        self.since = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.csv"
        if first_step and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [{name: row.get(name) for name in COLUMNS} for row in csv.DictReader(file)]
            read = [{name: float(x) if x else None for name, x in row.items()} for row in rows]
            self.rows = [
                row | {"step": int(step)} for row in read if (step := row["step"] or 0) <= first_step
            ]

    def add(self, step: int, loss: Any, gradient_norm: Any) -> None:
        """A step, with numbers that may still be computed."""
        self.waiting.append((step, loss, gradient_norm))

    def read(self) -> dict[str, Any]:
        """Waits for the steps that were added; returns the last row."""
        if not self.waiting:
            return self.rows[-1]
        numbers = [(step, float(loss), float(norm)) for step, loss, norm in self.waiting]
        speed = len(numbers) * self.tokens / (time.perf_counter() - self.since)
        # The rate of the n-th step is the schedule's after n - 1 steps.
        rates = np.asarray(self.schedule(np.array([step for step, *_ in numbers]) - 1))
        for row, rate in zip(numbers, rates, strict=True):
            self.rows.append(dict(zip(COLUMNS, (*row, float(rate), speed, None), strict=True)))
        self.waiting = []
        self.resume_clock()
        return self.rows[-1]

    def validated(self, loss: float) -> None:
        """Notes the loss on held-out text after the last step."""
        self.rows[-1]["validation_loss"] = loss
        self.resume_clock()

    def resume_clock(self) -> None:
        """What took time since the last step was not training."""
        self.since = time.perf_counter()

    def write(self) -> None:
        self.read()
        with (self.folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def plot(self) -> None:
        try:
            import matplotlib
        except ModuleNotFoundError:
            print("loss.png is left out: it needs matplotlib (pip install '.[examples]')", file=sys.stderr)
            return

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        columns = {name: np.array([row[name] for row in self.rows], float) for name in COLUMNS}
        held_out = ~np.isnan(columns["validation_loss"])
        figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
        above.plot(columns["step"], columns["loss"], linewidth=1, label="training")
        validation = columns["step"][held_out], columns["validation_loss"][held_out]
        above.plot(*validation, marker="o", label="validation")
        above.set(ylabel="loss (nats per token)", title="Language model")
        above.legend()
        below.plot(columns["step"], columns["gradient_norm"], linewidth=1)
        below.set(xlabel="step", ylabel="gradient norm")
        for panel in (above, below):
            panel.grid(alpha=0.3)
        figure.savefig(self.folder / "loss.png", dpi=120)
        plt.close(figure)
