import pathlib
import re
import types

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import _operations, dispatch, Platform
from tests.dispatch import toy
from tests.dispatch.toy import FastConfig, H200


def hooks(label: str = "", **others):
    return toy.hooks(FastConfig(0), label=label, **others)


def test_operations_and_their_order():
    assert {"flash_attention", "attention", "scaled_dot_product_attention"} <= set(
        ejx.kernel_registry.list_operations()
    )
    platforms = [i.platform.value for i in ejx.kernel_registry.ordered("flash_attention")]
    assert platforms == ["cuda", "triton", "xla", "pallas", "triton-interpret", "pallas-interpret"]
    assert [i.platform for i in ejx.kernel_registry.ordered("attention")] == [Platform.XLA]
    with pytest.raises(
        ValueError,
        match=r"^operation: expected one of .*, flash_attention, .*, received 'flash'; did you mean flash_attention\?$",
    ):
        ejx.kernel_registry.ordered("flash")


def test_every_operation_has_a_class_and_a_family():
    assert (
        _operations.CLASSES.keys()
        == _operations.OPERATIONS.keys()
        == set(dir(ejx)) & set(_operations.OPERATIONS)
    )


def test_what_a_platform_must_answer():
    with pytest.raises(
        ValueError,
        match=r"register\('op', 'xla'\): expected .* without default_config, candidates, config_type",
    ):
        dispatch.KernelRegistry().register("op", "xla")(types.SimpleNamespace(unsupported=None))
    with pytest.raises(ValueError, match=r"expected one of .*'xla'.* received 'verilog'"):
        dispatch.KernelRegistry().register("op", "verilog")(hooks())


def test_an_explicit_platform_is_never_replaced():
    assert ejx.kernel_registry.get(toy.OPERATION).platform is Platform.PALLAS
    assert ejx.kernel_registry.get(toy.OPERATION, "xla").platform is Platform.XLA
    assert ejx.kernel_registry.get(toy.OPERATION, Platform.TRITON).platform is Platform.TRITON
    with pytest.raises(
        ValueError,
        match=r"platform: expected one of \['triton', 'pallas', 'xla'\] for tests.toy, received 'cuda'",
    ):
        ejx.kernel_registry.get(toy.OPERATION, "cuda")
    with pytest.raises(ValueError, match=r"received 'triton' on backend 'gpu'"):
        ejx.kernel_registry.get(toy.OPERATION, "triton", "gpu")


def test_what_is_asked_for_by_name_only_is_never_chosen():
    registry = dispatch.KernelRegistry()
    registry.register("op", "triton-interpret", priority=-1)(hooks())
    with pytest.raises(ValueError, match="received None on backend None"):
        registry.get("op")
    assert registry.get("op", "triton-interpret").priority == -1


def test_unavailable_is_asked():
    registry = dispatch.KernelRegistry()
    registry.register("op", "xla")(hooks(unavailable=lambda device: f"not on {device.kind}"))
    ((_, reason),) = registry.list_implementations("op", H200)
    assert reason == "not on NVIDIA H200"
    assert registry.ordered("op")[0].unsupported(toy.problem(), H200) == reason


def test_disagreeing_signatures_are_found():
    registry = dispatch.KernelRegistry()
    registry.register("op", "xla")(hooks(forward=lambda arrays, spec: None))
    registry.register("op", "pallas")(hooks(forward=lambda arrays, spec, config: None))
    registry.validate_signatures("op", ("unsupported", "backward"))
    with pytest.raises(ValueError, match=r"op\.forward: the platforms disagree"):
        registry.validate_signatures("op", ("forward",))


@pytest.mark.parametrize(
    "room, above", [("dispatch", "attention|_kernel|launch|nn"), ("tuning", "attention|nn")]
)
def test_rooms_that_name_no_operation(room, above):
    """So that a new operation touches no file in them."""
    folder = pathlib.Path(ejx.__file__).parent / room
    files = sorted(folder.glob("*.py"))
    assert len(files) >= 8
    operations = [name for name in ejx.kernel_registry.list_operations() if not name.startswith("tests")]
    operations.remove("matmul")  # which is also a word of a setting of JAX
    setting = "(?<!default_)matmul(?!_precision)"
    named = re.compile(
        "|".join([*operations, "flash", "attention", "recurren", setting, "pooling"]), re.IGNORECASE
    )
    # A documentation string may give an example; code may not.
    strings = re.compile(r'"""(?:.|\n)*?"""')
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not named.findall(strings.sub("", text)), file.name
        assert not re.search(rf"^\s*(from|import) .*\.\.({above})\b", text, re.M)
