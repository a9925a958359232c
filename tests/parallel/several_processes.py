"""One of the two or four processes of a test: `python -m tests.parallel.several_processes PORT RANK COUNT FOLDER`.

Together they have four devices, as `XLA_FLAGS` says, which share the tokens. The first process writes the loss and the gradients of a model to a
file in FOLDER. Two processes train on one device each, write a checkpoint there, read it and go on. Then all repeat a call of attention, until the
last one ends: of two it kills itself, of four it raises an exception. The others go on.
"""

import os
import pathlib
import signal
import sys
from typing import Any

if __name__ == "__main__":  # not where the test imports the model
    os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx import models, nn, RingAttention

AXIS, VOCABULARY, WIDTH = "sequence", 16, 16
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 25)).astype(np.int32)


def model_of(**options: Any) -> models.Decoder:
    rope = nn.RotaryEmbedding(8)
    mixers = {
        "attention": {"num_heads": 2, "num_kv_heads": 1, "rope": rope},
        "gated_linear_attention": {"num_heads": 2, "use_short_conv": True},
    }
    layers = [models.LayerConfig(name, own, models.MLPConfig(24)) for name, own in mixers.items()]
    config = models.DecoderConfig(VOCABULARY, WIDTH, tuple(layers))
    return models.Decoder(config, **options, key=jax.random.key(0))


def loss(arrays: Any, static: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    logits = eqx.combine(arrays, static)(inputs)
    number = jnp.arange(VOCABULARY, dtype=targets.dtype)
    of_target = jnp.sum(jnp.where(targets[..., None] == number[None, None], logits, 0.0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_target)


def of_model(mesh: Any) -> list[np.ndarray]:
    """The loss and the gradients, with a part of every matrix on each device."""
    put = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    def part(x: Any) -> Any:
        splits = x.ndim > 2 and x.shape[-1] % 4 == 0
        return put(np.asarray(x), P(*(None,) * (x.ndim - 1), AXIS) if splits else P())

    arrays, static = eqx.partition(model_of(sequence_axis=AXIS), eqx.is_inexact_array)
    tokens = [put(x, P(None, AXIS)) for x in (TOKENS[:, :-1], TOKENS[:, 1:])]
    found = jax.jit(jax.value_and_grad(loss), static_argnums=1)(jax.tree.map(part, arrays), static, *tokens)
    return [np.asarray(x) for x in multihost_utils.process_allgather(jax.tree.leaves(found), tiled=True)]


def train(folder: pathlib.Path) -> list[np.ndarray]:
    """The losses of four steps, with a checkpoint after two."""
    from tests.models.test_checkpoints import make_state, place, trained

    state, losses = trained(place(make_state(), 2), 2, 2)
    ejx.save(folder / "checkpoint", state, sharded=True)
    state = ejx.load(folder / "checkpoint", place(eqx.filter_eval_shape(make_state), 2))
    return losses + trained(state, 2, 4)[1]


def main(port: str, rank: int, count: int, folder: pathlib.Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limits: Any = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 5}
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank, **limits)
    mesh = jax.make_mesh((4,), (AXIS,))  # explicit
    values = of_model(mesh)
    losses = train(folder) if count == 2 else []
    if rank == 0:
        np.savez(folder / "found.npz", *values)
        np.save(folder / "losses.npy", losses)
    x = np.ones((1, 16, 1, 8), np.float32)
    x = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(None, AXIS)), lambda i: x[i])
    step = jax.jit(RingAttention(AXIS, causal=True, method="ring"))
    jax.block_until_ready(step(x, x, x))
    if rank == count - 1:
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("of this process alone")
    while True:  # only an error ends this
        jax.block_until_ready(step(x, x, x))


if __name__ == "__main__":
    _, port, rank, count, folder = sys.argv
    main(port, int(rank), int(count), pathlib.Path(folder))
