"""Serving on a GPU: the tokens of every text are those that the model chooses for the whole text at once, whoever joins, leaves or has drafts.

python -m pytest tests/gpu/test_serving_gpu.py
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.models import Speculation
from tests.serving.engines import check_empty, HYBRID, make_engine, serve
from tests.serving.test_speculation import repetitive

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "ragged_paged_attention"
SIZES: dict[str, Any] = {"num_pages": 5, "page_size": 16, "max_batch": 4, "step_tokens": 32}
TOLERANCE = 0.02
"""Of the logits' standard deviation, by which the chosen token's may be below the largest: products are in TF32. Others are far below."""


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mixer", ["attention", "windowed", HYBRID, "delta,attention moe"])
def test_tokens_are_those_of_the_whole_text(mixer, drafts):
    """Steps of prompts and decodes share prefixes, and are preempted for want of pages."""
    speculate = Speculation(num_draft_tokens=drafts) if drafts else None
    engine = make_engine(mixer, 1 + mixer.count(","), **SIZES, speculate=speculate)
    given = repetitive(5, longest=18, most=40)
    texts = serve(engine, given)
    check_empty(engine)
    assert bool(engine.drafts_accepted) == bool(drafts)
    whole = eqx.filter_jit(engine.model)
    for (prompt, _), text in zip(given, texts, strict=True):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + len(text)] = [*prompt, *text]
        logits = np.asarray(whole(jnp.asarray(tokens)))[0, len(prompt) - 1 :][: len(text)]
        below = logits.max(-1) - np.take_along_axis(logits, np.array(text)[:, None], 1)[:, 0]
        assert below.max() <= TOLERANCE * logits.std(), (mixer, drafts)
