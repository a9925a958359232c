"""The tables in the package, and guesses from the nearest shape and the nearest device."""

import dataclasses
import importlib.resources
import logging

import pytest

from ejkernel_eqx import Backend, DeviceFacts, dispatch, Platform, Problem
from ejkernel_eqx.dispatch import shipped
from tests.dispatch import toy
from tests.dispatch.toy import FastConfig, H200

OPERATION = "tests.sized"
H100_PCIE = DeviceFacts(Backend.GPU, "NVIDIA H100 PCIe", "nvidia", "9.0", 114, 232_448)
GH_SMALL = DeviceFacts(Backend.GPU, "NVIDIA H20", "nvidia", "9.0", 78, 232_448)
A100 = DeviceFacts(Backend.GPU, "NVIDIA A100", "nvidia", "8.0", 108, 166_912)


def adapted(config, problem, device):
    """Blocks over 1000 are for one length and one device only."""
    if config.block < 1000:
        return config
    return FastConfig(1000 + problem.dim("T") + device.num_multiprocessors)


def too_large(config, problem, device):
    return "too large" if config.block > 100 and problem.dim("T") < 64 else None


HOOKS = toy.hooks(FastConfig(0), VERSION=3, config_unsupported=too_large, adapted=adapted)
SIZED = dispatch.Implementation(OPERATION, Platform.PALLAS, Backend.ANY, 0, "sized", HOOKS)


def problem(t=64, h=8, d=16, dtype="float32", **flags) -> Problem:
    dims = {"T": t, "H": h, "D": d}
    return Problem.make(OPERATION, dims=dims, dtypes={"x": dtype}, flags=flags, lengths={"T"}, counts={"H"})


def entry(block, p, origin="") -> tuple[tuple[Platform, str], dispatch.Known]:
    return (Platform.PALLAS, p.key()), dispatch.Known(FastConfig(block), (("forward", 1.0),), origin)


def known(*entries, device=H200, borrowed=()) -> dispatch.Snapshot:
    return dispatch.Snapshot(
        OPERATION, (SIZED,), device, dispatch.Policy.CACHED, shipped=dict(entries), borrowed=dict(borrowed)
    )


def answer(s: dispatch.Snapshot, p: Problem):
    selection = dispatch.select(s, p)
    return selection.config.block, selection.tier.value, selection.origin


# The nearest shape


def test_the_nearest_shape_answers_up_to_a_factor_of_four():
    table = known(entry(1, problem(64, origin=None), "shipped for X"), entry(2, problem(1024, origin=None)))
    cases = {64: 1, 32: 1, 16: 1, 128: 1, 512: 2, 2048: 2, 4096: 2}
    for t, block in cases.items():
        assert answer(table, problem(t, origin=None))[0] == block, t
    assert answer(table, problem(64, origin=None)) == (1, "persistent", "shipped for X")
    near = "from the nearest shape: D16 H8 T64 (shipped for X)"
    assert answer(table, problem(128, origin=None)) == (1, "persistent", near)
    assert dispatch.select(table, problem(128, origin=None)).ms == ()
    for far in (problem(8, origin=None), problem(8192, origin=None), problem(64, 32, origin=None)):
        assert answer(table, far) == (0, "heuristic", "")
    assert answer(table, problem(64, 16, origin=None))[0] == 1


def test_what_must_be_equal_for_a_guess():
    table = known(entry(1, problem(64, causal=True)))
    assert answer(table, problem(128, causal=True))[0] == 1
    for other in (
        problem(128, causal=False),
        problem(128),
        problem(128, causal=True, cap=1.0),
        problem(128, d=32, causal=True),
        problem(128, dtype="bfloat16", causal=True),
    ):
        assert answer(table, other)[0] == 0
    other_platform = (Platform.XLA, problem(64).key()), dispatch.Known(FastConfig(1))
    other_operation = (
        (Platform.PALLAS, problem(64).key().replace("sized", "other")),
        dispatch.Known(FastConfig(1)),
    )
    no_problem = (Platform.PALLAS, "not a key"), dispatch.Known(FastConfig(1))
    assert answer(known(other_platform, other_operation, no_problem), problem(128))[0] == 0


def test_a_guess_that_cannot_run_is_passed_over():
    table = known(entry(200, problem(64)), entry(1, problem(128)))
    assert answer(table, problem(32))[0] == 1  # 200 is nearer, but too large there
    assert answer(known(entry(200, problem(64))), problem(32)) == (0, "heuristic", "")
    denied = (Platform.PALLAS, problem(64).key()), dispatch.Known(None, denied="wrong")
    assert answer(known(denied, entry(1, problem(128))), problem(32))[0] == 1


def test_a_guess_is_adapted_and_then_asked_whether_it_can_run():
    table = known(entry(1001, problem(64, origin=None)))
    assert answer(table, problem(64, origin=None))[0] == 1001  # measured here
    multiprocessors = H200.num_multiprocessors
    assert answer(table, problem(128, origin=None))[0] == 1128 + multiprocessors
    assert answer(table, problem(32, origin=None)) == (0, "heuristic", "")
    far = known(borrowed=(entry(1001, problem(64, origin=None)),))
    assert answer(far, problem(64, origin=None))[0] == 1064 + multiprocessors


