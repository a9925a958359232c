"""Drawing tokens: the probabilities of the definition in float64, and what is no `Sampling`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.models.sampling import candidates, sample, Sampling, SamplingArrays


def _probabilities(logits, temperature, top_k, top_p, min_p=0.0):
    """What a token's probability is, one by one, in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return np.eye(len(logits))[order[0]]
    order = order[: top_k or None]
    weights = np.array([np.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order])
    weights /= weights.sum()
    kept, mass = 0, 0.0
    while kept < len(order) and mass < top_p:
        mass += weights[kept]
        kept += 1
    kept = min(kept, int((weights >= min_p * weights[0]).sum()))
    result = np.zeros(len(logits))
    result[order[:kept]] = weights[:kept] / weights[:kept].sum()
    return result


CHOICES = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.5, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0)]
CHOICES += [(2.0, 7, 0.6, 0.0), (1e-3, 0, 0.9, 0.0), (1.0, 1, 1.0, 0.0), (0.0, 3, 0.2, 0.5)]
CHOICES += [(1.0, 0, 1e-4, 0.0), (1.0, 1000, 0.999, 0.0), (1.0, 0, 1.0, 0.1), (2.0, 9, 0.9, 0.4)]


def test_candidates_are_those_of_the_definition():
    """The smallest set whose probability reaches top_p, of the top_k; of equals the first."""
    rng = np.random.default_rng(0)
    chosen = jax.jit(jax.vmap(candidates))
    for logits in (rng.normal(size=40) * 2, np.zeros(40), rng.integers(0, 3, 40)):
        logits = logits.astype(np.float32)
        columns = (np.array(x, np.int32 if n == 1 else np.float32) for n, x in enumerate(zip(*CHOICES)))
        results = chosen(np.tile(logits, (len(CHOICES), 1)), *columns)
        for choice, order, ranked, kept in zip(CHOICES, *map(np.asarray, results)):
            expected = _probabilities(logits, *choice)
            if choice[0] == 0:
                assert order[0] == expected.argmax()
                continue
            found = np.zeros(40)
            found[order] = np.where(kept, np.exp(ranked.astype(np.float64)), 0)
            np.testing.assert_allclose(found / found.sum(), expected, atol=1e-6, err_msg=str(choice))


@pytest.mark.slow
def test_samples_have_the_probabilities():
    """Chi squared over many positions, and repeatable; a row's choice does not depend on the others."""
    count, rng = 1000, np.random.default_rng(1)
    logits = (rng.normal(size=12) * 1.5).astype(np.float32)
    draw = jax.jit(sample)
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 6, 0.9), (0.0, 0, 1.0)):
        choice = Sampling(temperature, top_k, top_p, seed=3)
        rows = SamplingArrays.of([(choice, n) for n in range(count)], count)
        drawn = np.asarray(draw(np.tile(logits, (count, 1)), rows))
        expected = _probabilities(logits, temperature, top_k, top_p) * count
        found = np.bincount(drawn, minlength=12)
        assert (found[expected == 0] == 0).all()
        seen = expected > 0
        squares = ((found[seen] - expected[seen]) ** 2 / expected[seen]).sum()
        assert squares < seen.sum() - 1 + 5 * np.sqrt(2 * seen.sum())
    some = [(Sampling(1.0, seed=9), 5), (Sampling(1.0, seed=2), 5)]
    both = sample(jnp.tile(logits, (3, 1)), SamplingArrays.of([some[0], some[1], some[0]], 3))
    alone = sample(jnp.asarray(logits)[None], SamplingArrays.of(some[:1], 1))
    assert both[0] == both[2] == alone[0]


WRONG = [(-1.0,), (float("nan"),), (1e39,), ("1",), (True,), (1.0, -1), (1.0, 2.5), (1.0, 0, 0.0)]
WRONG += [
    (1.0, 0, 1.0, 0, 1.5),
    (1.0, 0, 1.5),
    (1.0, 0, None),
    (1.0, 0, 1.0, -1),
    (1.0, 0, 1.0, 2**32),
    (1.0, 0, 1.0, 0.5),
    (10**400,),  # JSON may hold such integers
    (1.0, 0, 10**400),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_sampling_is_checked(wrong):
    with pytest.raises(ValueError, match=r"expected .* received"):
        Sampling(*wrong)


def test_the_largest_that_sampling_takes():
    """A `top_k` above every vocabulary stands for all."""
    sampling = Sampling(3e38, 10**20, 1e-300, np.uint32(2**32 - 1))  # pyright: ignore[reportArgumentType]
    arrays = SamplingArrays.of([(sampling, 0)], 1)
    assert arrays.top_k == 2**31 - 1 and np.isfinite(arrays.temperature).all()
