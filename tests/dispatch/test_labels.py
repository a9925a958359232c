"""Labels: written without loss, found again in real lowered and compiled text, and read back into configurations."""

import dataclasses
import enum
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import ejkernel_eqx as ejx
from ejkernel_eqx import dispatch, Platform, Problem
from ejkernel_eqx.dispatch.labels import kernel_scope, label_of
from tests.dispatch.toy import H200, hooks

ROOT = pathlib.Path(__file__).parents[2]
OPERATION = "tests.labels"


class Order(enum.Enum):
    ROWS = 1
    COLUMNS = 2


@dataclasses.dataclass(frozen=True)
class Side:
    block: int
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    forward: Side
    backward: Side | None = None
    order: Order | None = None
    fast: bool = False
    name: str = ""
    sizes: tuple[int, ...] = ()
    parts: tuple[Side | str, ...] = ()


Implementation = hooks(Config(Side(1)))
ejx.kernel_registry.register(OPERATION, Platform.XLA)(Implementation)


def selection(config, operation: str = OPERATION, size: int = 64) -> dispatch.Selection:
    problem = Problem.make(operation, dims={"T": size}, dtypes={"x": "float32"}, flags={}, lengths={"T"})
    return dispatch.Selection(
        problem, ejx.kernel_registry.get(OPERATION, Platform.XLA), config, dispatch.Tier.HEURISTIC, ()
    )


def read(label):
    (record,) = ejx.labels_to_configs([label])
    return record


CONFIGS = [
    Config(Side(256), Side(-1, 0.5), Order.COLUMNS, True, "plain"),
    Config(Side(0), None, None, False, "a/b (c) [d] \"e\" 'f' g=h,i é\n"),
    Config(Side(1, 1e-05), Side(2, float("inf")), name="true", sizes=(1, -2, 3)),
    Config(Side(1, 1e300), name="~", parts=(Side(3), "x]", Side(4, -0.0))),
    Config(Side(1), name="12", parts=()),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_labels_are_read_back(config):
    label = label_of(selection(config))
    assert set(label) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.~%+!,-=[]")
    record = read(label)
    assert (record.operation, record.platform, record.reason) == (OPERATION, "xla", "")
    assert record.config == config and repr(record.config) == repr(config)
    assert record.problem == selection(config).problem.digest()
    assert ejx.extract_labels_from_hlo_text(f'op_name="jit(f)/transpose(jvp({label}))/dot"') == [label]


def test_a_label_tells_everything_apart():
    labels = {label_of(selection(config)) for config in CONFIGS}
    labels.add(label_of(selection(CONFIGS[0], size=128)))
    labels.add(label_of(selection(CONFIGS[0], operation="tests/labels (2)")))
    assert len(labels) == len(CONFIGS) + 2
    assert label_of(selection(CONFIGS[0], size=63)) == label_of(selection(CONFIGS[0], size=64))
    assert label_of(selection(CONFIGS[0])).startswith(
        "ejkernel_eqx.tests.labels.xla=[256,none],[-1,0.5],+COLUMNS,true,~plain,[],[]="
    )


def test_what_cannot_be_read_says_why():
    label = label_of(selection(CONFIGS[0]))
    head, values, checksum, digest = label.split("=")

    def reason(*parts):
        record = read("=".join(parts))
        assert record.config is None and record.label == "=".join(parts)
        return record.reason

    assert "'no.such' is not registered" in reason("ejkernel_eqx.no.such.xla", values, checksum, digest)
    assert "no platform 'cuda'" in reason(head.replace(".xla", ".cuda"), values, checksum, digest)
    assert "its fields are now Config(" in reason(head, values, "00000000", digest)
    fits = "does not fit the current configuration class"
    for changed in (
        "",
        "1,2",
        "[256,none]",
        values.replace("COLUMNS", "DIAGONAL"),
        values.replace("[-1", "-1"),
    ):
        assert fits in reason(head, changed, checksum, digest)
    assert fits in reason(head, values.replace("~plain", "!object"), checksum, digest)
    assert fits in reason(head, values.replace("256", "2x"), checksum, digest)
    for foreign in ("", "jit(f)/dot_general", label[:-1], label + "0", label.upper()):
        assert read(foreign).reason == "is not a label of this package"
    # What has no text form still gets a label; a kernel call never fails for its name.
    assert "cannot be read" in read(label_of(selection(dataclasses.replace(CONFIGS[0], name=object)))).reason


def test_a_changed_class_is_seen(monkeypatch):
    label = label_of(selection(CONFIGS[0]))

    # The same number of values, other meanings.
    fields = [(f.name.replace("backward", "reverse"), f.type) for f in dataclasses.fields(Config)]
    Renamed = dataclasses.make_dataclass("Renamed", fields, frozen=True)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(Implementation, "config_type", Renamed)
    assert "its fields are now Renamed(" in read(label).reason


def labelled(forward, backward):
    @jax.custom_vjp
    def call(x):
        with kernel_scope(forward):
            return jnp.sin(x) @ x.mT

    def call_backward(x, g):
        with kernel_scope(backward):
            return (jnp.cos(x) * (g @ x),)

    call.defvjp(lambda x: (call(x), x), call_backward)
    return call


FORWARD, BACKWARD = (selection(config) for config in CONFIGS[:2])
X = jax.ShapeDtypeStruct((8, 6), jnp.float32)


def transformed(call):
    """Name -> a function of `X`, and which of forward and backward it runs."""
    loss = lambda x: jnp.sum(jnp.square(call(x)))
    layers = lambda x: jax.lax.scan(lambda c, _: (jnp.mean(call(c)) * c, None), x, None, length=2)[0]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("a")
    return {
        "forward": (call, "f"),
        "gradient": (jax.grad(loss), "fb"),
        "vmap": (lambda x: jax.vmap(call)(jnp.stack([x, x])), "f"),
        "vmap of gradient": (lambda x: jax.vmap(jax.grad(loss))(jnp.stack([x, x])), "fb"),
        "scan": (jax.grad(lambda x: jnp.sum(layers(x))), "fb"),
        "remat": (jax.grad(lambda x: jax.checkpoint(loss)(x) ** 2), "fb"),
        "shard_map": (jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec), "f"),
    }


