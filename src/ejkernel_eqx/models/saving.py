"""`save_pretrained`: writes a model in its published form, which `transformers` and `from_pretrained` read."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from safetensors.numpy import save_file

from ..nn.arguments import check_sizes
from ..nn.float8_rows import refuse_float8
from ..quantised.dequantise import is_quantised
from ..weights.backwards import arrays_of, names_of, Recorder
from ..weights.configs import text_entries
from ..weights.fill import is_parameter
from ..weights.quantised.source import opened
from ..weights.source import ArraySource, of_file, Source
from .decoder import Decoder
from .filling import parts_of
from .forms import Form, FORMS, ONLY_LIKE
from .lora import is_lora, merge_lora
from .pretrained import read_config
from .published import decoder_config

_COPIED = """tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt
chat_template.jinja chat_template.json generation_config.json preprocessor_config.json processor_config.json""".split()
_FORMAT = {"format": "pt"}  # without which transformers refuses a file


def save_pretrained(
    model: Decoder,
    path: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    adapters: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Saves a model in its published form: `config.json` and safetensors, under the names that its family has. `transformers`,
    [`from_pretrained`][ejkernel_eqx.models.from_pretrained] and the command `serve` read the folder.

    ```python
    model = ejx.models.from_pretrained("Qwen3-0.6B")
    ...
    ejx.models.save_pretrained(model, "tuned", like="Qwen3-0.6B")
    ```

    Updates by [`LoRA`][ejkernel_eqx.models.LoRA] are merged into the weights, or saved alone with `adapters=True`. Each array keeps its dtype. The
    folder gets its name when all files in it are complete.

    **Arguments:**

    - `model`: a `Decoder` from `from_pretrained` or `from_config`.
    - `path`: a folder that does not exist or is empty.
    - `like`: the folder of the published model. The new folder has the names of its arrays, a copy of its tokenizer and chat template, and copies of
        the weights that the `Decoder` does not have, such as those for images. By default the names are those of the family, and only weights and
        `config.json` are written.
    - `adapters`: whether only the updates are saved, in the form of `peft`: `adapter_model.safetensors` and `adapter_config.json`.
    - `max_shard_bytes`: the maximum size of a file of weights, in bytes. Larger models become several files with an index.

    **Raises:** `ValueError` for a folder that is not empty; for a model without a published configuration, or with other arrays than its
    configuration describes; for quantised weights ([`ejkernel_eqx.dequantise`][] makes floats of them); and with `adapters`, for updates of
    projections that are published as parts of one array.
    """
    check_sizes(max_shard_bytes=max_shard_bytes)
    target = pathlib.Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"path: expected a folder that does not exist or is empty, received {str(target)!r}; name another one."
        )
    origin = None if like is None else pathlib.Path(like).expanduser()
    config = _configuration(model, origin)
    source = _source(model, config, origin)
    if adapters:
        arrays, adapter_config = _adapters(model, source, "" if origin is None else str(like))
        with _new_folder(target) as folder:
            save_file(arrays, folder / "adapter_model.safetensors", _FORMAT)
            _write(folder / "adapter_config.json", adapter_config)
        return
    model = merge_lora(model)
    _check_arrays(model)
    with _new_folder(target) as folder:
        _write_weights(folder, _weights(model, source, copies=origin is not None), max_shard_bytes)
        _write(folder / "config.json", config)
        if origin is not None:
            for name in _COPIED:
                if (origin / name).is_file():
                    shutil.copyfile(origin / name, folder / name)
        elif model.config.stop_tokens:
            _write(folder / "generation_config.json", {"eos_token_id": list(model.config.stop_tokens)})


def _configuration(model: Any, origin: pathlib.Path | None) -> dict[str, Any]:
    """The content of `config.json`."""
    if not isinstance(model, Decoder):
        raise ValueError(
            f"model: expected a Decoder, received {type(model).__name__}; ejx.save saves any module."
        )
    if origin is not None:
        config: Any = dict(read_config(origin / "config.json"))
        described = of_file(origin / "config.json", decoder_config, config)
    elif model.config.published is not None:
        config = json.loads(model.config.published)
        described = decoder_config(config)
    else:
        raise ValueError(
            "model: expected one from from_pretrained or from_config, received one whose DecoderConfig was built by hand, which has no config.json; "
            "save it with ejx.save."
        )
    if dataclasses.replace(described, stop_tokens=model.config.stop_tokens) != model.config:
        raise ValueError(
            "model: expected the architecture of its config.json, received a model whose config differs; give the folder that it is like."
        )
    if origin is None and (config.get("text_config") or config.get("model_type") in ONLY_LIKE):
        raise ValueError(
            "like: expected the folder of the published model, received None; a Decoder does not have all of "
            f"{config.get('model_type')}."
        )
    config.pop("quantization_config", None)  # what is written are floats
    dtype = model.embedding.dtype.name
    return config | {name: dtype for name in ("dtype", "torch_dtype") if name in config} | {"dtype": dtype}


