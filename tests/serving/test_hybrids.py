"""Prefixes that are shared and drafts at once, on models whose layers keep states beside pages: no token changes."""

from typing import Any

import pytest

from ejkernel_eqx.models import Speculation

from .engines import check_empty, check_whole, make_engine, serve

MIXERS = (
    "beside",
    "shared,mamba2,shared",
    "short,attention",
    "mamba1,attention",
    "mamba2,attention",
    "mamba3,attention",
    "delta,attention",
    "kda,mla",
    "mamba2,forgetting",
)
SYSTEM = bytes([10, 11, 12, 13, 14] * 3 + [7, 8])  # four pages and a token


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_shared_prefixes_with_drafts(mixer):
    """Greedy tokens are those of the whole text at once."""
    layers = 1 + mixer.count(",")
    sizes: dict[str, Any] = {
        "num_pages": 32,
        "page_size": 4,
        "max_batch": 4,
        "step_tokens": 16,
        "num_checkpoints": 4,
    }
    engine = make_engine(mixer, layers, **sizes, speculate=Speculation(num_draft_tokens=3))
    requests = [(SYSTEM + bytes([n, 10]), 20 + n) for n in range(3)]
    texts = [serve(engine, [request])[0] for request in requests]
    check_whole(mixer, zip(requests, texts), layers)
    # What the first request left is found by the others; all at once, and once more behind their own texts.
    new = sum(len(prompt) + count - 1 for prompt, count in requests)
    assert engine.tokens_computed - engine.drafts_offered + engine.drafts_accepted < new - 16
    longer = [(bytes([*prompt, *text]), 8) for (prompt, _), text in zip(requests, texts)]
    check_whole(mixer, zip(longer, serve(engine, longer, 1)), layers)
    assert engine.drafts_accepted > 0
    check_empty(engine)
