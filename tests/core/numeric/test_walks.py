"""Compiled walks over a tree say what a loop over its nodes says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import tree as module
from outrider.core.numeric.walks import ancestors, depths
from outrider.core.tree import fixed

trees = st.lists(st.integers(0, 1 << 16), min_size=0, max_size=80)


@settings(deadline=None, derandomize=True)
@given(trees)
def test_depths_and_ancestors(choices: list[int]) -> None:
    parents = np.array([-1, *(choice % (i + 1) for i, choice in enumerate(choices))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", 1000)
        plain = fixed(np.arange(len(parents)), parents)
        want = plain.ancestor_mask()
    assert plain.depths.tolist() == depths(parents).tolist()
    assert (want == ancestors(parents)).all() and want.dtype == ancestors(parents).dtype
    assert (fixed(np.arange(len(parents)), parents).ancestor_mask() == want).all()


@pytest.mark.parametrize("parents", [[0, *range(11)], [-1, 0, 3, *range(9)], [-1, -1, *range(10)]])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        fixed(np.arange(12), np.array(parents))
