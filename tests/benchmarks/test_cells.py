"""The benchmark of recurrent cells runs, checks before it times, and writes what it says."""

import jax
import jax.numpy as jnp

from benchmarks import cells_peers, cells_problems


def test_parameters_of_cudnn():
    """Its LSTM through JAX takes them in one array, which it would refuse at another size."""
    from jax.experimental import rnn

    problem = cells_problems.TINY[0]
    learned = cells_problems.make_inputs(problem).learned
    size = sum(learned[name].size for name in cells_peers.PARAMETERS)
    assert size == rnn.get_num_params_in_lstm(problem.I, problem.H, 1, False)
    flat = jnp.concatenate([learned[name].reshape(-1) for name in cells_peers.PARAMETERS])
    parts = rnn.unpack_lstm_weights(flat, problem.I, problem.H, 1, False)
    for name, found in zip(cells_peers.PARAMETERS, parts, strict=True):
        assert jnp.array_equal(jax.tree.leaves(found)[0], learned[name])
