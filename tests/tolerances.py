"""Assertions by the one tolerance table, which the package's tuner uses as well."""

from typing import Literal

import jax.numpy as jnp
import numpy as np

from ejkernel_eqx._tolerances import errors, Tolerance, TOLERANCES

__all__ = ["TOLERANCES", "Tolerance", "assert_close", "errors"]


def assert_close(
    actual,
    reference,
    dtype=None,
    kind: Literal["forward", "gradient"] = "forward",
    scale: float | None = None,
    name: str = "result",
):
    """Assert that `actual`, computed in `dtype`, agrees with `reference`.

    NaN never passes, on either side; infinities must stand at the same places with the same sign. `dtype` is the
    one of the inputs of the computation and defaults to that of `actual`. `scale` replaces the magnitude of the
    reference as the measure of what is small: give it where the reference is a cancellation near zero (the
    gradient of a nearly flat direction).
    """
    dtype = jnp.dtype(actual.dtype if dtype is None else dtype).name
    allowed = TOLERANCES[dtype][kind]
    if np.shape(actual) != np.shape(reference):
        raise AssertionError(f"{name}: shape {np.shape(actual)}, but the reference has {np.shape(reference)}")
    measured = errors(actual, reference, scale)
    if not (measured.rms <= allowed.rms and measured.peak <= allowed.peak):
        raise AssertionError(
            f"{name} ({kind}, {dtype}): relative RMS error {measured.rms:.3g} (allowed {allowed.rms:.3g}), "
            f"largest error {measured.peak:.3g} (allowed {allowed.peak:.3g})" + _where(actual, reference)
        )


def _where(actual, reference) -> str:
    actual, reference = (np.asarray(x).astype(np.float64) for x in (actual, reference))
    if actual.size == 0:
        return ""
    if np.isnan(actual).any() or np.isnan(reference).any():
        return f"; NaN: {int(np.isnan(actual).sum())} in the result, {int(np.isnan(reference).sum())} in the reference"
    with np.errstate(invalid="ignore"):
        error = np.where(actual == reference, 0.0, np.abs(actual - reference))
    index = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    return f"; worst at {index}: {actual[index]:.8g} instead of {reference[index]:.8g}"
