import functools
import importlib

import pytest

import ejkernel_eqx as ejx
from tests.attention.cases import xla_tiles
from tests.attention.dense import INTERPRET


@pytest.fixture(params=["xla", INTERPRET])
def flash(request):
    """`FlashAttention` on one platform, with tiles small enough for several to be at work."""
    if request.param == INTERPRET:
        pytest.importorskip("triton")
        return functools.partial(ejx.FlashAttention, platform=INTERPRET)
    return functools.partial(ejx.FlashAttention, config=xla_tiles(16, 16))


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that the interpreter has run."""
    pytest.importorskip("triton")
    module = importlib.import_module("ejkernel_eqx.testing.interpret")
    original, ran = module.interpret, []

    def counted(launch, arrays):
        ran.append(launch.label.rpartition(".")[2].removesuffix("_kernel"))
        return original(launch, arrays)

    monkeypatch.setattr(module, "interpret", counted)
    return ran
