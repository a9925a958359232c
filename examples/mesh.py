"""Training over several devices: where parameters, the state of the optimiser and tokens are, and the loss of logits that are split.

A mesh has up to three axes. `data` splits the rows of a batch and `sequence` their tokens; over both, each device keeps a part of every
matrix, which is gathered where it multiplies (fully sharded data parallelism). `tensor` splits the heads of attention, the hidden features
of MLPs and the vocabulary. Axes are explicit: the types of all arrays say where they are, and layers keep tokens there.
"""

import argparse
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx

AXES: tuple[str, ...] = ("data", "sequence", "tensor")
DATA, SEQUENCE, TENSOR = AXES


def read_axes(text: str) -> dict[str, int]:
    """Parses `data=2,sequence=4`; axes that are not named have one device."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"expected some of {'=N,'.join(AXES)}=N, received {part.strip()!r}"
            )
        sizes[name] = int(size)
    return sizes


def mesh_of(sizes: dict[str, int]) -> Mesh:
    count = math.prod(sizes.values())
    if count > jax.device_count():
        raise ValueError(
            f"expected at most the {jax.device_count()} devices that JAX sees, received {count}; "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of a CPU"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Explicit,) * len(sizes),
        devices=jax.devices()[:count],
    )


def spec_of(path: str, x: Any, model: ejx.models.Decoder, sizes: dict[str, int]) -> P:
    """How an array is split, by its path in the model, with which those in the state of its optimiser end."""
    if x.ndim < 2:
        return P()
    heads = re.search(r"\.stacks\[(\d+)\]\[(\d+)\]\.mixer\.([qkvo])_proj\.weight$", path)
    lead = (None,) * (x.ndim - 2)
    rows, columns = None, (DATA, SEQUENCE)
    if path.endswith((".embedding", ".head.weight", "gate_proj.weight", "up_proj.weight")):
        rows = TENSOR
    elif path.endswith("down_proj.weight"):
        rows, columns = columns, TENSOR
    elif heads is not None:
        mixer = model.stacks[int(heads[1])][int(heads[2])].mixer
        if isinstance(mixer, ejx.nn.MultiHeadAttention):
            if heads[3] == "o":
                rows, columns = columns, TENSOR
            elif mixer.num_kv_heads % sizes[TENSOR] == 0 or heads[3] == "q":
                rows = TENSOR
    elif not path.endswith("_proj.weight"):
        return P()

    def entry(axes: Any, size: int) -> Any:
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        return axes if size % math.prod(sizes[name] for name in names) == 0 else None

    return P(*lead, entry(rows, x.shape[-2]), entry(columns, x.shape[-1]))


def place(tree: Any, model: ejx.models.Decoder, mesh: Mesh) -> Any:
    """A model, or a tree with arrays of its form such as the state of an optimiser, on the mesh."""
    sizes = dict(mesh.shape)

    def put(path: Any, x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        return jax.device_put(x, NamedSharding(mesh, spec_of(jax.tree_util.keystr(path), x, model, sizes)))

    return jax.tree_util.tree_map_with_path(put, tree)


def put_tokens(batch: np.ndarray, mesh: Mesh) -> tuple[Array, Array]:
    """Inputs and targets `[..., B, T]` of batches `[..., B, T + 1]`, split by rows and tokens."""
    where = NamedSharding(mesh, P(*(None,) * (batch.ndim - 2), DATA, SEQUENCE))
    inputs, targets = (jax.device_put(x, where) for x in (batch[..., :-1], batch[..., 1:]))
    return inputs, targets


def cross_entropy(logits: Array, targets: Array) -> Array:
    """The mean over all tokens, without gathering logits whose vocabulary is split."""
    where = jax.typeof(logits).sharding
    number = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1, out_sharding=where)
    of_target = jnp.sum(jnp.where(number == targets[..., None], logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_target)