@pytest.mark.parametrize("name", transformed(jnp.sin))
def test_labels_survive(name):
    function, directions = transformed(labelled(FORWARD, BACKWARD))[name]
    lowered = jax.jit(function).lower(X)
    expected = {"f": label_of(FORWARD), "b": label_of(BACKWARD)}
    assert set(ejx.find_labels_in_lowered(lowered)) == {expected[d] for d in directions}
    compiled = lowered.compile()
    assert set(ejx.find_labels_in_lowered(compiled)) == {expected[d] for d in directions}
    assert ejx.find_labels_in_lowered(compiled.as_text()) == ejx.find_labels_in_lowered(compiled)
    assert ejx.find_labels_in_lowered(lowered.as_text()) == []  # without its debug information
    for record in ejx.labels_to_configs(ejx.find_labels_in_lowered(compiled)):
        assert record.config in CONFIGS[:2]


def test_only_text_is_searched():
    with pytest.raises(ValueError, match=r"lowered: expected .*received .*use jax.jit\(f\).lower"):
        ejx.find_labels_in_lowered(jnp.sin)


@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_the_gradient_of_attention_is_labelled(platform):
    x = jax.ShapeDtypeStruct((2, 16, 2, 16), jnp.float32)
    module = ejx.FlashAttention(causal=True, platform=platform)
    gradient = jax.grad(lambda x: jnp.sum(module(x, x, x)))
    choices = ejx.explain(gradient, x).choices
    lowered = jax.jit(gradient).lower(x)
    compiled = lowered.compile()
    for text in [lowered] if platform == "triton-interpret" else [lowered, compiled]:
        labels = ejx.find_labels_in_lowered(text)
        assert labels and set(labels) <= {choice.label for choice in choices}
        for record in ejx.labels_to_configs(labels):
            assert (record.operation, record.platform) == ("flash_attention", platform)
            assert repr(record.config) == choices[0].config
    # As a profiler shows them: in the text before, a function's names do not tell who calls it.
    names = compiled.as_text() or ""
    for direction in (r"/jvp\(", r"/transpose\(jvp\("):
        assert re.search(rf'{direction}[^"]*{re.escape(choices[0].label)}', names), direction


def names() -> list[str]:
    """Of a call, of a record and of a device."""
    x = jax.ShapeDtypeStruct((2, 8, 2, 8), jnp.float32)
    (choice,) = ejx.explain(ejx.FlashAttention(), x, x, x).choices
    record = dispatch.Record(OPERATION, "xla", 1, choice.key, {}, {"triton": "2", "jaxlib": "1"}, None)
    return [choice.label, choice.key, record.key, ejx.device_fingerprint(H200)]


PROGRAM = """
import json, os, sys
import jax, jax.numpy as jnp
from tests.dispatch.test_labels import CONFIGS, kernel_scope, names, selection
def f(x):
    with kernel_scope(selection(CONFIGS[0], sys.argv[1])):
        return jnp.sin(x) @ x.T
jax.jit(f)(jnp.ones((4, 4)))
print(json.dumps([names(), sorted(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))]))
"""


@pytest.mark.slow
def test_labels_are_the_same_in_every_process_and_keep_the_compilation_cache(tmp_path):
    """Another process finds the program that this one compiled, even under another label."""

    def run(operation, seed):
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}/src:{ROOT}",
            "PYTHONHASHSEED": seed,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-c", PROGRAM, operation]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        names, files = json.loads(done.stdout)
        return names, [file for file in files if file.startswith("jit_f-") and file.endswith("-cache")]

    first, second = run("one", "1"), run("two", "2")
    assert first == second and len(first[1]) == 1 and first[0] == names()
