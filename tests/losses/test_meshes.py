"""The losses on every kind of mesh, with rows of tokens and the vocabulary split over devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests import meshes
from tests.agreement import platforms
from tests.attention.dense import INTERPRET, normal
from tests.losses.cases import config_of, XlaConfig
from tests.meshes import HEADS, ROWS

platform = platforms()
ARRAYS = {"x": normal(0, 4, 6, 8), "weight": normal(1, 16, 8), "bias": normal(2, 16)}
ARRAYS["token_weights"] = jnp.abs(normal(3, 4, 6))
SPECS = {"x": (ROWS,), "weight": (HEADS,), "bias": (HEADS,), "token_weights": (ROWS,)}
LABELS = jnp.arange(24).reshape(4, 6) % 18 - 2


def everything(call, arrays, labels) -> Any:
    """Results, and the gradients of a function of all of them."""
    out, pull = jax.vjp(lambda arrays: call(labels=labels, **arrays), arrays)
    return out, pull(jax.tree.map(jnp.cos, out))[0]


def losses(operation, x, labels, weight, bias, token_weights) -> Any:
    return operation(x, labels, weight, bias, token_weights)


def statistics(operation, x, labels, weight, bias, token_weights) -> Any:
    loss, each = operation(x, labels, weight, bias, token_weights, return_statistics=True)
    return loss, each[:3]


def of_logits(operation, x, labels, weight, bias, token_weights) -> Any:
    logits = jnp.einsum("bte,ve->btv", x, weight) + bias[None, None]
    return ejx.cross_entropy(logits, labels, token_weights, label_smoothing=0.1)


def of_split_logits(operation, x, labels, weight, bias, token_weights) -> Any:
    logits, options = jnp.einsum("bte,ve->btv", x, weight) + bias[None, None], operation.options
    axis, reduction = options.vocab_axis, options.reduction
    return ejx.cross_entropy(logits, labels, token_weights, vocab_axis=axis, reduction=reduction)


def divergence(operation, x, labels, weight, bias, token_weights) -> Any:
    teacher = ejx.Teacher.from_features(x[..., :4], weight[:, :4], bias)
    return operation(x, weight, teacher, bias, token_weights, mask=labels >= 0)


CONFIG: dict[str, Any] = {"config": XlaConfig(8)}
CALLS: dict[str, Any] = {
    "mean": (losses, ejx.LinearCrossEntropy(**CONFIG)),
    "none": (losses, ejx.LinearCrossEntropy("none", config=XlaConfig(64))),
    "statistics": (statistics, ejx.LinearCrossEntropy("none", label_smoothing=0.1, **CONFIG)),
    "logits": (of_logits, None),
    "divergence": (divergence, ejx.LinearDivergence("jensen_shannon", **CONFIG)),
}


def agree_on_a_mesh(call, kind, layout, shape=(2, 2)) -> Any:
    expected = jax.jit(functools.partial(everything, call))(ARRAYS, LABELS)
    mesh = meshes.mesh_of(kind, shape)
    specs = {name: meshes.spec(layout, *axes) for name, axes in SPECS.items()}
    arrays, labels = meshes.place(mesh, (ARRAYS, LABELS), (specs, meshes.spec(layout, ROWS)))
    with meshes.context(kind, mesh):
        out, gradients = jax.jit(functools.partial(everything, call))(arrays, labels)
    meshes.agree(out, expected[0])
    meshes.agree(gradients, expected[1], "gradient")
    for name, x in gradients.items():
        if "automatic" not in kind:
            assert meshes.lies(x, mesh, specs[name]), (name, x.sharding)
    return arrays, labels


@pytest.mark.few(1)
@meshes.everywhere
@pytest.mark.parametrize("name", CALLS)
def test_on_a_mesh(name, kind, layout):
    function, operation = CALLS[name]
    agree_on_a_mesh(functools.partial(function, operation), kind, layout)


@pytest.mark.few(1)
@meshes.everywhere
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", [losses, divergence])
def test_kernels_on_a_mesh(form, reduction, kind, layout):
    pytest.importorskip("triton")
    make = ejx.LinearCrossEntropy if form is losses else ejx.LinearDivergence
    operation = make(reduction=reduction, platform=INTERPRET, config=config_of(INTERPRET, 4))
    agree_on_a_mesh(functools.partial(form, operation), kind, layout)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["automatic", "explicit without context"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_words_over_an_axis(reduction, kind, shape, platform):
    """One exchange of a chunk's numbers, by the name of the axis or by the type of the weight, and none on an axis of one device."""
    if platform == INTERPRET and kind == "automatic":
        pytest.skip("XLA does not split callbacks on an automatic mesh")
    axis, config = HEADS if kind == "automatic" else None, config_of(platform, 8)
    operation = ejx.LinearCrossEntropy(
        reduction, z_loss=0.1, vocab_axis=axis, platform=platform, config=config
    )
    call = functools.partial(statistics, operation)
    arrays, labels = agree_on_a_mesh(call, kind, "both", shape)
    alone = jax.jit(lambda arrays, labels: statistics(operation, labels=labels, **arrays)[1])
    count = meshes.collectives(alone.lower(arrays, labels).compile())
    assert dict(count) == ({} if shape[1] == 1 else {"all-gather": 1})


@pytest.mark.few(1)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("form", [losses, statistics, of_split_logits])
def test_inside_shard_map(form, reduction, check_vma, platform):
    """Each device has some tokens and some words; labels count all words."""
    options: Any = {"label_smoothing": 0.1, "platform": platform, "config": config_of(platform, 8)}
    call = lambda axis: functools.partial(form, ejx.LinearCrossEntropy(reduction, vocab_axis=axis, **options))
    specs = {name: P(*axes) for name, axes in SPECS.items()}
    out = P() if reduction == "sum" else P(ROWS)
    outs = (out, (P(ROWS),) * 3) if form is statistics else out

    def scalar(results) -> Any:
        # A sum of losses is some tens, whose sine would have fewer digits.
        return sum(jnp.sum(jnp.sin(x / 16)) for x in jax.tree.leaves(results))

    def local(arrays, labels):
        # A sum over the tokens of all devices is their sum.
        whole = lambda x: jax.lax.psum(x, ROWS) if reduction == "sum" and x.ndim == 0 else x
        return jax.tree.map(whole, call(HEADS)(labels=labels, **arrays))

    def split(arrays, labels):
        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P(ROWS)), out_specs=outs, check_vma=check_vma
        )(arrays, labels)

    def value_and_grad(function):
        return jax.jit(jax.value_and_grad(lambda arrays: scalar(function(arrays, LABELS))))(ARRAYS)

    mesh = meshes.mesh_of("automatic")
    value, grads = value_and_grad(split)
    expected, wanted = value_and_grad(lambda arrays, labels: call(None)(labels=labels, **arrays))
    meshes.agree(value, expected)
    meshes.agree(grads, wanted, "gradient")


def test_words_that_do_not_divide(unchecked):
    mesh = meshes.mesh_of("explicit", (1, 4))
    x, weight = meshes.place(mesh, (ARRAYS["x"], jnp.ones((18, 8))), (P(), P()))
    with pytest.raises(
        ValueError, match=r"weight: expected words in 4 equal parts .* received 18; pad them to 20"
    ):
        ejx.LinearCrossEntropy(vocab_axis=HEADS)(x, LABELS, weight)
    with pytest.raises(ValueError, match=r"vocab_axis: expected an axis of the mesh, .*'words'"):
        ejx.LinearCrossEntropy(vocab_axis="words")(x, LABELS, weight)
