"""The benchmark of recurrent cells runs, checks before it times, and writes what it says."""

import jax
import jax.numpy as jnp

from benchmarks import cells


def test_parameters_are_those_of_cudnn():
    # cuDNN's LSTM through JAX takes its parameters in one array, which it would refuse at another size.
    from jax.experimental import rnn

    problem = cells.PROBLEMS["tiny"][0]
    learned = cells.make_inputs(problem).learned
    size = sum(learned[name].size for name in cells.PARAMETERS)
    assert size == rnn.get_num_params_in_lstm(problem.I, problem.H, 1, False)
    flat = jnp.concatenate([learned[name].reshape(-1) for name in cells.PARAMETERS])
    parts = rnn.unpack_lstm_weights(flat, problem.I, problem.H, 1, False)
    for name, found in zip(cells.PARAMETERS, parts, strict=True):
        assert jnp.array_equal(jax.tree.leaves(found)[0], learned[name])
