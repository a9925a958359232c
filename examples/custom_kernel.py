"""A custom kernel, from its declaration to training: the fused cross entropy of a language model.

Plain JAX writes float32 copies of the `[N, V]` logits and probabilities for N tokens and a vocabulary of V, the largest arrays of a
training step. These kernels read the logits once in the forward pass and keep one number per token. In the backward pass they read the
logits once more and write the gradient, in the dtype of the logits.

It runs on any machine, where it checks, tunes, explains, trains and times the kernel. `docs/guides/custom-kernels.md` explains it.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ejkernel_eqx as ejx

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # Triton is published for Linux only; elsewhere, this runs on XLA
    triton = None

if triton is not None:

    @triton.jit
    def forward_kernel(
        logits_ptr,
        labels_ptr,
        loss_ptr,
        lse_ptr,
        V: tl.constexpr,
        SMOOTHING: tl.constexpr,
        Z_LOSS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program per token: computes the log-sum-exp of its logits in a single pass, and the loss."""
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(labels_ptr + row).to(tl.int64)
        logits_ptr += row * V
        columns = tl.arange(0, BLOCK)
        top = tl.full([], -1e30, tl.float32)  # finite, so that logits of -inf do no harm
        weights = tl.zeros([BLOCK], tl.float32)  # exp(logits - top), summed over blocks
        total = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, V, BLOCK):
            inside = start + columns < V
            logits = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(logits, axis=0))
            weights = weights * tl.exp(top - higher) + tl.exp(logits - higher)
            top = higher
            if SMOOTHING > 0:
                total += tl.where(inside, logits, 0.0)
        lse = top + tl.log(tl.sum(weights, axis=0))
        # A label outside the vocabulary returns NaN, as in plain JAX.
        picked = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=float("nan"))
        loss = lse - (1.0 - SMOOTHING) * picked.to(tl.float32) + Z_LOSS * lse * lse
        if SMOOTHING > 0:
            loss -= SMOOTHING / V * tl.sum(total, axis=0)
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
        SMOOTHING: tl.constexpr,
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
        target = tl.where(columns == label, 1.0 - SMOOTHING, 0.0) + SMOOTHING / V
        dlogits = dlse * tl.exp(logits - lse) - dloss * target
        tl.store(dlogits_ptr + row * V + columns, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


@dataclasses.dataclass(frozen=True)
class Block:
    """The number of logits that a program processes at a time (a power of two), and its number of warps."""

    block_n: int
    num_warps: int

    def __post_init__(self):
        if self.block_n < 1 or self.block_n & (self.block_n - 1):
            raise ValueError(f"Block.block_n: expected a power of two, received {self.block_n}.")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Platform `"triton"`. Each kernel has its own field, so that each is tuned by its own time."""

    forward: Block
    backward: Block


class CrossEntropy(ejx.CustomKernel):
    r"""Cross entropy of integer labels per token, with label smoothing $\varepsilon$ and z-loss $\zeta$:

    $$\mathrm{lse} = \log \sum_v e^{z_v}, \qquad
    \ell = \mathrm{lse} - (1 - \varepsilon)\, z_y - \tfrac{\varepsilon}{V} \sum_v z_v + \zeta\, \mathrm{lse}^2$$

    A negative label (-100) is ignored: loss and gradient are 0. Any batch axes, any vocabulary size.
    """

    operation: ClassVar = "examples.cross_entropy"
    inputs: ClassVar = {"logits": "... V", "labels": ("...", jnp.integer)}
    outputs: ClassVar = {"loss": ("...", jnp.float32), "lse": ("...", jnp.float32)}
    config_types: ClassVar = {ejx.Platform.TRITON: Blocks}

    label_smoothing: float = eqx.field(static=True)
    z_loss: float = eqx.field(static=True)
    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, label_smoothing=0.0, z_loss=0.0, *, platform=None, config=None, tune_for=None):
        self.label_smoothing = float(label_smoothing)
        self.z_loss = float(z_loss)
        self.plan = self.make_plan(platform=platform, config=config, tune_for=tune_for)

    def __call__(self, logits, labels):
        loss, _ = self.launch(logits=logits, labels=labels)
        return loss

    # The reference: everything else is checked against it, and platform "xla" runs it.

    def reference(self, logits, labels):
        lse = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        loss = lse - (1 - self.label_smoothing) * picked + self.z_loss * lse**2
        if self.label_smoothing:
            loss = loss - self.label_smoothing * jnp.mean(logits, axis=-1)
        return jnp.where(labels >= 0, loss, 0), lse

    # Triton launches. Arrays have one batch axis here, however many the caller has.

    def run_triton(self, arrays, config, launch):
        rows, _ = arrays["logits"].shape
        a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
        results = launch(
            forward_kernel,
            grid=(rows,),
            inputs={"logits_ptr": arrays["logits"], "labels_ptr": arrays["labels"]},
            outputs={"loss_ptr": a_row, "lse_ptr": a_row},
            constants=self._constants(arrays, config.forward),
            num_warps=config.forward.num_warps,
        )
        return results["loss_ptr"], results["lse_ptr"]

    def grad_triton(self, arrays, outputs, cotangents, config, launch):
        logits = arrays["logits"]
        results = launch(
            backward_kernel,
            grid=(logits.shape[0], -(-logits.shape[1] // config.backward.block_n)),
            inputs={
                "logits_ptr": logits,
                "labels_ptr": arrays["labels"],
                "lse_ptr": outputs["lse"],
                "dloss_ptr": cotangents["loss"],
                "dlse_ptr": cotangents["lse"],
            },
            outputs={"dlogits_ptr": jax.ShapeDtypeStruct(logits.shape, logits.dtype)},
            constants=self._constants(arrays, config.backward),
            num_warps=config.backward.num_warps,
        )
        return {"logits": results["dlogits_ptr"]}

    def _constants(self, arrays, block):
        vocabulary = arrays["logits"].shape[1]
        options = {"SMOOTHING": self.label_smoothing, "Z_LOSS": self.z_loss}
        return {"V": vocabulary, "BLOCK": block.block_n, **options}

    # For the tuner.

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
        label_key, ignored_key = jax.random.split(key)
        rows = (problem.dim("B"),)
        labels = jax.random.randint(label_key, rows, 0, problem.dim("V"))
        labels = jnp.where(jax.random.bernoulli(ignored_key, 0.1, rows), -100, labels)
        return {"labels": labels.astype(problem.dtype("labels"))}

    def cost(self, problem):
        elements = float(problem.dim("B") * problem.dim("V"))
        array = elements * jnp.dtype(problem.dtype("logits")).itemsize
        return ejx.Cost(4 * elements, array), ejx.Cost(9 * elements, 3 * array)


def example(shape=(64, 1003), dtype=jnp.float32):
    logits_key, label_key = jax.random.split(jax.random.key(0))
    labels = jax.random.randint(label_key, shape[:-1], 0, shape[-1])
    return 3 * jax.random.normal(logits_key, shape, dtype), labels.at[..., ::7].set(-100)


def difference(kernel, logits, labels):
    """The largest error of loss and gradient, compared with the reference differentiated by JAX."""

    def plain(logits, labels):
        return kernel.reference(logits, labels)[0]

    def both(function):
        return function(logits, labels), jax.grad(lambda x: jnp.sum(jnp.sin(function(x, labels))))(logits)

    errors = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), both(kernel), both(plain))
    return max(float(error) for error in errors)


def check():
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    print(f"chosen platform: largest error {difference(CrossEntropy(**options), *example()):.1e}")
    if triton is not None:  # the same kernels on any machine; slow, so the problem is small
        interpreted = CrossEntropy(**options, platform="triton-interpret")
        print(f"Triton, interpreted: largest error {difference(interpreted, *example((3, 100))):.1e}")
    logits, labels = example((4, 16, 1003))
    mapped = jax.vmap(CrossEntropy(**options))(logits, labels)  # one launch
    print(
        f"vmap: largest difference {jnp.max(jnp.abs(mapped - CrossEntropy(**options)(logits, labels))):.1e}"
    )


def tune(shape, dtype, platform):
    """Times the candidates for these shapes, unless a table has a result, and keeps the fastest."""
    arrays = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.int32)
    kernel = CrossEntropy(z_loss=1e-4, platform=platform, tune_for=arrays)
    print(ejx.explain(kernel, *arrays))


class Model(eqx.Module):
    """Predicts the next character from the previous one. The kernel is an ordinary field."""

    embedding: eqx.nn.Embedding
    head: eqx.nn.Linear
    loss: CrossEntropy

    def __init__(self, vocabulary, width, *, key):
        embedding_key, head_key = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=embedding_key)
        self.head = eqx.nn.Linear(width, vocabulary, key=head_key)
        self.loss = CrossEntropy(z_loss=1e-4)

    def __call__(self, tokens):  # [T]
        logits = jax.vmap(lambda token: self.head(self.embedding(token)))(tokens[:-1])
        return self.loss(logits, tokens[1:])


def train():
    text = "the quick brown fox jumps over the lazy dog. " * 8
    tokens = jnp.array([ord(character) for character in text]).reshape(8, -1)
    model, optimiser = Model(131, 32, key=jax.random.key(0)), optax.adam(3e-2)

    @eqx.filter_jit
    def step(model, state):
        value, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(tokens)))(model)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    state, losses = optimiser.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(40):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    print(f"training: loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def compare(shape, dtype):
    """Device time of loss and gradient."""
    logits, labels = example(shape, dtype)
    kernel = CrossEntropy(z_loss=1e-4)

    def gradient(function):
        return jax.value_and_grad(lambda logits: jnp.mean(function(logits, labels)))

    def plain(logits, labels):
        return kernel.reference(logits.astype(jnp.float32), labels)[0]

    for name, function in (("this kernel", kernel), ("plain JAX", plain)):
        timing = ejx.benchmark(gradient(function), logits)
        print(f"{name}: {timing.ms:.3f} ms for loss and gradient of {shape}, {dtype.__name__}")


def main():
    check()
    if jax.default_backend() == "gpu":
        tune((8192, 50257), jnp.bfloat16, platform=None)
        compare((8192, 50257), jnp.bfloat16)
    else:
        # Only Triton has candidates to choose from; they can be interpreted on any machine.
        if triton is not None:
            tune((4, 2000), jnp.float32, platform="triton-interpret")
        compare((256, 8191), jnp.float32)
    train()


if __name__ == "__main__":
    main()
