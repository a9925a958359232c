"""A layer of the package in a model of one's own: built, trained, saved. It runs in seconds on a CPU, and by the GPU kernels on a GPU."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ejkernel_eqx as ejx

# One operation: eight query heads and two key/value heads, on [..., sequence, heads, head_dim].
q, k, v = (jax.random.normal(jax.random.key(i), (2, 256, heads, 64)) for i, heads in enumerate((8, 2, 2)))
attention = ejx.FlashAttention(causal=True, sliding_window=128)
out = attention(q, k, v)
print(f"FlashAttention: out {out.shape}", ejx.explain(attention, q, k, v))  # which kernel, and why


class Classifier(eqx.Module):
    """An ordinary Equinox model with a layer of this package."""

    attention: ejx.nn.MultiHeadAttention
    head: eqx.nn.Linear

    def __init__(self, width: int = 64, *, key):
        keys, rope = jax.random.split(key), ejx.nn.RotaryEmbedding(width // 4)
        self.attention = ejx.nn.MultiHeadAttention(width, num_heads=4, rope=rope, key=keys[0])
        self.head = eqx.nn.Linear(width, 2, key=keys[1])

    def __call__(self, x):  # [sequence, width]
        return self.head(jnp.mean(x + self.attention(x), axis=0))


# The task: tell sequences in which every token appears twice in a row.
tokens = jax.random.randint(jax.random.key(1), (64, 32), 0, 100)
labels = jax.random.bernoulli(jax.random.key(2), shape=(64,)).astype(jnp.int32)
tokens = jnp.where(labels[:, None] == 1, jnp.repeat(tokens[:, ::2], 2, axis=1), tokens)
x = jax.random.normal(jax.random.key(3), (100, 64))[tokens]

model, optimiser = Classifier(key=jax.random.key(0)), optax.adam(3e-3)
state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def step(model, state):
    loss = lambda m: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(x), labels))
    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimiser.update(gradients, state)
    return eqx.apply_updates(model, updates), state, value


for _ in range(30):
    model, state, value = step(model, state)
print(f"training: loss {value:.3f}")

with tempfile.TemporaryDirectory() as folder:
    ejx.save(f"{folder}/model.eqx", model, {"width": 64})  # equinox.tree_serialise_leaves works, too
    same = ejx.load(f"{folder}/model.eqx", like=Classifier)
print(f"saved and loaded: {'equal' if eqx.tree_equal(model, same) else 'different'}")
