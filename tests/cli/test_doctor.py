"""`doctor` finds what there is and what is broken."""

import dataclasses
import importlib.util
import logging
import pathlib
import re
import types

import pytest

import ejkernel_eqx
import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, DeviceFacts, Platform
from tests.cli.parts import (
    CACHE_DIR,
    doctor,
    EnvironmentVariable,
    Implementation,
    output,
    POLICY_VARIABLE,
    problems,
)


def test_everything_is_listed(run_json, run):
    code, document = run_json("doctor", "--import", "tests.cli.kernels")
    assert code == output.OK and document["problems"] == []
    platforms = {row["platform"]: row for row in document["operations"]["flash_attention"]}
    assert platforms["xla"]["usable"] and platforms["xla"]["reason"] is None
    assert not platforms["cuda"]["usable"] and "needs a GPU" in platforms["cuda"]["reason"]
    assert platforms["triton-interpret"]["by_name_only"]
    assert len(document["operations"]["tests.cli.square"]) == 3
    assert {row["name"] for row in document["environment"]} == {variable.name for variable in ejx.env()}
    assert {POLICY_VARIABLE, CACHE_DIR.name} <= {variable.name for variable in ejx.env()}
    assert document["policy"] == "cached"
    assert document["device"]["fingerprint"] == ejx.device_fingerprint()
    code, text, _ = run("doctor", "--all")
    assert code == output.OK and text.rstrip().endswith("no problems found")
    for said in ("flash_attention", "needs a GPU", CACHE_DIR.name, POLICY_VARIABLE, "equinox"):
        assert said in text


def test_on_a_tpu_it_names_what_to_run_first(run, monkeypatch):
    monkeypatch.setattr(doctor, "this_device", lambda: DeviceFacts(Backend.TPU, "TPU v5 lite"))
    _, text, _ = run("doctor")
    assert re.match(r".*Pallas and XLA usable on TPU v5 lite; Triton: needs a GPU.*\n", text)
    assert "never run on a TPU" in text and "python -m pytest -m tpu -n 0" in text
    assert ("libtpu", importlib.util.find_spec("libtpu") is None) in [
        (name, version is None) for name, version in doctor.versions().items()
    ]


def test_with_another_triton_on_an_nvidia_gpu_it_says_what_is_left_out(monkeypatch):
    card = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", cudnn=(9, 19, 0))
    monkeypatch.setattr(doctor, "triton_unavailable", lambda: None)
    for reason in (None, "needs Triton 3.7 or 3.8, not 3.9.0"):
        monkeypatch.setattr(doctor, "versions_unfit", lambda reason=reason: reason)
        notes = doctor._notes(card)
        assert len(notes) == (reason is not None) and all(str(reason) in note for note in notes)
    assert "cudnn         9.19.0" in doctor._device_text(dataclasses.asdict(card) | {"fingerprint": "x"})


def test_a_folder_that_takes_no_files_is_wrong(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "file" / "cache"))
    code, text, _ = run("doctor")
    assert code == output.FAILED and len(text.splitlines()) == 2 and "cannot be written" in text
    code, text, _ = run("doctor", "--all")
    assert code == output.FAILED
    assert "NOT writable" in text and "PROBLEMS" in text
    assert f"{tmp_path / 'file' / 'cache'} cannot be written" in text


def test_a_variable_that_cannot_be_read_is_wrong(run_json, monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "sometimes")
    code, document = run_json("doctor")
    assert code == output.FAILED and document["policy"] is None
    (problem,) = document["problems"]
    assert POLICY_VARIABLE in problem and "'sometimes'" in problem and "'heuristic'" in problem
    row = next(row for row in document["environment"] if row["name"] == POLICY_VARIABLE)
    assert row["text"] == "sometimes" and row["value"] is None


