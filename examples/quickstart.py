"""The package in five snippets. They run in seconds on a CPU, and the same code uses the GPU kernels on a GPU."""

import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ejkernel_eqx as ejx


def attend() -> None:
    """Runs one operation on `[..., sequence, heads, head_dim]`, with eight query heads and two key/value heads."""
    q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(q_key, (2, 256, 8, 64))
    k, v = (jax.random.normal(key, (2, 256, 2, 64)) for key in (k_key, v_key))

    attn = ejx.FlashAttention(causal=True, sliding_window=128, logits_soft_cap=30.0)
    out, lse = jax.jit(lambda q, k, v: attn(q, k, v, return_lse=True))(q, k, v)
    print(f"FlashAttention: out {out.shape}, lse {lse.shape}, mean |out| {jnp.mean(jnp.abs(out)):.4f}")

    # Any number of leading axes works, and gradients; vmap runs as one kernel.
    one = attn(q[0], k[0], v[0])
    mapped = jax.vmap(attn)(q, k, v)
    print(f"largest difference alone/batched: {jnp.max(jnp.abs(one - mapped[0])):.1e}")
    dq, dk, dv = jax.jit(jax.grad(lambda q, k, v: jnp.sum(attn(q, k, v) ** 2), (0, 1, 2)))(q, k, v)
    print(
        f"gradient norms: q {jnp.linalg.norm(dq):.2f}, k {jnp.linalg.norm(dk):.2f}, v {jnp.linalg.norm(dv):.2f}"
    )


def choose() -> None:
    """The kernel is chosen when the module is built, and `explain` shows it. One call tunes it, or a whole model."""
    x = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.float32)  # arrays or shapes
    attn = ejx.FlashAttention(causal=True)
    print(ejx.explain(attn, x, x, x))
    # Candidates are checked against the reference, then timed; the result is kept for later processes. Omit the limits in practice.
    attn = ejx.tune(attn, x, x, x, options=ejx.TuneOptions(max_candidates=3, time_budget=10))
    print(ejx.explain(attn, x, x, x))


class Classifier(eqx.Module):
    """An ordinary Equinox model with a layer of this package."""

    attention: ejx.nn.MultiHeadAttention
    head: eqx.nn.Linear

    def __init__(self, width: int = 64, *, key):
        attention_key, head_key = jax.random.split(key)
        self.attention = ejx.nn.MultiHeadAttention(
            width, num_heads=4, num_kv_heads=2, rope=ejx.nn.RotaryEmbedding(width // 4), key=attention_key
        )
        self.head = eqx.nn.Linear(width, 2, key=head_key)

    def __call__(self, x):  # [sequence, width]
        return self.head(jnp.mean(x + self.attention(x), axis=0))


def train() -> Classifier:
    """Trains the model with optax to detect sequences in which every token appears twice in a row."""
    model = Classifier(key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (64, 32), 0, 100)
    repeats = jax.random.bernoulli(jax.random.key(2), shape=(64,))
    tokens = jnp.where(repeats[:, None], jnp.repeat(tokens[:, ::2], 2, axis=1), tokens)
    x = jax.random.normal(jax.random.key(3), (100, 64))[tokens]
    optimiser = optax.adam(3e-3)

    @eqx.filter_jit
    def step(model, state):
        def loss(model):
            logits = jax.vmap(model)(x)
            return jnp.mean(
                optax.softmax_cross_entropy_with_integer_labels(logits, repeats.astype(jnp.int32))
            )

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    values = []
    for _ in range(30):
        model, state, value = step(model, state)
        values.append(float(value))
    print(f"training: loss {values[0]:.3f} -> {values[-1]:.3f}")
    return model


def decode(layer: ejx.nn.MultiHeadAttention) -> None:
    """Runs the same layer token by token, passing the cache from call to call."""
    x = jax.random.normal(jax.random.key(4), (2, 10, 64))
    step = eqx.filter_jit(lambda x, cache: layer(x, cache))
    y, cache = step(x[:, :8], layer.init_cache(batch_shape=2, max_length=10))
    for t in (8, 9):
        y, cache = step(x[:, t : t + 1], cache)
    print(f"decoding: largest difference from the full pass {jnp.max(jnp.abs(y[:, 0] - layer(x)[:, 9])):.1e}")


def save(model: Classifier) -> None:
    """Saves weights and hyperparameters to one file. `equinox.tree_serialise_leaves` works too."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.eqx"
        ejx.save(path, model, {"width": 64})
        same = ejx.load(path, like=Classifier)
    print(f"saved and loaded: {'equal' if eqx.tree_equal(model, same) else 'different'}")


def main() -> None:
    attend()
    choose()
    model = train()
    decode(model.attention)
    save(model)


if __name__ == "__main__":
    main()
