"""`cache`: what has been tuned, passed on, taken over and forgotten."""

import io
import json
import sys

import pytest

from tests.cli.kernels import example_problem, OPERATION, SquareConfig
from tests.cli.parts import (
    BOTH,
    CACHE_DIR,
    Denied,
    device_facts,
    FORWARD,
    output,
    Timed,
    user_cache,
)
from tests.dispatch import toy


def record(n=64, platform="xla", chunks=2, operation=OPERATION, date="2026-11-20T10:00:00+00:00"):
    return toy.record(
        SquareConfig(chunks),
        example_problem(operation, {"N": n}, "float32", {}),
        platform=platform,
        ms={FORWARD: 0.25, BOTH: 0.75},
        spread={FORWARD: 0.01, BOTH: 0.02},
        errors={"out": 1e-7, "x": 2e-7},
        timed=(Timed("", {"chunks": 1}, 0.9, 0.03), Timed("", {"chunks": 2}, 0.75, 0.02)),
        denied=(Denied("", {"chunks": 3}, "out is wrong: relative RMS error 0.5"),),
        date=date,
    )


def table(core=OPERATION):
    return user_cache(device_facts(), core)


@pytest.fixture
def filled(folder):
    """Three records of this device, in two tables."""
    table().update([record(64), record(256, chunks=1)])
    table("other").put(record(64, "pallas", operation="tests.cli.other"))
    return folder


def tables(folder):
    """What the files hold, whoever wrote them."""
    return {
        path.relative_to(folder): sorted(
            json.dumps(entry, sort_keys=True) for entry in json.loads(path.read_text())["entries"]
        )
        for path in folder.glob("*/*.json")
    }


def test_list(run, run_json, filled):
    code, out, _ = run("cache", "list")
    assert code == output.OK
    row = next(line for line in out.splitlines() if "N256" in line)
    for said in (OPERATION, "xla", "chunks=1", "0.2500 / 0.7500", "2026-11-20"):
        assert said in row
    _, document = run_json("cache", "list")
    found = [(r["operation"], r["exact"]["dims"]["N"]) for r in document["records"]]
    assert found == [("tests.cli.other", 64), (OPERATION, 256), (OPERATION, 64)]
    _, document = run_json("cache", "list", "--operation", "tests.cli.other")
    assert [r["platform"] for r in document["records"]] == ["pallas"]
    _, document = run_json("cache", "list", "--device", "nvidia")
    assert document["records"] == []
    code, out, _ = run("cache", "list", "--device", "nvidia")
    assert code == output.OK and "no tuned configurations" in out


def test_show_tells_everything(run, run_json, filled):
    _, document = run_json("cache", "list", "--operation", OPERATION)
    entry = next(r for r in document["records"] if r["exact"]["dims"]["N"] == 64)
    code, out, _ = run("cache", "show", entry["digest"][:8])
    assert code == output.OK
    said = "chunks=2,forward 0.2500,spread 2.0%,x 2e-07,0.9000,winner,out is wrong,jaxlib,version"
    assert all(part in out for part in said.split(","))
    code, _, err = run("cache", "show", "")
    assert code == output.USAGE and "matches 3 of 3" in err
    winner = next(line for line in out.splitlines() if "winner" in line)
    assert "chunks=2" in winner and "0.7500" in winner
    _, shown = run_json("cache", "show", record(64).key)  # by the whole key
    assert shown["digest"] == entry["digest"] and shown["denied"] == [
        {"part": "", "config": {"chunks": 3}, "reason": "out is wrong: relative RMS error 0.5"}
    ]


def test_export_clear_import_is_a_round_trip(run, run_json, filled, tmp_path):
    before = tables(filled)
    code, document = run_json("cache", "export", tmp_path / "all.json")
    assert code == output.OK and document["records"] == 3
    code, out, _ = run("cache", "clear", "--yes")
    assert code == output.OK and out.startswith("3 records removed")
    assert not any(tables(filled).values())
    code, document = run_json("cache", "import", tmp_path / "all.json")
    assert code == output.OK
    counts = [document[name] for name in ("new", "replaced", "kept", "refused")]
    assert counts == [3, 0, 0, []]
    assert tables(filled) == before
    _, document = run_json("cache", "import", tmp_path / "all.json")
    assert (document["new"], document["kept"]) == (0, 3)
    code, out, _ = run("cache", "clear", "--operation", OPERATION, "--yes")
    assert code == output.OK and out.startswith("2 records removed")
    assert len(table("other")) == 1 and len(table()) == 0


