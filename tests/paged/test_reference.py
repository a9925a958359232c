"""The oracle against the same mathematics in numpy, query by query."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.paged.cases import _arrays, attend_exactly, Case, CASES, make, run_reference, spec_of


def by_query(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """One row, one query, one head at a time: what the docstring of `PagedSpec` says."""
    given, spec = _arrays(case), spec_of(case)
    q, table = given["q"].astype(np.float64), given["page_table"]
    width = case.D if spec.latent else case.V
    out, lse = np.zeros((*q.shape[:2], width)), np.full(q.shape[:2], -np.inf)
    pages, group = given["k"].shape[0], case.H // case.K

    def stored(name, page, place, head):
        x = given[name][page, place, head].astype(np.float64)
        if f"{name}_scale" not in given:
            return x
        scale = given[f"{name}_scale"]
        return x * (scale[head] if case.scales == "head" else scale[page, place, head])

    for n, (start, q_len, kv_len) in enumerate(zip(given["q_start"], given["q_len"], given["kv_len"])):
        for t in range(min(q_len, spec.max_query_len)):
            i, first = kv_len - q_len + t, kv_len - q_len
            low = max(
                0, 0 if spec.left is None else i - spec.left, given["kv_start"][n] if case.kv_start else 0
            )
            for h in range(case.H):
                scores, values = [], []
                for j in range(low, i + 1):
                    page = table[n, j // case.p]
                    if not 0 <= page < pages:
                        continue
                    key = value = stored("k", page, j % case.p, h // group)
                    if spec.latent:
                        key = np.concatenate([key, stored("rope", page, j % case.p, h // group)])
                    else:
                        value = stored("v", page, j % case.p, h // group)
                    s = spec.scale * (q[start + t, h] @ key)
                    s = (
                        s
                        if spec.logits_soft_cap is None
                        else spec.logits_soft_cap * np.tanh(s / spec.logits_soft_cap)
                    )
                    s += given["slopes"][h] * (j - i) if case.slopes else 0
                    if case.gates:
                        own, stored_gates = (
                            given[name].astype(np.float64) for name in ("own_gates", "gates")
                        )
                        s += (own[start + t, h] - stored_gates[page, j % case.p, h]).sum()
                    s += given["qq_bias"][t, j - first] if case.qq_bias and j >= first else 0
                    scores, values = [*scores, s], [*values, value]
                scores.append(float(given["sinks"][h]) if case.sinks else -np.inf)
                weights = np.exp(scores)
                if weights.sum() > 0:
                    lse[start + t, h] = np.log(weights.sum())
                    out[start + t, h] = weights[:-1] @ np.array(values).reshape(-1, width) / weights.sum()
    return out, lse


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.batch is None])
def test_agrees_with_numpy(name):
    (out, lse), results = by_query(CASES[name]), run_reference(CASES[name])
    np.testing.assert_allclose(results["out"], out, atol=1e-12)
    np.testing.assert_allclose(results["lse"], lse, atol=1e-12)


def test_rows_are_independent_and_pages_may_be_mapped():
    case = CASES["two rows"]
    arrays, spec = make(case)
    both = attend_exactly(arrays, spec)
    assert arrays.v is not None
    mapped = arrays._replace(k=jnp.stack([arrays.k] * 2), v=jnp.stack([arrays.v] * 2))
    again = attend_exactly(mapped, spec)
    np.testing.assert_array_equal(both["out"], again["out"])
    alone = arrays._replace(
        **{n: getattr(arrays, n)[1] for n in ("q", "page_table", "q_start", "q_len", "kv_len")}
    )
    one = attend_exactly(alone, spec)
    np.testing.assert_array_equal(both["out"][1], one["out"])
    np.testing.assert_array_equal(both["lse"][1], one["lse"])