def test_a_guess_does_not_depend_on_the_order_of_the_table():
    sizes = [(32, 8), (128, 8), (64, 4), (256, 8)]
    entries = [entry(block, problem(*size)) for block, size in enumerate(sizes, 1)]
    answers = {
        answer(known(*order), problem(64)) for order in (entries, entries[::-1], entries[2:] + entries[:2])
    }
    assert answers == {(1, "persistent", "from the nearest shape: D16 H8 T32")}


def test_guesses_are_part_of_what_makes_snapshots_alike():
    one, two = entry(1, problem(64)), entry(2, problem(64))
    assert known(one).answers == dataclasses.replace(known(), memory=dict([one])).answers
    assert known(one).answers != known(two).answers != known().answers
    assert known(borrowed=[one]).answers not in (known().answers, known(one).answers)


# The package's tables


@pytest.fixture
def ship(monkeypatch, tmp_path):
    """Writes the table of a device into a package of its own, as records of problems and blocks."""
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    # `nothing_known` hides the tables of the package; here are others.
    monkeypatch.setattr(dispatch.snapshot, "shipped_table", shipped.shipped_table)
    monkeypatch.setattr(dispatch.snapshot, "borrowed_table", shipped.borrowed_table)
    shipped._tables.cache_clear()

    def write(device, *records, text=None):
        folder = tmp_path / "data" / device.slug
        folder.mkdir(parents=True, exist_ok=True)
        header = {"device": device.to_dict()}
        (folder / "sized.json").write_text(
            dispatch.cache_file.render(header, records) if text is None else text
        )
        shipped._tables.cache_clear()

    yield write
    shipped._tables.cache_clear()


def record(block, p=None, **changed) -> dispatch.Record:
    return toy.record(FastConfig(block), p or problem(), **{"version": 3, **changed})


def test_a_shipped_table(ship):
    ship(
        H200,
        record(6),
        record(7, problem(128), software={"jaxlib": "0.0.1"}),
        record(8, problem(32), operation="another"),
        record(9, problem(256), version=2),
    )
    table = shipped.shipped_table(SIZED, H200)
    assert {key: k.config.block for (_, key), k in table.items()} == {
        problem().key(): 6,
        problem(128).key(): 7,
    }
    here = {k.config.block: (k.origin, k.ms) for k in table.values()}
    assert here[6] == ("shipped for NVIDIA H200", (("forward", 0.5),))
    assert here[7][0] == "shipped for NVIDIA H200, with jaxlib 0.0.1"
    assert shipped.shipped_table(SIZED, A100) == {}


def test_of_two_records_of_a_problem_that_of_this_software_decides(ship):
    ship(H200, record(6, date="2025-01-01"), record(7, software={"jaxlib": "0.0.1"}, date="2026-01-01"))
    (k,) = shipped.shipped_table(SIZED, H200).values()
    assert k.config == FastConfig(6)


def test_a_shipped_table_of_another_schema_is_ignored_aloud(ship, caplog):
    ship(H200, text=dispatch.cache_file.render({}, [record(6)]).replace('"schema": 2', '"schema": 3'))
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert shipped.shipped_table(SIZED, H200) == shipped.borrowed_table(SIZED, H100_PCIE) == {}
    assert "has schema 3, this version reads 2; it is ignored" in caplog.text


# The nearest device


def test_the_nearest_device():
    fleet = {"h200": H200, "h20": GH_SMALL, "a100": A100}
    nearest, like = shipped.nearest_device, dataclasses.replace
    assert nearest(H100_PCIE, fleet) == "h200"
    assert nearest(like(H200, kind="?", num_multiprocessors=80), fleet) == "h20"
    assert nearest(like(A100, kind="?", compute_capability="8.6"), fleet) == "a100"
    unrelated = {"compute_capability": "10.0"}, {"vendor": "amd"}, {"backend": Backend.TPU}
    for changed in (*unrelated, {"compute_capability": ""}, {"compute_capability": "gfx942"}):
        assert nearest(like(H200, **changed), fleet) is None
    nameless = like(H200, compute_capability="gfx942")
    assert nearest(nameless, {"other": nameless}) is None
    # Equally far: the same one everywhere.
    twins = {"b": H200, "a": H200}
    assert nearest(H100_PCIE, twins) == "a" == nearest(H100_PCIE, dict(reversed(twins.items())))


