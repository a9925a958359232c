"""`Published`: what the layers share that published models have."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from jaxtyping import PRNGKeyArray

from .._signatures import Module

L = TypeVar("L", bound="Published")


class Published(Module):
    """A layer that is built from the configuration of a published model."""

    _options_of: ClassVar[Callable[..., dict[str, Any]] | None] = None
    """The arguments of the layer, from a published configuration and the index of the layer."""

    @classmethod
    def from_config(
        cls: type[L], config: Mapping[str, Any], /, *, layer_index: int = 0, key: PRNGKeyArray, **options: Any
    ) -> L:
        """Builds a layer of a published model, with initial weights; load the published ones with [`ejkernel_eqx.load_published`][]. The
        docstring of the layer, or its guide, names the supported models.

        **Arguments:**

        - `config`: the parsed `config.json` of the model, or `config.to_dict()` of `transformers`.
        - `layer_index`: index of the layer in the model, from 0.
        - `key`: PRNG key for the initial weights.
        - `options`: further arguments of the constructor, such as `dtype`. They take precedence over `config`.

        Raises `ValueError` for unsupported models and options, and for a layer of another kind.
        """
        if cls._options_of is None:
            raise ValueError(
                f"from_config: expected a layer with a published counterpart, received {cls.__name__}; build it with its constructor."
            )
        return cls(**{**cls._options_of(config, layer_index), **options}, key=key)  # pyright: ignore[reportCallIssue]
