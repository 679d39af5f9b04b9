"""The sequences of one step by their method, and what together they need of the target."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from outrider.core.protocols import Drafter, Recipe
from outrider.core.records import NO_NEEDS, Needs
from outrider.core.rows.side import SideRows
from outrider.core.sequence import Running


@dataclass(slots=True)
class Group:
    """The sequences of one method in a step, and the seconds it took to draft for them."""

    recipe: Recipe
    members: list[Running]
    seconds: float = 0.0
    sides: dict[int, SideRows] = field(default_factory=dict)  # by slot, where the drafter has any

    @property
    def planned(self) -> bool:
        """Whether anybody asks how much to draft: the drafter, or a trace."""
        return self.recipe.drafter is not None or any(s.trace is not None for s in self.members)

    def followers(self) -> tuple[Drafter | None, list[Running]]:
        """The drafter, and the sequences that it has not failed; None where there are none."""
        following = [s for s in self.members if s.drafter is not None]
        return (self.recipe.drafter if following else None), following


def by_recipe(batch: Sequence[Running]) -> list[Group]:
    groups: dict[int, Group] = {}
    for s in batch:
        groups.setdefault(id(s.recipe), Group(s.recipe, [])).members.append(s)
    return list(groups.values())


def needs_of(batch: Collection[Running], sided: bool = False) -> Needs:
    """`sided`: with side rows, of whose logits more than the largest is read."""
    needs = NO_NEEDS
    for drafter in {id(s.drafter): s.drafter for s in batch if s.drafter is not None}.values():
        needs |= drafter.needs
    if any(s.params.prompt_logprobs is not None for s in batch):
        needs |= Needs(logits=True)
    return replace(needs, rounded=not sided and all(s.largest_only for s in batch))
