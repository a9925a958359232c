"""Training over several devices: the shardings of parameters, optimiser state and tokens, a loss for split logits, and options of the compiler."""

import math
import re
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..losses import cross_entropy
from ..nn import MultiHeadAttention
from .decoder import Decoder

MESH_AXES = ("data", "sequence", "tensor")
"""The axes of a mesh that [`place`][ejkernel_eqx.models.place] knows."""
DATA, SEQUENCE, TENSOR = MESH_AXES
_TABLES = (".embedding", ".embed_tokens_per_layer", ".head.weight")
_ROWS = ("gate_proj.weight", "up_proj.weight")
_PROJECTION = r"_proj(?:_with_mqa|_qkvz)?"
_COLUMNS = re.compile(rf"({_PROJECTION}|_projection|\.per_layer_input_gate|\.output_gate|\.linear)\.weight$")


# Queries and keys are not computed by one product, whose gradient would first write both next to each other.
FOR_GPUS = {"xla_gpu_dot_merger_threshold_mb": 0}
# Collectives run beside what does not wait for them.
FOR_SEVERAL = {"xla_gpu_enable_latency_hiding_scheduler": True}


def compiler_options(mesh: Mesh | None = None) -> dict[str, Any]:
    """XLA's options for a training step. They are options of one program; other programs of the process keep theirs.

    ```python
    step = eqx.filter_jit(step, donate="all", compiler_options=ejx.models.compiler_options(mesh))
    ```

    On GPUs, similar products stay apart, whose gradients would otherwise be copied next to each other. If the mesh has several, XLA's scheduler that
    hides latencies is on: gathers of weights and sums of gradients run beside products that do not need them.

    **Arguments:**

    - `mesh`: that of the arrays; default: one device, of the default platform.

    **Returns:** a dictionary for `compiler_options` of `jax.jit`, `equinox.filter_jit` or `lowered.compile`. It is empty for CPUs and TPUs.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda", "rocm"):
        return {}
    return FOR_GPUS | (FOR_SEVERAL if mesh is not None and mesh.size > 1 else {})


def partition_spec(path: str, leaf: Any, model: Decoder, mesh: Mesh) -> P:
    """Returns the `PartitionSpec` by which [`place`][ejkernel_eqx.models.place] splits an array of a decoder.

    **Arguments:**

    - `path`: the path of the array in the model, as `jax.tree_util.keystr` writes it. A path in an optimiser state that ends with it works, too.
    - `leaf`: the array, or a `jax.ShapeDtypeStruct`.
    - `model`, `mesh`: as in `place`.
    """
    sizes = _sizes(mesh)
    if leaf.ndim < 2:
        return P()
    axes = _axes(path, model, sizes)
    entries: list[Any] = [None] * leaf.ndim
    if is_expert := re.search(r"\.experts\.(gate|up|down)_proj$", path):
        # Experts lie over the devices of the rows, to which tokens travel. If there are too few of them, their hidden features do.
        entries[-3] = _entry((DATA,), leaf.shape[-3], sizes)
        hidden = TENSOR, SEQUENCE, *(() if entries[-3] else (DATA,))
        axes = ((), hidden) if is_expert[1] == "down" else (hidden, ())
    for at, own in zip((-2, -1), axes, strict=True):
        entries[at] = _entry(own, leaf.shape[at], sizes)
    return P(*entries) if any(entries) else P()


def _entry(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> Any:
    """Those of the axes, in order, whose devices together divide a size."""
    names: list[str] = []
    for name in axes:
        if name in sizes and size % math.prod(sizes[other] for other in (*names, name)) == 0:
            names.append(name)
    return tuple(names) if len(names) > 1 else names[0] if names else None


def _axes(path: str, model: Decoder, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that split the rows and the columns of a matrix. Rows are gathered without a copy in another order."""
    whole, fully, tensor = (), (DATA, SEQUENCE), (TENSOR,)
    both = (*tensor, *fully)
    if update := re.fullmatch(rf"(.*{_PROJECTION})\.(a|b|base\.weight)", path):  # of a LoRA
        rows, columns = _axes(f"{update[1]}.weight", model, sizes)
        return whole if update[2] == "a" else rows, whole if update[2] == "b" else columns
    if path.endswith(_TABLES):
        return tensor, fully
    if path.endswith(_ROWS):
        return both, whole
    if path.endswith("down_proj.weight"):
        return fully, tensor
    if not _COLUMNS.search(path):
        return whole, whole
    if heads := re.search(r"\.stacks\[(\d+)\]\[(\d+)\]\.mixer\.([qkvo])_proj\.weight$", path):
        mixer = model.stacks[int(heads[1])][int(heads[2])].mixer
        if isinstance(mixer, MultiHeadAttention):
            if heads[3] == "o":
                return fully, tensor
            if heads[3] == "q" or mixer.num_kv_heads % sizes.get(TENSOR, 1) == 0:
                return both, whole
    return whole, fully


