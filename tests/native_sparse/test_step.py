"""A step of decoding in one launch and in four, interpreted: against numpy in float64 over pages, and against dense attention over rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.launch import by_name
from tests.attention.dense import INTERPRET
from tests.compiled import DEVICES
from tests.native_sparse import cases, problems, test_paged
from tests.native_sparse.problems import configured, OPERATION, over_pages, PAGES, platform_of, problem
from tests.native_sparse.test_native_sparse import assert_best
from tests.native_sparse.test_paged import assert_agree, make, run
from tests.tolerances import assert_close

pytest.importorskip("triton")
Paged = test_paged.Case
LAUNCHES = {"four": problems.STEP, "one": ["whole_step_kernel"]}
CASES = {
    "several queries": Paged(queries=(3, 2, 0, 1), rest=2),
    "overlapping": Paged(queries=(1, 2, 0, 3), block=8, span=4, stride=2, V=8, scale=0.3, D=12),
    "long spans": Paged(queries=(2, 1, 0, 2), block=4, span=8, stride=4, H=3, K=1),
    "a page a block": Paged((200, 64), (1, 1), block=16, count=5, span=16, stride=16, page=16, window=33),
    "many blocks": Paged((187, 150), (1, 1), block=2, count=12, span=2, stride=2, page=4, window=9),
    "a head a key head": Paged(H=2, queries=(1, 1, 0, 1), count=1, window=1),
    "missing pages": Paged(queries=(1, 1, 0, 1), missing=((0, 1), (3, 0))),
    "bf16": Paged(queries=(1, 1, 0, 4), dtype="bfloat16"),
}


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched, in order."""
    names, of = [], by_name.Launcher.launch

    def noted(self: Any, kernel: Any, *given: Any, **more: Any) -> Any:
        names.append(kernel.fn.__name__)
        return of(self, kernel, *given, **more)

    monkeypatch.setattr(by_name.Launcher, "launch", noted)
    jax.clear_caches()  # what has been traced before launches nothing
    return names


WAYS = [(("four", "one")[n % 2], name) for n, name in enumerate([*CASES, "bf16", "missing pages"])]


@pytest.mark.few(2)
@pytest.mark.parametrize("launches, name", WAYS)
def test_pages(name, launches, launched):
    """For the blocks that were chosen, which are the best; tokens of no sequence give 0. Whatever is not stored is NaN."""
    case = CASES[name]
    dense, call = make(case)
    config = configured(split_k=1 if launches == "one" else 3)
    out, indices = run(case.operation(INTERPRET, config=config), call)
    assert list(dict.fromkeys(launched)) == LAUNCHES[launches]  # traced more than once
    nobody = slice(case.starts[-1], None)
    assert not out[nobody].any() and (indices[nobody] == -1).all()
    if case.missing:
        expected = test_paged._reference(case.operation(), call, jnp.asarray(indices))
        assert_close(out, np.asarray(expected))
    else:
        assert_agree(case, dense, out, indices)


@pytest.mark.slow
def test_equal_scores():
    """Of blocks with equal scores the earlier, in each of several groups of blocks."""
    case = CASES["many blocks"]
    _, call = make(case)
    alike = lambda x: jnp.ones_like(x) * jnp.asarray([1.0, 0.5])[None, None, :, None]
    call["compressed"] = dataclasses.replace(call["compressed"], k=alike(call["compressed"].k))
    for config in (None, configured(split_k=1)):
        _, indices = run(case.operation(INTERPRET, config=config), call)
        for row, length in zip(indices, case.lengths):
            own = (length - 1) // case.block
            assert (row == [own, *range(case.count - 1)]).all()


ROWS = {
    "one query": cases.Case(T=1, S=150, q_offset=(149, 37), window=33),
    "several": cases.Case(T=3, S=37, q_offset=(3, 30), D=12, H=3, K=1, block=8, span=4, stride=2),
    "static place": cases.Case(T=5, S=37, K=4),
    "no compressed key yet": cases.Case(T=2, S=40, q_offset=(0, 38), block=8, span=16, stride=8),
    "bf16": cases.Case(T=2, S=90, q_offset=(80, 88), dtype="bfloat16"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("launches, name", [(("one", "four")[n % 2], name) for n, name in enumerate(ROWS)])
def test_rows(name, launches, launched):
    """Over dense keys, of which those after a query are NaN."""
    case = ROWS[name]
    arrays, _ = cases.make(case)
    place, first = case.starts()
    more: Any = {}
    if not isinstance(case.q_offset, int | None):
        unseen = jnp.arange(case.keys)[None] > place.max(-1, keepdims=True)
        more = {f"compressed_{n}": compressed_means(case, arrays[n]) for n in "kv"}
        arrays |= {n: jnp.where(unseen[..., None, None], jnp.nan, arrays[n]) for n in "kv"}
    small = problem(dict(T=4, H=2, D=16), "float32", {})
    whole = platform_of(OPERATION, INTERPRET).default_config(small, DEVICES["sm_90"])
    few = problems.with_step(whole.few, split_k=1 if launches == "one" else 3)
    op = case.operation(INTERPRET, config=dataclasses.replace(whole, few=few))
    call = jax.jit(lambda given: op(**given, **case.others(), return_indices=True))
    out, indices = call(arrays | more)
    assert list(dict.fromkeys(launched)) == LAUNCHES[launches]  # traced more than once
    finite = {name: jnp.nan_to_num(x) for name, x in arrays.items()} | more
    own = dataclasses.replace(case, means=not more)
    expected = cases.by_hand(own, finite, indices, np.zeros(out.shape))
    assert_close(np.asarray(out.astype(jnp.float32)), expected["out"], case.dtype)
    assert_best(own, finite, np.asarray(indices), place, first)


def compressed_means(case: cases.Case, x: jax.Array) -> jax.Array:
    means = [x[:, at : at + case.sizes[0]].astype(jnp.float32).mean(1) for at in case.compressed()]
    return jnp.stack(means, 1).astype(x.dtype)


SIZES: dict[str, Any] = dict(N=8, S=65536, H=64, K=4, D=128, p=64)
REFUSED = {
    "": {},
    "query heads a key head, not 128": dict(H=128, K=1),
    "KiB of query heads": dict(K=1, D=256),
    "of up to 4096 blocks": dict(S=2**20),
    "MiB of scores": dict(N=2048),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_goes_by_branch(word):
    """`explain` says why; the default is a step otherwise."""
    device, pages = DEVICES["sm_90"], platform_of(PAGES)
    of = over_pages(SIZES | REFUSED[word], "bfloat16", {})
    config = pages.default_config(of, device)
    remark = pages.remark(config, of, device)
    assert bool(config.step.block_k) == (not word) == (not remark) and word in remark


def test_a_step_of_another_problem():
    """A chunk of a prompt needs no remark; what was measured for it is no step of decoding, and the other way round."""
    device, pages = DEVICES["sm_90"], platform_of(PAGES)
    chunk, longer = (over_pages(SIZES | more, "bfloat16", {}) for more in (dict(T=512), dict(N=64)))
    assert not pages.remark(pages.default_config(chunk, device), chunk, device)
    assert not pages.adapted(pages.default_config(chunk, device), longer, device).step.block_k
    assert pages.adapted(pages.default_config(longer, device), chunk, device).step.split_k >= 1
