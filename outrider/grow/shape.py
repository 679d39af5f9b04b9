"""Shape: a tree whose form is fixed before anything is drawn, and the rule that fills it with tokens.

A planned child is the j-th draw of its parent, whatever token comes out. Where a row has too few tokens the plan below
the missing node is left out; where a token is drawn twice the one child takes both plans, so that independent draws of
shape (k, 1, 1, ..) are k independent paths. Lossless: both depend only on what has been drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget
from outrider.core.tree import QRow, TokenTree
from outrider.grow.drawing import Drawing
from outrider.grow.growth import Growth, unroll


@dataclass(frozen=True, slots=True)
class Shape:
    """Planned nodes in level order; `parents[i]` is the parent of node i + 1, siblings in the order of their draws."""

    parents: tuple[int, ...] = ()
    children: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, 1):
            assert parent < node, "parents before children"
            children[parent].append(node)
        object.__setattr__(self, "children", tuple(map(tuple, children)))

    def __len__(self) -> int:
        """Candidates: node 0 does not count."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Per candidate: how many draws its parent makes before it."""
        return tuple(self.children[parent].index(node) for node, parent in enumerate(self.parents, 1))

    def within(self, budget: Budget) -> Shape:
        """Cut to a budget, level by level."""
        depths = self.depths
        fits = len(self) <= budget.nodes and max(depths) <= budget.depth
        # level order: what is left is a prefix, so the numbers of the nodes stay
        cut = [parent for parent, depth in zip(self.parents, depths[1:], strict=True) if depth <= budget.depth]
        return self if fits else Shape(tuple(cut[: max(budget.nodes, 0)]))


@lru_cache(maxsize=64)
def k_ary(expansion: tuple[int, ...], budget: Budget) -> Shape:
    """Every node at depth d has expansion[d] children, as far as the budget goes."""
    parents: list[int] = []
    level = [0]
    for width in expansion[: max(budget.depth, 0)]:
        new = [node for node in level for _ in range(width)][: max(budget.nodes - len(parents), 0)]
        level = list(range(len(parents) + 1, len(parents) + 1 + len(new)))
        parents += new
    return Shape(tuple(parents))


@dataclass(slots=True)
class _Fill:
    growth: Growth
    shape: Shape
    drawing: Drawing
    _plan: dict[int, tuple[int, ...]] = field(init=False)  # node -> the planned nodes that its draws will be

    def __post_init__(self) -> None:
        self._plan = {0: self.shape.children[0]}

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        growth, below = self.growth, dict[int, tuple[int, ...]]()
        for node, q in zip(nodes, rows, strict=True):
            planned = self._plan[node]
            made = growth.propose(node, self.drawing(q, len(planned), growth.noise, node))
            for child, plan in zip(made, planned, strict=False):
                below[child] = below.get(child, ()) + self.shape.children[plan]
        self._plan = {child: planned for child, planned in below.items() if planned}
        return list(self._plan)


def fill(
    shapes: Sequence[Shape], drawing: Drawing, source: Source, slots: Sequence[int], pending: Sequence[int],
    budgets: Sequence[Budget], noise: Sequence[Noise | None],
) -> list[TokenTree]:  # fmt: skip
    """One tree a slot, of its shape; a shape over its budget is cut before anything is drawn."""
    rules = []
    for shape, token, budget, slot_noise in zip(shapes, pending, budgets, noise, strict=True):
        cut = shape.within(budget)
        rules.append(_Fill(Growth(token, Budget(len(cut), budget.depth), slot_noise), cut, drawing))
    unroll(source, slots, rules)
    return [rule.growth.tree(source.name) for rule in rules]
