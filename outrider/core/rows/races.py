"""Races: what a target needs to find the tokens that a step's noise chooses within its pass, made before it runs.

For sequences whose rows a temperature alone reshapes, under a rule that only follows the target: the tokens are those
that `choices` would find behind the pass, which then has nothing left to ask the device for. All others are left to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.core.noise import VERIFY, StreamNoise, target_keys
from outrider.core.records import Race
from outrider.core.sequence import Running
from outrider.core.tree import TokenTree


def races(batch: Sequence[Running], trees: Mapping[int, TokenTree]) -> dict[int, Race]:
    """By slot, of those for whom it can be said beforehand."""
    racing, noises = list[Running](), list[StreamNoise]()
    for s in batch:
        history = s.history
        plainly = history.only_divided and not (history.edits_rows or history.one_by_one)
        if history.params.greedy or s.recipe.verifier.coupled or not plainly or history.legal is not None:
            continue
        if isinstance(noise := s.noise(VERIFY), StreamNoise):
            racing.append(s)
            noises.append(noise)
    if not racing:
        return {}
    keys = target_keys(noises, [trees[s.slot] for s in racing])
    made, at = dict[int, Race](), 0
    for s in racing:
        rows = len(trees[s.slot])
        made[s.slot] = Race(s.history.params.temperature, keys[at : at + rows])
        at += rows
    return made
