"""`from_pretrained` and `from_config`: published models, from their folder or their configuration."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._entries import entries_of, shown
from .._errors import CheckpointError
from ..weights import Weights
from ..weights.configs import text_entries
from ..weights.load import loaded
from ..weights.source import of_file, read_json
from .config import DecoderConfig, EncoderConfig
from .decoder import Decoder
from .encoder import Encoder
from .published import decoder_config, encoder_config, is_encoder, stop_tokens
from .sentence_files import read_pooler

_MOST_BYTES = 2**24
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_PARTS = (
    "vision_tower",
    "vision_model",
    "visual",
    "audio_tower",
    "multi_modal_projector",
    "embed_vision",
    "embed_audio",
)
_OTHER_PARTS = tuple(f"{root}{part}.*" for root in ("", "model.") for part in _PARTS)


def from_config(config: Mapping[str, Any], *, key: jax.Array, **options: Any) -> Any:
    """Makes a model with the architecture of a published one and with random weights.

    **Arguments:**

    - `config`: the content of its `config.json`.
    - `key`: a PRNG key for the weights.
    - `options`: the arguments of [`Decoder`][ejkernel_eqx.models.Decoder] or [`Encoder`][ejkernel_eqx.models.Encoder].

    **Returns:** a `Decoder`; for the configuration of an encoder, an `Encoder`.

    **Raises:** as [`decoder_config`][ejkernel_eqx.models.decoder_config].
    """
    return _model_of(_described(config), **options, key=key)


def _described(config: Mapping[str, Any]) -> DecoderConfig | EncoderConfig:
    return encoder_config(config) if is_encoder(config) else decoder_config(config)


def _model_of(described: DecoderConfig | EncoderConfig, **options: Any) -> Decoder | Encoder:
    is_decoder = isinstance(described, DecoderConfig)
    return Decoder(described, **options) if is_decoder else Encoder(described, **options)


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    ignore: tuple[str, ...] = (),
    dequantise: bool | Sequence[str] = False,
    sharding: Callable[[str, Any], Any] | None = None,
    **options: Any,
) -> Any:
    """Reads a published model from a folder in the form of `transformers` and the Hugging Face Hub. It downloads nothing, and runs no code in the
    folder.

    ```python
    model = ejx.models.from_pretrained("Qwen3-0.6B")
    texts = ejx.models.generate(model, [[1, 2, 3]], max_new_tokens=20)
    ```

    **Arguments:**

    The weights are read layer by layer, so they need not fit into memory twice.

    **Arguments:**

    - `path`: a folder with `config.json` and safetensors, in one file or several. `huggingface_hub.snapshot_download` writes one. The families are
        the keys of `ejx.models.FAMILIES`.
    - `dtype`: the dtype of the parameters; default that in which the model was published.
    - `ignore`: patterns of `fnmatch` for the names of weights that are not wanted. Two kinds of weights are never read: the other parts of a model
        with a `text_config`, such as those for images and sound, and the layers for multi-token prediction.
    - `dequantise`: whether quantised weights become floats of the model's dtype; or patterns of `fnmatch` for the names of those that do. By
        default each becomes an [`ejkernel_eqx.QuantizedWeight`][]. The `quant_method` may be `fp8`, `mxfp4`, `awq`, `gptq` or `compressed-tensors`.
    - `sharding`: for several devices, a function of two arguments: the path of a weight in the model, such as
        `".stacks[0][0].mixer.q_proj.weight"`, and its shape and dtype as a `jax.ShapeDtypeStruct`. It returns a `jax.sharding.Sharding`,
        or `None` for the default device. Weights in a stack have a leading axis for its layers. Those of
        `.shared_blocks` have none.
    - `options`: further arguments of [`Decoder`][ejkernel_eqx.models.Decoder]: `compute_dtype`, `platform`, `scan_layers`, `remat`,
        `expert_parallel`, `sequence_axis`, `token_order`.

    **Returns:** a `Decoder`; of an encoder, an `Encoder`. If the folder has files of sentence-transformers, the field `pooler` determines how
    [`embed`][ejkernel_eqx.models.embed] makes vectors.

    **Raises:**

    - `CheckpointError`, which is a `ValueError`, for a folder that lacks a file; for entries of `config.json` that are missing, of another type or
        out of bounds; for weights that are missing, left over or of other shapes; and for a `quantization_config` that is not supported or does not
        fit the arrays. Quantised arrays are checked before any of them is read.
    - `ValueError` for a model that is not supported.
    """
    folder = pathlib.Path(path).expanduser()
    path = folder / "config.json"
    config = read_config(path)
    described = of_file(path, _described, config)
    # In chat models, the tokens that end a turn are often in this file alone.
    beside = folder / "generation_config.json"
    if isinstance(described, DecoderConfig) and beside.is_file():
        size = described.vocab_size
        stop = of_file(beside, lambda config: stop_tokens(config, size), read_config(beside))
        described = dataclasses.replace(described, stop_tokens=stop or described.stop_tokens)
    dtype = of_file(path, published_dtype, config) if dtype is None else dtype
    weights, pooler = Weights.open(folder, dequantise=dequantise), read_pooler(folder)
    if pooler is not None and isinstance(described, DecoderConfig):
        # A model for vectors needs no head, and may be published without one.
        has_head = any(name.endswith("lm_head.weight") for name in weights.names())
        described = described if has_head else dataclasses.replace(described, tie_embeddings=True)
    make = lambda: _model_of(described, dtype=dtype, **options, key=jax.random.key(0))
    # Only shapes are computed, not the random weights. Integers, such as the index of a layer, are computed: no file has them.
    shapes = eqx.filter_eval_shape(make)
    is_integer = lambda x: eqx.is_array(x) and not jnp.issubdtype(x.dtype, jnp.inexact)
    integers = eqx.filter_jit(lambda: eqx.filter(make(), is_integer))()
    if sharding is not None:
        shapes, integers = _sharded(shapes, sharding), _sharded(integers, sharding)
    like = eqx.combine(integers, shapes)
    other_parts = _OTHER_PARTS if config.get("text_config") or config.get("vision_config") else ()
    model = loaded(like, weights, (*ignore, *other_parts, *_drafting_layers(config)))
    return eqx.tree_at(lambda m: m.pooler, model, pooler, is_leaf=lambda leaf: leaf is None)


def _drafting_layers(config: Mapping[str, Any]) -> list[str]:
    """Patterns for the names of the layers that predict further tokens. Their indices follow that of the last layer."""
    entries = text_entries(config)
    count, more = entries["num_hidden_layers"], entries.get("num_nextn_predict_layers") or 0
    return ["mtp.*", *(f"*.layers.{count + i}.*" for i in range(more))]


def _sharded(tree: Any, sharding: Callable[[str, Any], Any]) -> Any:
    """Shapes with the shardings that the function returns, and arrays placed on them."""
    if not callable(sharding):
        raise ValueError(
            f"sharding: expected a function of a path and a shape, received {type(sharding).__name__}; lambda path, leaf: ... is one."
        )

    def one(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        name, shape = jax.tree_util.keystr(path), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        found = sharding(name, shape)
        if found is not None and not isinstance(found, jax.sharding.Sharding):
            raise ValueError(
                f"sharding: expected a jax.sharding.Sharding or None for {name!r}, received {type(found).__name__}; "
                "NamedSharding(mesh, PartitionSpec(...)) is one."
            )
        if isinstance(leaf, jax.Array):
            return leaf if found is None else jax.device_put(leaf, found)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found)

    return jax.tree_util.tree_map_with_path(one, tree)


def published_dtype(config: Mapping[str, Any]) -> Any:
    """The dtype in a configuration; float32 if there is none."""
    whole, text = entries_of(config), text_entries(config)
    names = (entries.get(name) for entries in (whole, text) for name in ("dtype", "torch_dtype"))
    name = next((name for name in names if name is not None), "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(
            f"config: dtype: expected one of {', '.join(_DTYPES)}, received {shown(name)}; pass dtype= to from_pretrained."
        )
    return jnp.dtype(name)


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"{str(path)!r} is not there. Give the folder of a published model; huggingface_hub.snapshot_download(name) downloads one."
        )
    content = read_json(path, _MOST_BYTES)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{str(path)!r} holds no JSON object, but {type(content).__name__}. Download it again."
        )
    return content
