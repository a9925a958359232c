"""One call of inference attention, from resolved arrays to a platform and back."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from .._errors import UnsupportedError
from .._jitted import compiled_once, jitted
from .._kernel import Plan
from ..dispatch import announce, Implementation, Platform, Problem
from ..dispatch.labels import kernel_scope
from ..parallel import how_split, match_varying, opaque, Split
from .spec import PagedArrays, PagedSpec, PAGES, SHARED, WriteArrays
from .write import write, Writer

Named = dict[str, Array]
_NEW = "new_"


def attend(plan: Plan, operation: str, arrays: PagedArrays, spec: PagedSpec) -> Named:
    """`out`, and `lse` where it is asked for, on the platform that the plan chooses: the only way from an operation of this family to a kernel."""
    return jitted(_attend, plan, operation, spec)(arrays)


def _attend(plan: Plan, operation: str, spec: PagedSpec, arrays: PagedArrays) -> Named:
    results = _launched(plan, operation, spec, arrays)
    return results if spec.return_lse else {"out": results["out"]}


def _launched(plan: Plan, operation: str, spec: PagedSpec, arrays: PagedArrays) -> Named:
    selection = plan.select(problem_of(operation, arrays, spec), quiet=True)
    platform = selection.implementation.load()
    given, axes = arrays.given, axes_of(arrays, spec)
    if not getattr(platform, "OPAQUE", False):
        announce(selection)

        def plain(given: Named) -> Named:
            with kernel_scope(selection):
                return platform.forward(PagedArrays.of(given), spec, selection.config)

        return _not_differentiable(operation, selection.platform, plain)(given)

    def launch(given: Named) -> Named:
        """By the shapes of the launch: all leading axes are merged by now."""
        arrays = PagedArrays.of(given)
        chosen = plan.select(problem_of(operation, arrays, spec), platform=selection.platform)
        with kernel_scope(chosen):
            return platform.forward(arrays, spec, chosen.config)

    split, shared = how_split(selection.platform, plan.device), SHARED.intersection(given)
    # To take a head out of pages is to copy all of them.
    over_leading_axes = opaque(launch, axes, axes, split=split, shared=shared, sliced=False)
    return _not_differentiable(operation, selection.platform, over_leading_axes)(match_varying(given, given))


def writer(plan: Plan, operation: str, arrays: PagedArrays, spec: PagedSpec) -> Writer:
    """How the platform that the plan chooses for this call writes new tokens into its pages."""
    selection = plan.select(problem_of(operation, arrays, spec), quiet=True)
    platform = selection.implementation.load()
    if not getattr(platform, "OPAQUE", False):
        return write
    names = tuple((name, letters) for name, letters in axes_of(arrays, spec).items())
    return compiled_once(_write, selection.implementation, how_split(selection.platform, plan.device), names)


def _write(implementation: Implementation, split: Split, names: Any, arrays: WriteArrays) -> Named:
    axes = dict(names)
    axes |= {"slots": ("T",)} | {f"{_NEW}{name}": ("T", *axes[name][2:]) for name in PAGES}

    def launch(given: Named) -> Named:
        """With one leading axis on everything."""
        new = {name.removeprefix(_NEW): x for name, x in given.items() if name.startswith(_NEW)}
        pages = {name: x for name, x in given.items() if name in arrays.pages}
        return implementation.load().write(WriteArrays(pages, new, given["slots"]))

    given = {**arrays.pages, "slots": arrays.slots}
    given |= {f"{_NEW}{name}": x for name, x in arrays.new.items()}
    over_leading_axes = opaque(launch, axes, axes, split=split, sliced=False)
    call = _not_differentiable(implementation.operation, implementation.platform, over_leading_axes)
    return call(match_varying(given, given))


def problem_of(operation: str, arrays: PagedArrays, spec: PagedSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    q, k = arrays.q, arrays.k
    v = k if arrays.v is None else arrays.v
    dims = {
        "N": math.prod(arrays.q_start.shape),
        "T": math.prod(q.shape[:-2]),
        "H": q.shape[-2],
        "K": k.shape[-2],
        "D": q.shape[-1],
        "V": v.shape[-1],
        "p": k.shape[-3],
        "M": arrays.page_table.shape[-1],
        "Q": spec.max_query_len,
    }
    flags = {
        "latent": spec.latent,
        "scales": spec.scales,
        "ranged": arrays.kv_start is not None,
        "window": spec.left is not None,
        "soft_cap": spec.logits_soft_cap is not None,
        "sinks": arrays.sinks is not None,
        "alibi_slopes": arrays.slopes is not None,
        "qq_bias": arrays.qq_bias is not None,
        "lse": spec.return_lse,
    }
    return Problem.make(
        operation,
        dims=dims,
        dtypes={"q": q.dtype, "kv": k.dtype},
        flags=flags,
        lengths={"N", "T", "M", "Q"},
        counts={"H", "K"},
        requirements={"lse"},
    )


def axes_of(arrays: PagedArrays, spec: PagedSpec) -> dict[str, tuple[str, ...]]:
    heads, kv_heads = f"H{arrays.q.shape[-2]}", f"H{arrays.k.shape[-2]}"
    scale = ("P", "p", kv_heads) if spec.scales == "token" else (kv_heads,)
    return {
        "q": ("T", heads, "D"),
        "k": ("P", "p", kv_heads, "Dk"),
        "v": ("P", "p", kv_heads, "V"),
        "rope": ("P", "p", kv_heads, "Dr"),
        "page_table": ("N", "M"),
        **dict.fromkeys(("q_start", "q_len", "kv_len", "kv_start"), ("N",)),
        **dict.fromkeys(("k_scale", "v_scale", "rope_scale"), scale),
        "sinks": (heads,),
        "slopes": (heads,),
        "qq_bias": ("Q", "Q2"),
        "out": ("T", heads, "V"),
        "lse": ("T", heads),
    }


def _not_differentiable(
    operation: str, platform: Platform, function: Callable[[Named], Named]
) -> Callable[[Named], Named]:
    """The function, with a clear error where it would be differentiated."""
    call = jax.custom_jvp(function)

    @call.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            operation,
            {platform: "attention over pages is for inference and has no gradient"},
            "To differentiate, gather keys and values (`cache.gather()`) and call ejkernel_eqx.FlashAttention; to use the result as a "
            "constant, put jax.lax.stop_gradient around the arguments.",
        )

    return call
