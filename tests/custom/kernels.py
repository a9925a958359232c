"""Kernels of no use, with everything that a user's kernel may have: `out = scale * weight * x^2`, and what it is checked against."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx import Backend, CustomKernel, Plan, Platform
from tests.tolerances import assert_close

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

if triton is not None:

    @triton.jit
    def forward_kernel(x_ptr, weight_ptr, out_ptr, D: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        for start in tl.range(0, D, BLOCK):  # pyright: ignore
            i = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * D + i, mask=i < D, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + i, mask=i < D, other=0.0).to(tl.float32)
            out = SCALE * weight * x * x
            tl.store(out_ptr + row * D + i, out.to(out_ptr.dtype.element_ty), mask=i < D)

    @triton.jit
    def backward_kernel(
        x_ptr, weight_ptr, dout_ptr, dx_ptr, dweight_ptr,
        D: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        for start in tl.range(0, D, BLOCK):  # pyright: ignore
            i = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * D + i, mask=i < D, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + i, mask=i < D, other=0.0).to(tl.float32)
            dout = SCALE * tl.load(dout_ptr + row * D + i, mask=i < D, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * D + i, (2.0 * weight * x * dout).to(dx_ptr.dtype.element_ty), mask=i < D)
            tl.store(dweight_ptr + row * D + i, x * x * dout, mask=i < D)


@dataclasses.dataclass(frozen=True)
class Block:
    block_n: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    forward: Block
    backward: Block


class Square(CustomKernel):
    """`rows`: gradients of the shared weight come as a row per batch row, or summed."""

    operation: ClassVar = "tests.square"
    inputs: ClassVar = {"x": "... D", "weight": "D"}
    outputs: ClassVar = {"out": "... D"}
    lengths: ClassVar = frozenset({"D"})
    config_types: ClassVar = {Platform.TRITON: Blocks}

    scale: float = eqx.field(static=True)
    rows: bool = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(self, scale: Any = 2.0, rows=True, *, platform=None, config=None, tune_for=None):
        self.scale = scale
        self.rows = rows
        self.plan = self.make_plan(platform=platform, config=config, tune_for=tune_for)

    def __call__(self, x, weight):
        return self.launch(x=x, weight=weight)

    def reference(self, x, weight):
        return plain(x, weight, self.scale)

    def run_triton(self, arrays, config, launch):
        x, weight = arrays["x"], arrays["weight"]
        return launch(
            forward_kernel,
            grid=(x.shape[0],),
            inputs={"x_ptr": x, "weight_ptr": weight},
            outputs={"out_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype)},
            constants=self._constants(x, config.forward),
        )["out_ptr"]

    def grad_triton(self, arrays, outputs, cotangents, config, launch):
        x, weight = arrays["x"], arrays["weight"]
        made = {"dx_ptr": x.dtype, "dweight_ptr": jnp.float32}
        results = launch(
            backward_kernel,
            grid=(x.shape[0],),
            inputs={"x_ptr": x, "weight_ptr": weight, "dout_ptr": cotangents["out"]},
            outputs={name: jax.ShapeDtypeStruct(x.shape, dtype) for name, dtype in made.items()},
            constants=self._constants(x, config.backward),
        )
        dweight = results["dweight_ptr"]
        return {"x": results["dx_ptr"], "weight": dweight if self.rows else dweight.sum(0)}

    def _constants(self, x, block):
        return {"D": x.shape[1], "SCALE": self.scale, "BLOCK": block.block_n}

    def candidates(self, platform, problem, device):
        return [Blocks(Block(size), Block(size)) for size in (16, 32)]


class Opaque(CustomKernel):
    """A kernel that the compiler may not look into, whose body runs on any machine. `backward`: `"rows"` or `"summed"`."""

    operation: ClassVar = "tests.opaque"
    inputs: ClassVar = {"x": "... D", "weight": "D", "index": ("...", jnp.integer)}
    outputs: ClassVar = {"out": "... D", "total": ("...", jnp.float32), "place": ("...", jnp.int32)}
    backends: ClassVar = {Platform.PALLAS: Backend.ANY}

    backward: str = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(self, backward="rows", *, platform=None, config=None, tune_for=None):
        self.backward = backward
        self.plan = self.make_plan(platform=platform, config=config, tune_for=tune_for)

    def __call__(self, x, weight, index):
        return self.launch(x=x, weight=weight, index=index)

    def reference(self, x, weight, index):
        out = plain(x, weight, 1.0) * index[..., None].astype(x.dtype)
        return out, jnp.sum(out, axis=-1), index + 1

    def run_pallas(self, arrays, config):
        out, total, place = self.reference(**arrays)
        return out, total.astype(jnp.float32), place.astype(jnp.int32)

    def grad_pallas(self, arrays, outputs, cotangents, config):
        x, weight, index = arrays["x"], arrays["weight"], arrays["index"][:, None].astype(arrays["x"].dtype)
        dout = (cotangents["out"] + cotangents["total"][:, None].astype(x.dtype)) * index
        dweight = x * x * dout
        dweight = dweight if self.backward == "rows" else dweight.sum(0)
        return {"x": 2 * weight[None] * x * dout, "weight": dweight}

    def example_inputs(self, problem, key):
        return {"index": jnp.arange(problem.dim("B"), dtype=problem.dtype("index"))}


def define(**changes: Any) -> Any:
    """A small class, with some of its attributes replaced, or left out where the replacement is `None`."""

    def __init__(self, **options):
        self.plan = self.make_plan(**options)

    attributes: dict[str, Any] = {
        "__module__": __name__,
        "__qualname__": "Small",
        "operation": "tests.small",
        "inputs": {"x": "... D"},
        "outputs": {"out": "... D"},
        "plan": eqx.field(static=True),
        "__annotations__": {"plan": Plan},
        "__init__": __init__,
        "__call__": lambda self, x: self.launch(x=x),
        "reference": lambda self, x: x + 1,
    } | changes
    metaclass: Any = type(CustomKernel)
    return metaclass("Small", (CustomKernel,), {k: v for k, v in attributes.items() if v is not None})


def plain(x: Any, weight: Any, scale: float = 2.0) -> Any:
    return scale * jnp.expand_dims(weight, range(x.ndim - weight.ndim)) * x * x


def close(actual: Any, expected: Any) -> None:
    """By the tolerance table; integers exactly."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(x.dtype, jnp.integer):
            np.testing.assert_array_equal(x, y)
        else:
            assert_close(x, y, kind="gradient")
