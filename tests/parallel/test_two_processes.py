"""Tokens over the devices of two processes: the numbers of one, and an error where the other has died, not a hang."""

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
from tests.parallel.two_processes import loss, model_of, TOKENS
from tests.processes import environment
from tests.tolerances import assert_close

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_numbers_of_one_process_until_one_dies(tmp_path):
    """The other must end with an error, and well before anybody would look for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(devices=2) | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.parallel.two_processes", str(port)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=variables, cwd=ROOT, **options)
        for rank in range(2)
    ]
    try:
        processes[1].communicate(timeout=240)
        died = time.monotonic()
        text, _ = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode != 0 and "rror" in text, text
    assert time.monotonic() - died < 60
    arrays, static = eqx.partition(model_of(), eqx.is_inexact_array)
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = gradient(arrays, static, TOKENS[:, :-1], TOKENS[:, 1:])
    with np.load(tmp_path / "found.npz") as found:
        for n, (x, y) in enumerate(zip(found.values(), jax.tree.leaves(expected), strict=True)):
            assert_close(x, y, kind="gradient" if n else "forward", name=str(n))
    # Each wrote its part of a checkpoint. In one process, training on two devices gives the same bits.
    assert all((tmp_path / "checkpoint" / "1" / f"ocdbt.process_{rank}").is_dir() for rank in range(2))
    state, losses = trained(place(make_state(), 2), 2, 2)
    equal(ejx.load(tmp_path / "checkpoint", make_state), state)
    assert np.array_equal(np.load(tmp_path / "losses.npy"), losses + trained(state, 2, 4)[1])
