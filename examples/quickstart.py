"""An operation, the kernel that it chose, a layer in a trained model, decoding and saving: seconds on a CPU, and the GPU kernels on a GPU."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ejkernel_eqx as ejx

# An operation on `[..., sequence, heads, head_dim]`, with eight query heads and two key/value heads.
keys = jax.random.split(jax.random.key(0), 6)
q = jax.random.normal(keys[0], (2, 256, 8, 64))
k, v = (jax.random.normal(key, (2, 256, 2, 64)) for key in keys[1:3])
attention = ejx.FlashAttention(causal=True, sliding_window=128)
dq = jax.jit(jax.grad(lambda q: jnp.sum(attention(q, k, v) ** 2)))(q)
print(f"FlashAttention: out {attention(q, k, v).shape}, norm of the gradient {jnp.linalg.norm(dq):.1f}")
print(ejx.explain(attention, q, k, v))  # the chosen kernel; `ejx.tune` finds the fastest on this device


class Classifier(eqx.Module):
    """An ordinary Equinox model with a layer of this package."""

    attention: ejx.nn.MultiHeadAttention
    head: eqx.nn.Linear

    def __init__(self, *, key):
        self.attention = ejx.nn.MultiHeadAttention(64, num_heads=4, rope=ejx.nn.RotaryEmbedding(16), key=key)
        self.head = eqx.nn.Linear(64, 2, key=key)

    def __call__(self, x):  # [sequence, width]
        return self.head(jnp.mean(x + self.attention(x), axis=0))


# It learns to see in which sequences every token stands twice in a row.
tokens = jax.random.randint(keys[3], (64, 32), 0, 100)
repeats = jax.random.bernoulli(keys[4], shape=(64,)).astype(int)
tokens = jnp.where(repeats[:, None], jnp.repeat(tokens[:, ::2], 2, axis=1), tokens)
x = jax.random.normal(keys[5], (100, 64))[tokens]
model, optimiser = Classifier(key=keys[0]), optax.adam(3e-3)
state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
loss_of = lambda model: jnp.mean(cross_entropy(jax.vmap(model)(x), repeats))
gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
for _ in range(30):
    loss, gradients = gradient(model)
    updates, state = optimiser.update(gradients, state)
    model = eqx.apply_updates(model, updates)
print(f"training: loss {loss:.3f} after 30 steps (a guess: 0.693)")

# The same layer token by token: the cache goes from call to call.
y, cache = model.attention(x[:, :31], model.attention.init_cache(batch_shape=64, max_length=32))
y, cache = model.attention(x[:, 31:], cache)
print(f"decoding: largest difference {jnp.max(jnp.abs(y[:, 0] - model.attention(x)[:, 31])):.0e}")
with tempfile.TemporaryDirectory() as folder:
    ejx.save(f"{folder}/model.eqx", model)
    same = ejx.load(f"{folder}/model.eqx", like=lambda: Classifier(key=keys[0]))
print("saved and loaded:", "equal" if eqx.tree_equal(model, same) else "different")
