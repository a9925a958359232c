"""The bookkeeping of pages: whatever is done to it, every sequence reads its own tokens back."""

import copy
import functools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx import EjkernelError, OutOfPagesError, PageCopy, PageTable


class Sequences:
    """Tokens are numbers, kept in a NumPy pool through the table and in a list for each sequence."""

    def __init__(self, num_pages, page_size, max_pages, window):
        self.table = PageTable(num_pages, page_size, max_pages, window)
        self.window = window
        self.pool = np.full((num_pages, page_size), -1)
        self.tokens: dict[int, list[int]] = {}
        self.back: dict[int, int] = {}  # how many keys before its own a query may see
        self.written = self.named = 0

    def add(self, name, part):
        self.named += 1
        self.extend(self.named, part)

    def extend(self, name, part):
        count = round(part * 6)
        before = copy.deepcopy(vars(self.table))
        own = self.tokens.get(name, [])
        try:
            copies = self.table.allocate(name, count)
        except (OutOfPagesError, ValueError) as error:
            assert_same(before, vars(self.table))
            if isinstance(error, OutOfPagesError):
                assert error.free == self.table.num_free < error.wanted
            else:
                assert self.table.max_pages is not None
                assert len(own) + count > self.table.max_pages * self.table.page_size
            return
        self.back.setdefault(name, 10**9 if self.window is None else self.window - 1)
        assert len(copies) <= 1
        for source, target in copies:
            self.pool[target] = self.pool[source]
        slots = self.table.slots(name, len(own), len(own) + count)
        assert np.all(slots >= 0) and slots.dtype == np.int32
        new = range(self.written, self.written + count)
        self.pool.reshape(-1)[slots] = new
        self.tokens[name] = [*own, *new]
        self.written += count

    def fork(self, name, part):
        self.named += 1
        length = len(self.tokens[name])
        count = length if part > 0.4 else round(part / 0.4 * length)  # most forks take all
        call = functools.partial(self.table.fork, name, self.named, None if part > 0.4 else count)
        if self.shortened(name, count, call):
            self.tokens[self.named] = self.tokens[name][:count]
            self.back[self.named] = self.back[name]

    def truncate(self, name, part):
        length = round(part * len(self.tokens[name]))
        if self.shortened(name, length, functools.partial(self.table.truncate, name, length)):
            del self.tokens[name][length:]

    def shortened(self, name, length, call):
        """Whether it was done: exactly where nothing that the next query sees has been freed."""
        if max(0, length - self.back[name]) >= self.kept_from(name):
            call()
            return True
        before = copy.deepcopy(vars(self.table))
        with pytest.raises(
            ValueError, match=f"expected .* to {len(self.tokens[name])} tokens .* received {length}"
        ):
            call()
        assert_same(before, vars(self.table))
        return False

    def free_behind(self, name, part):
        length = len(self.tokens[name])
        latest = length if self.window is None else max(0, length - self.window + 1)
        if self.window is not None and part > 0.5:
            position, given = latest, ()
        else:
            position = round(part * latest)
            given = (position,)
        self.table.free_behind(name, *given)
        assert self.kept_from(name) + self.table.page_size > position
        if self.window is None:
            self.back[name] = min(self.back[name], length - position)

    def free(self, name, part):
        self.table.free(name)
        del self.tokens[name], self.back[name]

    def kept_from(self, name):
        """The first token of a page that is there."""
        row = self.table.row(name)
        pages = -(-len(self.tokens[name]) // self.table.page_size)
        return int(np.sum(row[:pages] < 0)) * self.table.page_size

    def reads_back(self):
        table, size = self.table, self.table.page_size
        table.check()
        assert set(table.sequences) == set(self.tokens)
        rows = table.rows(self.tokens)
        used = set(rows[rows >= 0].tolist())
        assert table.num_used == len(used) and table.num_free == table.num_pages - len(used)
        for row, (name, tokens) in zip(rows, self.tokens.items(), strict=True):
            first = max(0, len(tokens) - self.back[name])  # of the next query
            assert table.length(name) == len(tokens)
            own = table.row(name)
            assert np.array_equal(own[: len(row)], row[: len(own)])
            positions = np.arange(first, len(tokens))
            slots = row[positions // size] * size + positions % size
            assert np.array_equal(table.slots(name, first, len(tokens)), slots)
            assert np.array_equal(self.pool.reshape(-1)[slots], tokens[first:])
            assert np.all(row[-(-len(tokens) // size) :] == -1)


ACTIONS = ("add", "add", "extend", "extend", "extend", "fork", "fork", "truncate", "free_behind", "free")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 16),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11), st.floats(0, 1)), min_size=30, max_size=60
    ),
)
def test_every_sequence_reads_its_own_tokens(num_pages, page_size, max_pages, window, actions):
    """All that its next query may see, whatever was freed behind it, forked or taken back."""
    model = Sequences(num_pages, page_size, max_pages, window)
    for action, which, part in actions:
        live = list(model.tokens)
        if live or action == "add":
            getattr(model, action)(live[which % len(live)] if live else None, part)
            model.reads_back()
    for name in list(model.tokens):
        model.free(name, 0)
    assert model.table.num_free == num_pages
    model.table.check()


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value == after[name], name


