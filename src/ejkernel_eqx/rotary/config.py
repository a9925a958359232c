"""Rotary embeddings in published configurations: the scaling dict, and the keys beside it."""

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._entries import Entries, entries_of, FIELDS, shown
from .._errors import CheckpointError
from ..core.arguments import check_numbers
from .by_length import DynamicScaling, LongRopeScaling
from .scaling import LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling

_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_WITH_ORIGINAL = ("llama3", "yarn", "longrope", "su")
_LOCAL = ("rope_local_base_freq", "local_rope_theta")
_COMMON = {"rope_type", "type", "rope_theta", _PARTIAL, "mrope_section", "mrope_interleaved"}


class _Kind(NamedTuple):
    build: Any
    required: str = ""
    optional: str = ""

    def keys(self) -> list[str]:
        return [*self.required.split(), *self.optional.split()]


_LONGROPE = _Kind(
    LongRopeScaling,
    f"short_factor long_factor {_ORIGINAL}",
    "factor attention_factor short_mscale long_mscale",
)
_YARN = "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate"
_KINDS = {
    "default": _Kind(None),
    "mrope": _Kind(None, "mrope_section"),
    "linear": _Kind(LinearScaling, "factor"),
    "dynamic": _Kind(DynamicScaling, f"factor {_ORIGINAL}"),
    "llama3": _Kind(Llama3Scaling, f"factor low_freq_factor high_freq_factor {_ORIGINAL}"),
    "yarn": _Kind(YarnScaling, f"factor {_ORIGINAL}", _YARN),
    "longrope": _LONGROPE,
    "su": _LONGROPE,
    "proportional": _Kind(ProportionalScaling, "", "factor"),
}


@functools.cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    """The entries that `transformers` takes where a configuration has none."""
    file = importlib.resources.files("ejkernel_eqx.rotary").joinpath("defaults.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


class FoundScaling(NamedTuple):
    """The contents of a scaling dict; `None` for missing ones."""

    scaling: Any
    theta: Any
    rotary_dim: int | None
    mrope_section: Any
    mrope_interleaved: bool


def read_scaling(given: Mapping[str, Any], head_dim: int) -> FoundScaling:
    """Reads a dict `rope_scaling` or `rope_parameters` of one layer type."""
    given = {name: value for name, value in given.items() if value is not None}
    name = given.get("rope_type", given.get("type", "default"))
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"scaling: expected a rope_type of {', '.join(_KINDS)}, received {shown(name)}; other types are not supported."
        )
    missing = [key for key in kind.required.split() if key not in given]
    if missing:
        raise ValueError(
            f"scaling: expected {', '.join(missing)} in a dict of rope_type {name!r}, received {', '.join(sorted(map(str, given))[:8])}; "
            "use RotaryEmbedding.from_config, which also reads the keys beside it in the model's configuration."
        )
    unknown = set(given) - _COMMON - set(kind.keys())
    if unknown:
        raise ValueError(
            f"scaling: expected only known keys with rope_type {name!r}, received {', '.join(sorted(map(str, unknown))[:8])}; remove keys that do "
            "not belong to the rotation."
        )
    partial = given.get(_PARTIAL)
    keys = [key for key in kind.keys() if key in given and key not in _COMMON]
    numbers = {key.replace(_ORIGINAL, "original_max_position"): given[key] for key in keys}
    if name == "proportional":
        numbers["fraction"], partial = 1.0 if partial is None else partial, None
    if partial is not None:
        check_numbers(**{_PARTIAL: partial})
    section = given.get("mrope_section")
    return FoundScaling(
        scaling=None if kind.build is None else kind.build(**numbers),
        theta=given.get("rope_theta"),
        rotary_dim=None if partial is None else int(head_dim * partial),
        mrope_section=section,
        mrope_interleaved=section is not None and given.get("mrope_interleaved", False),
    )


