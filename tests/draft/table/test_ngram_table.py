"""The n-gram table equals a dictionary, whatever enters, leaves or collides."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.table import ngram_table
from outrider.draft.table.ngram_table import Table, claim, find


def small_table(entries: int, width: int = 2) -> Table:
    return Table(
        np.zeros((entries, 3), np.int64), np.zeros((entries, width), np.int32), np.zeros((entries, width), np.float32),
        np.zeros(entries, np.int32), np.zeros(ngram_table._index_size(entries), np.int32), np.zeros(2, np.int64),
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5)), max_size=120), st.integers(1, 9))
def test_the_table_equals_a_dictionary_whose_oldest_entry_leaves(keys, entries: int) -> None:
    table, known = small_table(entries), dict[tuple[int, int, int], int]()
    for number, key in enumerate(keys):
        entry = claim(table, *key)
        if key not in known:
            assert table.counts[entry] == 0 or (0, *key[1:]) in known
            if len(known) == entries:
                del known[next(iter(known))]
            known[key] = number
            table.counts[entry] = number
        assert table.counts[entry] == known[key]
        for owner, first, second in {(o, f, s) for o in range(3) for f in range(6) for s in range(6)}:
            found = find(table, owner, first, second)
            want = known.get((owner, first, second), known.get((0, first, second)))
            assert (table.counts[found] if found >= 0 else None) == want
