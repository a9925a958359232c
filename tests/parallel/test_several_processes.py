"""Tokens over the devices of several processes: the numbers of one, and an error where the other has died, not a hang."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.models.test_checkpoints import equal, make_state, place, trained
from tests.parallel.several_processes import loss, model_of, TOKENS
from tests.processes import environment
from tests.tolerances import assert_close

ROOT = pathlib.Path(__file__).parents[2]


def until_one_ends(count: int, folder: pathlib.Path) -> tuple[list[Any], list[str], float]:
    """The processes, what they wrote, and the seconds that the others went on after the last one had ended or begun to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(devices=4 // count) | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.parallel.several_processes", str(port)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([*command, str(rank), str(count), str(folder)], env=variables, cwd=ROOT, **options)
        for rank in range(count)
    ]
    try:
        texts = [processes[-1].communicate(timeout=240)[0]]
        ended = time.monotonic()
        texts += [process.communicate(timeout=120)[0] for process in processes[:-1]]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, texts[1:], strict=False):
        assert process.returncode != 0 and "rror" in text, text
    return processes, texts, time.monotonic() - ended


def check_numbers(folder: pathlib.Path) -> None:
    """The loss and the gradients are those of one device."""
    arrays, static = eqx.partition(model_of(), eqx.is_inexact_array)
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = gradient(arrays, static, TOKENS[:, :-1], TOKENS[:, 1:])
    with np.load(folder / "found.npz") as found:
        for n, (x, y) in enumerate(zip(found.values(), jax.tree.leaves(expected), strict=True)):
            assert_close(x, y, kind="gradient" if n else "forward", name=str(n))


@pytest.mark.slow
def test_numbers_of_one_process_until_one_dies(tmp_path):
    """The other must end with an error, and well before anybody would look for it."""
    processes, _, seconds = until_one_ends(2, tmp_path)
    assert processes[1].returncode == -signal.SIGKILL and seconds < 60
    check_numbers(tmp_path)
    # Each wrote its part of a checkpoint. In one process, training on two devices gives the same bits.
    assert all((tmp_path / "checkpoint" / "1" / f"ocdbt.process_{rank}").is_dir() for rank in range(2))
    state, losses = trained(place(make_state(), 2), 2, 2)
    equal(ejx.load(tmp_path / "checkpoint", make_state), state)
    assert np.array_equal(np.load(tmp_path / "losses.npy"), losses + trained(state, 2, 4)[1])


@pytest.mark.slow
def test_an_exception_in_one_of_four_processes(tmp_path):
    """It waits for the others, which wait for it, for as long as `shutdown_timeout_seconds` says: by default five minutes."""
    processes, (text, *_), seconds = until_one_ends(4, tmp_path)
    assert processes[-1].returncode != 0 and "of this process alone" in text
    assert seconds < 60
    check_numbers(tmp_path)
