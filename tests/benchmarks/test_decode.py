"""The benchmark of attention over pages runs, checks before it times, and writes what it says."""

import dataclasses
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decode, decode_peers, decode_problems, tune, tune_problems
from benchmarks.decode_problems import DecodeProblem
from ejkernel_eqx.dispatch import kernel_registry
from ejkernel_eqx.dispatch.cache_file import parse as parse_table
from ejkernel_eqx.dispatch.persistent import CACHE_DIR
from tests.recurrence.quick import quick

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5")
_CHOSEN = "^(decode N2 S40 p4|.* int8|prefill)"
_CARD = {"copy": 4.0, "read": 4.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run over decoding, 8-bit pages and a prefill, and the folder with its files."""
    folder = tmp_path_factory.mktemp("decode")
    paths = [f"--{name}={folder / name}" for name in ("json", "plot", "markdown")]
    # `jax.nn` promotes dtypes as it likes: the rule of this suite is for our own code.
    with jax.numpy_dtype_promotion("standard"):
        assert decode.main([*_QUICK, "--problems", _CHOSEN, "--commit", "abc", *paths]) == 0
    return json.loads((folder / "json").read_text()), folder


@pytest.mark.slow
def test_every_result_is_checked_and_timed(run):
    content, _ = run
    rows = content["rows"]
    assert {row["kind"] for row in rows} == {"decode", "8-bit pages", "prefill"}
    names = {(row["kind"], row["role"], row["implementation"]) for row in rows}
    assert names == {
        *((kind, "ours", "default") for kind in ("decode", "8-bit pages", "prefill")),
        *((kind, "peer", "gather + jax.nn xla") for kind in ("decode", "8-bit pages", "prefill")),
        ("8-bit pages", "baseline", "float32 pages"),
        ("prefill", "baseline", "FlashAttention"),
    }
    for row in rows:
        assert row["reason"] is None and 0 <= row["error"] < 1e-5
        assert row["ms"] > 0 and len(row["samples_ms"]) == 2 and row["spread"] >= 0
        assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e9)
        assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9)
        assert row["of_card"] == pytest.approx(row["tb_per_s"] / content["card"]["copy"])
        assert row["temporary_bytes"] >= 0
        if row["role"] == "ours":
            assert row["platform"] == "xla" and row["config"] and row["config_from"]
            assert math.isfinite(row["ratio"]) and row["ratio"] > 0
            assert (row["over_baseline"] is None) == (row["kind"] == "decode")


@pytest.mark.slow
def test_the_report_names_its_origin(run, capsys):
    content, folder = run
    environment = content["environment"]
    assert environment["device"] == jax.devices()[0].device_kind and environment["commit"] == "abc"
    assert content["card"]["copy"] > 0 and content["card"]["read"] > 0
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")
    text = (folder / "markdown").read_text()
    assert "| decode N2 S40 p4 H4 KV2 D16 float32 |" in text and "A copy runs at" in text
    again = ["--plot", str(folder / "again.png"), "--markdown", str(folder / "again.md")]
    assert decode.main(["--render", str(folder / "json"), *again]) == 0
    assert "lowest ratio, prefill" in capsys.readouterr().out and (folder / "again.png").is_file()


def test_failures_have_their_reason(monkeypatch):
    """What is wrong gets no time; a peer that raises does not stop the others, whatever it raises."""
    true, peers_of = decode_problems.ours, decode_peers.peers_of

    def wrong(problem, platform):
        return lambda inputs: 1.02 * true(problem, platform)(inputs)

    def fail(inputs):
        raise KeyError("no such kernel")

    def more(problem, gpu):
        yield decode_peers.Peer("broken", lambda inputs: inputs, fail)
        yield from peers_of(problem, gpu)

    monkeypatch.setattr(decode_problems, "ours", wrong)
    monkeypatch.setattr(decode_peers, "peers_of", more)
    with jax.numpy_dtype_promotion("standard"):
        mine, broken, peer = decode.measure(decode_problems.TINY[0], _CARD, decode.parse(_QUICK))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None
    assert broken.reason == "KeyError: 'no such kernel'" and broken.ms is None
    assert peer.reason is None and peer.ms is not None and mine.ratio is None


def test_no_platform_and_no_problem(capsys):
    with pytest.raises(SystemExit):
        decode.parse(["--platforms", "cuda"])
    assert decode.main(["--quick", "--problems", "nothing"]) == 2
    assert "no problem matches 'nothing'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("problem", decode_problems.TINY, ids=lambda p: p.name)
def test_every_way_to_compute_it_agrees(problem):
    """Ours, the baselines and what is gathered; and Pallas, interpreted, where it has a form."""
    inputs = decode_problems.make_inputs(problem)
    expected = decode_problems.expected_results(problem, inputs)
    ways = {"ours": (inputs, decode_problems.ours(problem, "xla"))}
    peers = [*decode_peers.peers_of(problem, False)]
    if problem is decode_problems.TINY[2]:
        peers += [decode_peers.pallas(problem, fitted=fitted, interpret=True) for fitted in (False, True)]
    ways |= {peer.name: (peer.convert(inputs), peer.run) for peer in peers}
    for name, (given, function) in ways.items():
        with jax.numpy_dtype_promotion("standard"):
            out = quick(function)(given)
        error, _ = decode_problems.error_of(problem, out, expected)
        assert error < 1e-5, name


def test_ejkernel_is_given_its_own_layout(monkeypatch):
    """Pages, heads, tokens: as dense attention on a stand-in's reading of them."""
    problem = decode_problems.TINY[1]
    inputs = decode_problems.make_inputs(problem)

    def page_attention(q, k, v, lengths, tables, *, attn_scale, max_context_len):
        heads = q.shape[1] // k.shape[1]
        k, v = (
            jnp.repeat(jnp.moveaxis(x[tables], 2, 1).reshape(len(q), x.shape[1], -1, x.shape[3]), heads, 1)
            for x in (k, v)
        )
        scores = attn_scale * jnp.einsum("nhd,nhsd->nhs", q, k)
        seen = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None] < lengths[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        assert max_context_len == problem.S
        return jnp.einsum("nhs,nhsd->nhd", weights, v)

    name = "ejkernel.kernels._triton.page_attention"
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:n]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules[name], "page_attention", page_attention, raising=False)
    peer = decode_peers.ejkernel(problem)
    out = peer.run(peer.convert(inputs))
    expected = decode_problems.expected_results(problem, inputs)
    assert decode_problems.error_of(problem, out, expected)[0] < 1e-5


