"""The benchmark of latent attention runs, checks before it times, and says how it compares with what is beside it."""

import dataclasses

import jax

from benchmarks import latent


def test_weights_are_no_constants_of_the_program():
    problem = dataclasses.replace(latent.PROBLEMS["tiny"][1], E=256)
    inputs = latent.FAMILY.make_inputs(problem, 0)
    lowered = jax.jit(latent.decoding(problem, "xla")).lower(inputs, latent.pages_of(inputs))
    assert len(lowered.as_text()) < sum(x.nbytes for x in inputs["weights"])
