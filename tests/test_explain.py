"""`explain`: real costs, measured times beside the bound, and the place of every choice in a model."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import BOTH, FORWARD, Known, memory_cache
from ejkernel_eqx.tuning import explain as explaining
from ejkernel_eqx.tuning import roofline as roofline_module
from tests.dispatch import toy
from tests.memory import nothing_in_memory

H200 = ejx.DeviceFacts(ejx.Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path))
    with nothing_in_memory():
        yield


@pytest.fixture
def h200(monkeypatch):
    """The device is taken for an H200, whatever the kernels run on."""
    clocks = (1.98e9, 4.916736e12)
    monkeypatch.setattr(roofline_module, "_read_clocks", lambda *_: clocks)
    taken_for(monkeypatch, H200)


def taken_for(monkeypatch, device):
    monkeypatch.setattr(explaining, "device_facts", lambda: device)
    monkeypatch.setattr(explaining, "_device_of", lambda selection: device)


def roof(choice, direction=FORWARD) -> Any:
    return choice.roofline(direction)


def tuned(x: Any, *ms: tuple[str, float]) -> tuple[Any, str]:
    """The configuration of attention over `x`, and its key, with measured times from now on."""
    with ejx.recording() as found:
        jax.eval_shape(ejx.FlashAttention(causal=True, platform="xla"), x, x, x)
    config, key = found[0].config, found[0].problem.key()
    memory_cache.put(ejx.Platform.XLA, key, Known(config, ms, "tuned 2026-01-02"))
    return config, key


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_costs_of_a_known_problem():
    (choice,) = ejx.explain("flash_attention", B=2, T=64, H=4, D=16, dtype="float32", causal=True).choices
    forward, both = roof(choice), roof(choice, BOTH)
    # Two products of 2 D operations for each pair of a query and a key not after it.
    assert forward.flops == 2 * 2 * 16 * 4 * 2 * (64 * 65 // 2) and both.flops == 3.5 * forward.flops
    arrays, lse = 4 * 2 * 64 * 4 * 16, 4 * 2 * 4 * 64
    assert forward.bytes == 4 * arrays + lse
    assert both.bytes == 2 * (4 * arrays + lse) and forward.intensity == forward.flops / forward.bytes
    # No document tells the peak of a CPU, and nothing was measured.
    assert (forward.bound_ms, forward.bound_by, forward.ms, forward.fraction) == (None,) * 4
    assert choice.problem == "flash_attention B2 D16 H4 K4 S64 T64 V16 float32 causal top_left window=None,0"
    assert (choice.platform, choice.tier, choice.dtype) == ("xla", "heuristic", "float32")


def test_measured_times_stand_beside_the_bound(h200):
    x = shape(4, 4096, 16, 128, dtype=jnp.bfloat16)
    tuned(x, (FORWARD, 0.5), (BOTH, 2.0))
    explanation = ejx.explain(ejx.FlashAttention(causal=True), x, x, x)
    (choice,) = explanation.choices
    forward, both = roof(choice), roof(choice, BOTH)
    assert (choice.tier, choice.origin) == ("memory", "tuned 2026-01-02")
    assert forward.bound_by == "compute"
    assert forward.bound_ms == pytest.approx(1e3 * forward.flops / (4096 * 132 * 1.98e9))
    assert (forward.ms, both.ms) == (0.5, 2.0) and forward.fraction == pytest.approx(0.2568 / 0.5, rel=1e-3)
    assert both.fraction == pytest.approx(3.5 * forward.bound_ms / 2.0)
    text = str(explanation)
    assert "(from: memory, tuned 2026-01-02)" in text
    assert "peak of bfloat16: 1071 TFLOP/s, 4.917 TB/s (132 multiprocessors at 1980 MHz" in text
    table = text.splitlines()[5:8]
    assert table[1].split() == ["forward", "0.5", "0.2568", "51%", "compute", "274.9", "269.5", "1020"]
    assert table[2].split()[:5] == ["forward+backward", "2", "0.8989", "45%", "compute"]
    assert len(set(map(len, table))) == 1

    # One token against a cache reads much and computes little.
    q, kv = shape(1, 1, 16, 128, dtype=jnp.bfloat16), shape(1, 4096, 16, 128, dtype=jnp.bfloat16)
    decode = roof(ejx.explain(ejx.FlashAttention(), q, kv, kv).choices[0])
    assert decode.bound_by == "memory" and decode.bound_ms == pytest.approx(1e3 * decode.bytes / 4.916736e12)


def test_a_time_of_rounded_lengths_is_no_fraction(h200):
    """Problems of 33 to 64 tokens share one entry; what one took says nothing exact of another."""
    x = shape(1, 60, 2, 16)
    tuned(x, (FORWARD, 1.0))
    (choice,) = ejx.explain(ejx.FlashAttention(causal=True), x, x, x).choices
    assert choice.ms == ((FORWARD, 1.0),) and roof(choice).bound_ms > 0
    assert roof(choice).fraction is None


def test_an_unknown_architecture_has_costs_but_no_bound(monkeypatch, h200):
    newer = dataclasses.replace(H200, kind="NVIDIA Z1", compute_capability="15.0")
    taken_for(monkeypatch, newer)
    explanation = ejx.explain("flash_attention", B=1, T=64, H=2, D=16, platform="xla")
    assert explanation.peaks == () and roof(explanation.choices[0]).bound_ms is None
    assert "GFLOP" in str(explanation) and "bound" not in str(explanation)


class Layer(eqx.Module):
    attention: ejx.FlashAttention

    def __call__(self, x):
        return x + self.attention(x, x, x)


class Model(eqx.Module):
    first: list
    stacked: Layer
    scales: jax.Array

    def __call__(self, x):
        for layer in self.first:
            x = layer(x)
        return jax.lax.scan(lambda x, scale: (scale * self.stacked(x), None), x, self.scales)[0]


def model():
    causal = ejx.FlashAttention(causal=True)
    return Model([Layer(causal), Layer(causal)], Layer(ejx.FlashAttention()), jnp.ones(3))


X = shape(2, 16, 2, 8)


@pytest.mark.few(1)
@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit])
def test_choices_know_their_place(jit):
    paths = lambda *call: [(c.path, "causal" in c.problem) for c in ejx.explain(*call).choices]
    inside = [(".first[0].attention", True), (".first[1].attention", True), (".stacked.attention", False)]
    assert paths(model(), X) == inside
    outside = [(f"args[0]{path}", causal) for path, causal in inside]
    assert paths(jit(lambda model, x: model(x)), model(), X) == outside
    assert paths(eqx.filter_grad(lambda model, x: jnp.sum(model(x))), model(), X) == outside
    # The same layer under `vmap`: what runs, once.
    mapped = ejx.explain(lambda model, x: jax.vmap(model)(x), model(), shape(3, *X.shape)).choices
    assert [choice.path for choice in mapped] == [path for path, _ in outside]
    captured = model()
    assert paths(lambda x: captured(x), X) == [("", True), ("", False)]


def test_a_call_that_needs_equal_layers_is_explained():
    """Its kernels have no place of their own."""
    stacking = lambda layers, x: jax.tree.map(lambda *leaves: leaves[0], *layers)(x)
    choices = ejx.explain(stacking, model().first, X).choices
    assert [choice.path for choice in choices] == [""] and "causal" in choices[0].problem


def test_layers_built_alike_are_one_row_of_the_text():
    text = str(ejx.explain(model(), X))
    assert text.count("platform  xla") == 2
    assert ".first[0].attention (and 1 more, to .first[1].attention): flash_attention B2" in text
    text = str(ejx.explain(model()))
    assert ".first[0].attention (and 2 more, to .stacked.attention): flash_attention\n  platform  xla" in text


def test_what_was_built_in_is_shown():
    x = jnp.ones(X.shape)
    config, key = tuned(x, (FORWARD, 0.25))
    (choice,) = ejx.explain({"a": ejx.FlashAttention(causal=True, tune_for=(x, x, x))}).choices
    assert (choice.path, choice.platform, choice.tier) == ("['a']", "xla", "memory")
    assert (choice.config, choice.origin, choice.ms) == (repr(config), "tuned 2026-01-02", ((FORWARD, 0.25),))
    assert choice.key == key and choice.problem.startswith("flash_attention B2 D8")
    assert "for other problems: xla" in choice.notes
    assert {name for name, _ in choice.rejected} == {"cuda", "pallas", "triton"}
    (choice,) = ejx.explain(ejx.FlashAttention(config=config)).choices
    assert (choice.config, choice.tier) == (repr(config), "override")


def test_everything_is_json():
    named = ejx.explain("flash_attention", B=1, T=8, H=1, D=8)
    for explanation in (ejx.explain(model(), X), ejx.explain(model()), ejx.explain("attention"), named):
        document = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
        assert len(document["choices"]) == len(explanation.choices)
    (choice,) = document["choices"]
    assert choice["rooflines"]["forward"]["flops"] == 2 * 2 * 8 * 36 and choice["key"] == named.choices[0].key
    assert choice["label"].startswith("ejkernel_eqx.flash_attention.xla=")


SIZES: dict[str, Any] = dict(B=1, T=8, H=1, D=8)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "array": (
        ("flash_attention", X),
        {},
        r"explain: expected sizes and flags by name .*received 1 positional",
    ),
    "operation": (("flash",), dict(B=1), r"operation: expected one of .*received 'flash'"),
    "without cases": ((toy.OPERATION,), dict(T=1), r"received 'tests.toy', which has none"),
    "flag": (("flash_attention",), dict(SIZES, colour=True), r"flags: .*colour"),
    "platform": (("flash_attention",), dict(SIZES, platform="cuda"), r"needs a GPU"),
    "call": ((model(), shape(4)), {}, r"q:"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    args, given, message = WRONG[name]
    with pytest.raises((ValueError, ejx.UnsupportedError), match=message):
        ejx.explain(*args, **given)


def test_nothing_to_explain_says_why():
    def double(x):
        return 2 * x

    attend = lambda x: ejx.FlashAttention()(x, x, x)
    text = str(ejx.explain(attend))
    assert "a function has none until it is called" in text and "ejx.explain(function, x)" in text
    assert "ejx.explain(double, x)" in str(ejx.explain(double))
    assert "launches none" in str(ejx.explain(double, jnp.ones(3)))
    assert "this dict contains no module of this package" in str(ejx.explain({"a": jnp.ones(3)}))
    some = ejx.explain(attend, jnp.ones((4, 2, 8)))
    assert some.choices and not some.remark and not some.to_dict()["remark"]


def test_remarks_on_a_configuration(h200, monkeypatch):
    """A platform may say something about its choice, for this problem on this device."""
    remark = lambda config, problem, device: (
        f"{type(config).__name__} for {problem.dim('M')} rows on {device.kind}"
    )
    platform = ejx.kernel_registry.get("grouped_matmul", "xla").load()
    monkeypatch.setattr(platform, "remark", remark, raising=False)
    sizes = jnp.array([3, 1])
    call = ejx.explain(ejx.GroupedMatmul(platform="xla"), jnp.ones((4, 8)), jnp.ones((2, 8, 8)), sizes)
    assert call.choices[0].notes == ("XlaConfig for 4 rows on NVIDIA H200",)