def test_a_shared_page_is_copied_by_whoever_writes_first():
    table = PageTable(4, 4)
    assert table.allocate("a", 6) == []
    table.fork("a", "b")
    assert table.num_used == 2
    assert table.allocate("b", 0) == [] and table.num_used == 2
    assert table.allocate("b", 1) == [PageCopy(1, 2)]
    assert table.row("a").tolist() == [0, 1] and table.row("b").tolist() == [0, 2]
    assert table.allocate("a", 1) == []  # its own again
    table.fork("a", "c", 4)
    assert table.allocate("c", 1) == []  # a full page is never written again
    assert table.row("c").tolist() == [0, 3]
    for name in "abc":
        table.free(name)
    assert table.num_free == 4 and table.sequences == ()
    table.check()


def test_no_effect_when_there_are_too_few():
    table = PageTable(3, 2, max_pages=9)
    table.allocate("a", 3)
    table.fork("a", "b")
    before = copy.deepcopy(vars(table))
    for name, count, wanted in (("a", 4, 3), ("b", 4, 3), ("new", 3, 2)):
        with pytest.raises(
            OutOfPagesError, match=f"expected {wanted} free pages for sequence '{name}', found 1"
        ) as raised:
            table.allocate(name, count)
        assert_same(before, vars(table))
        assert isinstance(raised.value, EjkernelError)
        again = pickle.loads(pickle.dumps(raised.value))
        assert (again.sequence, again.wanted, again.free) == (name, wanted, 1) and str(again) == str(
            raised.value
        )
    assert table.allocate("b", 1) == [PageCopy(1, 2)]


def test_rows():
    table = PageTable(8, 2)
    assert table.rows([]).shape == (0, 1)
    table.allocate("a", 5)
    table.allocate("b", 0)
    assert table.rows("ba").tolist() == [[-1, -1, -1], [0, 1, 2]] and table.rows("ab").dtype == np.int32
    table.free_behind("a", 4)
    assert table.row("a").tolist() == [-1, -1, 2] and table.slots("a", 0, 5).tolist() == [-1, -1, -1, -1, 4]
    assert table.num_free == 7
    with pytest.raises(ValueError, match="at most 2, the first that a window of 3 reaches"):
        narrow = PageTable(8, 1, window=3)
        narrow.allocate("a", 4)
        narrow.free_behind("a", 3)
    wide = PageTable(8, 2, max_pages=4)
    wide.allocate(("any", 1), 3)
    assert wide.row(("any", 1)).tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda t: PageTable(0, 4), "num_pages: expected"),
        (lambda t: PageTable(4, 0), "page_size: expected"),
        (lambda t: PageTable(4, 4, 0), "max_pages: expected"),
        (lambda t: PageTable(4, 4, window=0), "window: expected"),
        (lambda t: PageTable(2**20, 2**11), "num_pages: expected at most"),
        (lambda t: t.allocate("a", -1), "num_tokens: expected .* received -1"),
        (lambda t: t.allocate("a", 12), "num_tokens: expected at most 11 more tokens"),
        *((lambda t, name=name: getattr(t, name)("x"), "received 'x'") for name in ("free", "length", "row")),
        (lambda t: t.rows(["a", "x"]), "received 'x'"),
        (lambda t: t.slots("x", 0, 0), "received 'x'"),
        (lambda t: t.slots("a", 0, 6), "stop: expected start <= stop <= 5"),
        (lambda t: t.slots("a", 3, 2), "stop: expected"),
        (lambda t: t.slots("a", -1, 2), "start: expected"),
        (lambda t: t.fork("x", "y"), "received 'x'"),
        (lambda t: t.fork("a", "a"), "child: expected a new sequence, received 'a'"),
        *((lambda t, n=n: t.fork("a", "y", n), "num_tokens: expected 5 to 5 tokens") for n in (3, 6)),
        (lambda t: t.truncate("x", 0), "received 'x'"),
        *((lambda t, n=n: t.truncate("a", n), "length: expected") for n in (-1, 3, 6)),
        (lambda t: t.free_behind("x", 0), "received 'x'"),
        (lambda t: t.free_behind("a", 6), "first_visible_position: expected at most 5"),
        (lambda t: t.free_behind("a"), "first_visible_position: expected a position, received None"),
        (lambda t: t.free_behind("a", -1), "first_visible_position: expected"),
    ],
)
def test_wrong_arguments(call, words):
    table = PageTable(8, 4, max_pages=4)
    table.allocate("a", 5)
    table.free_behind("a", 4)
    before = copy.deepcopy(vars(table))
    with pytest.raises(ValueError, match=words):
        call(table)
    assert_same(before, vars(table))


@pytest.mark.parametrize("harm", ["leak", "twice", "short", "gap"])
def test_check_finds(harm):
    table = PageTable(8, 2)
    table.allocate("a", 6)
    table.fork("a", "b")
    own = table._sequences["a"]
    if harm == "leak":
        table._free.pop()
    elif harm == "twice":
        own.pages[0] = own.pages[1]
    elif harm == "short":
        own.length += 2
    else:
        own.pages[0] = -1
    with pytest.raises(AssertionError):
        table.check()