def _sizes(mesh: Mesh) -> Mapping[str, int]:
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) - set(MESH_AXES):
        shown = mesh.axis_names if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ValueError(
            f"mesh: expected a jax.sharding.Mesh with axes of {', '.join(MESH_AXES)}, received {shown}; "
            'jax.make_mesh((2, 2), ("data", "tensor")) makes one.'
        )
    return dict(mesh.shape)


def place(tree: Any, model: Decoder, mesh: Mesh) -> Any:
    """Places the arrays of a decoder on a mesh, or those of a tree with the same structure, such as the optimiser state.

    The axis `data` splits the rows of a batch, and `sequence` their tokens. Both together also split every matrix. The parts of a matrix are gathered
    where it is multiplied (fully sharded data parallelism). The axis `tensor` splits the heads of attention, the hidden features of MLPs and the
    vocabulary. Experts lie over `data`, to whose devices tokens travel; `tensor` and `sequence` split their hidden features. If the devices of
    an axis do not divide an array, it is not split by that axis. Vectors, quantised experts and the heads of shared blocks (Zamba2) are never split.

    ```python
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))  # explicit axes
    state = ejx.models.place(optimiser.init(eqx.filter(model, eqx.is_inexact_array)), model, mesh)
    model = ejx.models.place(model, model, mesh)
    inputs, targets = ejx.models.place_tokens(batch, mesh)  # batch: [B, T + 1]
    loss = ejx.models.split_cross_entropy(model(inputs), targets)
    ```

    **Arguments:**

    - `tree`: the model, or the optimiser state. Leaves that are no arrays stay as they are. A `jax.ShapeDtypeStruct` gets the sharding, as
        [`ejkernel_eqx.load`][] reads it from `like`.
    - `model`: the [`Decoder`][ejkernel_eqx.models.Decoder]. If `sequence` has several devices, build it with `sequence_axis="sequence"`.
    - `mesh`: a mesh with some of the axes `data`, `sequence` and `tensor`. On one with automatic axes, use `tensor` alone, or as
        many heads as devices, for speed: the compiler splits features, too.

    **Returns:** the tree with its arrays on the mesh.

    **Raises:** `ValueError` for a mesh with other axes.
    """

    def put(path: Any, leaf: Any) -> Any:
        is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        if not is_abstract and not eqx.is_array(leaf):
            return leaf
        where = NamedSharding(mesh, partition_spec(jax.tree_util.keystr(path), leaf, model, mesh))
        if is_abstract:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        return jax.device_put(leaf, where)

    return jax.tree_util.tree_map_with_path(put, tree)


def place_tokens(batch: Array | np.ndarray, mesh: Mesh) -> tuple[Array, Array]:
    """Splits batches `[..., B, T + 1]` of tokens into inputs and targets. **Returns:** two arrays `[..., B, T]` on the mesh, split by rows and
    tokens.

    **Raises:** `ValueError` for a mesh with other axes, or one that does not divide the rows or the tokens.
    """
    sizes = _sizes(mesh)
    if batch.ndim < 2 or not batch.shape[-1]:
        raise ValueError(
            f"batch: expected tokens [..., B, T + 1], received shape {tuple(batch.shape)}; batch[None] is one row."
        )
    for axis, what, count in ((DATA, "rows", batch.shape[-2]), (SEQUENCE, "tokens", batch.shape[-1] - 1)):
        if count % (parts := sizes.get(axis, 1)):
            raise ValueError(
                f"batch: expected {what} of inputs in {parts} equal parts, over the devices of axis {axis!r}, received {count}; leave out "
                f"{count % parts} of them, or pad them to {count + -count % parts} and give the padding negative targets."
            )
    axes = (name if name in sizes else None for name in (DATA, SEQUENCE))
    where = NamedSharding(mesh, P(*(None,) * (batch.ndim - 2), *axes))
    return jax.device_put(batch[..., :-1], where), jax.device_put(batch[..., 1:], where)


def split_cross_entropy(logits: Array, targets: Array) -> Array:
    """Returns the mean cross entropy of all tokens, in nats, by [`ejkernel_eqx.cross_entropy`][], which has more options. The vocabulary of the
    logits may be split over devices: they are not gathered.

    **Arguments:**

    - `logits`: `[..., V]`.
    - `targets`: integers `[...]` up to `V - 1`. Tokens with negative ones are left out.
    """
    return cross_entropy(logits, targets)
