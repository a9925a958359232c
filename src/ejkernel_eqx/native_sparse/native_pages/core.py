"""The kind of call and its problem."""

from ...core import ForwardKind
from ...dispatch import Problem
from ..problems import FIELDS
from . import reference
from .spec import LETTERS, PagedNativeArrays, PagedNativeSpec, RESULTS, SHARED


def problem_of(operation: str, arrays: PagedNativeArrays, spec: PagedNativeSpec) -> Problem:
    """The host metadata of a call. Shapes are those visible here, which inside a partitioned body are the local ones."""
    size = LETTERS.sizes(arrays)
    dims = {letter: size[letter] for letter in "HKDVpM"} | {name: size["B"] * size[name] for name in "NT"}
    dims |= {"Q": spec.max_query_len, "n": spec.sparse.count}
    flags = {name: getattr(spec.sparse, name) for name in FIELDS} | {"given": spec.sparse.given}
    dtypes = {"qkv": arrays.q.dtype, "gates": arrays.gates.dtype}
    kinds = {"lengths": set("NTMQ"), "counts": set("HK"), "requirements": {"given"}}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags=flags, **kinds)


ATTEND = ForwardKind(
    make=PagedNativeArrays,
    problem_of=problem_of,
    axes_of=LETTERS.axes_of,
    reference=reference.attend,
    results=RESULTS,
    learned=(),
    shared=SHARED,
    sliced=False,  # slicing a head out of the pages would copy all of them
    wanted=lambda spec: RESULTS[:1] if spec.sparse.given else RESULTS,
    refusal=(
        "native sparse attention over pages is for inference and has no gradient",
        "To differentiate, gather the keys and values (`cache.gather()`) and call ejkernel_eqx.NativeSparseAttention; to treat the result as a "
        "constant, wrap the arguments in jax.lax.stop_gradient.",
    ),
)
