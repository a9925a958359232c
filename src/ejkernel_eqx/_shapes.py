"""Shapes in public signatures, `Float[AnyArray, "*B T H D"]`, with one glossary of letters for all of them; and sizes that may be symbolic,
known only when a function exported by `jax.export` for any size is called.

| letters | size |
|---|---|
| `*B` | any number of leading axes, also none: the batch |
| `T`, `S` | tokens; of attention the queries and the keys |
| `H`, `K` | heads; of attention those of the queries and those of the keys and values; `H` also the hidden features of a recurrent cell |
| `D`, `V` | channels of a query or key, and of a value |
| `Dn`, `Dr` | of latent attention: channels of a key without and with a rotation |
| `R` | output heads of a recurrence: the largest count of its operands' heads; of a latent cache its rank |
| `I`, `P` | channels of a state space, and those of one of its heads |
| `M`, `J`, `L` | of Mamba-3: ranks, rotated pairs of channels, and the numbers that a token leaves for the next |
| `N`, `G` | state size, groups; in `N+1` the packed sequences (`S+1` where `N` is the size of a state); of pages the sequences |
| `G`, `I` | of a recurrent cell: gates times `H`, inputs |
| `C`, `W` | channels and width of a convolution, channels of a norm or a pooling; `W` also the slots of a rolling cache |
| `E`, `O` | features of the input and the output of a layer |
| `C`, `Cv` | of cross attention: features of the inputs of keys and values |
| `M`, `K`, `N`, `E` | of a grouped matmul: rows, the contracted axis, columns, groups |
| `M` | of a delta product the writes of a token |
| `L` | layers of recurrent cells, times their directions |
| `Q` | the most new tokens of a sequence |
| `n` | sinks of a head |

What reads as an expression of Python's begins with a space (`" N+1"`), as in jaxtyping, so that no tool takes it for one. A `#` marks an
axis that may be 1 and is broadcast; `...` stands for axes that the argument's documentation names. For a type checker the words are
jaxtyping's. At run time they check what kind of numbers an array holds and leave its shape to the operation, whose error names the
argument, both shapes and the remedy."""

from collections.abc import Sequence
from typing import Annotated, Any, get_args, TYPE_CHECKING, Union

import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer

AnyArray = Array | np.ndarray
"""What an operand may be."""

Numbers = Array | np.ndarray | np.number | np.bool_ | Sequence[Any]
"""What offsets, lengths, ids and small parameters may be: arrays, and lists of numbers."""

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    import jaxtyping

    class _Kind:
        """A word of jaxtyping's that checks dtypes, and keeps the shape for readers."""

        def __init__(self, word: Any) -> None:
            self._word = word

        def __getitem__(self, item: tuple[Any, str]) -> Any:
            given, letters = item
            kinds = get_args(given) or (given,)
            arrays = {Array, np.ndarray}
            types = tuple(self._word[kind, "..."] if kind in arrays else kind for kind in kinds)
            return Annotated[Union[types], letters.strip()]  # noqa: UP007  a tuple

    # Offsets, lengths and ids may be unsigned.
    Bool, Float, Int = map(_Kind, (jaxtyping.Bool, jaxtyping.Float, jaxtyping.Integer))


def is_symbolic(size: Any) -> bool:
    """Returns whether a size is symbolic."""
    return export.is_symbolic_dim(size)


def remedy_of_size(value: Any, least: int) -> str:
    """Returns what to pass in place of a value that is no integer of at least `least`, at the end of a message."""
    if isinstance(value, Tracer):
        return "shapes depend on it, so pass it as a static argument of jit"
    is_number = isinstance(value, int | float | np.integer | np.floating | Array) and not isinstance(
        value, bool
    )
    if not is_number or np.ndim(value) or not float(value).is_integer():
        return "pass an integer of Python"
    return f"pass {least} or more" if value < least else f"pass the integer {int(value)}"


def least(count: Any, length: Any) -> Any:
    """The smaller of two sizes; if either is symbolic, `count`, which may then be the larger one."""
    return count if is_symbolic(count) or is_symbolic(length) else min(count, length)


def as_value(size: Any) -> Any:
    """A size that may be symbolic, for arithmetic with int32."""
    return jnp.asarray(size, jnp.int32) if is_symbolic(size) else size