def test_a_device_without_a_table_borrows(ship):
    ship(H200, record(6), record(200, problem(1024)))
    ship(A100, record(1))
    borrowed = shipped.borrowed_table(SIZED, H100_PCIE)
    assert {k.config.block for k in borrowed.values()} == {6, 200}
    table = known(device=H100_PCIE, borrowed=borrowed)
    assert answer(table, problem()) == (6, "persistent", "from NVIDIA H200")
    near = "from the nearest shape: D16 H8 T64 (from NVIDIA H200)"
    assert answer(table, problem(128)) == (6, "persistent", near)
    assert dispatch.select(table, problem()).ms == ()
    # What was measured here, even at another shape, comes before.
    table = known(entry(1, problem(128)), device=H100_PCIE, borrowed=borrowed)
    assert answer(table, problem())[0] == 1
    # A device with a table of its own, a CPU and a stranger borrow nothing.
    stranger = dataclasses.replace(H200, kind="new", compute_capability="12.0")
    for device in (H200, DeviceFacts(Backend.CPU, "cpu"), stranger):
        assert shipped.borrowed_table(SIZED, device) == {}


def test_the_tables_that_come_with_the_package_fit_it():
    """Every table is whole, says what device it is of, and holds records whose problem agrees with their key."""
    folders = list(importlib.resources.files("ejkernel_eqx").joinpath("data").iterdir())
    assert "nvidia_h200" in {folder.name for folder in folders}
    for file in (file for folder in folders for file in folder.iterdir()):
        content = dispatch.cache_file.parse(file.read_text(encoding="utf-8"), str(file))
        device = DeviceFacts.from_dict(content.header["device"])
        assert file.name.endswith(".json") and device.slug in str(file) and device.backend is not Backend.CPU
        assert device.num_multiprocessors and device.shared_memory and content.records
        for r in content.records:
            assert Problem.from_dict(r.exact).key() == r.problem and r.operation == r.exact["operation"]
            directions = {"forward"} if file.name == "paged.json" else {"forward", "forward+backward"}
            assert r.config is not None and r.ms.keys() == directions and r.software


@pytest.fixture
def on_an_h200(monkeypatch):
    """`on_an_h200(family, gluon)`: what the package has measured there, as a module built there finds it; `gluon` says what is missing."""

    def records(family: str, gluon: str | None = None) -> list[tuple[dispatch.Record, dispatch.Selection]]:
        triton = pytest.importorskip(f"ejkernel_eqx.{family}.triton.compiled")
        monkeypatch.setattr(triton, "unavailable", lambda device: None)  # which asks this machine
        for module in ("backward_tiles", "tile_sizes"):
            name = f"ejkernel_eqx.attention.triton.hopper.{module}.gluon_unavailable"
            monkeypatch.setattr(name, lambda device: gluon)
        monkeypatch.setattr(dispatch.snapshot, "shipped_table", shipped.shipped_table)
        monkeypatch.setattr(dispatch.snapshot, "device_facts", lambda: H200)
        file = importlib.resources.files("ejkernel_eqx").joinpath(f"data/nvidia_h200/{family}.json")
        found = dispatch.cache_file.parse(file.read_text(encoding="utf-8"), str(file)).records
        places = {(r.operation, r.platform) for r in found}
        tables = {place: dispatch.take_snapshot(place[0], platform=place[1]) for place in places}
        select = lambda r: dispatch.select(tables[r.operation, r.platform], Problem.from_dict(r.exact))
        return [(r, select(r)) for r in found]

    return records


FAMILIES = ("attention", "convolution", "normalization", "paged", "pooling", "recurrence")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_record_that_comes_with_the_package_answers_on_its_device(family, on_an_h200, caplog):
    """The kernel's version is that of the record, and its class takes the configuration."""
    found = on_an_h200(family)
    platforms = {"cuda", "triton", "xla"} if family == "attention" else {"triton"}
    assert {r.platform for r, _ in found} == platforms
    for r, selection in found:
        assert (selection.tier, dispatch.to_dict(selection.config)) == (dispatch.Tier.PERSISTENT, r.config)
        assert selection.origin.startswith("shipped for NVIDIA H200") and selection.ms
    assert not caplog.records


def test_where_gluon_is_missing_every_record_answers_with_another_forward(on_an_h200):
    """The tiles of the backward stay, if they are not Hopper's; times with the other forward decide nothing."""
    found, kernels = 0, ("forward", "key_gradient")
    for r, selection in on_an_h200("attention", "needs JAX 0.11.1 or newer, not 0.10.2"):
        if (r.operation, r.platform) != ("flash_attention", "triton"):
            continue
        assert selection.tier is dispatch.Tier.PERSISTENT and r.config is not None
        assert selection.origin.startswith("shipped for NVIDIA H200")
        config = dispatch.to_dict(selection.config)
        assert not any(config[kernel]["hopper_programs"] for kernel in kernels)
        replaced = {kernel: config[kernel] for kernel in kernels if r.config[kernel]["hopper_programs"]}
        assert config == r.config | replaced
        if "forward" in replaced:
            remark = selection.implementation.load().remark(selection.config, selection.problem, H200)
            assert not selection.ms and "needs JAX 0.11.1" in remark
            found += 1
        elif not replaced:
            assert selection.ms
    assert found