def test_every_variable_of_ours_is_declared():
    """Whatever the package reads under its own name, `doctor` lists."""
    folder = pathlib.Path(ejkernel_eqx.__file__).parent
    named = {
        name
        for file in folder.rglob("*.py")
        for name in re.findall(r"EJKERNEL_EQX_[A-Z_]+", file.read_text())
    }
    assert named == {variable.name for variable in ejx.env()}
    assert all(variable.description and "\n" not in variable.description for variable in ejx.env())


def test_an_empty_variable_is_unset(monkeypatch):
    variable = EnvironmentVariable("TESTS_NUMBER", "a number", int, 3)
    for text, read in (("", 3), ("7", 7)):
        monkeypatch.setenv(variable.name, text)
        assert variable.text == (text or None) and variable.read() == read
    monkeypatch.setenv(variable.name, "many")
    with pytest.raises(ValueError, match=r"environment variable TESTS_NUMBER: .*'many'"):
        variable.read()


def test_files_set_aside_are_named(run_json, folder, caplog):
    broken = folder / ejx.device_fingerprint() / "attention.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        code, document = run_json("doctor")
    assert code == output.OK  # set aside is put right
    assert document["cache"]["set_aside"] == [f"{broken}.broken-1"] and document["cache"]["files"] == []
    assert not broken.exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'cuda'\nmore"), AssertionError()]
)
def test_a_machine_without_a_device_is_wrong(run, run_json, monkeypatch, error):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(problems, "device_facts", lambda: (_ for _ in ()).throw(error))
    code, document = run_json("doctor")
    assert code == output.FAILED and document["device"] is None and document["operations"] == {}
    (problem,) = document["problems"]
    assert problem.startswith("JAX has no device: ") and "'cuda'" in problem and "more" not in problem
    code, text, _ = run("doctor")
    assert code == output.FAILED and problem in text
    code, _, err = run("bench", "flash_attention", "--shape", "T=32,H=1,D=16")
    assert code == output.FAILED and err == f"error: {problem}\n"


def test_triton_that_fails_on_a_gpu_is_wrong_and_a_gpu_without_it_is_told(monkeypatch):
    hooks = types.SimpleNamespace(unavailable=lambda device: "is too old")
    triton, xla = (
        Implementation("tests.cli.gpu", platform, backend, 1, "tests", hooks)
        for platform, backend in ((Platform.TRITON, Backend.GPU), (Platform.XLA, Backend.ANY))
    )
    monkeypatch.setattr(
        ejx.kernel_registry, "_table", {"tests.cli.gpu": {i.platform: i for i in (triton, xla)}}
    )

    def problems(backend: Backend, version: str | None) -> list[str]:
        found: list[str] = []
        monkeypatch.setattr(doctor, "versions", lambda: {"triton": version})
        doctor._operations(DeviceFacts(backend, "device"), found)
        return found

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    (told,) = problems(Backend.GPU, "3.7.1")
    assert told.startswith("tests.cli.gpu: triton is installed") and told.endswith("is too old")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    (told,) = problems(Backend.GPU, None)
    assert "triton is not installed (pip install 'ejkernel-eqx[triton]')" in told
    assert problems(Backend.CPU, None) == []
    missing = doctor._versions_text({"jax-triton": None, "optax": "1"})
    assert missing == {"jax-triton": "not installed (pip install 'ejkernel-eqx[triton]')", "optax": "1"}


def test_variables_are_shown_as_text(monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "heuristic")
    monkeypatch.setenv(CACHE_DIR.name, "")
    shown = repr(ejx.env())
    assert f"{POLICY_VARIABLE}: set to 'heuristic', read as heuristic\n" in shown
    assert f"{CACHE_DIR.name}: not set\n" in shown and str(ejx.env()) == shown
    monkeypatch.setenv(POLICY_VARIABLE, "sometimes")
    assert "set to 'sometimes', INVALID: environment variable" in repr(ejx.env())
    assert isinstance(ejx.env(), tuple) and all(isinstance(one, EnvironmentVariable) for one in ejx.env())