def read_config(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The arguments of `RotaryEmbedding` for a published model."""
    config = entries_of(config)
    head_dim = _head_dim(config, layer_type)
    scaling = _scaling_of(config, layer_type)
    if scaling is None:
        scaling = _scaling_before_nesting(config, layer_type)
        original = config.get(_ORIGINAL)
        if original is not None and scaling.get("rope_type", scaling.get("type")) in _WITH_ORIGINAL:
            scaling[_ORIGINAL] = original
    scaling.setdefault("rope_theta", _theta(config, layer_type))
    _complete(scaling, config)
    found: dict[str, Any] = {"head_dim": head_dim, "scaling": scaling}
    if config.get("rotary_dim") is not None and _PARTIAL not in scaling:
        return found | {"rotary_dim": config["rotary_dim"]}
    scaling.setdefault(_PARTIAL, _partial(config))
    return found


def _first(config: Entries, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of the entries that is there."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def _is_local(layer_type: str | None) -> bool:
    return layer_type is not None and layer_type.startswith("sliding")


def _head_dim(config: Entries, layer_type: str | None) -> int:
    if layer_type == "full_attention" and config.get("global_head_dim"):
        return config["global_head_dim"]
    if (width := _first(config, ("qk_rope_head_dim", "head_dim"))) is not None:
        return width
    width = _first(config, ("hidden_size", "n_embd"))
    heads = _first(config, ("num_attention_heads", "n_head"))
    if width is None or heads is None:
        part = next((name for name in ("text_config", "llm_config") if config.raw(name)), None)
        remedy = f"pass config[{part!r}]" if part else "they determine the size of a head"
        raise CheckpointError(
            f"config: expected head_dim, or hidden_size and num_attention_heads, received neither; {remedy}."
        )
    return width // heads


def _scaling_of(config: Entries, layer_type: str | None) -> dict[str, Any] | None:
    """A copy of the scaling dict of these layers; `None` if all layers share one."""
    found = _whole_scaling(config)
    types = [name for name in found if name not in FIELDS and isinstance(found.raw(name), Mapping)]
    if not types:
        return None
    if layer_type not in types:
        raise _unknown_layers(types, layer_type)
    return found.inner(layer_type).known()


def _scaling_before_nesting(config: Entries, layer_type: str | None) -> dict[str, Any]:
    """The scaling dict of a configuration with only one: if layers differ, it applies to those with full attention."""
    two_kinds = (
        config.get("model_type") in _defaults()["theta_by_layer"] or _first(config, _LOCAL) is not None
    )
    if two_kinds and layer_type is None:
        raise _unknown_layers(["full_attention", "sliding_attention"], layer_type)
    if two_kinds and _is_local(layer_type):
        return {}
    return _whole_scaling(config).known()


def _whole_scaling(config: Entries) -> Entries:
    return config.inner("rope_scaling" if config.get("rope_scaling") else "rope_parameters")


def _unknown_layers(types: list[str], layer_type: str | None) -> ValueError:
    return ValueError(
        f"layer_type: expected one of {', '.join(types[:8])}, the layer types of this configuration, received {layer_type!r}; layers "
        "without a rotation have rope=None."
    )


def _theta(config: Entries, layer_type: str | None) -> Any:
    model_type = config.get("model_type") or ""
    default = _defaults()["theta"].get(model_type, 1e4)
    wide, local = _defaults()["theta_by_layer"].get(model_type, (default, None))
    if _is_local(layer_type) and (local is not None or _first(config, _LOCAL) is not None):
        return _first(config, _LOCAL, local)
    return _first(config, ("rope_theta", "global_rope_theta", "rotary_emb_base"), wide)


def _partial(config: Entries) -> Any:
    default = _defaults()["partial"].get(config.get("model_type") or "", 1.0)
    return _first(config, (_PARTIAL, "rotary_pct"), default)


def _complete(scaling: dict[str, Any], config: Entries) -> None:
    """Adds the lengths that are keys beside the scaling dict."""
    name, longest = scaling.get("rope_type", scaling.get("type")), config.get("max_position_embeddings")
    if longest is None:
        return
    if name == "dynamic":
        scaling[_ORIGINAL] = longest
    if name in _WITH_ORIGINAL:
        scaling.setdefault(_ORIGINAL, longest)
    if name in _WITH_ORIGINAL and name != "llama3":
        scaling.setdefault("factor", longest / scaling[_ORIGINAL])
