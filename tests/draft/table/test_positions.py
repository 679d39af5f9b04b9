"""Shapes built from counts are the best trees of their size."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.table.positions import most_accepted


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_shape_builder_keeps_the_best_tree(seed: int, places: int) -> None:
    """Counts as accepted paths give them: a place counts whenever one below it does."""
    source = np.random.default_rng(seed)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(30):
        path = tuple(source.integers(0, 2, int(source.integers(1, 4))).tolist())
        for end in range(1, len(path) + 1):
            counts[path[:end]] = counts.get(path[:end], 0) + 1
    kept = most_accepted(counts, places)
    assert len(kept) == min(places, len(counts))
    assert all(path[:-1] in kept[:i] for i, path in enumerate(kept) if len(path) > 1)
    best = 0
    for chosen in product((0, 1), repeat=len(counts)):  # at most 14 places
        tree = {path for path, taken in zip(counts, chosen, strict=True) if taken}
        if len(tree) == len(kept) and all(path[:-1] in tree for path in tree if len(path) > 1):
            best = max(best, sum(counts[path] for path in tree))
    assert sum(counts[path] for path in kept) == best
