"""LeadingTarget: rank 0's part of a model as a target, whose every change of state happens on the other ranks, too.

Trees and paths are decided by rank 0 alone, so that no rank's clock or seed can choose another one. Exact as the target
of one process is, up to the order in which the parts of a sum are added. Cost: one small message a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.core.errors import OutriderError
from outrider.core.records import Needs, Piece, Scores, Traits
from outrider.runtime.ranks.group import Group
from outrider.runtime.slots import SlotTarget


class LeadingTarget:
    def __init__(self, target: SlotTarget, group: Group) -> None:
        self.target, self.group = target, group
        self.vocab_size, self.max_context, self.max_rows = target.vocab_size, target.max_context, target.max_rows
        self.device: torch.device = target.device

    @property
    def traits(self) -> Traits:
        return self.target.traits

    @property
    def free_slots(self) -> int:
        return self.target.free_slots

    def length(self, slot: int) -> int:
        return self.target.length(slot)

    def fits(self, rows: Mapping[int, int]) -> bool:
        return self.target.fits(rows)

    def acquire(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        self.group.tell("acquire", [int(token) for token in tokens], salt)
        return self.target.acquire(tokens, salt)

    def release(self, slot: int) -> None:
        self.group.tell("release", slot)
        self.target.release(slot)

    def fork(self, slot: int, length: int | None = None) -> int:
        self.group.tell("fork", slot, length)
        return self.target.fork(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        self.group.tell("truncate", slot, length)
        self.target.truncate(slot, length)

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        self.group.tell("run", list(pieces), needs)
        try:
            return self.target.run(pieces, needs)
        except OutriderError:  # what is refused is refused by every rank
            raise
        except RuntimeError as error:  # an exchange between the layers
            raise self.group.failed(error) from error

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.group.tell("commit", list(slots), [list(path) for path in paths])
        self.target.commit(slots, paths)

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        self.group.tell("prepare", list(contexts), needs)
        self.target.prepare(contexts, needs)

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()
