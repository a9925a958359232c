"""The host side of a chunk of tokens with a teacher."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ...core.arguments import accumulator
from ...launch import given, Launcher, result, result_like
from ..chunks import product
from ..spec import LossSpec
from ..statistics import Slope
from .divergence_kernel import divergence_kernel


def launch(
    spec: LossSpec, config: Any, arrays: Any, logits: Array, words: int, slope: Slope | None = None
) -> tuple[Array, Array]:
    """The divergence of each token of a chunk; and the gradient of the student's logits in their place, if there is a slope."""
    teacher = arrays.get("teacher_logits")
    if teacher is None:
        x = arrays["teacher_x"]
        # Float16 ends at 65,504.
        dtype = x.dtype if x.dtype == jnp.bfloat16 else accumulator(x.dtype)
        teacher = product(x, arrays["teacher_weight"], ((1,), (1,)), dtype)
    numbers = {
        "V": words,
        "STRIDE": logits.shape[1],
        "TEACHER_STRIDE": teacher.shape[1],
        "CAP": spec.logits_soft_cap or 0.0,
        "TEACHER_CAP": spec.teacher_soft_cap or 0.0,
        "TEMPERATURE": spec.temperature,
        "DIVERGENCE": spec.divergence,
        "BETA": spec.beta,
        "SLOPE": slope is not None,
        "FAST": config.fast_exp,
        **given(BIAS=arrays["bias"], TEACHER_BIAS=arrays["teacher_bias"]),
    }
    more = {"teacher": teacher, "of_p": None if slope is None else slope.of_p}
    launcher = Launcher("losses", arrays | more, numbers, arrays["x"])
    outputs, in_place = {"losses": result(len(logits))}, {"before": None, "logits": logits}
    aliases = None
    if slope is not None:
        outputs["logits"], in_place, aliases = result_like(logits), {"before": logits}, {"before": "logits"}
    made = launcher(divergence_kernel, config, outputs, len(logits), in_place, aliases=aliases)
    return made["losses"], made.get("logits", logits)