def test_peers_on_a_gpu(monkeypatch):
    monkeypatch.setattr(decode_peers, "missing", lambda: [])
    names = lambda problem: [peer.name for peer in decode_peers.peers_of(problem, True)]
    plain, _, int8, latent, _, prefill = decode_problems.TINY
    every = ["gather + jax.nn xla", "gather + jax.nn cudnn", "Pallas", "Pallas, fitted"]
    assert names(plain) == [*every, "ejKernel"]
    assert names(int8) == ["float32 pages", *every]
    assert names(latent) == ["gather + XLA"]
    assert names(prefill) == ["FlashAttention", *every[:2]]


def test_sizes_of_the_problems():
    names = [problem.name for problem in (*decode_problems.EVERY, *decode_problems.CPU)]
    assert len(set(names)) == len(names)
    anchor = decode_problems.PAGES[0]
    assert anchor.flops() == 4 * 64 * 4096 * 32 * 128
    queries, tables = 2 * 64 * 32 * 128 * 2, 4 * 64 * (256 + 1)
    assert anchor.bytes() == 64 * 4096 * 2 * 8 * 128 * 2 + queries + tables
    int8, head = decode_problems.EIGHT_BITS[0], decode_problems.EIGHT_BITS[2]
    assert int8.bytes() - head.bytes() == 64 * 4096 * 2 * 8 * 4
    assert anchor.bytes() > 1.9 * int8.bytes()
    latent = decode_problems.LATENTS[0]
    assert latent.flops() == 2 * 64 * 4096 * 128 * (576 + 512)
    assert latent.bytes() == 64 * 4096 * 576 * 2 + 64 * 128 * (576 + 512) * 2 + 4 * 64 * 65
    assert decode_problems.PREFILLS[0].flops() == 4 * (8192 * 8193 // 2) * 32 * 128
    for bar in decode_problems.BARS:
        assert set(bar.problems) <= set(decode_problems.EVERY)
        assert bar.field in {field.name for field in dataclasses.fields(decode.Row)}


def _row(problem: DecodeProblem, ms: float, **more) -> decode.Row:
    row = decode.Row(problem.name, problem.kind, decode.MINE, "default", problem.bytes(), problem.flops())
    return dataclasses.replace(row, ms=ms, tb_per_s=problem.bytes() / ms / 1e9, **more)


def test_bars_are_of_the_worst_problem_and_of_our_fastest():
    fast, slow, *_ = decode_problems.PAGES
    rows = [_row(fast, 0.25, ratio=2.0), _row(slow, 0.4, ratio=1.5), _row(slow, 0.5)]
    few = [_row(problem, ms) for problem, ms in zip(decode_problems.FEW, (0.02, 0.025))]
    summary = decode.summarise([*rows, *few])
    bandwidth, latency = summary["bars"]
    assert bandwidth["problem"] == slow.name and not bandwidth["met"]
    assert bandwidth["value"] == pytest.approx(slow.bytes() / 0.4e9)
    assert (bandwidth["measured"], bandwidth["of"]) == (2, 4)
    assert latency["value"] == 0.025 and latency["met"] and latency["at_most"]
    assert summary["lowest ratio"] == {"decode": {"value": 1.5, "problem": slow.name}}


def test_runs_of_one_launch_take_one_set_after_the_other():
    sets = [jnp.full(2, n, jnp.float32) for n in range(3)]
    results = jax.jit(decode.in_turn(lambda x: 2 * x, 5))(sets)
    assert [float(x[0]) for x in results] == [0, 2, 4, 0, 2]


def test_what_pallas_is_given():
    """Powers of two that divide the pages; enough programs, each with a block of keys."""
    for problem in decode_problems.EVERY:
        if problem.kind != "decode":
            continue
        pages = -(-problem.S // problem.p)
        splits, block = decode_peers.pallas_splits(problem, pages), decode_peers.pallas_block(problem.p)
        assert splits * block <= pages and block * problem.p <= 256
        assert splits * problem.N * problem.K >= 1024 or 2 * splits * block > pages


@pytest.mark.slow
def test_tuned_for_every_operation_that_asks(monkeypatch, tmp_path):
    """A decode's winner serves every operation that may be asked for one."""
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    table = tmp_path / "paged.json"
    arguments = ["--family", "paged", "--quick", "--platform", "xla", "--output", str(table)]
    arguments += ["--candidates", "2", "--samples", "2", "--sample-ms", "0.5", "--commit", "abc"]
    assert tune.main(arguments) == 0
    records = parse_table(table.read_text(), "table").records
    operations = ("paged", "prefill_paged", "ragged_paged", "unified")
    assert {r.operation for r in records} == {f"{name}_attention" for name in operations}
    assert all(r.config and set(r.errors) == {"out", "lse"} for r in records)


def test_what_an_operation_may_ask_for():
    problems = {p.name: p for p in tune_problems.FAMILIES["paged"].problems()}
    ask = tune_problems.FAMILIES["paged"].also
    operations = ("paged", "prefill_paged", "ragged_paged", "unified", "ragged_decode")

    def askers(name):
        problem = problems[name].make(kernel_registry.get(problems[name].operation, "xla"))
        return [x for x in operations if ask(f"{x}_attention", problem)]

    decodes = next(name for name in problems if name.startswith("paged_attention"))
    dense = next(name for name in problems if name.startswith("ragged_decode"))
    drafts = next(name for name in problems if "qq_bias" in name)
    mixed = next(name for name in problems if name.startswith("ragged_paged"))
    assert askers(decodes) == [*operations[:4]]
    assert askers(mixed) == [*operations[1:4]]
    assert askers(drafts) == ["unified"] and askers(dense) == ["ragged_decode"]
