"""Either: each slot's tree is the one its own grower would have made alone."""

from __future__ import annotations

from outrider.core.records import Budget
from outrider.core.tree import chain
from outrider.grow.either import Either


class Marked:
    """Answers with a chain of its own token, and notes whom it was asked for."""

    def __init__(self, token: int) -> None:
        self.token, self.asked, self.seen = token, [], []

    def grow(self, source, slots, pending, budgets, noise):
        self.asked.append((list(slots), list(noise)))
        return [chain(p, [self.token] * b.nodes) for p, b in zip(pending, budgets, strict=True)]

    def observe(self, slots, records) -> None:
        self.seen.append((slots, records))


def test_slots_go_to_the_grower_of_their_kind_and_come_back_in_order() -> None:
    likeliest, drawn = Marked(1), Marked(2)
    grower = Either(likeliest, drawn)
    trees = grower.grow(None, [4, 5, 6], [7, 8, 9], [Budget(1, 1), Budget(2, 2), Budget(3, 3)], [None, "noise", None])
    assert [tree.tokens.tolist() for tree in trees] == [[7, 1], [8, 2, 2], [9, 1, 1, 1]]
    assert likeliest.asked == [([4, 6], [None, None])] and drawn.asked == [([5], ["noise"])]
    grower.grow(None, [4], [7], [Budget(1, 1)], [None])
    assert len(drawn.asked) == 1  # nobody to grow for: not asked
    grower.observe([4], ["record"])
    assert likeliest.seen == drawn.seen == [([4], ["record"])]