def _source(model: Decoder, config: Mapping[str, Any], origin: pathlib.Path | None) -> Source:
    """The published arrays whose names identify the form."""
    if origin is not None:
        return opened(origin, False)
    form = FORMS.get(text_entries(config)["model_type"], Form())
    return ArraySource(dict.fromkeys(form.names(model.config)))


def _check_arrays(model: Decoder) -> None:
    refuse_float8("model", model, "save")
    shapes = lambda tree: {
        jax.tree_util.keystr(path): getattr(leaf, "shape", None)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised)
        if is_parameter(leaf) or is_quantised(leaf)
    }
    expected = shapes(eqx.filter_eval_shape(lambda: Decoder(model.config, key=jax.random.key(0))))
    received = shapes(model)
    for path in [*received, *expected]:
        if received.get(path) != expected.get(path):
            raise ValueError(
                f"model{path}: expected shape {expected.get(path)}, received {received.get(path)}; undo what was changed after the model was built."
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_quantised):
        if is_quantised(leaf):
            raise ValueError(
                f"model{jax.tree_util.keystr(path)}: expected floats, received a QuantizedWeight; save ejx.dequantise(model)."
            )


def _weights(model: Decoder, source: Source, copies: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the published arrays of the model by name, then those of the source that the model does not have."""
    view = Recorder.over(source)
    for module, read, views in parts_of(model, view):
        yield from arrays_of(module, read, views).items()
    # If the embedding is the head, it has changed, and the head of the source must not be copied.
    tied = ("lm_head.weight", "embed_out.weight") if model.head is None else ()
    for name in source.names() if copies else ():
        if name not in view.recorded and not name.endswith(tied):
            yield name, np.asarray(source.read(name))


def _write_weights(
    folder: pathlib.Path, arrays: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int
) -> None:
    files: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total = 0

    def close() -> None:
        save_file(shard, folder / f"shard-{len(files)}", _FORMAT)
        files.append(list(shard))
        shard.clear()

    for name, array in arrays:
        if shard and sum(x.nbytes for x in shard.values()) + array.nbytes > max_shard_bytes:
            close()
        shard[name] = np.asarray(array, order="C")
        total += array.nbytes
    close()
    if len(files) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"shard-{index}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _adapters(model: Decoder, source: Source, base: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the `adapter_config.json` of `peft`."""
    plain = jax.tree.map(lambda node: node.base if is_lora(node) else node, model, is_leaf=is_lora)
    view, arrays, modules = Recorder.over(source), {}, []
    kinds: set[tuple[int, float]] = set()
    for (module, _, _), (without, read, views) in zip(parts_of(model, view), parts_of(plain, view)):
        nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_lora)
        updates = {jax.tree_util.keystr(path): node for path, node in nodes if is_lora(node)}
        names = names_of(without, read, views) if updates else {}
        for path, update in updates.items():
            if f"{path}.weight" not in names:
                raise ValueError(
                    f"adapters: expected updates of projections that are published one by one, received one of {path}, which is a part of "
                    "another published array; save the merged model, adapters=False."
                )
            name = names[f"{path}.weight"].removesuffix(".weight")
            modules.append(name)
            kinds.add((update.a.shape[-2], update.scale))
            for letter, x in (("A", update.a), ("B", update.b)):
                arrays[f"base_model.model.{name}.lora_{letter}.weight"] = np.asarray(x)
    if len(kinds) != 1:
        raise ValueError(
            f"adapters: expected updates of one rank and alpha, received {len(kinds)} kinds; add_lora makes such ones."
        )
    ((rank, scale),) = kinds
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none"}
    config |= {"r": rank, "lora_alpha": rank * scale, "lora_dropout": 0.0, "fan_in_fan_out": False}
    return arrays, config | {"target_modules": modules, "inference_mode": True}


@contextlib.contextmanager
def _new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that gets its name when the block ends. If the block fails, it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(suffix=".tmp", prefix=f".{target.name}.", dir=target.parent) as around:
        folder = pathlib.Path(around) / target.name
        folder.mkdir()
        yield folder
        if target.exists():
            target.rmdir()  # it is empty
        folder.rename(target)


def _write(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
