"""The benchmark of attention over pages runs, checks before it times, and writes what it says."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decode, decode_peers, decode_problems, tune_problems
from benchmarks.decode_problems import DecodeProblem
from ejkernel_eqx.dispatch import kernel_registry
from tests.recurrence.quick import quick


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


def test_what_pallas_is_given():
    """Powers of two that divide the pages; enough programs, each with a block of keys."""
    for problem in decode_problems.EVERY:
        if problem.kind != "decode":
            continue
        pages = -(-problem.S // problem.p)
        splits, block = decode_peers.pallas_splits(problem, pages), decode_peers.pallas_block(problem.p)
        assert splits * block <= pages and block * problem.p <= 256
        assert splits * problem.N * problem.K >= 1024 or 2 * splits * block > pages


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
