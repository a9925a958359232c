"""The kind of call shared by the family, its problem and its axes, and how platforms write new tokens into pages."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._jitted import compiled_once
from .._kernel import Plan
from ..core import ForwardKind, is_opaque, Named
from ..core.arguments import accumulator
from ..dispatch import Implementation, Problem
from ..parallel import how_split, Leading, match_varying, opaque, Split
from . import reference
from .cache.write import write, Writer
from .spec import axes_of, LETTERS, PagedArrays, PagedSpec, PAGES, RESULTS, SHARED, WriteArrays

_NEW = "new_"


def problem_of(operation: str, arrays: PagedArrays, spec: PagedSpec) -> Problem:
    """The host metadata of a call. Shapes are those visible here, which inside a partitioned body are the local ones."""
    q, k, size = arrays.q, arrays.k, LETTERS[spec.scales].sizes(arrays)
    dims = {letter: size[letter] for letter in "HKDpM"} | {name: size["B"] * size[name] for name in "NT"}
    dims |= {"Q": spec.max_query_len, "V": arrays.value_channels}
    present = {"ranged": arrays.kv_start, "window": spec.left, "soft_cap": spec.logits_soft_cap}
    present |= {"sinks": arrays.sinks, "alibi_slopes": arrays.slopes, "qq_bias": arrays.qq_bias}
    present |= {"log_forget": arrays.gates}
    flags: dict[str, Any] = {name: x is not None for name, x in present.items()}
    flags |= {"latent": spec.latent, "scales": spec.scales, "lse": spec.return_lse}
    # "kv" is the dtype of both kinds of pages unless they differ.
    second = {name: x.dtype for name in ("v", "rope") if (x := getattr(arrays, name)) is not None}
    dtypes = {"q": q.dtype, "kv": k.dtype} | {name: x for name, x in second.items() if x != k.dtype}
    kinds = {"lengths": set("NTMQ"), "counts": set("HK"), "requirements": {"lse"}}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags=flags, **kinds)


ATTEND = ForwardKind(
    make=lambda **given: PagedArrays.of(given),
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference.attend,
    results=RESULTS,
    learned=(),
    shared=SHARED,
    sliced=False,  # slicing a head out of the pages would copy all of them
    wanted=lambda spec: RESULTS if spec.return_lse else RESULTS[:1],
    refusal=(
        "attention over pages, or over latents in a cache, is for inference and has no gradient",
        "To differentiate, call the layer or model on all tokens without a cache, or gather the keys and values (`cache.gather()`) and call "
        "ejkernel_eqx.FlashAttention; to treat the result as a constant, wrap the arguments in jax.lax.stop_gradient.",
    ),
)


def finish(plan: Plan, arrays: PagedArrays, spec: PagedSpec) -> Array | tuple[Array, Array]:
    """`out`, and `lse` if requested, on the platform that the plan chooses; zeros and minus infinity where no token belongs to a sequence."""
    # Nothing is launched without tokens: every result is that of a query that sees no key.
    if is_empty(arrays):
        shape = arrays.q.shape[:-1]
        out = jnp.zeros((*shape, arrays.value_channels), arrays.q.dtype)
        results = {"out": out, "lse": jnp.full(shape, -jnp.inf, accumulator(arrays.q.dtype))}
    else:
        results = ATTEND.call(plan, plan.operation, arrays, spec)
    return (results["out"], results["lse"]) if spec.return_lse else results["out"]


def is_empty(arrays: PagedArrays) -> bool:
    """Reports whether there are no tokens, or none that belong to a sequence."""
    return 0 in (arrays.q.size, arrays.kv_len.size)


def writer(plan: Plan, arrays: PagedArrays, spec: PagedSpec) -> Writer:
    """The function by which the platform chosen for this call writes new tokens into pages: its own kernel, or XLA's scatter."""
    selection = plan.select(problem_of(plan.operation, arrays, spec))
    platform = selection.implementation.load()
    # XLA's scatter writes for the platforms that have no kernel of their own for it.
    if not is_opaque(platform) or not hasattr(platform, "write"):
        return write
    names = tuple((name, letters) for name, letters in axes_of(arrays, spec).items())
    return compiled_once(_write, selection.implementation, how_split(selection.platform, plan.device), names)


def _write(implementation: Implementation, split: Split, names: Any, arrays: WriteArrays) -> Named:
    axes = dict(names)
    axes |= {"slots": ("T",)} | {f"{_NEW}{name}": ("T", *axes[name][2:]) for name in PAGES}

    def launch(given: Named, runs: Any) -> Named:
        """The arrays with exactly one leading axis."""
        new = {name.removeprefix(_NEW): x for name, x in given.items() if name.startswith(_NEW)}
        pages = {name: x for name, x in given.items() if name in arrays.pages}
        return implementation.load().write(WriteArrays(pages, new, given["slots"]))

    given = {**arrays.pages, "slots": arrays.slots}
    given |= {f"{_NEW}{name}": x for name, x in arrays.new.items()}
    over_leading_axes = opaque(launch, Leading(axes=axes), split=split, sliced=False)
    call = ATTEND.refused(implementation.operation, implementation.platform, over_leading_axes)
    return call(match_varying(given, given))
