"""A custom kernel, from its declaration to training: the fused cross entropy of a language model.

Plain JAX writes float32 copies of the `[N, V]` logits and probabilities, the largest arrays of a training step. These kernels read the
logits once in each pass, and keep one number per token. `docs/guides/custom-kernels.md` explains the code, which runs on any machine.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # Triton is published for Linux only; elsewhere, this runs on XLA
    triton = None

if triton is not None:

    @triton.jit
    def forward_kernel(
        logits_ptr, labels_ptr, loss_ptr, lse_ptr, V: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """One program per token: computes the log-sum-exp of its logits in a single pass, and the loss."""
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(labels_ptr + row).to(tl.int64)
        logits_ptr += row * V
        columns = tl.arange(0, BLOCK)
        top = tl.full([], -1e30, tl.float32)  # finite, so that logits of -inf do no harm
        weights = tl.zeros([BLOCK], tl.float32)  # exp(logits - top), summed over blocks
        for start in tl.range(0, V, BLOCK):
            inside = start + columns < V
            logits = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(logits, axis=0))
            weights = weights * tl.exp(top - higher) + tl.exp(logits - higher)
            top = higher
        lse = top + tl.log(tl.sum(weights, axis=0))
        # A label outside the vocabulary returns NaN, as in plain JAX.
        picked = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=float("nan"))
        loss = lse - picked.to(tl.float32) + Z_LOSS * lse * lse
        tl.store(loss_ptr + row, tl.where(label >= 0, loss, 0.0))
        tl.store(lse_ptr + row, lse)

    @triton.jit
    def backward_kernel(
        logits_ptr,
        labels_ptr,
        lse_ptr,
        dloss_ptr,
        dlse_ptr,
        dlogits_ptr,
        V: tl.constexpr,
        Z_LOSS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program per block of a token's logits. Each gradient is written once, so runs are bitwise repeatable."""
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < V
        label = tl.load(labels_ptr + row)
        lse = tl.load(lse_ptr + row)
        dloss = tl.where(label >= 0, tl.load(dloss_ptr + row), 0.0)
        dlse = tl.load(dlse_ptr + row) + dloss * (1.0 + 2.0 * Z_LOSS * lse)
        logits = tl.load(logits_ptr + row * V + columns, mask=inside, other=float("-inf")).to(tl.float32)
        dlogits = dlse * tl.exp(logits - lse) - tl.where(columns == label, dloss, 0.0)
        tl.store(dlogits_ptr + row * V + columns, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


@dataclasses.dataclass(frozen=True)
class Block:
    """The number of logits that a program processes at a time (a power of two), and its number of warps."""

    block_n: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Platform `"triton"`. Each kernel has its own field, so that each is tuned by its own time."""

    forward: Block
    backward: Block


class CrossEntropy(ejx.CustomKernel):
    r"""Cross entropy of integer labels per token, with z-loss $\zeta$: $\ell = \mathrm{lse} - z_y + \zeta\, \mathrm{lse}^2$, where
    $\mathrm{lse} = \log \sum_v e^{z_v}$.

    A negative label (-100) is ignored: loss and gradient are 0. Any batch axes, any vocabulary size.
    """

    operation: ClassVar = "examples.cross_entropy"
    inputs: ClassVar = {"logits": "... V", "labels": ("...", jnp.integer)}
    outputs: ClassVar = {"loss": ("...", jnp.float32), "lse": ("...", jnp.float32)}
    config_types: ClassVar = {ejx.Platform.TRITON: Blocks}

    z_loss: float = eqx.field(static=True)
    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, z_loss=0.0, *, platform=None, config=None, tune_for=None):
        self.z_loss = float(z_loss)
        self.plan = self.make_plan(platform=platform, config=config, tune_for=tune_for)

    def __call__(self, logits, labels):
        return self.launch(logits=logits, labels=labels)[0]

    # Everything else is checked against the reference, and platform "xla" runs it.
    def reference(self, logits, labels):
        lse = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(labels >= 0, lse - picked + self.z_loss * lse**2, 0), lse

    # Arrays have one batch axis in the launches, however many the caller has.
    def run_triton(self, arrays, config, launch):
        rows, vocabulary = arrays["logits"].shape
        a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
        results = launch(
            forward_kernel,
            grid=(rows,),
            inputs={"logits_ptr": arrays["logits"], "labels_ptr": arrays["labels"]},
            outputs={"loss_ptr": a_row, "lse_ptr": a_row},
            constants={"V": vocabulary, "Z_LOSS": self.z_loss, "BLOCK": config.forward.block_n},
            num_warps=config.forward.num_warps,
        )
        return results["loss_ptr"], results["lse_ptr"]

    def grad_triton(self, arrays, outputs, cotangents, config, launch):
        logits, block = arrays["logits"], config.backward.block_n
        inputs = {"logits_ptr": logits, "labels_ptr": arrays["labels"], "lse_ptr": outputs["lse"]}
        results = launch(
            backward_kernel,
            grid=(logits.shape[0], -(-logits.shape[1] // block)),
            inputs=inputs | {"dloss_ptr": cotangents["loss"], "dlse_ptr": cotangents["lse"]},
            outputs={"dlogits_ptr": jax.ShapeDtypeStruct(logits.shape, logits.dtype)},
            constants={"V": logits.shape[1], "Z_LOSS": self.z_loss, "BLOCK": block},
            num_warps=config.backward.num_warps,
        )
        return {"logits": results["dlogits_ptr"]}

    def candidates(self, platform, problem, device):
        """The first one is used without tuning."""
        most = 1 << (problem.dim("V") - 1).bit_length()  # a block past the end of a row would only idle
        sizes = [(4096, 8), (2048, 4), (8192, 16), (1024, 4), (8192, 8), (4096, 4), (2048, 8), (16384, 16)]
        blocks = dict.fromkeys(Block(min(block_n, most), num_warps) for block_n, num_warps in sizes)
        return [Blocks(block, block) for block in blocks]

    def unsupported(self, platform, problem, device):
        if platform is ejx.Platform.TRITON and problem.dtype("logits") == "float64":
            return "takes float32, float16 and bfloat16, not float64"
        return None

    def example_inputs(self, problem, key):
        """Logits are random numbers by default. Labels must be valid, and some of them are ignored."""
        labels = jax.random.randint(key, (problem.dim("B"),), 0, problem.dim("V"))
        labels = jnp.where(labels % 10 == 0, -100, labels)
        return {"labels": labels.astype(problem.dtype("labels"))}


def example(shape, dtype=jnp.float32):
    logits_key, label_key = jax.random.split(jax.random.key(0))
    labels = jax.random.randint(label_key, shape[:-1], 0, shape[-1])
    return 3 * jax.random.normal(logits_key, shape, dtype), labels.at[..., ::7].set(-100)


def check(name, kernel, logits, labels):
    """Compares loss and gradient with the reference, differentiated by JAX."""

    def both(function):
        return function(logits, labels), jax.grad(lambda x: jnp.sum(jnp.sin(function(x, labels))))(logits)

    plain = both(lambda logits, labels: kernel.reference(logits, labels)[0])
    error = max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(both(kernel), plain))
    print(f"{name}: largest error {error:.1e}")


def train():
    """Learns the logits of the next character after each character. Under `vmap`, all rows are one launch."""
    text = jnp.array([[ord(character) for character in "the quick brown fox jumps over the lazy dog. "]] * 8)
    kernel, logits, losses = CrossEntropy(z_loss=1e-4), jnp.zeros((131, 131)), []
    step = jax.jit(jax.value_and_grad(lambda x: jnp.mean(jax.vmap(kernel)(x[text[:, :-1]], text[:, 1:]))))
    for _ in range(100):
        loss, slope = step(logits)
        logits, losses = logits - 30 * slope, [*losses, float(loss)]
    print(f"training: loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    gpu = jax.default_backend() == "gpu"
    check("chosen platform", CrossEntropy(1e-3), *example((64, 1003)))
    if triton is not None:  # the same kernels on any machine; slow, so the problems are small
        check("Triton, interpreted", CrossEntropy(1e-3, platform="triton-interpret"), *example((3, 100)))
    platform = None if gpu or triton is None else "triton-interpret"
    # Times the candidates for these shapes, unless a table has a result, and keeps the fastest.
    shapes = jax.eval_shape(lambda: example((8192, 50257), jnp.bfloat16) if gpu else example((4, 2000)))
    print(ejx.explain(CrossEntropy(1e-4, platform=platform, tune_for=shapes), *shapes))
    train()
