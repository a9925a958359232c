"""The benchmark of attention over pages runs, checks before it times, and writes what it says."""

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decode, prepare, problems, runner
from benchmarks.decode import DecodeProblem, PROBLEMS
from ejkernel_eqx.dispatch import kernel_registry
from tests.recurrence.quick import quick


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS["tiny"], ids=lambda p: p.name)
def test_every_way_to_compute_it_agrees(problem):
    """Ours, the baselines and what is gathered; and Pallas, interpreted, where it has a form."""
    inputs = decode.make_inputs(problem)
    expected = decode.expected_results(problem, inputs)
    ways = {"ours": (inputs, decode.ours(problem, "xla"))}
    peers = [*decode.peers_of(problem, False)]
    if problem is PROBLEMS["tiny"][2]:
        peers += [decode.pallas(problem, fitted=fitted, interpret=True) for fitted in (False, True)]
    ways |= {peer.name: (peer.convert(inputs), peer.run) for peer in peers}
    for name, (given, function) in ways.items():
        with jax.numpy_dtype_promotion("standard"):
            out = quick(function)(given)
        errors, _ = runner.errors_of(problem.dtype, {"out": out}, expected)
        assert errors["out"] < 1e-5, name


def test_ejkernel_is_given_its_own_layout(monkeypatch):
    """Pages, heads, tokens: as dense attention on a stand-in's reading of them."""
    problem = PROBLEMS["tiny"][1]
    inputs = decode.make_inputs(problem)

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
    peer = decode.ejkernel(problem)
    out = peer.run(peer.convert(inputs))
    expected = decode.expected_results(problem, inputs)
    assert runner.errors_of(problem.dtype, {"out": out}, expected)[0]["out"] < 1e-5


def test_peers_on_a_gpu(monkeypatch):
    monkeypatch.setattr(decode, "is_missing", lambda package: False)
    names = lambda problem: [peer.name for peer in decode.peers_of(problem, True)]
    plain, _, int8, latent, _, prefill = PROBLEMS["tiny"]
    every = ["gather + jax.nn xla", "gather + jax.nn cudnn", "Pallas", "Pallas, fitted"]
    assert names(plain) == [*every, "ejKernel"]
    assert names(int8) == ["float32 pages", *every]
    assert names(latent) == ["gather + XLA"]
    assert names(prefill) == ["FlashAttention", *every[:2]]


def test_sizes_of_the_problems():
    anchor = PROBLEMS["pages"][0]
    assert anchor.flops() == 4 * 64 * 4096 * 32 * 128
    queries, tables = 2 * 64 * 32 * 128 * 2, 4 * 64 * (256 + 1)
    assert anchor.bytes() == 64 * 4096 * 2 * 8 * 128 * 2 + queries + tables
    int8, head = PROBLEMS["eight_bits"][0], PROBLEMS["eight_bits"][2]
    assert int8.bytes() - head.bytes() == 64 * 4096 * 2 * 8 * 4
    assert anchor.bytes() > 1.9 * int8.bytes()
    latent = PROBLEMS["latents"][0]
    assert latent.flops() == 2 * 64 * 4096 * 128 * (576 + 512)
    assert latent.bytes() == 64 * 4096 * 576 * 2 + 64 * 128 * (576 + 512) * 2 + 4 * 64 * 65
    assert PROBLEMS["prefills"][0].flops() == 4 * (8192 * 8193 // 2) * 32 * 128
    for bar in decode.BARS:
        assert set(bar.problems) <= {p for problems in PROBLEMS.values() for p in problems}
        assert bar.field in ("ms", "tb_per_s", "tflop_per_s", "over_baseline")


def _row(problem: DecodeProblem, ms: float, **more) -> prepare.Row:
    row = prepare.Row(problem.name, "forward", "default", ms=ms, **more)
    inputs: Any = None  # sizes are the problem's
    decode.FAMILY.complete(problem, inputs, "forward", [row])
    return row


def test_bars_are_of_the_worst_problem_and_of_our_fastest():
    fast, slow, *_ = PROBLEMS["pages"]
    rows = [_row(fast, 0.25, ratio=2.0), _row(slow, 0.4, ratio=1.5), _row(slow, 0.5)]
    few = [_row(problem, ms) for problem, ms in zip(PROBLEMS["few"], (0.02, 0.025))]
    summary = decode.FAMILY.sum_up([*rows, *few], ())["summary"]
    bandwidth, latency = summary["bars"]
    assert bandwidth["problem"] == slow.name and not bandwidth["met"]
    assert bandwidth["value"] == pytest.approx(slow.bytes() / 0.4e9)
    assert (bandwidth["measured"], bandwidth["of"]) == (2, 4)
    assert latency["value"] == 0.025 and latency["met"] and latency["at_most"]
    assert summary["lowest ratio"] == {"decode": {"value": 1.5, "problem": slow.name}}


def test_what_pallas_is_given():
    """Powers of two that divide the pages; enough programs, each with a block of keys."""
    for problem in (p for group in decode.FAMILY.groups for p in PROBLEMS[group]):
        if problem.kind != "decode":
            continue
        pages = -(-problem.S // problem.p)
        splits, block = decode.pallas_splits(problem, pages), decode.pallas_block(problem.p)
        assert splits * block <= pages and block * problem.p <= 256
        assert splits * problem.N * problem.K >= 1024 or 2 * splits * block > pages


def test_what_an_operation_may_ask_for():
    family = problems.FAMILIES["paged"]
    every = {p.name: p for p in family.problems()}
    operations = ("paged", "prefill_paged", "ragged_paged", "unified", "ragged_decode")

    def askers(name):
        problem = every[name].make(kernel_registry.get(every[name].operation, "xla"))
        return [x for x in operations if family.also(f"{x}_attention", problem)]

    decodes = next(name for name in every if name.startswith("paged_attention"))
    dense = next(name for name in every if name.startswith("ragged_decode"))
    drafts = next(name for name in every if "qq_bias" in name)
    mixed = next(name for name in every if name.startswith("ragged_paged"))
    assert askers(decodes) == [*operations[:4]]
    assert askers(mixed) == [*operations[1:4]]
    assert askers(drafts) == ["unified"] and askers(dense) == ["ragged_decode"]
