"""Quantised models where models are used: served, streamed, speculated, exported, saved, and on a mesh."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, generate, Speculation, stream
from ejkernel_eqx.serving import Engine
from tests.meshes import context, HEADS, mesh_of, ROWS
from tests.quantised.test_models import models, STACKS, TOKENS
from tests.tolerances import assert_close

PROMPTS = [[5, 6, 7], [1, 2]]
LONG: Any = {"max_new_tokens": 6, "stop_tokens": ()}
slow = pytest.mark.slow


def served(model: Decoder) -> list[list[int]]:
    engine = Engine(model, num_pages=16, page_size=4, max_batch=2, step_tokens=8)
    numbers = [engine.submit(prompt, max_new_tokens=6) for prompt in ([1, 2, 3, 4, 5], [7, 8], [9, 3, 3] * 3)]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    for event in engine.run():
        texts[event.request].append(event.token)
    return [texts[number] for number in numbers]


@pytest.mark.parametrize(
    "name, kind",
    [("attention", "int4"), *(pytest.param(*pair, marks=slow) for pair in [("experts", "mxfp4"), ("recurrences", "fp8")])],
)  # fmt: skip
def test_served_tokens_are_those_of_the_numbers(name, kind):
    model, floats = models(name, kind)
    texts = served(model)
    assert texts == served(floats) and all(len(text) == 6 for text in texts)


@slow
def test_streams_and_drafts():
    """A quantised model drafts for itself and for its floats."""
    model, floats = models("attention", "int4")
    wanted = generate(floats, PROMPTS, **LONG).tokens
    np.testing.assert_array_equal(np.stack(list(stream(model, PROMPTS, **LONG)), axis=-1), wanted)
    for one, draft in ((model, None), (model, model), (floats, model)):
        speculate = Speculation(draft, num_draft_tokens=3)
        np.testing.assert_array_equal(generate(one, PROMPTS, **LONG, speculate=speculate).tokens, wanted)


@pytest.mark.usefixtures("unchecked")
def test_an_exported_model_keeps_its_codes():
    """Weights are arguments of the program, as they are stored. It is the same program in a file."""
    pytest.importorskip("flatbuffers")
    model, floats = models("attention", "int4")
    arrays, static = eqx.partition(model, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    call = lambda leaves, tokens: eqx.combine(jax.tree.unflatten(tree, leaves), static)(tokens)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    tokens = jax.ShapeDtypeStruct(export.symbolic_shape("b,t"), jnp.int32)
    program = export.deserialize(export.export(jax.jit(call))(shapes, tokens).serialize())
    assert sum(x.dtype == jnp.uint8 for x in program.in_avals) == 7  # of seven projections
    for ids in (TOKENS, TOKENS[:1, :3]):
        assert_close(program.call(leaves, ids), floats(ids))


def test_a_file_of_a_model_has_its_format(tmp_path):
    config = DecoderConfig(40, 32, STACKS["attention"])
    build = lambda kind, key: ejx.quantise(Decoder(config, key=key), kind)
    model = build("int8", jax.random.key(3))
    ejx.save(tmp_path / "model.ejx", model, {"kind": "int8"})
    assert eqx.tree_equal(ejx.load(tmp_path / "model.ejx", build), model)
    # Codes and scales of both are arrays of the same dtypes and shapes.
    floats = ejx.dequantise(model)
    with pytest.raises(ejx.CheckpointError, match=r"element: expected 'float8_e4m3fn', received 'int8'"):
        ejx.load(tmp_path / "model.ejx", ejx.quantise(floats, "fp8"))
    with pytest.raises(ejx.CheckpointError, match="which is not in the file"):
        ejx.load(tmp_path / "model.ejx", floats)


def split(model: Any, mesh: Any) -> Any:
    """Rows of the first projections, columns of the last, and the vocabulary; scales where blocks allow it."""

    def one(path: Any, x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        name, axes = jax.tree_util.keystr(path), [None] * x.ndim
        is_part = name.endswith((".codes", ".scales"))
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            axes[-2 if is_part else -1] = HEADS
        elif "o_proj" in name or "down_proj" in name:
            axes[-1] = HEADS
        elif "embedding" in name or "head" in name:
            axes[0] = HEADS
        axes = [None if size % 2 else axis for axis, size in zip(axes, x.shape)]
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    return jax.tree_util.tree_map_with_path(one, model)


def is_matrix(path: str) -> bool:
    return path.endswith("_proj.weight") or path in (".embedding", ".head.weight") or ".experts." in path


@pytest.mark.parametrize(
    "name, kind, mesh, shape",
    [
        ("attention", "int4", "explicit without context", (1, 2)),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                ("attention", "fp8-block", "automatic", (1, 2)),
                ("attention", "int8", "explicit", (2, 1)),
                ("experts", "mxfp4", "explicit", (1, 2)),  # whose columns are split within a block
                ("experts", "int8", "explicit without context", (2, 2)),
                ("experts", "int4", "automatic", (1, 1)),
            ]
        ),
    ],
)
def test_on_a_mesh(name, kind, mesh, shape):
    """Tokens and the loss, with every matrix quantised: the embedding and the head, too."""
    model = Decoder(DecoderConfig(40, 32, STACKS[name]), key=jax.random.key(1))
    model = ejx.quantise(model, kind, where=is_matrix)
    loss = eqx.filter_jit(lambda model, ids: model.loss(model.features(ids[:, :-1]), ids[:, 1:]))
    tokens, value = generate(model, TOKENS, max_new_tokens=3, stop_tokens=()).tokens, loss(model, TOKENS)
    devices = mesh_of(mesh, shape)
    ids = jax.device_put(TOKENS, NamedSharding(devices, P(ROWS)))
    with context(mesh, devices):
        placed = split(model, devices)
        np.testing.assert_array_equal(generate(placed, ids, max_new_tokens=3, stop_tokens=()).tokens, tokens)
        assert_close(np.asarray(loss(placed, ids)), np.asarray(value))
