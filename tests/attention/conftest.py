import functools

import pytest

import ejkernel_eqx as ejx
from tests.attention.cases import xla_tiles
from tests.attention.dense import INTERPRET
from tests.memory import nothing_in_memory


@pytest.fixture(params=["xla", INTERPRET])
def flash(request):
    """`FlashAttention` on one platform, with tiles small enough for several to be at work."""
    if request.param == INTERPRET:
        pytest.importorskip("triton")
        return functools.partial(ejx.FlashAttention, platform=INTERPRET)
    return functools.partial(ejx.FlashAttention, config=xla_tiles(16, 16))


def name_of(launch):
    return launch.label.rpartition(".")[2].removesuffix("_kernel")


def ran_by_interpreter(monkeypatch, what):
    """`what` of every launch that the interpreter runs from now on."""
    pytest.importorskip("triton")
    from tests.attention.tritons import interpret

    original, ran = interpret.interpret, []

    def counted(launch, arrays):
        ran.append(what(launch))
        return original(launch, arrays)

    monkeypatch.setattr(interpret, "interpret", counted)
    return ran


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that the interpreter has run."""
    return ran_by_interpreter(monkeypatch, name_of)


@pytest.fixture
def nothing_known():
    """No configurations are remembered, and none from the test is afterwards."""
    with nothing_in_memory():
        yield
