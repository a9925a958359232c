"""`LayerInputs`: the inputs of a layer besides the features of the tokens."""

from typing import Any, NamedTuple

from jax import Array


class LayerInputs(NamedTuple):
    """The inputs of one layer, or of a stack. A stack has an `embedding [repetitions, layers of the pattern, ..., T, P]`, and the `keys` of the
    layers before it."""

    embedding: Array | None = None
    keys: Any = None
    start: Array | None = None
    """The embeddings of the tokens `[..., T, E]`."""
    shared_blocks: tuple[Any, ...] = ()

    def of(self, place: int, source: int | None) -> "LayerInputs":
        """The inputs of a layer of the pattern, which reads the keys of the layer `source`."""
        embedding = None if self.embedding is None else self.embedding[place]
        return self._replace(embedding=embedding, keys=None if source is None else self.keys[source])
