"""Tokens over the devices of two processes: the numbers of one, and an error where the other has died, not a hang."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.parallel.two_processes import loss, model_of, TOKENS
from tests.processes import environment
from tests.tolerances import assert_close

ROOT = pathlib.Path(__file__).parents[2]


def run(dies: int, *file: pathlib.Path) -> None:
    """Both processes, of which one dies: the other must end with an error, and well before anybody would look for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(devices=2) | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.two_processes", *map(str, (port, rank, dies, *file))],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        processes[dies].communicate(timeout=240)
        died = time.monotonic()
        text, _ = processes[1 - dies].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
    assert processes[dies].returncode == -signal.SIGKILL
    assert processes[1 - dies].returncode != 0 and "rror" in text, text
    assert time.monotonic() - died < 60


@pytest.mark.slow
def test_numbers_of_one_device_until_one_dies(tmp_path):
    run(1, tmp_path / "found.npz")
    arrays, static = eqx.partition(model_of(), eqx.is_inexact_array)
    expected = jax.jit(jax.value_and_grad(loss), static_argnums=1)(
        arrays, static, TOKENS[:, :-1], TOKENS[:, 1:]
    )
    with np.load(tmp_path / "found.npz") as found:
        for n, (x, y) in enumerate(zip(found.values(), jax.tree.leaves(expected), strict=True)):
            assert_close(x, y, kind="gradient" if n else "forward", name=str(n))


@pytest.mark.slow
def test_the_first_process_dies_which_coordinates():
    run(0)
