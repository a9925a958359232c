"""The tolerance table shared by the test suite and the tuner.

A result is measured against a reference of higher precision in two ways: the root mean square of the error,
relative to that of the reference, and the largest single error, relative to the reference's largest entry.
The numbers depend on the dtype in which the result was computed and are never relaxed for a test: a failing test
has found a problem.
"""

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    rms: float  # sqrt(mean(error^2)) / sqrt(mean(reference^2))
    peak: float  # max |error| / max |reference|


# One unit in the last place is 2^-8 of the value in bf16, 2^-11 in f16, 2^-24 in f32 and 2^-53 in f64. Float32 matrices may
# be multiplied in three tf32 passes, whose products carry an error of 2^-22.
TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "float64": {"forward": Tolerance(1e-13, 1e-12), "gradient": Tolerance(1e-12, 1e-11)},
    "float32": {"forward": Tolerance(2e-6, 1e-5), "gradient": Tolerance(1e-5, 5e-5)},
    "float16": {"forward": Tolerance(1e-3, 4e-3), "gradient": Tolerance(2e-3, 8e-3)},
    "float8_e4m3fn": {"forward": Tolerance(5e-2, 1.4e-1), "gradient": Tolerance(1e-1, 2.8e-1)},
    "float8_e5m2": {"forward": Tolerance(1e-1, 2.8e-1), "gradient": Tolerance(2e-1, 5.6e-1)},
    "bfloat16": {"forward": Tolerance(6e-3, 2e-2), "gradient": Tolerance(1.2e-2, 4e-2)},
}


def errors(actual, reference, scale: float | None = None) -> Tolerance:
    """The two measured errors of `actual`; infinite if there is any NaN."""
    actual, reference = (np.asarray(x).astype(np.float64) for x in (actual, reference))
    if actual.shape != reference.shape:
        raise ValueError(f"shape {actual.shape}, but the reference has {reference.shape}")
    infinite = np.isinf(reference)
    if np.isnan(actual).any() or np.isnan(reference).any():
        return Tolerance(np.inf, np.inf)
    if not np.array_equal(infinite, np.isinf(actual)) or not np.array_equal(
        actual[infinite], reference[infinite]
    ):
        return Tolerance(np.inf, np.inf)
    actual, reference = actual[~infinite], reference[~infinite]
    if actual.size == 0:
        return Tolerance(0.0, 0.0)
    error = np.abs(actual - reference)
    rms_scale = np.sqrt(np.mean(reference**2)) if scale is None else scale
    peak_scale = np.max(np.abs(reference)) if scale is None else scale
    if rms_scale == 0.0:
        # If the reference is exactly zero everywhere (no visible key), the result must be too.
        return Tolerance(0.0, 0.0) if not error.any() else Tolerance(np.inf, np.inf)
    return Tolerance(float(np.sqrt(np.mean(error**2)) / rms_scale), float(np.max(error) / peak_scale))
