"""Reinforcement learning with a reward that can be checked: a small decoder learns to sort digits, from its rewards alone.

    python examples/grpo.py                # two minutes on two cores
    python examples/grpo.py --digits 4     # a longer task
    python examples/grpo.py --kl-weight 0.01  # held to the model that it began as

A step samples a group of answers to each of some prompts, gives an answer the share of its digits that stand in the right place, and takes
gradients of GRPO (Shao et al. 2024, arXiv:2402.03300): answers that are better than their group become likelier. Nothing shows the model a
sorted row.
"""

import argparse
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, Sampling

DIGITS = 10


def make_model(key: Array) -> Decoder:
    """Two layers of attention and a SwiGLU, whose tokens are digits."""
    heads = {"num_heads": 4, "num_kv_heads": 4, "rope": ejx.nn.RotaryEmbedding(16)}
    layer = LayerConfig("attention", heads, MLPConfig(128))
    return Decoder(DecoderConfig(DIGITS, 64, (layer,) * 2), key=key)


def reward_of(prompts: Array, answers: Array) -> Array:
    """The share of digits in their right places, `[..., T]` to `[...]`."""
    return jnp.mean((jnp.sort(prompts, -1) == answers).astype(jnp.float32), -1)


def sample(model: Decoder, prompts: Array, key: Array, temperature: float = 1.0) -> Array:
    """An answer to each prompt, with as many tokens."""
    sampling = Sampling(temperature=temperature)
    drawn = {"sampling": sampling, "key": key} if temperature else {}
    return ejx.models.generate(
        model, prompts, max_new_tokens=prompts.shape[-1], stop_tokens=(), **drawn
    ).tokens


def statistics_of(model: Decoder, prompts: Array, answers: Array) -> ejx.TokenStatistics:
    """Of the tokens of the answers."""
    tokens = jnp.concatenate([prompts, answers], -1)
    features = model.features(tokens[..., :-1])[..., prompts.shape[-1] - 1 :, :]
    return model.token_statistics(features, answers)


def make_step(args: argparse.Namespace, optimiser: optax.GradientTransformation, first: Decoder) -> Any:
    @eqx.filter_jit(donate="all-except-first")
    def step(key: Array, model: Decoder, state: Any) -> tuple[Decoder, Any, Array, Array]:
        of_prompts, of_answers = jax.random.split(key)
        prompts = jax.random.randint(of_prompts, (args.prompts, 1, args.digits), 0, DIGITS)
        prompts = jnp.tile(prompts, (1, args.group, 1))
        answers = sample(model, prompts, of_answers)
        rewards = reward_of(prompts, answers)
        advantages = ejx.group_advantages(rewards)
        old, mask = statistics_of(model, prompts, answers), jnp.ones(answers.shape, bool)
        reference = statistics_of(first, prompts, answers).log_probs if args.kl_weight else None

        def loss_of(model: Decoder) -> Array:
            new = statistics_of(model, prompts, answers)
            options = {"reference_log_probs": reference, "kl_weight": args.kl_weight}
            loss = ejx.grpo_loss(new.log_probs, advantages, mask, old_log_probs=old.log_probs, **options)
            return loss - args.entropy_weight * jnp.mean(new.entropy)

        for _ in range(args.updates):  # from the second on, the ratio of probabilities is clipped
            grads = eqx.filter_grad(loss_of)(model)
            changes, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
            model = eqx.apply_updates(model, changes)
        return model, state, jnp.mean(rewards), jnp.mean(old.entropy)

    return step


def score(model: Decoder, digits: int, key: Array) -> float:
    """The share of prompts, out of 256 new ones, that the likeliest answers sort."""
    prompts = jax.random.randint(key, (256, digits), 0, DIGITS)
    answers = sample(model, prompts, key, temperature=0.0)
    return float(jnp.mean(reward_of(prompts, answers) == 1))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--digits", type=int, default=3, help="of a prompt and its answer")
    add("--steps", type=int, default=400)
    add("--prompts", type=int, default=32, help="of a step")
    add("--group", type=int, default=8, help="answers to each prompt, at least 2")
    add("--updates", type=int, default=2, help="of the model, in each step")
    add("--learning-rate", type=float, default=1e-3)
    add(
        "--entropy-weight",
        type=float,
        default=0.05,
        help="of the entropy, which keeps answers of a group different",
    )
    add("--kl-weight", type=float, default=0.0, help="of the divergence from the first model")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    """Trains a model and returns the share of new prompts that it sorts."""
    args = parse(argv)
    key = jax.random.key(args.seed)
    model = first = make_model(key)
    model = jax.tree.map(
        lambda x: x.copy() if eqx.is_array(x) else x, model
    )  # a step takes its model's arrays
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.learning_rate))
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    step, start = make_step(args, optimiser, first), time.perf_counter()
    for number in range(args.steps):
        model, state, reward, entropy = step(jax.random.fold_in(key, number), model, state)
        if number % 50 == 0 or number == args.steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {number}: reward {reward:.3f}, entropy {entropy:.3f} ({seconds:.0f} s)", flush=True)
    final = score(model, args.digits, jax.random.fold_in(key, args.steps))
    print(f"{final:.1%} of new prompts are sorted")
    return final


if __name__ == "__main__":
    main()
