"""A source and a grower as one drafter: on how many threads it drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.records import Budget
from outrider.draft.grown import Grown


@pytest.fixture
def threads():
    """As many as every machine has, and what it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


class Looking:
    """A grower that notes the threads it may use, and may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.seen = fails, list[int]()

    def grow(self, source: Any, slots: Any, *_: Any) -> list[Any]:
        self.seen.append(torch.get_num_threads())
        if self.fails:
            raise RuntimeError("no tree")
        return [None] * len(slots)


def drafter(grower: Looking, beside: bool) -> Grown:
    made = Grown(SimpleNamespace(begin=lambda *_: None), grower, beside=beside)
    for slot in range(2):
        made.begin(slot, SimpleNamespace(tokens=np.array([5]), temperature=0.0))
    return made


@pytest.mark.parametrize(("beside", "slots", "used"), [(True, 1, 1), (True, 2, 1), (False, 1, 2)])
def test_drafts_stay_on_one_thread_where_the_target_has_its_own(
    threads: int, beside: bool, slots: int, used: int
) -> None:
    grower = Looking()
    drafter(grower, beside).propose(range(slots), [Budget(3, 3)] * slots, [None] * slots)
    assert grower.seen == [used] and torch.get_num_threads() == threads


def test_a_failed_draft_leaves_the_threads_as_they_were(threads: int) -> None:
    with pytest.raises(RuntimeError):
        drafter(Looking(fails=True), True).propose([0], [Budget(3, 3)], [None])
    assert torch.get_num_threads() == threads
