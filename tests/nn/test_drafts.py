"""New tokens that are taken back: after any number of accepted ones every sequence goes on as if the others had never been there. Pools hold
NaN where nobody has written."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Buckets, PageTable, RaggedBatch
from ejkernel_eqx.nn import CacheState
from tests.nn import paged_layers as small
from tests.nn import recurrent_layers
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

SLOTS = (3, 0, 6, 1, 5)
ROOM, PROMPTS = 4, (1, 5, 2, 7, 4)  # of these some have more tokens than there is room for
BUCKETS = Buckets((20,), (5,), (1,), (4, 8))
accept = quick(lambda caches, accepted, batch: caches.accept(accepted, batch))


def poisoned(pool):
    return jax.tree.map(lambda x: jnp.full_like(x, True if x.dtype == bool else jnp.nan), pool)


def batch_of(counts, lengths):
    table = [[-1]] * len(lengths)  # no layer has pages
    return RaggedBatch.build(counts, lengths, table, page_size=64, state_indices=SLOTS, buckets=BUCKETS)


def packed(rows, size):
    rows = np.concatenate(rows)
    return jnp.asarray(np.pad(rows, ((0, size - len(rows)), (0, 0)), constant_values=np.nan))


# Every layer is in one of two tests.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        "mamba3",
        "gla",
        "kimi",
        "qwen3-next, three writes",
        "lfm2",
        "rwkv6",
        "rwkv7",
        "rwkv7 channels",
    ],
)
def test_accepted_tokens(name):
    layer = recurrent_layers.build(name)
    rows, wrong = np.asarray(recurrent_layers.inputs(5, 16)), np.float32(3) * small.inputs(1)[0]
    expected = quick(lambda x: layer(x))(rows)
    step = quick(lambda x, pool, batch: layer(x, pool, batch=batch))
    pool = poisoned(layer.init_state(8, num_draft_tokens=ROOM))
    batch = batch_of(PROMPTS, PROMPTS)
    y, pool = step(packed([x[:n] for x, n in zip(rows, PROMPTS)], 20), pool, batch)
    assert_close(y[:19], np.concatenate([x[:n] for x, n in zip(np.asarray(expected), PROMPTS)]))
    done = np.array(PROMPTS)
    for turn in range(5):
        counts = (np.arange(5) + turn) % 5  # each sequence accepts 0 to 4 in turn
        counts = np.minimum(counts, 16 - done)
        drafts = [np.concatenate([x[n : n + a], wrong[: ROOM - a]]) for x, n, a in zip(rows, done, counts)]
        batch = batch_of([ROOM] * 5, done + ROOM)
        y, pool = step(packed(drafts, 20), pool, batch)
        for n, a in enumerate(counts):
            assert_close(
                y[ROOM * n : ROOM * n + a], expected[n, done[n] : done[n] + a], name=f"{name}, {turn}"
            )
        pool = accept(pool, jnp.asarray(counts), batch)
        done += counts
    others = [n for n in range(8) if n not in SLOTS]
    assert all(jnp.isnan(x[jnp.array(others)]).all() for x in jax.tree.leaves(pool) if x.dtype != bool)


@pytest.mark.slow
def test_a_hybrid_model_takes_drafts_back():
    """Stacked attention and recurrent layers, scanned over in place. What is accepted of the padded sequence does not matter."""
    rows, (expected, _) = small.inputs(), small.dense_model()
    step, table = quick(small.in_place, donate_argnums=1), PageTable(small.PAGES, small.PAGE)
    options: Any = {"page_size": small.PAGE, "buckets": Buckets((12,), (4,), (5,), (4,))}
    options |= {"state_indices": [3, 0, 4]}
    caches, done = small.new_caches(num_draft_tokens=4), [0] * small.SEQUENCES
    for accepted in ([2, 4, 0], [3, 0, 4], [1, 1, 2], [4, 4, 4]):
        accepted = [min(a, small.TOKENS - n) for a, n in zip(accepted, done)]
        drafts = [np.concatenate([x[n : n + a], -x[:4]])[:4] for x, n, a in zip(rows, done, accepted)]
        assert not any(table.allocate(n, 4) for n in range(small.SEQUENCES))
        lengths, tables = [n + 4 for n in done], table.rows(range(small.SEQUENCES))
        batch = RaggedBatch.build([4] * small.SEQUENCES, lengths, tables, **options)
        y, caches = step(packed(drafts, 12), caches, batch)
        caches = accept(caches, jnp.asarray([*accepted, 77]), batch)
        for n, a in enumerate(accepted):
            known = expected[n, done[n] : done[n] + a]
            assert_close(y[4 * n : 4 * n + a], known, name=f"sequence {n} from {done[n]}")
            table.truncate(n, done[n] + a)
        done = [n + a for n, a in zip(done, accepted)]


@pytest.mark.slow
def test_tokens_that_nobody_takes_back_count_and_go_with_their_slot():
    layer = recurrent_layers.build("lightning")
    x, step = jnp.asarray(small.inputs()[0]), quick(lambda x, pool, batch: layer(x, pool, batch=batch))
    expected = quick(lambda x: layer(x))(x)
    caches = CacheState.init([layer], num_pages=1, page_size=64, num_slots=3, num_draft_tokens=3)

    options: dict[str, Any] = {"page_size": 64, "buckets": Buckets((3,), (1,), (1,), (3,))}

    def one(caches, tokens, length, slot):
        batch = RaggedBatch.build([len(tokens)], [length], [[0]], **options, state_indices=[slot])
        y, pool = step(packed([tokens], 3), caches.layers[0], batch)
        return y[: len(tokens)], caches.with_layers([pool]), batch

    _, caches, batch = one(caches, x[:3], 3, 1)
    caches = caches.accept([2], batch).copy_states([1], [2])
    y, caches, _ = one(caches, x[2:3], 3, 2)
    assert_close(y, expected[2:3])
    y, caches, _ = one(caches, x[3:6], 6, 2)  # nothing was said: all count
    assert_close(y, expected[3:6])
    y, caches, batch = one(caches, x[6:8], 8, 2)
    y, caches, _ = one(caches.accept([2], batch).accept([0], batch), x[6:8], 8, 2)
    assert_close(y, expected[6:8])
    y, _, _ = one(caches, x[:2], 2, 2)  # another sequence in the slot
    assert_close(y, expected[:2])


@pytest.mark.parametrize(
    "name", ["lightning", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba2", "qwen3-next"))]
)
def test_sequences_that_pause_and_fork(name):
    """Drafts that nobody has taken back yet, of sequences that bring no token, are copied, or read more tokens than there is room for. What is
    taken back holds NaN."""
    layer = recurrent_layers.build(name)
    x = np.asarray(recurrent_layers.inputs(3, 14))
    nan = np.full((2, x.shape[-1]), np.nan, np.float32)
    expected = np.asarray(quick(lambda x: layer(x))(x))
    run = quick(lambda x, pool, batch: layer(x, pool, batch=batch))
    sizes: dict[str, Any] = {"num_pages": 1, "page_size": 64, "num_slots": 6, "num_draft_tokens": ROOM}
    caches = CacheState.init([layer], **sizes)
    caches = caches.with_layers([poisoned(caches.layers[0])])
    done = {slot: 0 for slot in range(6)}

    def step(*sequences, accepted=()):
        """Each `(slot, row of x, number of new tokens)`, with so many NaN behind those that are accepted."""
        nonlocal caches
        slots, rows, counts = zip(*sequences)
        behind = [count - a for count, a in zip(counts, accepted)] or [0] * len(counts)
        starts = [done[slot] for slot in slots]
        spans = zip(rows, starts, counts, behind)
        tokens = [np.concatenate([x[row, n : n + count - b], nan[:b]]) for row, n, count, b in spans]
        lengths = [n + count for n, count in zip(starts, counts)]
        options: dict[str, Any] = {"page_size": 64, "buckets": Buckets((10,), (3,), (1,), (8,))}
        batch = RaggedBatch.build(counts, lengths, [[-1]] * len(counts), **options, state_indices=slots)
        y, pool = run(packed(tokens, 10), caches.layers[0], batch)
        caches = caches.with_layers([pool])
        if accepted:
            caches = caches.accept([*accepted, *[0] * (3 - len(accepted))], batch)
        else:
            ends = np.cumsum(counts)
            for row, n, end, count in zip(rows, starts, ends, counts):
                assert_close(
                    y[end - count : end], expected[row, n : n + count], name=f"{name}, row {row} from {n}"
                )
        done.update((slot, n + count - b) for slot, n, count, b in zip(slots, starts, counts, behind))

    step((0, 0, 5), (1, 1, 3))
    step((0, 0, 4), (1, 1, 3), accepted=(2, 1))
    step((0, 0, 6), (1, 1, 0))  # more than there is room for; and none
    step((0, 0, 1))
    step((1, 1, 2))
    caches, done[4] = caches.copy_states([1], [4]), done[1]
    step((1, 1, 2), (4, 1, 3), accepted=(0, 3))
    step((1, 1, 1), (4, 1, 1))
    done[4] = 0  # another sequence in the slot of drafts that count
    step((4, 2, 2), (1, 1, 1))


def test_one_name_for_both_kinds():
    layer, mixer = small.attention(), recurrent_layers.build("mamba2")
    lead, sizes = (2,), {"num_pages": 6, "page_size": 4, "num_slots": 3}
    options: dict[str, Any] = {"batch_shape": lead, "dtype": jnp.int8, "scales": "head"}
    pools = tuple(m.init_pool(**sizes, **options, num_draft_tokens=0) for m in (layer, mixer))
    for one, other in (
        (layer.init_cache(lead, 8, jnp.bfloat16), layer.init_cache(lead, max_length=8, dtype=jnp.bfloat16)),
        (mixer.init_cache(lead, 8, jnp.bfloat16), mixer.init_state(2, jnp.bfloat16)),
        (pools, (layer.init_paged_cache(6, 4, **options), mixer.init_state((2, 3)))),
        (pools, CacheState.init((layer, mixer), **sizes, **options).layers),
    ):
        assert eqx.tree_equal(one, other)


def test_mistakes(unchecked):
    layer, x = recurrent_layers.build("lightning"), jnp.ones((3, 2, recurrent_layers.EMBED))
    pool, plain = layer.init_state(3, num_draft_tokens=2), layer.init_state(3)
    batch = RaggedBatch.build([2, 3, 0], [2, 3, 0], [[0], [1], []], page_size=4, state_indices=[0, 2, -1])
    stateless, nothing = RaggedBatch.build([1], [1], [[0]], page_size=4), None
    sizes: dict[str, Any] = {"num_pages": 1, "page_size": 1, "num_slots": 0}
    accept: Any = pool.accept
    cases = {
        "accept: expected a pool that keeps drafts": lambda: plain.accept([1, 3, 0], batch),
        "num_draft_tokens: expected a static int >= 0": lambda: layer.init_state(2, num_draft_tokens=-1),
        "batch: expected the RaggedBatch of the call": lambda: accept([1], nothing),
        r"accepted: expected shape \[N\] = \[3\]": lambda: accept([1, 3], batch),
        r"accepted: expected integers \[N\]": lambda: accept([1.0, 3.0, 0.0], batch),
        r"accepted: expected 0 to .* received \[3 3 0\]": lambda: accept([3, 3, 0], batch),
        r"num_draft_tokens=2, received \[1 2 0\]": lambda: accept(np.array([1, 2, 0]), batch),
        "received \\[-1  3  0\\]": lambda: accept([-1, 3, 0], batch),
        "batch: expected a RaggedBatch with a pool that keeps drafts": lambda: layer(x, pool),
        "batch: expected state_indices": lambda: accept([1], stateless),
        "num_slots: expected": lambda: layer.init_pool(**sizes),
    }
    for words, call in cases.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert jax.tree.structure(accept([1, 3, 99], batch)) == jax.tree.structure(pool)