def test_the_newer_record_stays(run_json, filled, tmp_path):
    run_json("cache", "export", tmp_path / "old.json", "--operation", OPERATION)
    newer = record(64, chunks=1, date="2026-12-01T00:00:00+00:00")
    table().put(newer)
    run_json("cache", "export", tmp_path / "new.json", "--operation", OPERATION)
    _, document = run_json("cache", "import", tmp_path / "old.json")
    assert (document["replaced"], document["kept"]) == (0, 2)
    table().put(record(64))
    _, document = run_json("cache", "import", tmp_path / "new.json")
    assert (document["replaced"], document["kept"]) == (1, 1)
    found = table().get(newer.key)
    assert found is not None and found.config == {"chunks": 1}


def test_clear_asks(run, filled, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # nobody there
    code, _, err = run("cache", "clear")
    assert code == output.USAGE and "--yes" in err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, out, err = run("cache", "clear")
    assert (code, out) == (output.USAGE, "") and "remove 3 records" in err and "nothing was removed" in err
    assert len(table()) == 2
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    code, _, _ = run("cache", "clear")
    assert code == output.OK and len(table()) == 0


@pytest.fixture
def exported(run_json, filled, tmp_path):
    """`exported(change)` imports what was exported, changed by `change(tables)`, where nothing is known: the exit code and the document."""

    def imported(change):
        file = tmp_path / "all.json"
        run_json("cache", "export", file)
        run_json("cache", "clear", "--yes")
        content = json.loads(file.read_text())
        change(content["tables"])
        file.write_text(json.dumps(content))
        return run_json("cache", "import", file)

    return imported


SCHEMA_9 = '{"format": "ejkernel_eqx exported tuning records", "schema": 9, "tables": []}'
NO_FILES = {
    "": "is not JSON",
    '{"format": "ejk': "is not JSON",
    "[1, 2]": "is another kind of file",
    '{"format": "torch"}': "is another kind of file",
    SCHEMA_9: "has schema 9, this version reads 1",
}


@pytest.mark.parametrize(("text", "said"), NO_FILES.items())
def test_a_file_that_is_none_is_refused_whole(run, filled, tmp_path, text, said):
    before = tables(filled)
    (tmp_path / "bad.json").write_text(text)
    code, out, err = run("cache", "import", tmp_path / "bad.json")
    assert (code, out) == (output.USAGE, "") and said in err and str(tmp_path / "bad.json") in err
    assert tables(filled) == before


def _set(**changes):
    return lambda entry: entry.update(changes)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_set(version=7), "is of version 7 of the kernels, this package has 1"),
        (_set(config={"chunk": 2}), "unknown ['chunk']"),
        (_set(config={"chunks": "two"}), "expected int, received 'two'"),
        (_set(problem="{}"), "its key does not match its problem"),
        (_set(exact={"operation": OPERATION}), "its problem cannot be read"),
        (_set(colour="red"), "unknown fields ['colour']"),
        (lambda entry: entry.pop("software"), "missing ['software']"),
    ],
)
def test_a_bad_record_is_refused_alone(exported, spoil, said):
    code, document = exported(
        lambda tables: spoil(next(t for t in tables if t["core"] == OPERATION)["entries"][0])
    )
    assert code == output.FAILED and document["new"] == 2
    (refused,) = document["refused"]
    assert said in refused["reason"] and refused["record"].endswith(f"{OPERATION} entry 0")


def test_a_table_for_another_place_is_refused(exported, filled):
    def change(tables):
        tables[0]["device"] = "../../elsewhere"
        tables[1] = "text"

    code, document = exported(change)
    assert code == output.FAILED and (document["new"], len(document["refused"])) == (0, 2)
    assert not (filled.parent.parent / "elsewhere").exists()


def test_records_of_another_device_keep_their_place(exported, run_json):
    exported(lambda tables: tables[0].update(device="nvidia_h200-12345678"))
    _, document = run_json("cache", "list", "--device", "nvidia_h200")
    assert {r["device"] for r in document["records"]} == {"nvidia_h200-12345678"}


def test_a_folder_that_takes_no_files_fails_the_import(run, run_json, filled, tmp_path, monkeypatch):

    run_json("cache", "export", tmp_path / "all.json")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "file" / "cache"))
    code, out, err = run("cache", "import", tmp_path / "all.json")
    assert (code, out) == (output.FAILED, "") and "could not be written" in err
