"""What is said of a class that is not complete, and of a call that does not fit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, kernel_registry
from tests.custom.kernels import Blocks, define, Opaque, Square


@dataclasses.dataclass
class Thawed:
    size: int = 1


MISSING = ("operation", "inputs", "outputs", "__init__", "__call__", "reference")


@pytest.mark.parametrize("names", [*((name,) for name in MISSING), MISSING], ids=" ".join)
def test_what_is_missing_is_named_at_once(names):
    with pytest.raises(ValueError, match="Small, a CustomKernel:\n- ") as error:
        define(**dict.fromkeys(names))
    assert all(f"- {name} is missing: " in str(error.value) for name in names)


Settings = dict[str, Any]
WRONG: dict[str, tuple[Settings, str]] = {
    "array": ({"__annotations__": {"plan": ejx.Plan, "weight": jax.Array}}, "field weight is not static"),
    "mutable": ({"config_types": {"xla": Thawed}, "candidates": print}, "expected a frozen dataclass"),
    "no platform": ({"config_types": {"triton": Blocks}, "candidates": print}, "no method run_triton"),
    "no candidates": ({"config_types": {"xla": Blocks}}, "candidates .or default_config. is missing"),
    "output of new axes": ({"outputs": {"out": "... E"}}, r"outputs\['out'\]: no input has the axes \['E'\]"),
    "output without batch": ({"outputs": {"out": "D"}}, "expected batch axes"),
    "inputs without batch": ({"inputs": {"x": "D"}}, "inputs: expected at least one with batch axes"),
    "unreadable axes": ({"inputs": {"x": "... D D"}}, r"inputs\['x'\]: expected distinct letters"),
    "batch in the middle": ({"inputs": {"x": "D ..."}}, r"inputs\['x'\]: expected distinct letters"),
    "letter B": ({"inputs": {"x": "... B"}}, "the number of rows"),
    "not axes": ({"inputs": {"x": 3}}, "expected a name and its axes"),
    "same names": ({"outputs": {"x": "... D"}}, r"share the names \['x'\]"),
    "no outputs": ({"outputs": {}}, "outputs: expected at least one"),
    "unknown lengths": ({"lengths": {"T"}}, r"lengths: no input has the axes \['T'\]"),
    "strange name": ({"operation": "a/b"}, "operation: expected letters"),
    "taken by us": ({"operation": "flash_attention"}, "'flash_attention' is already used"),
    "taken by another": ({"operation": "tests.square"}, "'tests.square' is already used by .*Square"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    settings, message = WRONG[name]
    before = kernel_registry.list_operations()
    with pytest.raises(ValueError, match=message):
        define(**settings)
    assert kernel_registry.list_operations() == before


def test_a_class_defined_anew_replaces_itself():
    for offset in (1.0, 5.0):
        kernel = define(reference=lambda self, x, offset=offset: x + offset)()
        assert kernel(jnp.zeros((2, 3))).tolist() == [[offset] * 3] * 2


def test_platforms_come_from_the_methods():
    found = [i.platform.value for i in kernel_registry.ordered("tests.square")]
    assert found == ["triton", "xla", "triton-interpret"]
    assert kernel_registry.get("tests.opaque", "pallas").backend is Backend.ANY
    chosen = {row.platform for row in ejx.explain(Square(), jnp.ones((2, 4)), jnp.ones(4)).choices}
    assert chosen <= {"xla", "triton"}


X, WEIGHT = jnp.ones((2, 3, 8)), jnp.ones(8)
CALLS: dict[str, tuple[Any, str]] = {
    "size": (lambda: Square()(X, jnp.ones(7)), r"weight: .* with D = 8 as in x, received shape \(7,\)"),
    "rank": (lambda: Square()(X, WEIGHT[None]), r"weight: expected \[D\], received shape \(1, 8\)"),
    "scalar": (lambda: Square()(jnp.float32(1), WEIGHT), r"x: expected \[..., D\], received shape \(\)"),
    "batch": (
        lambda: Opaque()(X, WEIGHT, jnp.ones((3, 2), jnp.int32)),
        r"index: .* with batch axes \(2, 3\) as in x, received shape \(3, 2\)",
    ),
    "dtype": (lambda: Opaque()(X, WEIGHT, X[..., 0]), "index: expected dtype integer, received float32"),
    "complex": (lambda: Square()(X.astype(jnp.complex64), WEIGHT), "x: complex arrays are not supported"),
    "not an array": (lambda: Square()([1.0], WEIGHT), "x: expected an array, received list"),
    "option": (lambda: Square(scale=(1, 2)), r"Square.scale: expected a bool, int, .*received a tuple"),
    "names": (lambda: Square().launch(x=X), r"expected the inputs \['x', 'weight'\], received \['x'\]"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


RETURNS: dict[str, tuple[Settings, str]] = {
    "shape": (
        {"run_xla": lambda self, arrays, _: arrays["x"].T},
        r"run_xla .*'out': expected shape \(2, 3\)",
    ),
    "dtype": ({"run_xla": lambda self, arrays, _: arrays["x"].astype(int)}, r"dtype float32, received"),
    "number": ({"run_xla": lambda *_: (1, 2)}, r"run_xla: expected the outputs \['out'\]"),
    "nothing": ({"run_xla": lambda *_: None}, "run_xla returned 'out'.*received None"),
    "no gradient": ({"grad_xla": lambda *_: {}}, r"grad_xla: .* the gradients of \['x'\], received \[\]"),
    "config": (
        {"config_types": {"xla": Blocks}, "candidates": lambda *_: [3]},
        "expected Blocks, received 3; ",
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_methods_that_return_something_else(name):
    settings, message = RETURNS[name]
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: jnp.sum(define(**settings)()(x)))(jnp.ones((2, 3)))


def test_a_platform_may_refuse():
    words = lambda self, platform, problem, device: "takes D up to 8" if problem.dim("D") > 8 else None
    Refusing = define(operation="tests.refusing", unsupported=words)
    assert Refusing()(jnp.ones(8)).shape == (8,)
    with pytest.raises(ejx.UnsupportedError, match=r"tests.refusing.*xla.*takes D up to 8"):
        Refusing()(jnp.ones(9))
    with pytest.raises(ejx.UnsupportedError, match="takes D up to 8"):
        Refusing(tune_for=(jnp.ones(9),))
