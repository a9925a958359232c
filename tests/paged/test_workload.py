"""What the tuner is given: inputs of their very problem, results that agree, costs that count what is seen."""

import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import FORWARD
from tests.compiled import DEVICES
from tests.paged.cases import core, example_problem, make_arrays, make_batch, spec_of_problem
from tests.workloads import assert_agrees, work_of

SIZES = dict(S=40, H=4, K=2, D=16)
KINDS = {
    "decode": example_problem("paged_attention", dict(N=3, p=4, **SIZES), "float32", {}),
    "options": example_problem(
        "unified_attention",
        dict(N=3, T=16, Q=4, p=8, V=8, **SIZES),
        "float32",
        dict(window=True, soft_cap=True, sinks=True, alibi_slopes=True, qq_bias=True, lse=True),
    ),
    "mixed": example_problem("ragged_paged_attention", dict(N=3, T=32, **SIZES), "bfloat16", {}),
    "latent": example_problem(
        "paged_attention", dict(N=2, S=20, H=4, D=24, V=16), "float32", dict(latent=True, scales="token")
    ),
    "int8 values": example_problem(
        "ragged_paged_attention",
        dict(N=2, T=8, **SIZES),
        "bfloat16",
        dict(scales="token", kv="bfloat16", v="int8"),
    ),
    "latent float8, bfloat16 rope": example_problem(
        "paged_attention",
        dict(N=2, S=20, H=4, D=24, V=16),
        "bfloat16",
        dict(latent=True, scales="head", kv="float8_e5m2", v="bfloat16"),
    ),
    "dense": example_problem("ragged_decode_attention", dict(B=3, **SIZES), "float32", {}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    arrays, spec = make_arrays(wanted, 0), spec_of_problem(wanted)
    found = core.problem_of(wanted.operation, arrays, spec)
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, 1).q) != np.asarray(arrays.q)).any()
    q_start, q_len, kv_len = (np.asarray(x)[0] for x in (arrays.q_start, arrays.q_len, arrays.kv_len))
    assert (
        (q_len >= 1).all() and q_len.max() <= wanted.dim("Q") and q_start[-1] + q_len[-1] <= wanted.dim("T")
    )
    assert (kv_len >= q_len).all() and kv_len.max() == wanted.dim("M") * wanted.dim("p")
    table = np.asarray(arrays.page_table)
    assert sorted(table[table >= 0]) == list(range(arrays.k.shape[0]))
    if arrays.k.shape[0] > 4:
        assert (np.diff(table[table >= 0]) != 1).any()


def test_dtypes_of_pages_are_named_apart_where_they_differ():
    """What was tuned for pages of one dtype is found by the same key as ever."""
    names = lambda name: dict(KINDS[name].dtypes)
    assert names("mixed") == {"q": "bfloat16", "kv": "bfloat16"}
    assert names("int8 values") == {"q": "bfloat16", "kv": "bfloat16", "v": "int8"}
    assert names("latent float8, bfloat16 rope") == {"q": "bfloat16", "kv": "float8_e5m2", "rope": "bfloat16"}


def test_batches_are_like_what_a_server_has():
    mixed = make_batch(KINDS["mixed"], 0).q_len
    assert sorted(mixed)[:2] == [1, 1] and sum(mixed) == 30
    chunks = example_problem("prefill_paged_attention", dict(N=2, T=32, Q=20, **SIZES), "float32", {})
    assert min(make_batch(chunks, 0).q_len) > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_reference(name):
    run = assert_agrees(KINDS[name].operation, "xla", KINDS[name])
    assert all(np.asarray(x).any() for x in run.reference.values())


def test_costs_are_the_visible_keys_once():
    problem = KINDS["decode"]
    cost = work_of("paged_attention", "xla", problem).costs[FORWARD]
    keys = int(make_batch(problem, 0).kv_len.sum())
    assert cost.flops == 2 * keys * 4 * 32
    tables = 4 * (3 * 10 + 3 * 3)
    assert cost.bytes == 4 * keys * 2 * 32 + 4 * 3 * 4 * (16 + 16 + 1) + tables


@pytest.mark.parametrize("name", KINDS)
def test_configurations_are_distinct_and_the_heuristic_is_first(name):
    platform = ejx.kernel_registry.get(KINDS[name].operation, "xla").load()
    configs = platform.candidates(KINDS[name], DEVICES["sm_90"])
    assert configs[0] == platform.default_config(KINDS[name], DEVICES["sm_90"])
    assert len(set(configs)) == len(configs)


def test_explain_knows_the_words():
    text = str(
        ejx.explain("ragged_paged_attention", N=4, T=64, p=32, dtype="bfloat16", **(SIZES | {"S": 512}))
    )
    assert "p32" in text and "M16" in text


@pytest.mark.parametrize(
    "operation, dims, flags, word",
    [
        ("paged_attention", dict(H=4, D=16), {}, "S"),
        ("paged_attention", dict(T=4, **SIZES), {}, "T"),
        ("ragged_paged_attention", SIZES, {}, "T"),
        ("ragged_paged_attention", dict(T=4, Q=5, **SIZES), {}, "at most T=4"),
        ("paged_attention", dict(SIZES, K=3), {}, "multiple of K"),
        ("paged_attention", SIZES, dict(latent=True), "V < D"),
        ("paged_attention", SIZES, dict(scales="row"), "row"),
        ("paged_attention", SIZES, dict(kv="int8"), "scales"),
        ("paged_attention", SIZES, dict(v="int8"), "received float32 and int8"),
        ("paged_attention", SIZES, dict(alibi_slopes=True), "alibi_slopes"),
        ("ragged_decode_attention", dict(N=2, **SIZES), {}, "N"),
    ],
)
def test_words_that_do_not_fit(operation, dims, flags, word):
    with pytest.raises(ValueError, match=word):
        example_problem(operation, dims, "float32", flags)
